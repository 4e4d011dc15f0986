"""Profiling: one dense forward pass a calibration prompt, every candidate pattern of every head on the way.

Layer by layer the observer has q, k and v in hand: it brings the candidates to their target costs (on the first prompt
of a length; later prompts take the patterns found there) and scores them; the layer itself goes on with dense
attention. What a layer's choice of tokens is worth to later layers is taken from the same pass. Nothing of size S x S
is held, and what was measured is on disk after every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from sparsekv.kernels.dispatch import choose_backend
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.place import device_name, dtype_name, versions
from sparsekv.planner.pricing.mandatory import check_targets
from sparsekv.planner.profile_data import LengthProfile, Profile
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.planner.search.collect import collected
from sparsekv.planner.search.observe import Pass
from sparsekv.planner.search.partial import Records
from sparsekv.planner.search.prompts import CalibrationPrompt, PromptSource, digest_of
from sparsekv.planner.search.space import aims, decode_budgets, decode_selectors
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.hf.load import LoadedModel

Prompts = Mapping[int, Sequence[CalibrationPrompt]]


def profile(
    loaded: LoadedModel, options: PlanOptions, progress: Progress | None = None, out: Path | None = None
) -> Profile:
    """Profiles a model.

    Args:
        loaded: the model, in evaluation mode.
        options: settled (`PlanOptions.settled`).
        progress: where to report.
        out: where the profile is going to be written; what is measured is kept in `out` + ".partial" until then, and
            a run that was interrupted goes on from there. The file itself is written by the caller, who then calls
            `discard_partial`.

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
    records = Records(out and _partial(out), _identity(loaded, options, prompts, backend))
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


def discard_partial(out: Path) -> None:
    """Removes what an interrupted run would go on from, once the profile itself is written."""
    _partial(out).unlink(missing_ok=True)


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


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
