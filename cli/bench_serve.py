"""`sparsekv bench serve`: requests through two engines of vLLM, by a plan and dense."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.arguments import Output, device_and_dtype, settings_of
from sparsekv.cli.benched import (
    LENGTHS,
    Benched,
    BenchRun,
    HandDecode,
    HandPrefill,
    Timed,
    named_subject,
    print_rows,
)
from sparsekv.cli.output import tell
from sparsekv.planner.flags import Count, Counts, Flag, Key, Lengths
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import KVDtype

if TYPE_CHECKING:
    from sparsekv.bench.serve import Load

_SERVE_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens
_CROSSOVER = 8192  # up to which a plan made by hand is dense


class ServeFlags(Benched, HandPrefill, HandDecode, Timed, Output):
    """Holds what `bench serve` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Tokens of a prompt, such as 4k,32k; by default as fits the device.", *LENGTHS),
    ] = ()
    at_once: Annotated[
        Counts, Flag("Requests that the engine has at a time, each a row; 1 by default.", metavar="LIST")
    ] = (1,)
    answer: Annotated[Count, Key("Tokens of an answer; 64 by default.", "N")] = 64
    alone: Annotated[bool, Key("One engine at a time, for loads that do not fit the device twice.", "true")] = False
    tensor_parallel: Annotated[Count, Key("GPUs of each engine, one engine at a time; 1 by default.", "N")] = 1
    kv_dtype: KVDtype = "auto"


def loads_of(flags: ServeFlags, lengths: Sequence[int]) -> tuple[Load, ...]:
    """Returns every length, with every number of requests at once."""
    from sparsekv.bench.serve import Load

    return tuple(Load(length, flags.answer, at_once, at_once) for length, at_once in product(lengths, flags.at_once))


def serve(flags: ServeFlags) -> None:
    """Requests through two engines of vLLM in this process, by a plan and dense, in turn."""
    machine = settings_of(flags)
    from sparsekv.runtime.vllm.settings import check_installed

    check_installed()
    used = named_subject(flags, flags.lengths).plan
    from sparsekv.bench.hand_plans import HandDecode as DecodeByHand
    from sparsekv.bench.hand_plans import dense_up_to, dummy_plan, hand_plan
    from sparsekv.bench.serve import COLUMNS, ServeBench, bench_serve, served_model
    from sparsekv.planner.settled import density_for

    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _SERVE_LENGTHS[hardware.type]
    loads = loads_of(flags, wanted)
    drawn = (flags.repeats, _STEP_TOKENS, machine.backend, flags.seed)
    alone = flags.alone or flags.tensor_parallel > 1  # ranks are processes, and so is each of two engines then
    engines = (None, flags.tensor_parallel, flags.kv_dtype)
    bench = ServeBench(loads, hardware, precision, *drawn, alone, *engines)
    words = "given"
    with served_model(flags.model, flags.random_weights, bench.longest) as subject:
        if used is None:
            shares = flags.density or tuple(map(density_for, wanted))
            make = dummy_plan if flags.random_weights else hand_plan
            used, words = make(subject.info, wanted, shares, TileShape())
            if flags.budget is not None:
                plans, chosen = DecodeByHand(flags.budget).plans(subject.info, bench.longest)
                used, words = used.model_copy(update={"decode": plans["last"].decode}), f"{words}; {chosen}"
            used, words = dense_up_to(used, _CROSSOVER), f"{words}, dense up to {_CROSSOVER}"
        if subject.note:
            tell(subject.note)
        rows = list(bench_serve(subject, used, words, bench, BarProgress()))
    own = rows[0].data()
    what = ", ".join(str(own[name]) for name in ("model", "device", "dtype", "host"))
    what += f", {own['backend']} kernels, steps of {_STEP_TOKENS}"
    what += f", {flags.tensor_parallel} ranks" if flags.tensor_parallel > 1 else ""
    what += f", keys and values in {flags.kv_dtype}" if flags.kv_dtype != "auto" else ""
    title = f"{what}; weights: {own['weights']}; plan: {words}"
    print_rows(BenchRun(rows, title, COLUMNS), as_json=flags.as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)
