"""`sparsekv eval`: a model on the tasks, dense and with its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli.options import (
    AllowMismatch,
    Backend,
    Batch,
    Chunk,
    Device,
    Dtype,
    Json,
    Model,
    PlanFile,
    Seed,
    Target,
    Tasks,
    given,
)
from sparsekv.cli.output import columns, emit, emit_json
from sparsekv.cli.scores import SCORE_HEADER, score_row
from sparsekv.cli.values import lengths_from, names_from
from sparsekv.plans.errors import PromptError, UsageError

if TYPE_CHECKING:
    from sparsekv.planner.eval_results import EvalResult, TaskResult


def evaluate(
    context: typer.Context,
    target: Target = None,
    plan: PlanFile = None,
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
    allow_mismatch: AllowMismatch = False,
    as_json: Json = False,
) -> None:
    """Measure the tasks on held-out samples: retrieval by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder) dense is measured alone.
    """
    from sparsekv.cli.subject import backend_named, load, subject_of
    from sparsekv.plans.schema import check_model

    subject = subject_of(target, plan, model)
    idle = [name for name in ("phase", "backend", "allow_mismatch") if name in given(context) and subject.plan is None]
    if idle:
        raise UsageError(f"expected a plan beside --{idle[0].replace('_', '-')}, found none; name one with --plan FILE")
    most = _one_length(length)
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation import prompts_at_once
    from sparsekv.planner.options import TASKS
    from sparsekv.planner.progress import BarProgress

    names = TASKS if tasks is None else names_from(tasks, "--tasks")
    loaded = load(subject, device, dtype)
    if most > loaded.info.context_length:
        raise PromptError(
            f"expected a length within the model's context of {loaded.info.context_length} tokens, found {most}; "
            "give a shorter --length"
        )
    differs = check_model(subject.plan, loaded.info, allow_mismatch) if subject.plan else []
    result = measure(
        loaded,
        subject.plan,
        names,
        most,
        samples,
        phase=phase,
        backend=backend_named(backend),
        batch=batch or prompts_at_once(loaded.model, most),
        seed=seed,
        prefill_chunk=chunk,
        allow_mismatch=allow_mismatch,
        progress=BarProgress(),
    )
    has_plan = subject.plan is not None
    if as_json:
        emit_json(_report(result, samples, has_plan) | ({"differs": differs} if has_plan else {}))
    else:
        emit(_text(result, samples, has_plan))


def _one_length(text: str) -> int:
    lengths = lengths_from(text, "--length")
    if len(lengths) != 1:
        raise UsageError(f"expected one --length, found {text!r}; call eval once for each")
    return lengths[0]


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
