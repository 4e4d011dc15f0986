"""`sparsekv bench decode`: steps of decode and whole tokens, by a plan and dense, or with layers in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import model_validator

from sparsekv.cli.arguments import AllowMismatch, Output, Subject, device_and_dtype, settings_of
from sparsekv.cli.bench_rows import Benched, Narrow, Timed, print_rows
from sparsekv.cli.bench_subject import subject_of, title_of
from sparsekv.cli.output import tell
from sparsekv.planner.flags import Counts, Flag, Layers, Lengths, Names, OneShare, TokenBudget
from sparsekv.planner.options import Hardware
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparsekv.bench.decode import DecodeBench
    from sparsekv.bench.random_model import BenchModel
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Plan

_LENGTHS = {"cuda": (8192, 32768, 131072, 524288), "cpu": (8192,)}
_OF_HAND = ("budget", "filters", "selector", "window")


class DecodeFlags(Benched, Timed, Hardware, AllowMismatch, Output):
    """What `bench decode` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag(
            "Cached tokens a row, such as 8k,512k; by default as fits model and device.",
            ("--lengths", "--length"),
            "LIST",
        ),
    ] = ()
    batch: Annotated[Counts, Flag("Rows decoded at once, such as 1,4; 1 by default.", metavar="LIST")] = (1,)
    budget: Annotated[
        TokenBudget,
        Flag(
            "Without a plan: tokens that a filter layer chooses; 2k by default.", ("--budget", "--decode-budget"), "N"
        ),
    ] = tokens(2048)
    filters: Annotated[
        Layers,
        Flag("Without a plan: filter layers; three by depth by default.", ("--filters", "--filter-layers"), "LAYERS"),
    ] = ()
    selector: Annotated[Names, Flag("Without a plan: last, uniform, exponential; last by default.", metavar="LIST")] = (
        "last",
    )
    window: Annotated[Narrow | None, Flag("Queries that uniform and exponential selectors weigh.", metavar="N")] = None
    offload: Annotated[
        Literal["auto", "always", "never"] | None,
        Flag(
            "In place of dense: the plan with layers in host memory (as `run --offload`) against the plan with "
            "everything on the device."
        ),
    ] = None
    miss_rate: Annotated[
        OneShare | None,
        Flag(
            "With --offload on a GPU: the share of the chosen tokens that is new in each step. Random weights choose "
            "at random.",
            metavar="SHARE",
        ),
    ] = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        self.refuse(_OF_HAND if self.plan else (), "each says what the plan is", "plan")
        if self.miss_rate is not None and self.offload is None:
            raise UsageError("expected --miss-rate beside --offload, found it alone; add --offload always")
        return self


def decode(flags: DecodeFlags) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    by_hand = any(map(flags.is_given, _OF_HAND))
    used = None if by_hand else Subject.named(flags.model, flags.plan, None).plan
    if not used and flags.allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")
    machine = settings_of(flags)
    hardware, precision = device_and_dtype(machine)
    if flags.miss_rate is not None and hardware.type != "cuda":
        raise UsageError(f"expected a GPU for --miss-rate, whose kernel runs there, found {hardware}; leave it out")
    from sparsekv.bench.decode import COLUMNS, RANDOM_NOTE, DecodeBench, bench_decode, check_decode
    from sparsekv.bench.hand_plans import HandDecode
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.progress import BarProgress

    info = describe_named(flags.model, flags.random_weights)
    wanted, info = _lengths(flags, info, _LENGTHS[hardware.type])
    bench = DecodeBench(
        wanted,
        flags.batch,
        flags.repeats,
        backend=machine.backend,
        seed=flags.seed,
        allow_mismatch=flags.allow_mismatch,
    )
    hand = HandDecode(flags.budget, flags.filters, flags.selector, flags.window, flags.offload is not None)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    check_decode(info, plans, bench)
    _check_offload(flags, info, plans, bench)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(one.decode and one.decode.offload for one in plans.values())
    how = {"longest": max(wanted), "seed": flags.seed, "cached": 0 if offloads else min(wanted) * min(flags.batch)}
    subject = subject_of(flags, hardware, precision, **how)
    if flags.offload is not None:
        _offloaded(flags, subject, plans, words, bench)
        return
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    if flags.as_json:
        tell(RANDOM_NOTE)
    print_rows(rows, f"{title_of(subject, rows[0], words)}\n{RANDOM_NOTE}", COLUMNS, flags.as_json)


def _lengths(flags: DecodeFlags, info: ModelInfo, usual: tuple[int, ...]) -> tuple[tuple[int, ...], ModelInfo]:
    """Those to time, and the model with room for them where its weights are random."""
    if flags.random_weights:
        wanted = flags.lengths or usual
        return wanted, info.model_copy(update={"context_length": max(*wanted, info.context_length)})
    fitting = tuple(length for length in usual if length <= info.context_length)
    return flags.lengths or fitting or (info.context_length,), info


def _check_offload(flags: DecodeFlags, info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench) -> None:
    from sparsekv.bench.offload import check_miss_rate

    if flags.offload is not None and any(one.decode and one.decode.offload is None for one in plans.values()):
        raise UsageError(
            "expected a plan that permits layers to be in host memory, found one that does not; compile it with "
            "`plan --offload`, or make one by hand: --budget 2k"
        )
    if flags.miss_rate is not None:
        check_miss_rate(info, plans, bench)


def _offloaded(
    flags: DecodeFlags, subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench
) -> None:
    from sparsekv.bench.offload import COLUMNS, bench_offload
    from sparsekv.planner.progress import BarProgress

    assert flags.offload is not None
    share = flags.miss_rate
    rows = list(bench_offload(subject, plans, words, bench, flags.offload, share, BarProgress()))
    title = f"{title_of(subject, rows[0], words)}; --offload {flags.offload}"
    title += f"; choices swapped for lists with {share:.3g} of new tokens a step" if share else ""
    print_rows(rows, title, COLUMNS, flags.as_json, "device_ms" if flags.offload == "never" else "offloaded_ms")
