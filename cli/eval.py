"""`sparsekv eval`: a model on the tasks, dense and with its plan."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sparsekv.cli import options
from sparsekv.cli.arguments import Output, Subjects, settings_of
from sparsekv.cli.bench_curves import CURVE_OPTIONS, CurveFlags, check_length, measure_curve
from sparsekv.cli.output import SCORE_HEADER, agreement_table, columns, emit, emit_json, score_row, tell
from sparsekv.planner.flags import MOST, Flag, Lengths
from sparsekv.planner.options import TASKS, Drawn, Hardware
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Quality, to_data

if TYPE_CHECKING:
    from sparsekv.planner.eval_results import EvalResult
    from sparsekv.planner.evaluation import EvalSamples
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Measurement, Plan

PhaseName = Literal["prefill", "decode", "both"]
_OF_PLAN = ("phase", "backend", "allow_mismatch")


class EvalFlags(Subjects, CurveFlags, Drawn, Hardware, Output):
    """What `eval` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag(
            "Most tokens of a prompt and its answer, by default 4k; several for --curve.",
            ("--length", "--lengths"),
            "TOKENS",
        ),
    ] = (4096,)
    samples: Annotated[int, Field(ge=1, le=MOST), Flag("Samples a task.", metavar="N")] = 20
    phase: Annotated[PhaseName, Flag("Phases that follow the plan.")] = "both"

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.curve is not None:
            self.refuse(_OF_PLAN, "a curve is of both phases, by what is fastest", "curve")
        elif unread := next(filter(self.is_given, CURVE_OPTIONS), None):
            flag = self.flag_of(unread)
            raise UsageError(f"expected --curve FILE beside {flag}, found none; leave {flag} out, or name the file")
        elif len(self.lengths) != 1:
            raise UsageError(f"expected one --length, found {self.lengths}; call eval once for each")
        return self

    @property
    def drawn(self) -> EvalSamples:
        """The samples."""
        from sparsekv.planner.evaluation import EvalSamples

        lengths = tuple(sorted(self.lengths))
        return EvalSamples(self.tasks or TASKS, lengths, self.samples, self.batch, self.seed, self.prefill_chunk)


def evaluate(flags: EvalFlags) -> None:
    """Measure the tasks on held-out samples: retrieval by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. With
    --curve FILE the divergence from dense is measured at many densities, of plans compiled from --profile and of other
    methods, on the same samples; `show --html --curve FILE` draws it.
    """
    subject = flags.subject
    if subject.plan is None and (unread := next(filter(flags.is_given, _OF_PLAN), None)):
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    if flags.curve is not None:
        measure_curve(subject, flags)
        return
    backend = settings_of(flags).backend
    from sparsekv.planner.eval_results import measurement_of
    from sparsekv.planner.evaluation import DENSE, Mode, PlanMode
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.schema import check_model

    plan, phase, length = subject.plan, flags.phase, flags.lengths[0]
    if plan is None:
        tell(f"dense is measured alone: {subject.no_plan}")

    def check(info: ModelInfo, _: str) -> None:
        check_length(length, info.context_length)
        if plan is not None:
            check_model(plan, info, flags.allow_mismatch)

    loaded = subject.load(flags.typed("device"), flags.typed("dtype"), check)
    differs = check_model(plan, loaded.info, flags.allow_mismatch) if plan else []
    modes: dict[str, Mode] = {}
    if plan is not None:
        modes[phase] = PlanMode(plan, phase, backend, flags.allow_mismatch)
        if note := _all_dense(plan, phase, length):
            tell(note)
    (result,) = measure(loaded, modes, flags.drawn, progress=BarProgress())[phase if modes else DENSE]
    if flags.as_json:
        emit_json(_report(result, flags.samples, plan is not None) | ({"differs": differs} if plan else {}))
    else:
        measured = measurement_of([result], phase, flags.prefill_chunk) if plan else None
        emit(_text(result, flags.samples, phase, measured))


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


app = options.app(options.command(evaluate))
