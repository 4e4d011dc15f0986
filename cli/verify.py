"""`sparsekv verify`: does a plan keep what its gate asks for?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, settings_of
from sparsekv.cli.output import emit, emit_json, emit_verdict, quality_table, tell
from sparsekv.cli.plan_files import answered_prompts, check_replaceable, check_writable, outcomes_beside, own_prompts
from sparsekv.cli.verdict import DRAWN_BY, GATED_BY, Ended, denser_command, repeated, run_by, verdict
from sparsekv.planner.common_options import DEFAULT_TASKS, Drawn, GivenPrompt, Hardware, digest_of_prompts, set_aside
from sparsekv.planner.flags import MOST, Flag, Lengths
from sparsekv.planner.options import HELD_OUT, VERIFY_TIME, Gate, Gated, PlanOptions, lengths_to_verify
from sparsekv.plans.errors import GateError, SparseKVError, UsageError
from sparsekv.plans.files import executed_digest, parse_plan, read_text, rewrite_plan
from sparsekv.plans.model import OTHER_WEIGHTS, ModelInfo, same_architecture
from sparsekv.plans.schema import NOTHING_SPARSE, Plan, check_model, to_data
from sparsekv.plans.show import claims

if TYPE_CHECKING:
    from sparsekv.planner.options import Settled
    from sparsekv.planner.outcomes_file import OutcomesRecord
    from sparsekv.planner.verify import Verification


_COMPARED = ("lengths", "tasks", "seed", "prefill_chunk")


class VerifyFlags(Subjects, Gated, Drawn, Hardware, Output):
    """Holds what `verify` is asked to do."""

    group: ClassVar = "Verification"
    lengths: Annotated[
        Lengths,
        Flag(
            "Such as 4k,16k; by default the plan's own, or where it names none some that fit the device.",
            ("--lengths", "--length"),
            "LIST",
        ),
    ] = ()
    verify_samples: Annotated[int | None, Field(ge=1, le=MOST), Flag(HELD_OUT, ("--samples",), "N")] = None
    verify_time: Annotated[float | None, Field(gt=0.0, le=1e6), Flag(VERIFY_TIME, metavar="SECONDS")] = None
    prompts_file: Annotated[
        Path | None,
        Flag(
            'Own prompts: JSON lines of {"prompt", "answer"}; of those it was made from, the part set aside.',
            ("--prompts",),
            "FILE",
        ),
    ] = None
    write: Annotated[bool, Flag("Put this quality and status in place of the plan's own, unless they show less.")] = (
        False
    )
    more: Annotated[
        bool,
        Flag("Beside --write: go on from what an undecided verification drew, in PLAN.outcomes; --samples counts all."),
    ] = False

    full: Annotated[bool, Flag("Print tables by phase, task and gate too.")] = False

    def options(self, plan: Plan) -> PlanOptions:
        """Returns what to verify of a plan."""
        return PlanOptions(
            **lengths_to_verify(plan, self.lengths, plan.model.context_length),
            tasks=self.tasks,
            verify_samples=self.verify_samples,
            gate=self.gate,
            verify_time=self.verify_time,
            verify_seed=self.seed if self.is_given("seed") else None,
            batch=self.batch,
            prefill_chunk=self.prefill_chunk,
            kv_dtype=plan.kv_dtype,
            backend=settings_of(self).backend,
        )

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.prompts_file is not None:
            self.refuse(("tasks", "seed"), "no samples are drawn", "prompts_file")
        if self.more and not self.write:
            raise UsageError("expected --write beside --more, whose outcomes are in a file beside the plan; add it")
        return self

    @property
    def comparable(self) -> dict[str, object]:
        """Returns what was asked for of the settings of outcomes, by their names but for gates."""
        asked = {"lengths": tuple(sorted(self.lengths)), "tasks": self.tasks}
        return {name: asked.get(name, self.typed(name)) for name in _COMPARED if self.is_given(name)}


def verify(flags: VerifyFlags) -> None:
    """Run a plan on held-out prompts against dense: prefill, decode, both.

    Exit 1 when a gate is shown to be missed. Exit 0 otherwise, also where what was drawn shows neither that a gate is
    met nor that it is missed, whatever its mean: the last lines say which, and `--write --more` goes on from there.
    """
    subject = flags.subject
    found = subject.need_plan()
    if not flags.write:
        _verify(flags, subject, found)
        return
    from sparsekv.planner.records import only_run

    file = _own_file(subject)
    with only_run(outcomes_beside(file)):
        before = read_text(file)
        _verify(flags, subject, parse_plan(before, str(file)), file, before)


def _verify(flags: VerifyFlags, subject: Subject, found: Plan, file: Path | None = None, before: str = "") -> None:
    """Runs a plan, and writes to its file, which held `before`, where one is named."""
    if found.is_dense:
        _tell_nothing_sparse(found, subject, flags)
        return
    if flags.more and _is_decided(found):
        _tell_decided(found, subject, flags)
        return
    earlier = _earlier(flags, found, file) if flags.more and file else None
    asked = flags.options(found)
    subject = subject.checked(flags, asked.lengths)
    calibrated, aside = _set_aside(found, flags.prompts_file)
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file and not aside else ()
    from sparsekv.planner.evaluation.given import HeldOut
    from sparsekv.planner.options import settle
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.verify import verify as measure

    def check(info: ModelInfo, hardware: str) -> None:
        check_model(found, info)
        settle(asked, info.context_length, hardware)

    if earlier:  # precision and kernels as before, unless this call says otherwise, which is refused then
        before_this = {"dtype": earlier.settings.dtype, "backend": earlier.settings.backend}
        flags = flags.model_copy(update={n: v for n, v in before_this.items() if not flags.is_given(n)})
    loaded = subject.load(flags, check)
    found = _of_these_weights(found, loaded.info)
    differs = check_model(found, loaded.info)
    if flags.write:
        _check_same_weights(found, loaded.info)
    settled = settle(asked, loaded.info.context_length, loaded.model.device.type)
    settled = _as_before(settled, earlier) if earlier else settled.but(tasks=settled.tasks or DEFAULT_TASKS)
    evidence = found.quality.evidence if found.quality else None
    result = measure(
        loaded,
        found,
        settled,
        BarProgress(),
        attempt=evidence.attempt if evidence else 1,  # the samples are those of that attempt
        prompts=prompts,
        held_out=HeldOut.of(loaded.tokenizer, calibrated, aside, settled) if aside else None,
        skipped=(evidence and evidence.skipped) or 0,
        earlier=earlier,
        keep=_keeping(file) if file is not None and (earlier or not outcomes_beside(file).exists()) else None,
    )
    writes = file is not None and result.says_more(found)
    facts: dict[str, Any] = {"passed": result.passed, "verified": result.passed and result.conclusive}
    facts |= {"reasons": list(result.reasons), "quality": to_data(result.quality)}
    facts |= {"model": loaded.info.id, "plan_model": found.model.id, "differs": differs}
    recorded = result.recorded(found)
    ended = None
    if result.passed:
        spent = 0.0 if flags.verify_samples else settled.verify_time
        ended = Ended(
            spent,
            writes and result.may_verify,
            result.seconds,
            run_by(flags, result.used_up),
            repeated(flags, (*DRAWN_BY, *GATED_BY)),
            writes=subject.path is not None and not _other_weights(found, loaded.info),
        )
    _say(recorded, subject, flags, result.reasons, ended)
    if differs:
        tell(f"measured on {loaded.info.id}; this says nothing about {found.model.id}, the model of the plan")
    if file is not None:
        _write(result, found, file, before, facts, writes)
    if not result.passed:
        denser = f"`{denser_command(recorded, _place(recorded, subject), subject.model)}`, with the same gates"
        raise GateError(f"gate missed: {'; '.join(result.reasons)}; go on with {denser}").with_facts(**facts)
    if flags.as_json:
        emit_json(facts)


def _of_these_weights(plan: Plan, model: ModelInfo) -> Plan:
    """An imported plan was made from a config alone: what is measured is measured on the weights that are loaded."""
    known, found = plan.model.fingerprint, model.fingerprint
    same = same_architecture(known.architecture, found.architecture)
    if plan.status != "imported" or known.weights is not None or not same:
        return plan
    return plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": found})})


def _set_aside(plan: Plan, file: Path | None) -> tuple[tuple[GivenPrompt, ...], tuple[GivenPrompt, ...]]:
    """The prompts of a file that the plan was calibrated on, and those that were set aside; none of other prompts."""
    if file is None or plan.provenance.prompts is None:
        return (), ()
    calibrated, aside = set_aside(own_prompts(file))
    return (calibrated, aside) if digest_of_prompts(aside) == plan.provenance.prompts else ((), ())


def _tell_nothing_sparse(plan: Plan, subject: Subject, flags: VerifyFlags) -> None:
    if flags.as_json:
        emit_json({"passed": True, "verified": False, "reasons": [NOTHING_SPARSE], "quality": None})
    else:
        _say(plan, subject, flags)


def _write(result: Verification, plan: Plan, file: Path, before: str, facts: dict[str, Any], writes: bool) -> None:
    """Puts what was found in the plan's file, and what is gone on from beside it, unless more is known there."""
    if not writes:
        tell(f"{file}: left as it is, {plan.status}: more is known there than this run shows")
        return
    from sparsekv.planner.outcomes_file import keep_outcomes

    recorded, beside = result.recorded(plan), outcomes_beside(file)
    try:
        if result.outcomes is not None:
            keep_outcomes(result.outcomes, beside)
        rewrite_plan(recorded, file, before)
    except SparseKVError as error:
        kept = f"in {beside}, for --more" if result.outcomes is not None and beside.exists() else "in no file"
        error.with_facts(**facts).add_note(f"what was measured is printed, and {kept}")
        raise
    if result.outcomes is None:
        keep_outcomes(None, beside)
    tell(f"{file}: written as {recorded.status_text}")


