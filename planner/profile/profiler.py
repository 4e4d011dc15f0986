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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.data_files import device_name, dtype_name, versions
from sparsekv.planner.families import check_targets
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import CalibrationPrompt, PromptSource, digest_of
from sparsekv.planner.profile.head_errors import Layer, Rows, score_candidates
from sparsekv.planner.profile.profile_data import LengthProfile, Profile, Table
from sparsekv.planner.profile.resume import LayerRecord, Records, collected
from sparsekv.planner.profile.search_space import (
    Patterns,
    Prefix,
    aims,
    decode_budgets,
    decode_selectors,
    fit_to_target,
)
from sparsekv.planner.profile.similarity import DecodeLayer, ReuseScores
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.describe import attention_modules, decoder_of
from sparsekv.runtime.hf.load import LoadedModel

Prompts = Mapping[int, Sequence[CalibrationPrompt]]


def profile(
    loaded: LoadedModel, options: PlanOptions, progress: Progress | None = None, resume: Path | None = None
) -> Profile:
    """Profiles a model.

    Args:
        loaded: the model, in evaluation mode.
        options: settled (`PlanOptions.settled`).
        progress: where to report.
        resume: a file for what is measured, layer by layer; a run that was interrupted goes on from it. The caller
            removes it once the profile is saved or used.

    Raises:
        UsageError, PromptError: options or prompts do not fit; a target density leaves no room for the tiles that
            every pattern computes.
        BackendError: the backend cannot run here.
    """
    model, info = loaded.model, loaded.info
    head_dim = info.attention[0].head_dim
    chosen = choose_backend(model.device, model.dtype, head_dim, options.backend, options.tile_shape)
    backend = cast(BackendName, chosen.name)
    source = PromptSource.of(loaded.tokenizer, options)
    prompts = {length: source.prompts(length) for length in options.lengths}
    _check_targets(prompts, options)
    records = Records(resume, _identity(loaded, options, prompts, backend))
    total = sum(_work(prompt) for some in prompts.values() for prompt in some) * info.layers
    with (progress or NoProgress()).stage("profile", total=total) as step:
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
        calibration=_digest(prompts),
        versions=versions(),
        lengths=tuple(_length(length, some, options, records, info.layers) for length, some in prompts.items()),
    )


def _check_targets(prompts: Prompts, options: PlanOptions) -> None:
    if "prefill" in options.phases and options.target_speedup is None:
        tokens = {length: [len(prompt.ids) for prompt in some] for length, some in prompts.items()}
        check_targets(tokens, options.target_density, options.tile_shape, options.families)


def _work(prompt: CalibrationPrompt) -> float:
    # Attention and candidates grow with the square of the length, the rest of the model with the length.
    return len(prompt.ids) / 1024 * (1.0 + len(prompt.ids) / 8192)


def _digest(prompts: Prompts) -> str:
    return digest_of([prompt for some in prompts.values() for prompt in some])


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
        "budgets": [budget.model_dump() for budget in decode_budgets(options)],
        "prompts": _digest(prompts),
        "versions": versions(),
    }


def _length(
    length: int, prompts: Sequence[CalibrationPrompt], options: PlanOptions, records: Records, layers: int
) -> LengthProfile:
    decode = "decode" in options.phases
    return collected(
        length,
        [len(prompt.ids) for prompt in prompts],
        [aim.candidate for aim in aims(options, length)],
        decode_budgets(options) if decode else (),
        decode_selectors() if decode else (),
        [[records[length, sample, layer] for sample in range(len(prompts))] for layer in range(layers)],
    )


