"""What `eval` is asked to do, and what `eval --curve` besides; the lengths that a model has room for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sparsekv.cli.arguments import Output, Subjects
from sparsekv.planner.flags import MOST, Flag, Lengths, Names, Options, Shares, each_once, text, words
from sparsekv.planner.options import DEFAULT_TASKS, Drawn, Hardware, Phase
from sparsekv.plans.errors import PromptError, UsageError

if TYPE_CHECKING:
    from sparsekv.planner.evaluation import EvalSamples

PhaseName = Literal["prefill", "decode", "both"]
OF_PLAN = ("phase", "backend", "allow_mismatch")


class CurveFlags(Options):
    """What to measure a curve of; nothing given is all there is."""

    curve: Annotated[
        Path | None, Flag("Measure many densities of the plan and of other methods into this file.", metavar="FILE")
    ] = None
    profile: Annotated[
        tuple[Path, ...],
        Flag(
            "For --curve: what `plan --profile-out` wrote. Given twice, one is of --preset minference.",
            metavar="FILE",
            reads=list[Path],
        ),
    ] = ()
    phases: Annotated[
        tuple[Phase, ...], text(words), AfterValidator(each_once), Flag("For --curve: prefill,decode.", metavar="NAMES")
    ] = ()
    methods: Annotated[
        Names, Flag("For --curve, such as sparsekv,streamingllm,quest; all by default.", metavar="NAMES")
    ] = ()
    densities: Annotated[
        Shares,
        Flag("For --curve: of the prefill methods that take one.", ("--densities", "--density"), "SHARES"),
    ] = ()
    budgets: Annotated[
        Shares, Flag("For --curve: of the context, of the decode methods.", ("--budgets", "--budget"), "SHARES")
    ] = ()


CURVE_OPTIONS = tuple(name for name in CurveFlags.model_fields if name != "curve")


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
    prompts_file: Annotated[
        Path | None,
        Flag(
            'Instead of tasks, own prompts: JSON lines of {"prompt", "answer", "task"?}, measured by length.',
            ("--prompts",),
            "FILE",
        ),
    ] = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.prompts_file is not None:
            self.refuse(("tasks", "lengths", "samples", "seed", "curve"), "no samples are drawn", "prompts_file")
        if self.curve is not None:
            self.refuse(OF_PLAN, "a curve is of both phases, by what is fastest", "curve")
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
        tasks = self.tasks or DEFAULT_TASKS
        return EvalSamples(tasks, lengths, self.samples, self.batch, self.seed, self.prefill_chunk)


def check_length(length: int, context: int) -> None:
    """Refuses a length beyond a model's context.

    Raises:
        PromptError: it is.
    """
    if length > context:
        raise PromptError(
            f"expected lengths within the model's context of {context} tokens, found {length}; give a shorter --length"
        )