def _keeping(file: Path) -> Callable[[OutcomesRecord], None]:
    """Returns what writes the outcomes of each round beside a plan, so that an interruption loses one round."""
    from sparsekv.planner.outcomes_file import keep_outcomes

    def keep(record: OutcomesRecord) -> None:
        with suppress(SparseKVError):  # a full disk is told at the end, with what was measured
            keep_outcomes(record, outcomes_beside(file))

    return keep


def _is_decided(plan: Plan) -> bool:
    """Returns whether more prompts would change nothing: a figure that was measured of a plan is missed, or all are
    met."""
    outcomes = {claim.outcome for _, _, _, claim in claims(plan.quality)} if plan.quality else set()
    return plan.status == "verified" or "missed" in outcomes or outcomes == {"met"}


def _tell_decided(plan: Plan, subject: Subject, flags: VerifyFlags) -> None:
    """Says that nothing is left to be drawn.

    Raises:
        GateError: a gate was missed.
    """
    measured = claims(plan.quality) if plan.quality else ()
    missed = [f"{phase}: {name}" for phase, _, name, claim in measured if claim.outcome == "missed"]
    said = f"nothing is left to be drawn: what was measured of {_place(plan, subject)} is decided"
    facts: dict[str, Any] = {"passed": not missed, "verified": plan.status == "verified", "reasons": [said]}
    facts |= {"quality": to_data(plan.quality) if plan.quality else None}
    if missed:
        denser = denser_command(plan, _place(plan, subject), subject.model)
        raise GateError(f"{said}, and missed its gate in {', '.join(missed)}; go on with `{denser}`").with_facts(
            **facts
        )
    if flags.as_json:
        emit_json(facts)
        return
    tell(said)
    _say(plan, subject, flags)


