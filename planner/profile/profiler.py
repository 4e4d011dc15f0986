"""Profiling: one dense pass up and down the layers a calibration prompt, with every candidate of every head on the way.

On the way up, how well a layer's choice of tokens serves later layers is measured. On the way down each layer has q, k,
v and the gradient of the answer by its attention output in hand: candidates are brought to their target costs (on the
first prompt of a length; later prompts take the patterns found there) and scored on the prompt's own rows. The answer
takes no part in that: when a model runs, prefill ends with the prompt. Nothing of size S x S is stored, and what was
measured is on disk after every layer.

Shapes: B batch (1), H query heads, R candidates a head, S rows, D head size, E hidden size, W model size, Z = H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparsekv.kernels.backends import choose_backend
from sparsekv.kernels.methods import code_of, registry
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.profile.calibration import CalibrationPrompt, digest_of_calibration
from sparsekv.planner.profile.head_errors import Layer, SampledRows, score_candidates
from sparsekv.planner.profile.profile_data import SCORES, Profile
from sparsekv.planner.profile.resume import Key, LayerRecord, ProfileRun, as_table, length_means, records_at
from sparsekv.planner.profile.search_space import (
    Aim,
    CommonPrefix,
    Numbers,
    Patterns,
    aims,
    fit_to_target,
    in_steps,
    screened,
    slots,
)
from sparsekv.planner.profile.sensitivity import Sensitivity, walk_layers
from sparsekv.planner.profile.similarity import ReuseScores, token_choice
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.records import RunFile, versions
from sparsekv.plans.patterns import PATTERNS
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.architecture import architecture_of
from sparsekv.runtime.hf.describe import attention_modules, config_of
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall
from sparsekv.runtime.model_config import device_name, dtype_name, has_soft_cap

Prompts = Mapping[int, Sequence[CalibrationPrompt]]

# Of a candidate's target density: the allocation goes by what was measured, and each step of the search costs an index.
_SLACK = 0.05
# Rows of candidates that are brought to their targets together. Each holds the queries of a layer once more, and the
# more there is to a row, the less is gained by another one in the same launches.
_FITTED_AT_ONCE = 4
_FITTED_BYTES = 2 << 30  # of queries
# A sample of query tiles is cut into runs of neighbours, on a GPU into so many: columns are gathered for each of them.
_RUNS = {"cuda": 8}


def profile(job: Job, progress: Progress | None = None, resume: Path | None = None) -> Profile:
    """Profiles a model.

    Args:
        resume: a file for what is measured, layer by layer; a run that was interrupted goes on from it. The caller
            removes it once the plan is written.
    """
    loaded, options, progress = job.subject, job.options, progress or Progress()
    model, info = loaded.model, loaded.info
    layers = range(info.layers)
    head_dim = info.largest_head
    capped = has_soft_cap(config_of(model))
    chosen = choose_backend(model.device, model.dtype, head_dim, options.backend, options.tile, capped)
    backend = cast(BackendName, chosen.name)
    prompts = job.prompts
    choice = token_choice(options) if "decode" in options.phases else None
    candidates = {length: [aim.candidate for aim in aims(options, length)] for length in prompts}
    records = records_at(resume, _identity(loaded, options, prompts, backend) | {"step": job.step})
    known = records.all(LayerRecord)
    keys = [(length, one, layer) for length, some in prompts.items() for one in range(len(some)) for layer in layers]
    missing = [key for key in keys if key not in known]
    whole, total = (
        sum(prefill_work(len(prompts[length][sample].ids)) for length, sample, _ in some) for some in (keys, missing)
    )
    if total < whole:
        progress.say(f"profile resumed: {100 * (1 - total / whole):.3g}% of it was measured by an interrupted run")
    with progress.stage("profile", total=total) as step:
        for length, some in prompts.items():
            for sample, prompt in enumerate(some):
                one = ProfilePass(loaded, options, backend, length, sample, prompt, job.step)
                one.run(records, partial(step.advance, prefill_work(len(prompt.ids))))
    return Profile(
        model=info,
        device=device_name(model.device),
        dtype=dtype_name(model.dtype),
        backend=backend,
        tile=options.tile,
        preset=options.preset,
        seed=options.seed,
        samples=max(map(len, prompts.values())),
        tasks=() if options.prompts else options.tasks,
        calibration=digest_of_calibration(prompts),
        versions=versions(),
        lengths=tuple(
            length_means(
                length,
                some,
                candidates[length],
                choice,
                [[known[length, sample, layer] for sample in range(len(some))] for layer in range(info.layers)],
            )
            for length, some in prompts.items()
        ),
    )


def _identity(loaded: LoadedModel, options: Settled, prompts: Prompts, backend: BackendName) -> dict[str, Any]:
    """Everything that the records of a run depend on."""
    return {
        "fingerprint": loaded.info.fingerprint.model_dump(mode="json"),
        "device": device_name(loaded.model.device),
        "dtype": dtype_name(loaded.model.dtype),
        "backend": backend,
        "phases": list(options.phases),
        "tile": options.tile.model_dump(),
        "aims": {str(length): [aim.candidate.model_dump() for aim in aims(options, length)] for length in prompts},
        "row_strides": {str(length): options.row_stride_at(length) for length in prompts},
        "choice": token_choice(options).model_dump(mode="json"),
        "prompts": digest_of_calibration(prompts),
        "seed": options.seed,  # of the tokens that gradients are taken at
        "versions": versions(),
        "rules": [code_of(registry()[name]) for name in options.families if name not in PATTERNS],
    }


class ProfilePass:
    """One prompt of one length, layer by layer."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: Settled,
        backend: BackendName,
        length: int,
        sample: int,
        prompt: CalibrationPrompt,
        step: int | None,
    ) -> None:
        self._loaded, self._options, self._backend = loaded, options, backend
        self._length, self._sample, self._prompt, self._step = length, sample, prompt, step
        self._aims = aims(options, length) if "prefill" in options.phases else ()
        decode = "decode" in options.phases
        self._reuse = ReuseScores(prompt.decode_rows, token_choice(options)) if decode else None

    def run(self, records: RunFile[ProfileRun], layer_done: Callable[[str], None]) -> None:
        """Measures every layer that has no record yet, and adds its record."""
        model, layers = self._loaded.model, range(self._loaded.info.layers)
        known = records.all(LayerRecord)

        def add(layer: int, scores: Mapping[str, Any]) -> None:
            if (self._length, self._sample, layer) not in known:
                found = {**scores, **decoded.pop(layer, {})}
                records.add(LayerRecord(length=self._length, sample=self._sample, layer=layer, **found))
                layer_done(f"{self._length} tokens, prompt {self._sample + 1}, layer {layer}")

        if all((self._length, self._sample, layer) in known for layer in layers):
            return
        decoded: dict[int, dict[str, Any]] = {}
        modules = {cast(Any, module).layer_idx: cast(Any, module) for module in attention_modules(model)}
        output = architecture_of(config_of(model).model_type).output

        def up(call: AttentionCall, hidden_BSE: torch.Tensor) -> None:
            where = f"queries, keys and values of layer {call.layer}"
            check_numbers(model, where, call.q_BHSD, call.k_BGKD, call.v_BGKD)
            decoded[call.layer] = self._decode(call, getattr(modules[call.layer], output), hidden_BSE)
            if not self._aims:
                add(call.layer, {})

        def down(found: Sensitivity) -> None:
            is_new = (self._length, self._sample, found.call.layer) not in known
            scored = is_new and found.call.window is None
            add(found.call.layer, self._prefill(found, known) if scored else {})

        ids_1S = torch.from_numpy(self._prompt.ids.astype(np.int64)).to(model.device)[None]
        seed = self._options.seed + self._sample
        with torch.no_grad():
            walk_layers(model, ids_1S, self._prompt.answer_rows, seed, up, down if self._aims else None)
        # Layers with a recurrent state have no attention to plan, and no choice that serves others.
        budgets = len(self._reuse.choice.budgets) if self._reuse else 0
        for layer in set(layers) - modules.keys():
            add(layer, {"kept": ((0.0,) * (layer + 1),) * budgets})

    def _decode(self, call: AttentionCall, o_proj: nn.Module, hidden_BSE: torch.Tensor) -> dict[str, Any]:
        if self._reuse is None:
            return {}
        layer = self._reuse.attended(call, _weight_of(o_proj, call.q_BHSD))
        self._reuse.choose(call.layer, layer)
        moved = float(layer.moved)
        residual = float(hidden_BSE[0, list(self._prompt.decode_rows)].float().norm())
        kept = as_table(self._reuse.kept(layer, range(call.layer + 1)))
        return {"importance": moved / max(moved + residual, 1e-20), "kept": kept}

    def _prefill(self, found: Sensitivity, known: Mapping[Key, LayerRecord]) -> dict[str, Any]:
        number, layer = found.call.layer, self._layer(found)
        prefix = layer.prefix
        if self._sample > 0:
            first = known[self._length, 0, number]
            candidates, patterns = np.array(first.candidates), first.patterns
        else:
            candidates, compared = self._screened(layer)
            patterns = tuple(self._patterns_of(candidates, prefix, compared))
        scores = score_candidates(layer, patterns)
        tables = {name: as_table(getattr(score, f"{name}_H") for score in scores) for name in SCORES}
        return {"candidates": tuple(map(tuple, candidates.tolist())), "patterns": patterns, **tables}

    def _layer(self, found: Sensitivity) -> Layer:
        call, tile, end = found.call, self._options.tile, self._prompt.answer_start
        q_BHSD, k_BGSD, v_BGSD = (x[:, :, :end] for x in (call.q_BHSD, call.k_BGKD, call.v_BGKD))
        steps = in_steps(end, self._step, tile)
        prefix = CommonPrefix(q_BHSD, k_BGSD, steps, tile, call.scale, softmax=call.softmax, layer=call.layer)
        prefix = prefix.with_lines(aim.patterns.last_q for aim in self._aims if aim.patterns.last_q)
        stride, runs = self._options.row_stride_at(self._length), _RUNS.get(q_BHSD.device.type)
        rows = SampledRows.of(steps, self._prompt.tail_start, tile, stride, runs)
        dense_BHSD, gradient_BHSD = (x[:, :, :end] for x in (found.out_BHSD, found.gradient_BHSD))
        return Layer(prefix, v_BGSD, dense_BHSD, gradient_BHSD, rows, self._backend)

    def _screened(self, layer: Layer) -> tuple[Numbers, dict[int, Patterns]]:
        """[slot, H]: what is worth measuring on every prompt; and the patterns of the candidates that were compared."""
        compared = screened(self._aims)
        every_head = np.tile(np.array(compared)[:, None], layer.prefix.heads)
        known = dict(zip(compared, self._patterns_of(every_head, layer.prefix, {}), strict=True))
        damage_CH = np.stack([score.damage_H for score in score_candidates(layer, list(known.values()))])
        return slots(self._aims, compared, damage_CH), known

    def _patterns_of(self, numbers_RH: Numbers, prefix: CommonPrefix, known: Mapping[int, Patterns]) -> list[Patterns]:
        """Returns the patterns of each row of candidates, one a head."""
        rows = numbers_RH.tolist()
        found = {
            position: tuple(known[number][head] for head, number in enumerate(row))
            for position, row in enumerate(rows)
            if all(number in known for number in row)
        }
        missing = [position for position in range(len(rows)) if position not in found]
        at_once = fitted_at_once(prefix.q_BHSD)
        for first in range(0, len(missing), at_once):
            some = missing[first : first + at_once]
            found |= zip(some, self._fitted(numbers_RH[some], prefix), strict=True)
        return [found[position] for position in range(len(rows))]

    def _fitted(self, numbers_RH: Numbers, prefix: CommonPrefix) -> Iterator[Patterns]:
        """The rows side by side, as the heads of a wider layer: a step of the search is one index for all of them."""
        aims: Sequence[Aim] = [self._aims[number] for number in numbers_RH.T.flatten().tolist()]
        targets = [aim.density * prefix.causal_tiles for aim in aims]
        slack = _SLACK if self._options.preset is None else 0.0
        fitted = fit_to_target(prefix.repeated(len(numbers_RH)), [aim.patterns for aim in aims], targets, slack)
        return (fitted[row :: len(numbers_RH)] for row in range(len(numbers_RH)))


def fitted_at_once(q_BHSD: torch.Tensor) -> int:
    """Rows of candidates that are brought to their targets together: as many as repeat the queries within 2 GiB, 1 to
    4."""
    return max(1, min(_FITTED_AT_ONCE, _FITTED_BYTES // q_BHSD.nbytes))


def _weight_of(projection: nn.Module, q_BHSD: torch.Tensor) -> torch.Tensor:
    """The weight of an output projection, [W, Z]: read through the module unless it is stored as plain numbers on its
    device. Quantised ones are packed or scaled, and accelerate brings offloaded ones only when the module is called."""
    weight = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and type(weight) is nn.Parameter and weight.device == q_BHSD.device:
        return weight.detach()
    size = q_BHSD.shape[1] * q_BHSD.shape[3]
    unit_ZZ = torch.eye(size, dtype=q_BHSD.dtype, device=q_BHSD.device)
    nothing_1Z = torch.zeros_like(unit_ZZ[:1])
    through_ZW: torch.Tensor = projection(unit_ZZ) - projection(nothing_1Z)
    return through_ZW.T
