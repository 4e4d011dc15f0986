"""`sparsekv bench serve`: requests through two engines of vLLM, by a plan and dense."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Self

import typer
from pydantic import model_validator

from sparsekv.cli.arguments import Output, device_and_dtype, settings_of
from sparsekv.cli.benched import (
    BUDGET,
    FILTERS,
    LENGTHS,
    Benched,
    BenchRun,
    HandDensity,
    HandTile,
    Timed,
    named_subject,
    print_rows,
)
from sparsekv.cli.output import tell
from sparsekv.planner.flags import Count, Counts, Flag, Layers, Lengths, OneLength, Size, TokenBudget
from sparsekv.planner.options import Kernels, KVPrecision, Precision
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape

if TYPE_CHECKING:
    from sparsekv.bench.serve import Load

_SERVE_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_SERVE_BY_HAND = ("density", "crossover", "tile", "budget", "filters", "keep", "generated")


class ServeFlags(Benched, Timed, Precision, Kernels, Output):
    """Holds what `bench serve` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Tokens of a prompt, such as 4k,32k; by default as fits the device.", *LENGTHS),
    ] = ()
    answer: Annotated[Count, Flag("Tokens of an answer.", metavar="N")] = 64
    at_once: Annotated[
        Counts, Flag("Requests that the engine has at a time, each a row; 1 by default.", metavar="LIST")
    ] = (1,)
    requests: Annotated[Count | None, Flag("In all; as many as at once by default.", metavar="N")] = None
    step_tokens: Annotated[OneLength, Flag("Of a step at most: vLLM's max_num_batched_tokens.", metavar="N")] = 8192
    density: HandDensity = ()
    crossover: Annotated[OneLength, Flag("Without a plan: lengths up to N are dense.", metavar="N")] = 8192
    tile: HandTile = None
    budget: Annotated[
        TokenBudget | None, Flag("Without a plan: decode by filter layers that choose so many tokens.", *BUDGET)
    ] = None
    filters: Annotated[Layers, Flag("These filter layers; three by depth by default.", *FILTERS)] = ()
    keep: Annotated[
        Count | None,
        Flag("Without a plan: all layers but three keep so many tokens of a prompt, and 132 more.", metavar="N"),
    ] = None
    generated: Annotated[Count, Flag("With --keep: the newest tokens of an answer that they keep.", metavar="N")] = 256
    dense_decode: Annotated[bool, Flag("Decode without the plan.")] = False
    alone: Annotated[bool, Flag("One engine at a time, for loads that do not fit the device twice.")] = False
    per_minute: Annotated[Counts, Flag("Requests that come at random in a minute; each is a row.", metavar="LIST")] = ()
    tensor_parallel: Annotated[
        Count, Flag("GPUs of each engine, one engine at a time (vLLM's tensor_parallel_size).", metavar="N")
    ] = 1
    drafted: Annotated[
        Count | None,
        Flag("Tokens that a look-up (ngram) drafts at a time, in both engines; decode is dense.", metavar="N"),
    ] = None
    cache_memory: Annotated[
        Size | None, Flag("For keys and values, of each engine (vLLM's kv_cache_memory_bytes).", metavar="SIZE")
    ] = None

    kv_dtype: KVPrecision = "auto"

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.budget is None:
            self.refuse(("filters",), "decode is dense without --budget")
        if self.keep is None:
            self.refuse(("generated",), "layers keep everything without --keep")
        else:
            self.refuse(("budget",), "an evicting layer is in no segment", "keep")
            self.refuse(("dense_decode",), "decode without the plan reads all tokens", "keep")
        if self.per_minute and len(self.at_once) > 1:
            raise UsageError(
                f"expected one number in --at-once beside --per-minute, found {len(self.at_once)}: requests come when "
                "they come, and it is only the engine's limit"
            )
        self.refuse(_SERVE_BY_HAND if self.plan else (), "each says what the plan is", "plan")
        return self


def loads_of(flags: ServeFlags, lengths: Sequence[int]) -> tuple[Load, ...]:
    """Returns every length, with every number of requests at once, at every rate."""
    from sparsekv.bench.serve import Load

    return tuple(
        Load(length, flags.answer, at_once, flags.requests or at_once, rate)
        for length, at_once, rate in product(lengths, flags.at_once, flags.per_minute or (None,))
    )


def serve(flags: ServeFlags) -> None:
    """Requests through two engines of vLLM in this process, by a plan and dense, in turn."""
    machine = settings_of(flags)
    from sparsekv.runtime.vllm.settings import check_installed

    check_installed()
    used = named_subject(flags, flags.lengths, any(map(flags.is_given, _SERVE_BY_HAND))).plan
    from sparsekv.bench.hand_plans import HandDecode, dense_up_to, dummy_plan, hand_plan, kept_by_hand
    from sparsekv.bench.serve import COLUMNS, ServeBench, bench_serve, served_model
    from sparsekv.planner.settled import density_for

    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _SERVE_LENGTHS[hardware.type]
    loads = loads_of(flags, wanted)
    drawn = (flags.repeats, flags.step_tokens, machine.backend, flags.seed)
    alone = flags.alone or flags.tensor_parallel > 1  # ranks are processes, and so is each of two engines then
    engines = (flags.cache_memory, flags.tensor_parallel, flags.kv_dtype, flags.drafted or 0)
    bench = ServeBench(loads, hardware, precision, *drawn, alone, *engines)
    words = "given"
    with served_model(flags.model, flags.random_weights, bench.longest) as subject:
        if used is None:
            shares = flags.density or tuple(map(density_for, wanted))
            make = dummy_plan if flags.random_weights else hand_plan
            used, words = make(subject.info, wanted, shares, flags.tile or TileShape())
            if flags.budget is not None:
                plans, chosen = HandDecode(flags.budget, flags.filters).plans(subject.info, bench.longest)
                used, words = used.model_copy(update={"decode": plans["last"].decode}), f"{words}; {chosen}"
            used, words = dense_up_to(used, flags.crossover), f"{words}, dense up to {flags.crossover}"
            if flags.keep is not None:
                rules, kept = kept_by_hand(subject.info, flags.keep, flags.generated)
                used, words = used.model_copy(update={"kv_cache": rules}), f"{words}; {kept}"
        if flags.dense_decode:
            used = used.model_copy(update={"decode": None, "kv_cache": None})
        if subject.note:
            tell(subject.note)
        rows = list(bench_serve(subject, used, words, bench, BarProgress()))
    own = rows[0].data()
    what = ", ".join(str(own[name]) for name in ("model", "device", "dtype", "host"))
    what += f", {own['backend']} kernels, steps of {flags.step_tokens}"
    what += f", {flags.tensor_parallel} ranks" if flags.tensor_parallel > 1 else ""
    what += f", keys and values in {flags.kv_dtype}" if flags.kv_dtype != "auto" else ""
    title = f"{what}; weights: {own['weights']}; plan: {words}"
    print_rows(BenchRun(rows, title, COLUMNS), as_json=flags.as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)
