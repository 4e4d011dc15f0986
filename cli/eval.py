"""`sparsekv eval`: a model on the tasks, dense and with its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli.options import (
    Backend,
    Batch,
    Chunk,
    Device,
    Dtype,
    Json,
    Model,
    Seed,
    Tasks,
)
from sparsekv.cli.output import columns, emit, emit_json
from sparsekv.cli.scores import SCORE_HEADER, score_row
from sparsekv.cli.values import lengths_from, names_from
from sparsekv.plans.errors import PromptError, UsageError

if TYPE_CHECKING:
    from sparsekv.planner.results import EvalResult, TaskResult


def evaluate(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model; a folder's sparsekv.yaml is its plan.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The plan; without one, dense only.")
    ] = None,
    model: Model = None,
    tasks: Tasks = None,
    length: Annotated[
        str, typer.Option("--length", metavar="LENGTH", help="Most tokens of a prompt and its answer.")
    ] = "4k",
    samples: Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Samples a task.")] = 20,
    phase: Annotated[
        Literal["prefill", "decode", "both"], typer.Option("--phase", help="Phases that follow the plan.")
    ] = "both",
    seed: Seed = 0,
    batch: Batch = None,
    chunk: Chunk = None,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Measure the tasks on held-out samples: retrieval by exact match, text by perplexity."""
    from sparsekv.cli.subject import backend_named, load, subject_of

    subject = subject_of(target, plan, model)
    lengths = lengths_from(length, "--length")
    if len(lengths) != 1:
        raise UsageError(f"expected one --length, found {length!r}; call eval once for each")
    from sparsekv.planner.evaluate import evaluate as measure
    from sparsekv.planner.options import TASKS
    from sparsekv.planner.progress import BarProgress

    loaded = load(subject, device, dtype)
    if lengths[0] > loaded.info.context_length:
        raise PromptError(
            f"expected a length within the model's context of {loaded.info.context_length} tokens, found {lengths[0]}"
        )
    result = measure(
        loaded,
        subject.plan,
        names_from(tasks) or TASKS,
        lengths[0],
        samples,
        phase=phase,
        backend=backend_named(backend),
        batch=batch or (8 if loaded.model.device.type == "cuda" else 1),
        seed=seed,
        prefill_chunk=chunk,
        progress=BarProgress(),
    )
    has_plan = subject.plan is not None
    if as_json:
        emit_json(_report(result, samples, has_plan))
    else:
        emit(_text(result, samples, has_plan))


def _report(result: EvalResult, samples: int, has_plan: bool) -> dict[str, Any]:
    tasks = {name: _task(task, has_plan) for name, task in result.tasks.items()}
    report: dict[str, Any] = {"tasks": tasks, "prefill_density": None, "samples": samples, "length": result.lengths[0]}
    if has_plan:
        report |= {"prefill_density": result.prefill_density, "decode_share": result.decode_share, "kl": result.kl}
    return report


def _task(task: TaskResult, has_plan: bool) -> dict[str, Any]:
    score = task.score
    if not has_plan:
        return {"dense": score.dense, "sparse": None}
    return {"dense": score.dense, "sparse": score.sparse, "interval": list(score.interval)}


def _text(result: EvalResult, samples: int, has_plan: bool) -> str:
    rows = [score_row(name, task.score, has_plan) for name, task in result.tasks.items()]
    facts = f"{samples} samples a task at {result.lengths[0]:,} tokens"
    if has_plan:
        facts += f"; prefill computed {result.prefill_density:.3f} of the tiles"
        facts += f", decode attended to {result.decode_share:.3f} of the tokens; KL {result.kl:.3g}"
    return f"{columns([SCORE_HEADER, *rows], right=(1, 2))}\n\n{facts}"
