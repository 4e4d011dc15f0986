"""Measures on held-out prompts whether a plan meets its gates: prefill alone, decode alone, and both.

Samples follow from what the plan executes, so that nobody chose them and no earlier attempt at a plan saw them. They
are drawn until every figure of every gate is decided, something is missed, or the time is up (gates.py says how). Of
further samples only what is undecided is run: phases and lengths, the floor beside them, dense's own continuation; and
where only right answers are, only tasks that dense or the plan solves. A
plan is *verified* where all are met, by gates at least as strict as the defaults, and every sparse bucket was run
sparse near the end of its lengths; else it stays unverified, with what was measured. Where the time was up before all
was decided, a later run goes on from the outcomes (outcomes.py, outcomes_file.py). Results come from evaluation/; what
to try after a miss is said in tighten.py.

A plan whose layers evict tokens loses what nobody asked for yet. So it is also run on tasks that show that, and on what
dense generates far beyond an answer, and is not verified where any one task has lost more than all of them may.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from sparsekv.planner.common_options import GivenPrompt, digest_of_prompts
from sparsekv.planner.evaluation import DENSE, EvalSamples, Evaluator, Mode, PhaseName, PlanMode, opened
from sparsekv.planner.evaluation.given import NEAR_END, GivenSamples, HeldOut, samples_of
from sparsekv.planner.evaluation.results import Comparison, EvalResult, measurement_of, merged
from sparsekv.planner.gates import Wanted, fails_at, level_of, line_of, lost_tasks
from sparsekv.planner.options import Gate, Settled
from sparsekv.planner.outcomes import Outcomes, Pace, floor_of
from sparsekv.planner.outcomes_file import OutcomesRecord, OutcomesSettings
from sparsekv.planner.progress import Progress, StageStep, prefill_work
from sparsekv.planner.tasks import Kit, Split, prepare
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Evidence, Measurement, Plan, Quality
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel

_BROKEN_FLOOR = 0.1  # nats: that much is no rounding
_ROUNDS = 6  # most samples of each task and length between two looks, on a GPU; on a CPU one
_ROUND_TOKENS = 1 << 17  # of a task between two looks
_DENSE_FROM = 0.999  # a density that computes everything, but for how shares are counted
_LONG_TEXT = 128  # tokens of dense's own text that a plan reads whose layers evict tokens
_UNDECIDED = "undecided: "


@dataclass(frozen=True, slots=True)
class Verification:
    """Holds what was measured, and what it shows.

    Attributes:
        passed: whether nothing is missed.
        conclusive: whether the plan is verified.
        reasons: what was missed, a line each; else what keeps the plan from being verified.
        missed: for each phase that missed the gate, the lengths that did worst.
        drawn: samples of a task and length, at most.
        outcomes: what a later run goes on from; None where nothing is left to be drawn.
        seconds: about how long that run takes; None where that is not known.
        used_up: something is undecided, and the prompts that were given were all run.
    """

    quality: Quality
    passed: bool
    conclusive: bool
    reasons: tuple[str, ...]
    missed: Mapping[PhaseName, tuple[int, ...]]
    drawn: int = 0
    outcomes: OutcomesRecord | None = None
    seconds: float | None = None
    used_up: bool = False

    @property
    def may_verify(self) -> bool:
        """Returns whether a later run that goes on from here may verify the plan: samples that were chosen do not."""
        return self.outcomes is not None and not self.outcomes.settings.chosen

    def says_more(self, plan: Plan) -> bool:
        """Returns whether it is to stand in the file of a plan, in place of what is known there: it verifies the plan,
        misses the same gates, or is of more prompts of an unverified one."""
        own, known = self.quality.evidence, plan.quality.evidence if plan.quality else None
        assert own is not None, "measured just now"
        if not self.passed:
            return own.gates == (known.gates if known else Gate().named)
        return self.conclusive or known is None or (plan.status != "verified" and own.prompts >= known.prompts)

    def recorded(self, plan: Plan) -> Plan:
        """The plan with its quality; verified where that was conclusive."""
        status = "verified" if self.conclusive else "unverified"
        return plan.model_copy(update={"status": status, "quality": self.quality})


def verify(
    loaded: LoadedModel,
    plan: Plan,
    options: Settled,
    progress: Progress | None = None,
    kit: Kit | None = None,
    *,
    attempt: int = 1,
    prompts: Sequence[GivenPrompt] = (),
    held_out: HeldOut | None = None,
    skipped: int = 0,
    earlier: OutcomesRecord | None = None,
    keep: Callable[[OutcomesRecord], None] | None = None,
) -> Verification:
    """Runs a plan on held-out prompts and compares it with dense.

    Args:
        loaded: the model, with nothing applied to it.
        plan: the plan; phases that are dense at every length are not measured.
        options: settled: gate, tasks, verify_time, verify_samples, verify_lengths, batch.
        attempt: which plan this is of those that were tried, from 1: later ones need more proof.
        prompts: of the caller, in place of samples of tasks; they verify nothing, as they were chosen.
        held_out: or those that were set aside before the plan was searched for.
        skipped: how many of these, at a length, earlier attempts saw.
        earlier: what an undecided verification of the plan drew, which is gone on from.
        keep: called with what a later run goes on from after each round that leaves something undecided.

    Raises:
        GateError: the model without a plan, or a kernel with every tile computed, gives numbers that are not finite.
        UsageError: nothing of the plan is sparse, or the earlier outcomes were drawn with other settings.
        PromptError: a task does not fit a length.
        PlanMismatchError, UnsupportedError, BackendError: the plan cannot be applied.
    """
    phases = planned_phases(plan)
    if not phases:
        raise UsageError("expected a plan that is sparse somewhere, found none: there is nothing to verify")
    modes = _modes(plan, phases, options, loaded.model.dtype)
    options = options.but(tasks=options.verified_tasks(evicts=bool(plan.retained)))
    text = _LONG_TEXT if plan.retained else 0
    samples, source = held_out_samples(plan, options), kit or prepare(loaded.tokenizer, Split.VERIFICATION)
    if prompts:
        samples = GivenSamples.of(samples, samples_of(loaded.tokenizer, prompts, loaded.info.context_length))
        chosen = dict.fromkeys((*options.verify_chosen, "--prompts"))
        options = options.but(tasks=samples.tasks, verify_chosen=tuple(chosen))
    elif held_out:
        samples = GivenSamples.at(samples, held_out.after(skipped))
        options = options.but(tasks=samples.tasks, verify_lengths=samples.lengths)
    digest = held_out.digest if held_out else digest_of_prompts(prompts) if prompts else None
    settings = OutcomesSettings.of(
        loaded, plan, executed_digest(plan), options,
        content_seed=samples.seed, attempt=attempt, skipped=skipped, prompts=digest,
    )  # fmt: skip
    if earlier is not None:
        earlier.settings.check_same(dict(settings))
    samples.check_fit(source)
    found = earlier.outcomes(tuple(modes)) if earlier else Outcomes({name: {} for name in modes}, options.gate, attempt)
    with (
        opened(loaded, modes, batch=samples.batch, chunk=samples.prefill_chunk, text=text) as evaluator,
        (progress or Progress()).stage("evaluate", _work(samples, options.verify_samples, modes)) as step,
    ):
        if earlier is None:
            found.wanted = {
                length: dict.fromkeys(some, Wanted())
                for length in samples.lengths
                if (some := [one for one in phases if length in _sparse_lengths(plan, one, samples.lengths)])
            }
        kept = None if keep is None else lambda: keep(OutcomesRecord.of(found, settings))
        _draw(found, evaluator, samples, source, options, step, kept)
    return _verdict(plan, found, options, settings)


def _work(samples: EvalSamples, most: int | None, modes: Mapping[str, Mode]) -> float | None:
    """The units of all samples; unknown where as many are drawn as it takes."""
    if most is None:
        return None
    return most * len(samples.tasks) * (1 + len(modes)) * sum(map(prefill_work, samples.lengths))


def _modes(plan: Plan, phases: Sequence[PhaseName], options: Settled, dtype: torch.dtype) -> dict[str, Mode]:
    """The plan by phase; and the kernels with every tile and token computed, over keys and values as the plan has them,
    but in float32, where their rounding is nothing beside a gate: left out, it counts as the plan's."""
    how = (options.backend, options.kv_dtype)
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, *how) for phase in phases}
    if dtype == torch.float32 and options.kv_dtype == "auto":
        return modes
    whole = _whole(plan)
    return modes | {floor_of(phase): PlanMode(whole, phase, *how) for phase in phases}


