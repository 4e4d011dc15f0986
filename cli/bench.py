"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import OffloadMode, Output, device_and_dtype, settings_of
from sparsekv.cli.bench_peers import peers
from sparsekv.cli.bench_serve import serve
from sparsekv.cli.benched import (
    LENGTHS,
    Benched,
    BenchLengths,
    BenchRun,
    HandDecode,
    HandPrefill,
    Timed,
    named_subject,
    print_rows,
    subject_of,
    title_of,
)
from sparsekv.planner.common_options import KVPrecision
from sparsekv.planner.flags import Count, Counts, Flag, Key, Lengths, Names, OneShare, Shares, Tile
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape, tokens
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from sparsekv.bench.random_model import BenchModel
    from sparsekv.bench.token_runs import DecodeBench

# --- kernels and prefill ----------------------------------------------------------------------------------------------

_KERNEL_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}
_PREFILL_LENGTHS = {"cuda": (8192, 32768), "cpu": (4096,)}


class KernelFlags(Timed, Output):
    """Holds what `bench kernels` is asked to do."""

    lengths: BenchLengths = ()
    density: Annotated[
        Shares,
        Flag("Densities to plant structure at, such as 5% or 0.05,0.2; by default 0.05.", metavar="SHARES"),
    ] = (0.05,)
    patterns: Names = ("mixed", "vertical_slash")  # several joined by +, or mixed: all that can be planted
    backend: Names = ()  # all that can run
    heads: Count = 32
    kv_heads: Count = 8
    head_dim: Count = 128
    tile: Tile = None


def kernels(flags: KernelFlags) -> None:
    """Index building and sparse attention of one layer on planted structure.

    `asked` is the density asked for, `density` what was computed; `whole` is index and attention timed as one.
    `mass` is the share of the softmax that the computed positions hold on sampled rows, `error` the largest difference
    from float32 attention over the same index.
    """
    print_rows(measure_kernels(flags), as_json=flags.as_json)


def measure_kernels(flags: KernelFlags) -> BenchRun:
    """Returns the rows of `bench kernels`."""
    hardware, precision = device_and_dtype(settings_of(flags))
    _check_backends(flags, hardware)
    from sparsekv.bench.kernels import COLUMNS, PLANTED_NOTE, KernelBench, bench_kernels

    tile = flags.tile or TileShape()
    bench = KernelBench(
        lengths=flags.lengths or _KERNEL_LENGTHS[hardware.type],
        densities=flags.density,
        backends=flags.backend,
        patterns=flags.patterns,
        heads=flags.heads,
        kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        tile=tile,
        device=hardware,
        dtype=precision,
        seed=flags.seed,
        rounds=flags.repeats,
    )
    rows = list(bench_kernels(bench, BarProgress()))
    shape = f"{flags.heads}/{flags.kv_heads} heads of size {flags.head_dim}, {rows[0].dtype}, {tile.key} tiles"
    return BenchRun(rows, f"{rows[0].device}, {shape}\n{PLANTED_NOTE}", COLUMNS, note=PLANTED_NOTE)


def _check_backends(flags: KernelFlags, device: torch.device) -> None:
    """Refuses backends none of which runs here; beside one that runs, the row of another one says why it does not."""
    from sparsekv.kernels.backends import check_backend

    for name in flags.backend:
        try:
            check_backend(name, device)
        except BackendError:
            if name == flags.backend[-1]:
                raise
        else:
            return


class PrefillFlags(Benched, HandPrefill, Timed, Output):
    """Holds what `bench prefill` is asked to do."""

    lengths: BenchLengths = ()
    dense_layers: Annotated[Count | None, Key("Measure dense on N layers and multiply; rows say so.", "N")] = None
    kv_host_layers: Annotated[
        int | None, Field(ge=0, le=1024), Key("Layers whose keys and values go to host memory.", "N")
    ] = None


def prefill(flags: PrefillFlags) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    print_rows(measure_prefill(flags), as_json=flags.as_json)


