"""`sparsekv eval`: a model on the tasks, dense and with its plan."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli import arguments
from sparsekv.cli.bench_curves import CURVE_OPTIONS, Curve, measure_curve
from sparsekv.cli.output import SCORE_HEADER, agreement_table, columns, emit, emit_json, score_row, tell
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.schema import Quality, to_data

if TYPE_CHECKING:
    from sparsekv.planner.evaluation.results import EvalResult
    from sparsekv.planner.evaluation import PhaseName
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Measurement, Plan


def evaluate(
    context: typer.Context,
    target: arguments.Target = None,
    plan: arguments.PlanFile = None,
    model: arguments.Model = None,
    tasks: arguments.Tasks = None,
    length: Annotated[
        str,
        typer.Option(
            "--length",
            "--lengths",
            metavar="TOKENS",
            help="Most tokens of a prompt and its answer; several for --curve.",
        ),
    ] = "4k",
    samples: Annotated[int, typer.Option(min=1, max=arguments.MOST, metavar="N", help="Samples a task.")] = 20,
    phase: Annotated[Literal["prefill", "decode", "both"], typer.Option(help="Phases that follow the plan.")] = "both",
    seed: arguments.Seed = 0,
    batch: arguments.Batch = None,
    chunk: arguments.Chunk = None,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    allow_mismatch: arguments.AllowMismatch = False,
    curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure many densities of the plan and of other methods into this file."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For --curve: what `plan --profile-out` wrote. Given twice, one is of --preset minference.",
        ),
    ] = None,
    phases: Annotated[str | None, typer.Option(metavar="NAMES", help="For --curve: prefill,decode.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="For --curve, such as sparsekv,streamingllm,quest; all by default."),
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(
            "--densities", "--density", metavar="SHARES", help="For --curve: of the prefill methods that take one."
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets", "--budget", metavar="SHARES", help="For --curve: of the context, of the decode methods."
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Measure the tasks on held-out samples: retrieval by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. With
    --curve FILE the divergence from dense is measured at many densities, of plans compiled from --profile and of other
    methods, on the same samples; `show --html --curve FILE` draws it.
    """
    subject = arguments.Subject.named(target, plan, model)
    has_plan = subject.plan is not None
    idle = [
        name for name in ("phase", "backend", "allow_mismatch") if name in arguments.given(context) and not has_plan
    ]
    if idle:
        raise UsageError(f"expected a plan beside --{idle[0].replace('_', '-')}, found none; name one with --plan FILE")
    lengths = arguments.lengths_from(length, "--length")
    _check_curve(arguments.given(context))
    if len(lengths) != 1 and curve is None:
        raise UsageError(f"expected one --length, found {length!r}; call eval once for each")
    from sparsekv.planner.options import TASKS

    names = TASKS if tasks is None else arguments.tasks_from(tasks, "--tasks")
    if curve is not None:
        asked_curve = Curve.of(curve, profile or [], phases, methods, densities, budgets)
        measure_curve(subject, asked_curve, names, lengths, samples, seed, batch, chunk, device, dtype, as_json)
        return
    asked_backend = arguments.settings(device, dtype, backend).backend
    from sparsekv.planner.evaluation.results import measurement_of
    from sparsekv.planner.evaluation import DENSE, EvalSamples, Mode, PlanMode
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.schema import check_model

    if not has_plan:
        tell(f"dense is measured alone: {subject.no_plan}")

    def check(info: ModelInfo, _: str) -> None:
        _check_length(lengths[0], info.context_length)
        if subject.plan:
            check_model(subject.plan, info, allow_mismatch)

    loaded = subject.load(device, dtype, check)
    differs = check_model(subject.plan, loaded.info, allow_mismatch) if subject.plan else []
    modes: dict[str, Mode] = {}
    if subject.plan is not None:
        modes[phase] = PlanMode(subject.plan, phase, asked_backend, allow_mismatch)
        if note := _all_dense(subject.plan, phase, lengths[0]):
            tell(note)
    asked = EvalSamples(tuple(names), lengths, samples, batch, seed, chunk)
    (result,) = measure(loaded, modes, asked, progress=BarProgress())[phase if modes else DENSE]
    if as_json:
        emit_json(_report(result, samples, has_plan) | ({"differs": differs} if has_plan else {}))
    else:
        emit(_text(result, samples, phase, measurement_of([result], phase, chunk) if has_plan else None))


def _all_dense(plan: Plan, phase: PhaseName, length: int) -> str | None:
    """A line where nothing that is measured is sparse at the length: dense is then compared with itself."""
    from sparsekv.planner.verify import is_sparse_at
    from sparsekv.plans.types import format_length

    parts = {"prefill": plan.prefill, "decode": plan.decode}
    ends = []
    for name, part in parts.items():
        if part is None or phase not in (name, "both"):
            continue
        if is_sparse_at(part.bucket(length), length):
            return None
        behind = [bucket for bucket in part.lengths if bucket.up_to is None or bucket.up_to >= length]
        dense = list(takewhile(lambda bucket: bucket.dense, behind))
        if not dense:
            ends.append(f"{name}, which chooses nothing of so few tokens")
        else:
            last = dense[-1].up_to
            ends.append(f"{name} {'at every longer length too' if last is None else f'up to {format_length(last)}'}")
    where = f" ({', '.join(ends)})" if ends else f": it has no {phase} phase"
    return f"the plan is dense at {format_length(length)}{where}; dense is compared with itself"


def _check_curve(given: dict[str, Any]) -> None:
    has_curve = "curve" in given
    for name in ("phase", "backend", "allow_mismatch") if has_curve else CURVE_OPTIONS:
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            missing = f"no {flag} beside --curve, found it" if has_curve else f"--curve FILE beside {flag}, found none"
            raise UsageError(f"expected {missing}; leave {flag} out{'' if has_curve else ', or name the file'}")


def _check_length(length: int, context: int) -> None:
    if length > context:
        raise PromptError(
            f"expected a length within the model's context of {context} tokens, found {length}; give a shorter --length"
        )


def _report(result: EvalResult, samples: int, has_plan: bool) -> dict[str, Any]:
    scores = {name: task.score for name, task in result.tasks.items()}
    tasks: dict[str, Any] = {name: {"dense": score.dense, "sparse": None} for name, score in scores.items()}
    measured: dict[str, Any] = {"prefill_density": None}
    if has_plan:
        for name, score in scores.items():
            tasks[name] |= {"sparse": score.sparse, "interval": score.interval}
            tasks[name] |= {"agreement": to_data(score.agreement) if score.agreement else None}
        measured = {"prefill_density": result.prefill_density, "decode_share": result.decode_share, "kl": result.kl}
        measured |= {"agreement": to_data(result.agreement)}
    return {"tasks": tasks, "samples": samples, "length": result.lengths[0], **measured}


def _text(result: EvalResult, samples: int, phase: PhaseName, measured: Measurement | None) -> str:
    rows = [score_row(name, task.score, measured is not None) for name, task in result.tasks.items()]
    parts = [columns([SCORE_HEADER, *rows], right=(1, 2))]
    facts = f"{samples} {'sample' if samples == 1 else 'samples'} a task at {result.lengths[0]:,} tokens"
    if measured is not None:
        parts.append(agreement_table(Quality(**{phase: measured})))
        facts += f"; prefill computed {result.prefill_density:.3f} of the tiles"
        facts += f", decode attended to {result.decode_share:.3f} of the tokens; KL {result.kl:.3g}"
    return "\n\n".join((*parts, facts))