def _whole(plan: Plan) -> Plan:
    """The same phases by the same kernels, with every tile and token computed."""
    prefill = decode = None
    if plan.prefill:
        model, every = plan.model, AShape(sink=tokens(1), window=tokens(plan.model.context_length))
        heads = tuple(
            HeadGroup(layer=layer, heads=tuple(range(model.group_of(layer).heads)), pattern=every)
            for layer in model.full_layers
        )
        prefill = PrefillPlan(tile=plan.prefill.tile, lengths=(PrefillBucket(up_to=None, heads=heads),))
    if plan.decode:
        decode = DecodePlan(lengths=(DecodeBucket(up_to=None, dense=True),))
    return plan.model_copy(update={"prefill": prefill, "decode": decode, "kv_cache": None})


def held_out_samples(plan: Plan, options: Settled) -> EvalSamples:
    """Returns what a plan is verified on: of a seed that was asked for, or that follows from what the plan executes."""
    seed = content_seed(plan) if options.verify_seed is None else options.verify_seed
    return EvalSamples(
        options.tasks, options.verify_lengths, 1, options.batch, seed, prefill_chunk=options.prefill_chunk
    )


def content_seed(plan: Plan) -> int:
    """The seed of a plan's held-out samples."""
    return int(executed_digest(plan).removeprefix("sha256:")[:8], 16)


