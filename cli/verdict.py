"""The end of `plan`, `verify` and `show`: the status of a plan, each length in a row, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from sparsekv.cli.output import columns
from sparsekv.planner.flags import Options
from sparsekv.planner.options import Gate
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.brief import LENGTH_HEADER, brief, length_rows
from sparsekv.plans.schema import NOTHING_SPARSE, Plan
from sparsekv.plans.show import claims
from sparsekv.plans.types import format_length, share_of_points

_LONGER = 1800  # seconds of verification to go on with, or more
_WIDTH = 100  # columns
_LEAST = 60  # seconds
_LONGEST = 1_000_000  # that the option takes
_SURE = 1.5  # times what is estimated
RUN_BY = ("device", "dtype", "backend", "prefill_chunk", "prompts_file")
GATED_BY = tuple(Gate.set_keys())
DRAWN_BY = ("lengths", "tasks", "seed")


@dataclass(frozen=True, slots=True)
class Ended:
    """Says how a verification ended undecided.

    Attributes:
        spent: seconds after which its time was up; 0 where that is not known, or time did not end it.
        goes_on: whether its outcomes are beside the plan, to go on from.
        needed: seconds that it would about take to go on; None where that is not known.
        asked: the options that the next run has to repeat.
        measured: those that say what was measured, and by which gates. The next run repeats them while that is
            undecided; where all of it is met, it is what keeps the plan from being verified.
        writes: whether the plan's file is there to be written, and was measured on its own model.
    """

    spent: float = 0.0
    goes_on: bool = False
    needed: float | None = None
    asked: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    writes: bool = True

    @property
    def flags(self) -> str:
        """Returns what to verify with next. From the start, the same time would show the same."""
        seconds, more = max(_LONGER, 4 * self.spent), ("--more",) if self.goes_on else ()
        write = ("--write",) if self.writes else ()
        if self.goes_on:
            seconds = max(_LONGER, self.spent) if self.needed is None else max(_LEAST, _SURE * self.needed)
        spends = f"--verify-time {math.ceil(min(seconds, _LONGEST))}"
        return " ".join((*self.asked, *self.measured, *write, *more, spends))


def repeated(flags: Options, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the options among `names` that were asked for, as they are typed."""
    values = {name: getattr(flags, parent) for parent, model in flags.nested() for name in model.model_fields}
    return tuple(
        _typed(flags.flag_of(name), getattr(values.get(name, flags), name)) for name in names if flags.is_given(name)
    )


def run_by(flags: Options, used_up: bool) -> tuple[str, ...]:
    """Returns the options by which a verification ran, to be repeated; but for prompts that are all run."""
    return repeated(flags, (name for name in RUN_BY if not (used_up and name == "prompts_file")))


def _typed(flag: str, value: Any) -> str:
    if value is True:
        return flag
    several = value if isinstance(value, tuple) else (value,)
    words = ",".join(format_length(one) if flag == "--lengths" else _word(one) for one in several)
    return f"{flag}{'=' if flag.startswith('--set') else ' '}{shlex.quote(words)}"


def _word(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def verdict(plan: Plan, file: str, reason: str = "", *, model: str = "", ended: Ended | None = None) -> tuple[str, ...]:
    """Lines of text: the status, each length, who chooses or what is evicted, right answers, what keeps the plan from
    being verified, and the next command.

    Args:
        model, ended: see `next_command`.
    """
    table = columns([LENGTH_HEADER, *length_rows(plan)], right=range(len(LENGTH_HEADER))).splitlines()
    return (f"{file}: {plan.status_text}", *table, *sentences(plan, file, reason, model, ended))


def sentences(plan: Plan, file: str, reason: str = "", model: str = "", ended: Ended | None = None) -> tuple[str, ...]:
    """The lines of `verdict` below its table."""
    evidence = plan.quality.evidence if plan.quality else None
    reason = NOTHING_SPARSE if plan.is_dense else reason or (evidence.reason or "" if evidence else "")
    if not (reason or plan.quality):
        reason = "its quality was not measured"
    told = wrap(reason.split(";")[0], _WIDTH)  # all of it: `show --full`, `verify --json`
    return (*brief(plan), *told, f"next: {next_command(plan, file, model, ended)}")


def next_command(plan: Plan, file: str, model: str = "", ended: Ended | None = None) -> str:
    """Returns what to go on with: `run` where the plan is verified, or dense. Else a longer `verify`, but where more
    prompts would change nothing, because a gate is missed or answers are lost with every gate decided: `plan`.

    Args:
        model: where it is, if the plan's own name of it is not enough.
        ended: how verification ended undecided; None where that is not known.
    """
    named = f"{shlex.quote(model)} " if model not in ("", plan.model.id) else ""
    place = f"{named}--plan {shlex.quote(file)}"
    if plan.status == "verified" or plan.is_dense:
        return f"sparsekv run {place}"
    outcomes = {claim.outcome for _, _, _, claim in claims(plan.quality)} if plan.quality else set()
    if "missed" in outcomes or (outcomes == {"met"} and _lost_answers(plan)):
        return denser_command(plan, file, model)
    ended = ended or Ended()
    ended = replace(ended, measured=()) if outcomes == {"met"} else ended
    return f"sparsekv verify {place} {ended.flags}"


def denser_command(plan: Plan, file: str, model: str = "") -> str:
    """Returns what makes another plan where this one misses a gate; of one that evicts tokens, one that keeps more of
    them."""
    retain = plan.provenance.settings.get("retain")
    more = f" --retain {retain + 0.1:.2g}" if isinstance(retain, float) and retain < 0.9 else ""
    out = file if file.endswith(".yaml") else PLAN_NAME
    return f"sparsekv plan {shlex.quote(model or plan.model.id)} -o {shlex.quote(out)}{more} --force"


def _lost_answers(plan: Plan) -> bool:
    """Returns whether a plan that evicts tokens has lost more right answers to a task than all of them may."""
    if not (plan.retained and plan.quality and plan.quality.evidence):
        return False
    most = share_of_points(plan.quality.evidence.gates.get("max_accuracy_drop", 0.0))
    scores = (one for measured in plan.quality.phases.values() for one in measured.tasks.items())
    return any(score.dense - score.sparse > most for task, score in scores if task != "perplexity")
