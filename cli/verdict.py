"""The verdict on a plan in a few lines: gains, what is lossy, its status, and the command to go on with."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparsekv.planner.flags import Options
from sparsekv.planner.options import Gate
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.exact_gain import exact_line
from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.plans.schema import HURT_BY_EVICTION, NOTHING_SPARSE, Plan
from sparsekv.plans.show import claims, over, text_of
from sparsekv.plans.types import format_ids, format_length, share_of_points

_LONGER = 1800  # seconds of verification to go on with, or more
_LEAST = 60  # seconds
_LONGEST = 1_000_000  # that the option takes
_SURE = 1.5  # times what is estimated
RUN_BY = ("device", "dtype", "backend", "batch", "prefill_chunk", "prompts_file", "allow_mismatch")
GATED_BY = tuple(name for name in Gate.model_fields if name != "solved")  # which has no flag
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
    words = (format_length(one) if flag == "--lengths" else _word(one) for one in several)
    return f"{flag} {shlex.quote(','.join(words))}"


def _word(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def verdict(plan: Plan, file: str, reason: str = "", *, model: str = "", ended: Ended | None = None) -> tuple[str, ...]:
    """A line each: what is sparse and what it is predicted to gain, where exact output pays if that is known, what is
    dropped where something is and what that did to answers, the status with its reason, the next command.

    Args:
        model, ended: see `next_command`.
    """
    measured = (plan.quality.both, plan.quality.prefill, plan.quality.decode) if plan.quality else ()
    found = next((one.agreement for one in measured if one and one.agreement), None)
    evidence = plan.quality.evidence if plan.quality else None
    reason = NOTHING_SPARSE if plan.is_dense else reason or (evidence.reason or "" if evidence else "")
    if not reason and found:
        reason = f"{found.kl:.2g} nats from dense on {found.samples} held-out samples"
    status = f"status: {plan.status}" + (f", {reason}" if reason else "" if plan.quality else ", never measured")
    kept = (
        (f"kv_cache: lossy, {_kept_share(plan)}; of a prompt: {_kept(plan)}", *hurt_lines(plan))
        if plan.retained
        else ()
    )
    exact = (line,) if (line := exact_line(plan)) else ()
    return (
        _gains("prefill", plan),
        _gains("decode", plan),
        *exact,
        *kept,
        status,
        f"next: {next_command(plan, file, model, ended)}",
    )


def next_command(plan: Plan, file: str, model: str = "", ended: Ended | None = None) -> str:
    """Returns what to go on with: `run` where the plan is verified, or dense. Else a longer `verify`, but where more
    prompts would change nothing, because a gate is missed or answers are lost with every gate decided: `plan`.

    Args:
        model: where it is, if the plan's own name of it is not enough.
        ended: how verification ended undecided; None where that is not known.
    """
    place = f"--plan {shlex.quote(file)}"
    place += f" --model {shlex.quote(model)}" if model not in ("", plan.model.id) else ""
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
    return f"sparsekv plan {shlex.quote(model or plan.model.id)} -o {shlex.quote(out)}{more}"


def _lost_answers(plan: Plan) -> bool:
    """Returns whether a plan that evicts tokens has lost more right answers to a task than all of them may."""
    if not (plan.retained and plan.quality and plan.quality.evidence):
        return False
    most = share_of_points(plan.quality.evidence.gates.get("max_accuracy_drop", 0.0))
    scores = (one for measured in plan.quality.phases.values() for one in measured.tasks.items())
    return any(score.dense - score.sparse > most for task, score in scores if task != "perplexity")


def _kept(plan: Plan) -> str:
    """Returns what layers keep of a prompt beside its ends, rule by rule."""
    rules = [rule for rule in plan.kv_cache or () if rule.is_lossy]
    named = [("layer" if len(rule.layers) == 1 else "layers", rule) for rule in rules]
    return ", ".join(f"{name} {format_ids(rule.layers)} {text_of(rule.keep)}" for name, rule in named)


def _kept_share(plan: Plan) -> str:
    model, rules = plan.model, plan.retained
    length, layers = max(plan.planned_lengths, default=model.context_length), model.full_layers
    kept = sum(rules[layer].kept_tokens(length) if layer in rules else length for layer in layers)
    return f"{kept / (len(layers) * length):.0%} of the cache at {format_length(length)}"


def hurt_lines(plan: Plan) -> tuple[str, ...]:
    """Returns what evicting tokens did to answers that it hurts most, in a line; none where that was not measured."""
    measured = plan.quality and (plan.quality.both or plan.quality.decode)
    scores = [(task, measured.tasks.get(task)) for task in HURT_BY_EVICTION] if measured and plan.retained else []
    told = [f"{task} {score.dense:.0%} -> {score.sparse:.0%} (of {score.samples})" for task, score in scores if score]
    return (f"where eviction hurts: right answers, dense -> plan: {', '.join(told)}",) if told else ()


def _gains(phase: Literal["prefill", "decode"], plan: Plan) -> str:
    part: PrefillPlan | DecodePlan | None = getattr(plan, phase)
    # `same_as` names another bucket of the list
    if part is None or all(bucket.dense or getattr(bucket, "same_as", None) for bucket in part.lengths):
        return f"{phase}: dense {over(plan) if phase == 'decode' else 'at every length'}"
    line = f"{phase}: sparse"
    if isinstance(part, DecodePlan):
        chosen = f"{len(part.sparse_layers)} of {plan.model.layers} layers read what {len(part.filter_layers)} choose"
        line = f"{phase}: {chosen}"
    known = [(entry.length, getattr(entry, phase)) for entry in (plan.cost.lengths if plan.cost else ())]
    sparse = [one for one in reversed(known) if one[1] is not None and not part.bucket(one[0]).dense]
    length, found = next(iter(sparse), (0, None))
    if found is None:
        return line
    gain = f"attention {found.dense_us / max(found.sparse_us, 1e-9):.2f}x as fast as dense, predicted"
    share = f", {found.density:.3f} of the tiles" if phase == "prefill" else ""
    return f"{line}{share}; {gain} at {format_length(length)}"