def _sparse_lengths(plan: Plan, phase: PhaseName, lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns where a phase is sparse: others would dilute what is bounded over all lengths. All, if it is sparse at
    none."""
    parts = [
        part for name, part in (("prefill", plan.prefill), ("decode", plan.decode)) if part and phase in (name, "both")
    ]
    rules = plan.retained.values() if phase != "prefill" else ()

    def is_sparse_at(n: int) -> bool:
        return any(part.bucket(n).is_sparse_at(n) for part in parts) or any(rule.kept_tokens(n) < n for rule in rules)

    return tuple(filter(is_sparse_at, lengths)) or tuple(lengths)


def _draw(
    found: Outcomes, evaluator: Evaluator, samples: EvalSamples, kit: Kit, options: Settled, step: StageStep,
    keep: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Samples, until all is decided or something is missed, or there are to be no more."""
    most, deadline = options.verify_samples or math.inf, time.monotonic() + options.verify_time
    while any(found.drawn[length] < most for length in found.wanted) and not found.is_missed:
        started, before = time.monotonic(), found.prompts
        for length, phases in sorted(found.wanted.items()):
            if found.looks and time.monotonic() > deadline:
                break
            count = int(min(most - found.drawn[length], _rounds(samples, evaluator)))
            asked = replace(samples, samples=count, first=found.drawn[length])
            if count and not _compare(found, evaluator, asked, length, kit, phases, step):
                found.ended.add(length)
            found.drawn[length] += count
            del found.wanted[length]
        if found.prompts > before:
            found.timed.append(Pace(found.prompts - before, time.monotonic() - started))
        if found.wanted:
            break  # the time was up within a round: it is looked at once it is whole
        found.look()
        if keep and found.is_open:
            keep()
    found.look(last=True)


def _rounds(samples: EvalSamples, evaluator: Evaluator) -> int:
    on_gpu = evaluator.loaded.model.device.type == "cuda"
    return max(1, min(_ROUNDS, _ROUND_TOKENS // max(samples.lengths))) if on_gpu else 1


def _compare(
    found: Outcomes, evaluator: Evaluator, asked: EvalSamples, length: int, kit: Kit,
    phases: Mapping[PhaseName, Wanted], step: StageStep,
) -> bool:  # fmt: skip
    """Runs samples, of each phase what is wanted; whether there were any."""
    whole = reduce(operator.or_, phases.values())
    if not whole.floor and found.looks:
        asked = replace(asked, tasks=found.answering_tasks(length))
    some = asked.drawn(kit, length) if asked.tasks else []
    if not some:
        return False
    if not whole.texts:
        evaluator = replace(evaluator, greedy=False, text=0)
    floored = [floor_of(phase) for phase, wanted in phases.items() if wanted.floor and floor_of(phase) in found.results]
    results = evaluator.compare(some, [*phases, *floored], step=step, before=asked.first * len(asked.tasks))
    check_finite(results[DENSE], "without a plan")
    for name in floored:
        check_finite(results[name], "with every tile computed")
    for name in (*phases, *floored):
        found.add(name, EvalResult.of(length, asked.tasks, some, results[DENSE], results[name]))
    return True


def check_finite(found: Comparison, how: str) -> None:
    """Refuses a model, or kernels, that a plan cannot be held against.

    Raises:
        GateError: some probabilities are nan or infinite.
    """
    bad = sum(not outcome.is_finite for outcome in found.outcomes)
    if bad:
        raise GateError(
            f"expected finite probabilities {how}, found nan or infinity in {bad} of {len(found.outcomes)} samples; "
            "check the model in this precision, or use another backend (--set backend=NAME)"
        )


def _verdict(plan: Plan, found: Outcomes, options: Settled, settings: OutcomesSettings) -> Verification:
    """Returns what the results of each phase say of a plan by its gates."""
    missed = {phase: claims.missed_lengths for phase, claims in found.claims.items() if claims.having("missed")}
    missed |= {phase: broken for phase in found.phases if (broken := tuple(n for p, n in found.broken if p == phase))}
    reasons = tuple(
        f"{phase} at {format_length(length)}: nan or infinity in {count} samples"
        for (phase, length), count in found.broken.items()
    ) + tuple(
        line_of(phase, name, claim) for phase, claims in found.claims.items() for name, claim in claims.having("missed")
    )
    lost = tuple(line for phase in found.phases for line in lost_tasks(phase, found.measured(phase), found.gate))
    lost = lost if plan.retained else ()
    used_up = found.is_used_up and settings.prompts is not None
    doubts = (*reasons, *lost) if reasons else (*lost, *_doubts(plan, found, options, used_up))
    quality = Quality(
        **{phase: _recorded(phase, found, options.prefill_chunk) for phase in found.phases},
        evidence=_evidence(found, options, next(iter(doubts), None), settings.skipped),
    )
    told = tuple(f"{line}{_time_needed(found, options)}" if line.startswith(_UNDECIDED) else line for line in doubts)
    record = OutcomesRecord.of(found, settings) if found.is_open else None
    spent = (max(found.drawn.values()), record, found.seconds, used_up)
    return Verification(quality, not missed, not doubts, told, missed, *spent)


def _time_needed(found: Outcomes, options: Settled) -> str:
    """Returns what is left to be drawn, in seconds, and a round where the time had room for the first one alone; they
    are of this run, so that the plan does not have them."""
    first_alone = found.looks == len(found.timed) == 1 and found.wanted and math.isfinite(options.verify_time)
    needed = found.more and found.pace is not None and found.seconds is not None
    left = f": {found.seconds:.0f} s at {found.pace:.2g} s a prompt" if needed else ""
    if not first_alone:
        return left
    one = max(1.0, found.timed[0].seconds)
    return f"{left}; no second round of prompts fits into {options.verify_time:g} s: one takes {one:.0f} s"


def _doubts(plan: Plan, found: Outcomes, options: Settled, used_up: bool) -> Iterator[str]:
    """Returns what keeps a plan that misses nothing from being verified.

    Args:
        used_up: the prompts that were given were all run.
    """
    open_ = [(p, name, claim) for p, claims in found.claims.items() for name, claim in claims.having("undecided")]
    if open_:
        hardest = max(open_, key=lambda one: one[2].more or math.inf)
        others = f" ({len(open_) - 1} more figures are undecided)" if len(open_) > 1 else ""
        more = (
            f"about {found.more} more prompts like these {found.prompts} would decide"
            if found.more
            else "how many more prompts would decide cannot be told from these"
        )
        more += "; the prompts that were given are used up: add to them" if used_up else ""
        yield f"{_UNDECIDED}{line_of(*hardest)}{others}; {more}"
    for phase in found.phases:
        for floor in found.of(floor_of(phase)):
            broken = sum(one.flipped for one in floor.outcomes) > options.gate.max_failed * len(floor.outcomes)
            if broken or floor.kl > _BROKEN_FLOOR:
                yield (
                    f"{phase} at {format_length(floor.lengths[0])}: with every tile computed the kernels are "
                    f"{floor.kl:.3g} nats from the model's own attention, or pick other first tokens, which is no "
                    "rounding; see `sparsekv doctor`, or use another backend (--set backend=NAME)"
                )
    yield from _untouched(plan, found)
    if not options.gate.is_strict:
        yield "the gates are looser than the defaults; leave them out to have the plan verified"
    if options.verify_chosen:
        yield f"samples were chosen by {', '.join(options.verify_chosen)}; `sparsekv verify` without them may verify it"


def _recorded(phase: PhaseName, found: Outcomes, chunk: int | None) -> Measurement:
    """Returns what was measured of a phase, with its floor, failures and claims."""
    claims, measured = found.claims[phase], {one.length: one for one in found.measured(phase)}
    floors, size = found.results.get(floor_of(phase), {}), fails_at(found.gate, phase)
    failed = {
        length: sum(bool(prompt.fails(size)) for prompts in one.tasks.values() for prompt in prompts)
        for length, one in measured.items()
    }
    own = measurement_of(found.of(phase), phase, chunk)
    by_length = tuple(
        part.model_copy(
            update={
                "floor": floors[part.length].kl if part.length in floors else None,
                "failed": failed[part.length],
                "claims": claims.by_length[part.length],
            }
        )
        for part in own.by_length
    )
    floor = merged(floors.values()).kl if floors else None
    whole = {"floor": floor, "failed": sum(failed.values()), "claims": claims.overall, "by_length": by_length}
    return own.model_copy(update=whole)


def _evidence(found: Outcomes, options: Settled, reason: str | None, skipped: int) -> Evidence:
    prompts = max(sum(len(result.outcomes) for result in found.of(phase)) for phase in found.phases)
    return Evidence(
        level=level_of(found.attempt),
        attempt=found.attempt,
        looks=found.looks,
        prompts=prompts,
        seed=options.verify_seed,
        tasks=options.tasks,
        skipped=skipped or None,
        gates=options.gate.named,
        excludes=None if reason else _excludes(found, options),
        reason=reason,
    )


def _excludes(found: Outcomes, options: Settled) -> str:
    gate, lengths = options.gate, ", ".join(map(format_length, options.verify_lengths))
    solved = all("accuracy" in claims.overall for claims in found.claims.values())
    lost = f"a loss of {gate.max_accuracy_drop:g} points of accuracy"
    return (
        f"at {lengths}: divergence and disagreement beyond the gates, failures on {gate.max_failed:.0%} of prompts, "
        f"{lost if solved else 'nothing of accuracy, since no task is solved'}; not excluded: rarer failures, such as "
        "one prompt in a hundred, and other lengths and tasks"
    )


def planned_phases(plan: Plan) -> tuple[PhaseName, ...]:
    """Returns what of a plan there is to measure: the phases that are sparse somewhere, and both together."""
    sparse: list[PhaseName] = []
    if plan.prefill and not all(bucket.dense for bucket in plan.prefill.lengths):
        sparse.append("prefill")
    if plan.retained or (plan.decode and not all(bucket.dense for bucket in plan.decode.lengths)):
        sparse.append("decode")
    return (*sparse, "both") if len(sparse) == 2 else tuple(sparse)


def _untouched(plan: Plan, found: Outcomes) -> tuple[str, ...]:
    """The sparse buckets of a plan that were not run sparse near the end of their own lengths, a remark each."""
    remarks = []
    for phase, part in (("prefill", plan.prefill), ("decode", plan.decode)):
        run = _ran_sparse(phase, part, found) if part else []
        after, before = 0, None
        for bucket in part.lengths if part else ():
            end, longest = _end(plan, bucket), bucket.up_to or plan.model.context_length
            continued = isinstance(bucket, PrefillBucket) and _continues(bucket, before)
            was_run = any(max(after, NEAR_END * end) < length <= longest for length in run)
            if bucket.is_sparse_at(longest) and not (continued or was_run):
                reached, least = _range(after, bucket.up_to), format_length(max(after + 1, math.ceil(NEAR_END * end)))
                nearby = f"from {least} on, such as {format_length(longest)}"
                remarks.append(f"{phase} {reached} is sparse and was not run sparse at a length {nearby}")
            after, before = bucket.up_to or after, bucket
    return tuple(remarks)


def _end(plan: Plan, bucket: PrefillBucket | DecodeBucket) -> int:
    """The longest length that a bucket was made for. Decode beyond the longest planned one has the same budgets."""
    if bucket.up_to is not None:
        return bucket.up_to
    planned = [entry.length for entry in plan.cost.lengths] if plan.cost and isinstance(bucket, DecodeBucket) else []
    return max(planned, default=plan.model.context_length)


def _ran_sparse(phase: str, part: PrefillPlan | DecodePlan, found: Outcomes) -> list[int]:
    """The lengths at which less than everything was computed."""
    share = "prefill_density" if phase == "prefill" else "decode_share"
    results = found.results.get(phase, {}).items()
    return [
        length
        for length, result in results
        if part.bucket(length).is_sparse_at(length) and getattr(result, share) < _DENSE_FROM
    ]


def _continues(bucket: PrefillBucket, before: object) -> bool:
    """Returns whether an extrapolated bucket is as another, or has the tokens that the one before it has at its end, as
    shares of the context."""
    if bucket.same_as or not (bucket.extrapolated and isinstance(before, PrefillBucket) and before.up_to):
        return bucket.extrapolated and bucket.same_as is not None
    length = before.up_to
    at_its_end = (group.model_copy(update={"pattern": group.pattern.of_context(length)}) for group in bucket.heads)
    return tuple(at_its_end) == before.heads


def _range(after: int, up_to: int | None) -> str:
    """The lengths of a bucket behind one that ends at `after`, or behind none (0)."""
    beyond = f"of more than {format_length(after)}" if after else ""
    if up_to is None:
        return beyond or "at every length"
    return f"{beyond}, up to {format_length(up_to)}," if beyond else f"up to {format_length(up_to)}"