def measure_prefill(flags: PrefillFlags) -> BenchRun:
    """Returns the rows of `bench prefill`."""
    named, machine = named_subject(flags, flags.lengths), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _PREFILL_LENGTHS[hardware.type]
    from sparsekv.bench.hand_plans import hand_plan
    from sparsekv.bench.prefill import COLUMNS, PrefillBench, bench_prefill
    from sparsekv.planner.options import density_for

    subject, words = subject_of(flags, named, hardware, precision, longest=max(wanted), seed=flags.seed), "given"
    if used is None:
        used, words = hand_plan(subject.info, wanted, flags.density or tuple(map(density_for, wanted)), TileShape())
    bench = PrefillBench(
        wanted,
        flags.repeats,
        None,
        machine.backend,
        flags.kv_host_layers,
        flags.dense_layers,
        flags.seed,
        flags.random_weights,
    )
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    return BenchRun(rows, title_of(subject, rows[0], words), COLUMNS)


# --- decode -----------------------------------------------------------------------------------------------------------

_DECODE_LENGTHS = {"cuda": (8192, 32768, 131072, 524288), "cpu": (8192,)}


class DecodeFlags(Benched, HandDecode, Timed, Output):
    """Holds what `bench decode` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Cached tokens a row, such as 8k,512k; by default as fits model and device.", *LENGTHS),
    ] = ()
    batch: Annotated[Counts, Flag("Rows decoded at once, such as 1,4; 1 by default.", metavar="LIST")] = (1,)
    offload: Annotated[
        OffloadMode | None,
        Flag(
            "In place of dense: the plan with layers in host memory (as `run --offload`) against the plan with "
            "everything on the device."
        ),
    ] = None
    miss_rate: OneShare | None = None  # with `offload` on a GPU: share of the chosen tokens that is new in each step
    exact: bool = False  # also tokens that the plan drafts and dense attention checks
    acceptance: OneShare | None = None  # share of drafts that is taken to count
    kv_dtype: KVPrecision = "auto"

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.exact:
            self.refuse(("offload",), "checks read all keys and values", "exact")
        if self.offload is not None:
            self.refuse(("kv_dtype",), "both sides have keys and values as the model makes them", "offload")
        elif self.miss_rate is not None:
            raise UsageError("expected miss_rate beside --offload, found it alone; add --offload always")
        return self


def decode(flags: DecodeFlags) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    print_rows(measure_decode(flags), as_json=flags.as_json)


def measure_decode(flags: DecodeFlags) -> BenchRun:
    """Returns the rows of `bench decode`."""
    named, machine = named_subject(flags, flags.lengths), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    if flags.miss_rate is not None and hardware.type != "cuda":
        raise UsageError(f"expected a GPU for miss_rate, whose kernel runs there, found {hardware}; leave it out")
    from sparsekv.bench.decode import COLUMNS, RANDOM_NOTE, bench_decode, check_decode
    from sparsekv.bench.hand_plans import HandDecode as DecodeByHand
    from sparsekv.bench.offload import check_offload
    from sparsekv.bench.random_model import describe_named
    from sparsekv.bench.token_runs import NEW_EXACT, NEW_TOKENS, DecodeBench

    info = describe_named(flags.model, flags.random_weights)
    wanted, info = _decode_lengths(flags, info, _DECODE_LENGTHS[hardware.type])
    bench = DecodeBench(
        wanted,
        flags.batch,
        flags.repeats,
        NEW_EXACT if flags.exact else NEW_TOKENS,
        backend=machine.backend,
        seed=flags.seed,
        allow_mismatch=flags.random_weights,
        exact=flags.exact,
        acceptance=flags.acceptance,
        kv_dtype=flags.kv_dtype,
    )
    hand = DecodeByHand(flags.budget or tokens(2048), offload=flags.offload is not None)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    check_decode(info, plans, bench)
    if flags.offload is not None:
        check_offload(info, plans, bench, flags.miss_rate)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(one.decode and one.decode.offload for one in plans.values())
    room = 0 if offloads else min(wanted) * min(flags.batch)
    subject = subject_of(flags, named, hardware, precision, longest=max(wanted), seed=flags.seed, cached=room)
    if flags.offload is not None:
        return _offloaded(flags, subject, plans, words, bench)
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    return BenchRun(rows, f"{title_of(subject, rows[0], words)}\n{RANDOM_NOTE}", COLUMNS, note=RANDOM_NOTE)


def _decode_lengths(flags: DecodeFlags, info: ModelInfo, usual: tuple[int, ...]) -> tuple[tuple[int, ...], ModelInfo]:
    """Those to time, and the model with room for them where its weights are random."""
    if flags.random_weights:
        wanted = flags.lengths or usual
        return wanted, info.model_copy(update={"context_length": max(*wanted, info.context_length)})
    fitting = tuple(length for length in usual if length <= info.context_length)
    return flags.lengths or fitting or (info.context_length,), info


def _offloaded(
    flags: DecodeFlags, subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench
) -> BenchRun:
    from sparsekv.bench.offload import COLUMNS, bench_offload

    assert flags.offload is not None
    share = flags.miss_rate
    rows = list(bench_offload(subject, plans, words, bench, flags.offload, share, BarProgress()))
    title = f"{title_of(subject, rows[0], words)}; --offload {flags.offload}"
    title += f"; choices swapped for lists with {share:.3g} of new tokens a step" if share else ""
    return BenchRun(rows, title, COLUMNS, "device_ms" if flags.offload == "never" else "offloaded_ms")


# --- headline ---------------------------------------------------------------------------------------------------------

_README = {32768: 0.20, 131072: 0.08, 524288: 0.04, 1048576: 0.03}  # densities of whole prompts
_ACCEPTED = 0.975


class HeadlineFlags(Timed, Output):
    """Holds what `bench headline` is asked to do."""

    model: Annotated[
        str,
        Flag("Alias, hub id, folder or GGUF file; llama3-8b by default.", metavar="MODEL", is_argument=True),
    ] = "llama3-8b"
    lengths: BenchLengths = ()


def headline(flags: HeadlineFlags) -> None:
    """The README's table but for vLLM's rows (`bench serve`): kernels, prefill, decode, drafts, with random weights.

    Attention of a layer at a density of 0.05; whole prompts; tokens by a plan; and tokens that a plan drafts and dense
    attention checks, where 97.5% of drafts are taken to count.
    """
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.options import density_for

    hardware, _ = device_and_dtype(settings_of(flags))
    lengths = flags.lengths or _PREFILL_LENGTHS[hardware.type]
    (group, *_) = describe_named(flags.model, True).attention
    timed: dict[str, Any] = {"lengths": lengths, "repeats": flags.repeats, "seed": flags.seed}
    shape: dict[str, Any] = {"heads": group.heads, "kv_heads": group.kv_heads, "head_dim": group.head_dim}
    model: dict[str, Any] = {"model": flags.model, "random_weights": True}
    shares = tuple(_README.get(length) or density_for(length) for length in lengths)
    parts = (
        measure_kernels(KernelFlags(**timed, **shape, patterns=("vertical_slash",))),
        measure_prefill(PrefillFlags(**timed, **model, density=shares)),
        measure_decode(DecodeFlags(**timed, **model)),
        measure_decode(DecodeFlags(**timed, **model, exact=True, acceptance=_ACCEPTED)),
    )
    print_rows(*parts, as_json=flags.as_json)


app = commands.group(
    help="Time kernels, a model's prefill or decode, or requests through vLLM, against dense.", no_args_is_help=True
)
for run, summary, *examples in (
    (
        kernels,
        "Index building and attention of one layer, without a model.",
        "sparsekv bench kernels --lengths 32k,128k --density 5%",
        "SPARSEKV_DEVICE=cpu sparsekv bench kernels --lengths 4k",
    ),
    (
        prefill,
        "A model's prefill, by its plan and dense.",
        "sparsekv bench prefill ./my-model --lengths 32k",
        "sparsekv bench prefill llama3-8b --random-weights --lengths 128k --set density=8%",
    ),
    (
        decode,
        "A model's decode steps, by a plan and dense.",
        "sparsekv bench decode ./my-model --lengths 32k --batch 1,4",
        "sparsekv bench decode llama3-8b --random-weights --lengths 128k --set budget=2k",
    ),
    (
        serve,
        "Requests through vLLM, by a plan and dense.",
        "sparsekv bench serve ./my-model --lengths 32k --at-once 1,8",
        "sparsekv bench serve llama3-8b --random-weights --lengths 128k --set density=0.08",
    ),
    (
        peers,
        "Published methods beside a plan: time, divergence, RULER.",
        "sparsekv bench peers ./my-model --lengths 32k -o peers.json --picture peers.svg",
        "sparsekv bench peers llama3-8b --random-weights --lengths 32k",
    ),
    (
        headline,
        "The README's table, in one go.",
        "sparsekv bench headline",
        "sparsekv bench headline tiny-retriever --lengths 4k",
    ),
):
    commands.add(app, run, *examples, summary=summary)
