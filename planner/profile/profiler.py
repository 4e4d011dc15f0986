"""Profiling: one dense forward pass a calibration prompt, every candidate pattern of every head on the way.

Layer by layer the observer has q, k and v in hand: it brings the candidates to their target costs (on the first prompt
of a length; later prompts take the patterns found there) and scores them; the layer itself goes on with dense
attention. How well a layer's choice of tokens serves later layers is taken from the same pass. Nothing of size S x S
is stored, and what was measured is on disk after every layer.

Shapes: B batch (1), H query heads, S rows, D head size, W model size, Z = H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.data_files import device_name, dtype_name, versions
from sparsekv.planner.options import PlanOptions, check_targets
from sparsekv.planner.profile.calibration import CalibrationPrompt, calibration_prompts, digest_of
from sparsekv.planner.profile.head_errors import Layer, Rows, score_candidates
from sparsekv.planner.profile.mix import with_tasks
from sparsekv.planner.profile.profile_data import SCORES, Profile
from sparsekv.planner.profile.resume import LayerRecord, Records, RunShape, as_table, length_means
from sparsekv.planner.profile.search_space import Patterns, Prefix, aims, fit_to_target
from sparsekv.planner.profile.similarity import ReuseScores, token_choice
from sparsekv.planner.progress import Progress
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.describe import attention_modules, decoder_of
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel

Prompts = Mapping[int, Sequence[CalibrationPrompt]]


def profile(
    loaded: LoadedModel, options: PlanOptions, progress: Progress | None = None, resume: Path | None = None
) -> Profile:
    """Profiles a model.

    Args:
        options: settled (`PlanOptions.settled`).
        resume: a file for what is measured, layer by layer; a run that was interrupted goes on from it. The caller
            removes it once the profile is saved or used.

    Raises:
        UsageError, PromptError: options or prompts do not fit; a target density leaves no room for the tiles that
            every pattern computes.
        BackendError: the backend cannot run here.
    """
    model, info, progress = loaded.model, loaded.info, progress or Progress()
    layers = range(info.layers)
    head_dim = info.attention[0].head_dim
    chosen = choose_backend(model.device, model.dtype, head_dim, options.backend, options.tile_shape)
    backend = cast(BackendName, chosen.name)
    if not options.prompts:
        options = with_tasks(loaded, options)
    prompts = calibration_prompts(loaded.tokenizer, options)
    _check_targets(prompts, options)
    choice = token_choice(options) if "decode" in options.phases else None
    candidates = {length: [aim.candidate for aim in aims(options, length)] for length in prompts}
    searched = candidates if "prefill" in options.phases else dict.fromkeys(prompts, ())
    shape = RunShape(info, {length: len(some) for length, some in prompts.items()}, searched, choice)
    records = Records(resume, _identity(loaded, options, prompts, backend), shape)
    total = sum(_work(prompt) for some in prompts.values() for prompt in some) * info.layers
    keys = [(length, sample, layer) for length, n in shape.samples.items() for sample in range(n) for layer in layers]
    if found := sum(key in records for key in keys):
        samples = f"{found / info.layers:.3g} of {sum(shape.samples.values())} samples"
        progress.say(f"profile resumed: {samples} were measured by an interrupted run")
    with progress.stage("profile", total=total) as step:
        for length, some in prompts.items():
            for sample, prompt in enumerate(some):
                one = Pass(loaded, options, backend, length, sample, prompt)
                one.run(records, partial(step.advance, _work(prompt)))
    return Profile(
        model=info,
        device=device_name(model.device),
        dtype=dtype_name(model.dtype),
        backend=backend,
        tile=options.tile_shape,
        preset=options.preset,
        seed=options.seed,
        samples=max(map(len, prompts.values())),
        tasks=() if options.prompts else options.tasks,
        calibration=digest_of(prompts),
        versions=versions(),
        lengths=tuple(
            length_means(
                length,
                [len(prompt.ids) for prompt in some],
                candidates[length],
                choice,
                [[records[length, sample, layer] for sample in range(len(some))] for layer in range(info.layers)],
            )
            for length, some in prompts.items()
        ),
    )


def _check_targets(prompts: Prompts, options: PlanOptions) -> None:
    if "prefill" in options.phases and options.target_speedup is None:
        tokens = {length: [len(prompt.ids) for prompt in some] for length, some in prompts.items()}
        check_targets(tokens, options.target_density, options.tile_shape, options.families)


def _work(prompt: CalibrationPrompt) -> float:
    # Attention and candidates grow with the square of the length, the rest of the model with the length.
    return len(prompt.ids) / 1024 * (1.0 + len(prompt.ids) / 8192)


def _identity(loaded: LoadedModel, options: PlanOptions, prompts: Prompts, backend: BackendName) -> dict[str, Any]:
    """Everything that the records of a run depend on."""
    return {
        "fingerprint": loaded.info.fingerprint.model_dump(mode="json"),
        "device": device_name(loaded.model.device),
        "dtype": dtype_name(loaded.model.dtype),
        "backend": backend,
        "phases": list(options.phases),
        "tile": options.tile_shape.model_dump(),
        "aims": {str(length): [aim.candidate.model_dump() for aim in aims(options, length)] for length in prompts},
        "row_stride": options.row_stride,
        "choice": token_choice(options).model_dump(mode="json"),
        "prompts": digest_of(prompts),
        "versions": versions(),
    }


class Pass:
    """One prompt of one length, layer by layer."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: PlanOptions,
        backend: BackendName,
        length: int,
        sample: int,
        prompt: CalibrationPrompt,
    ) -> None:
        self._loaded, self._options, self._backend = loaded, options, backend
        self._length, self._sample, self._prompt = length, sample, prompt
        self._aims = aims(options, length) if "prefill" in options.phases else ()
        decode = "decode" in options.phases
        self._reuse = ReuseScores(prompt.decode_rows, token_choice(options)) if decode else None

    def run(self, records: Records, layer_done: Callable[[str], None]) -> None:
        """Measures every layer that has no record yet, and adds its record."""
        model, layers = self._loaded.model, range(self._loaded.info.layers)

        def done(layer: int) -> None:
            layer_done(f"{self._length} tokens, prompt {self._sample + 1}, layer {layer}")

        if all((self._length, self._sample, layer) in records for layer in layers):
            for _ in layers:
                done(len(layers))
            return
        modules: Sequence[Any] = attention_modules(model)
        projections: list[torch.Tensor] = [module.o_proj.weight for module in modules]
        ids_1S = torch.from_numpy(self._prompt.ids.astype(np.int64)).to(model.device)[None]
        with torch.no_grad(), _residuals(model, self._prompt.decode_rows) as residuals:

            def observe(call: AttentionCall) -> None:
                where = f"queries, keys and values of layer {call.layer}"
                check_numbers(model, where, call.q_BHSD, call.k_BGKD, call.v_BGKD)
                layer = self._layer(call, projections[call.layer])
                if self._reuse is not None:
                    self._reuse.choose(call.layer, layer)
                if (self._length, self._sample, call.layer) not in records:
                    scores = {} if call.window is not None else self._prefill(call.layer, layer, records)
                    scores |= self._decode(call.layer, layer, residuals[call.layer])
                    records.add(LayerRecord(length=self._length, sample=self._sample, layer=call.layer, **scores))
                done(call.layer + 1)

            with capture_attention(model, observe):
                decoder_of(model)(input_ids=ids_1S, use_cache=False)

    def _layer(self, call: AttentionCall, projection_WZ: torch.Tensor) -> Layer:
        tile = self._options.tile_shape
        prefix = Prefix(call.q_BHSD, call.k_BGKD, call.chunk, tile, call.scale)
        rows = Rows.of(call.chunk.longest, self._prompt.tail_start, tile, self._options.row_stride or 1)
        return Layer(prefix, call.v_BGKD, projection_WZ, rows, self._backend)

    def _decode(self, number: int, layer: Layer, residual: float) -> dict[str, Any]:
        if self._reuse is None:
            return {}
        moved = self._reuse.moved(layer)
        kept = tuple(map(as_table, self._reuse.kept(layer, range(number + 1))))
        return {"importance": moved / max(moved + residual, 1e-20), "kept": kept}

    def _prefill(self, number: int, layer: Layer, records: Records) -> dict[str, Any]:
        if not self._aims:
            return {}
        prefix = layer.prefix.with_lines(aim.patterns.last_q for aim in self._aims if aim.patterns.last_q)
        patterns: Sequence[Patterns]
        if self._sample > 0:
            patterns = records[self._length, 0, number].patterns
        else:
            patterns = [fit_to_target(prefix, aim.patterns, aim.density * prefix.causal_tiles) for aim in self._aims]
        scores = score_candidates(replace(layer, prefix=prefix), patterns)
        tables = {name: as_table(getattr(score, f"{name}_H") for score in scores) for name in SCORES}
        return {"patterns": tuple(patterns), **tables}


@contextmanager
def _residuals(model: Any, rows: Sequence[int]) -> Iterator[dict[int, float]]:
    """|| residual || at the given rows, before each layer of a forward pass inside the `with`."""
    norms: dict[int, float] = {}

    def note(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_BSW = args[0] if args else kwargs["hidden_states"]
            norms[layer] = float(hidden_BSW[0, list(rows)].float().norm())

        return hook

    layers: Any = decoder_of(model).layers
    hooks = [layer.register_forward_pre_hook(note(position), with_kwargs=True) for position, layer in enumerate(layers)]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