@dataclass(frozen=True, slots=True)
class Pass:
    """One prompt of one length."""

    loaded: LoadedModel
    options: PlanOptions
    backend: BackendName
    length: int
    sample: int
    prompt: CalibrationPrompt

    def run(self, records: Records, layer_done: Callable[[str], None]) -> None:
        """Measures every layer that has no record yet, and adds its record."""
        model, layers = self.loaded.model, range(self.loaded.info.layers)
        if all((self.length, self.sample, layer) in records for layer in layers):
            for _ in layers:
                layer_done(self.note(len(layers)))
            return
        ids_1S = torch.from_numpy(self.prompt.ids.astype(np.int64)).to(model.device)[None]
        with torch.no_grad(), _residuals(model, self.prompt.decode_rows) as residuals:
            observer = _Observer(self, records, residuals, layer_done)
            with capture_attention(model, observer):
                decoder_of(model)(input_ids=ids_1S, use_cache=False)

    def note(self, layer: int) -> str:
        """What progress says is being worked on."""
        return f"{self.length} tokens, prompt {self.sample + 1}, layer {layer}"


class _Observer:
    """Sees the layers of one pass in order."""

    def __init__(
        self, one: Pass, records: Records, residuals: dict[int, float], layer_done: Callable[[str], None]
    ) -> None:
        self._one, self._records, self._residuals, self._layer_done = one, records, residuals, layer_done
        self._aims = aims(one.options, one.length) if "prefill" in one.options.phases else ()
        self._reuse: ReuseScores | None = None
        if "decode" in one.options.phases:
            prompt = one.prompt
            self._reuse = ReuseScores(
                prompt.decode_rows, prompt.answer_start, decode_budgets(one.options), decode_selectors()
            )
        modules: Sequence[Any] = attention_modules(one.loaded.model)
        self._projections: list[torch.Tensor] = [module.o_proj.weight for module in modules]

    def __call__(self, call: AttentionCall) -> None:
        key = (self._one.length, self._one.sample, call.layer)
        projection_WZ = self._projections[call.layer]
        decode = DecodeLayer(call.q_BHSD, call.k_BGKD, call.v_BGKD, call.scale, projection_WZ)
        if self._reuse is not None:
            self._reuse.choose(call.layer, decode)
        if key not in self._records:
            self._records.add(self._record(call, decode))
        self._layer_done(self._one.note(call.layer + 1))

    def _record(self, call: AttentionCall, decode: DecodeLayer) -> LayerRecord:
        scores = self._scores(call, decode.projection_WZ) if call.window is None and self._aims else {}
        if self._reuse is not None:
            moved = self._reuse.moved(decode)
            scores["importance"] = moved / max(moved + self._residuals[call.layer], 1e-20)
            scores["kept"] = tuple(_table(table) for table in self._reuse.kept(decode, range(call.layer + 1)))
        return LayerRecord(length=self._one.length, sample=self._one.sample, layer=call.layer, **scores)

    def _scores(self, call: AttentionCall, projection_WZ: torch.Tensor) -> dict[str, Any]:
        one, tile = self._one, self._one.options.tile_shape
        sampled = [aim.patterns.last_q for aim in self._aims if aim.patterns.last_q]
        prefix = Prefix(call.q_BHSD, call.k_BGKD, call.chunk, tile, call.scale).with_lines(sampled)
        rows = Rows.of(call.chunk.longest, one.prompt.tail_start, tile, one.options.row_stride or 1)
        patterns = self._patterns(call.layer, prefix)
        scores = score_candidates(Layer(prefix, call.v_BGKD, projection_WZ, rows, one.backend), patterns)
        return {
            "patterns": tuple(patterns),
            "error": _table([score.error_H for score in scores]),
            "tail_error": _table([score.tail_error_H for score in scores]),
            "mass": _table([score.mass_H for score in scores]),
            "tiles": _table([score.tiles_H / prefix.causal_tiles for score in scores]),
            "columns": _table([score.columns_H / prefix.causal_tiles for score in scores]),
        }

    def _patterns(self, layer: int, prefix: Prefix) -> Sequence[Patterns]:
        if self._one.sample > 0:
            return self._records[self._one.length, 0, layer].patterns
        return [fit_to_target(prefix, aim.patterns, aim.density * prefix.causal_tiles) for aim in self._aims]


def _table(rows: Sequence[npt.NDArray[np.float64]] | npt.NDArray[np.float64]) -> Table:
    return tuple(tuple(float(value) for value in row) for row in rows)


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
    hooks = [layer.register_forward_pre_hook(note(place), with_kwargs=True) for place, layer in enumerate(layers)]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