def _earlier(flags: VerifyFlags, plan: Plan, file: Path) -> OutcomesRecord:
    """Returns what an undecided verification of a plan drew, where this call may go on from it."""
    from sparsekv.planner.outcomes_file import read_outcomes
    from sparsekv.planner.records import versions

    found = read_outcomes(outcomes_beside(file))
    gates = {name: getattr(flags.gate, name) for name in Gate.model_fields if flags.gate.is_given(name)}
    known = {"plan": executed_digest(plan), "versions": versions(), "gates": found.settings.gates.but(**gates)}
    found.settings.check_same(known | flags.comparable)
    most = max((count for _, count in found.drawn), default=0)
    if flags.verify_samples is not None and flags.verify_samples <= most:
        raise UsageError(
            f"expected --samples of more than the {most} that were drawn of each task and length, found "
            f"{flags.verify_samples}; --more counts them all"
        )
    return found


def _as_before(settled: Settled, earlier: OutcomesRecord) -> Settled:
    """Returns options that draw as an earlier run did."""
    found = earlier.settings
    return settled.but(
        tasks=found.tasks,
        gate=found.gates,
        verify_lengths=found.lengths,
        verify_seed=found.seed,
        verify_chosen=found.chosen,
        prefill_chunk=found.prefill_chunk,
    )


def _say(
    plan: Plan, subject: Subject, flags: VerifyFlags, reasons: Sequence[str] = (), ended: Ended | None = None
) -> None:
    """Prints the verdict, below it with --full the tables."""
    place, reason = _place(plan, subject), "; ".join(reasons)
    lines = verdict(plan, place, reason, model=subject.model, ended=ended)
    if flags.as_json:
        tell("\n".join(lines))
        return
    emit_verdict(lines, plan.status)
    if flags.full and plan.quality:
        emit(f"\n{quality_table(plan.quality)}")


def _place(plan: Plan, subject: Subject) -> str:
    return str(subject.path or plan.model.id)


def _own_file(subject: Subject) -> Path:
    """The plan's file, to be written."""
    if subject.path is None:
        raise UsageError(
            "expected a plan file of yours beside --write, found the plan of a hub repository; copy it and name the "
            "copy with --plan FILE"
        )
    check_writable(subject.path)
    check_replaceable(outcomes_beside(subject.path), "what is left undecided", "outcomes")
    return subject.path


def _check_same_weights(plan: Plan, model: ModelInfo) -> None:
    """A plan's quality is of the weights that it was made for."""
    if _other_weights(plan, model):
        is_older = plan.model.fingerprint.weights_difference(model.fingerprint) == "older kind"
        part = "a newer weights fingerprint, which says nothing about the older one of the plan"
        raise UsageError(
            f"expected the model that the plan was made for beside --write, found another one ({model.id}, with "
            f"{part if is_older else OTHER_WEIGHTS}); leave --write out, or plan this model"
        )


def _other_weights(plan: Plan, model: ModelInfo) -> bool:
    known = plan.model.fingerprint.weights
    return known is None or known != model.fingerprint.weights


app = commands.app(
    verify,
    "sparsekv verify ./my-model --write",
    "sparsekv verify --plan plan.yaml --write --more --verify-time 1800",
)
