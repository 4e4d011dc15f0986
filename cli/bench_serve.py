"""`sparsekv bench serve`: requests through two engines of vLLM, by a plan and dense."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Self

import typer
from pydantic import model_validator

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
from sparsekv.planner.common_options import KVPrecision
from sparsekv.planner.flags import Count, Counts, Flag, Key, Lengths, OneLength, Size
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.patterns import TileShape

if TYPE_CHECKING:
    from sparsekv.bench.serve import Load

_SERVE_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_CROSSOVER = 8192  # up to which a plan made by hand is dense
_GENERATED = 256  # the newest tokens of an answer that layers keep by a plan made by hand


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
    requests: Annotated[Count | None, Key("In all; as many as at once by default.", "N")] = None
    per_minute: Annotated[Counts, Key("Requests that come at random in a minute; each is a row.", "LIST")] = ()
    step_tokens: Annotated[OneLength, Key("Of a step at most (max_num_batched_tokens); 8k by default.", "N")] = 8192
    alone: Annotated[bool, Key("One engine at a time, for loads that do not fit the device twice.", "true")] = False
    tensor_parallel: Annotated[Count, Key("GPUs of each engine, one engine at a time; 1 by default.", "N")] = 1
    kv_dtype: KVPrecision = "auto"
    cache_memory: Annotated[Size | None, Key("For keys and values, of each engine.", "SIZE")] = None
    drafted: Annotated[Count | None, Key("Tokens that a look-up (ngram) drafts, in both engines.", "N")] = None
    keep: Annotated[Count | None, Key("Without a plan: tokens that all layers but three keep.", "N")] = None

    @classmethod
    def by_hand(cls) -> tuple[str, ...]:
        """Returns the options of plans made by hand."""
        return (*super().by_hand(), "keep")

    @model_validator(mode="after")
    def _layers_choose_or_evict(self) -> Self:
        if self.keep is not None:
            self.refuse(("budget",), "an evicting layer is in no segment", "keep")
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
    used = named_subject(flags, flags.lengths).plan
    from sparsekv.bench.hand_plans import HandDecode as DecodeByHand
    from sparsekv.bench.hand_plans import dense_up_to, dummy_plan, hand_plan, kept_by_hand
    from sparsekv.bench.serve import COLUMNS, ServeBench, bench_serve, served_model
    from sparsekv.planner.options import density_for

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
            used, words = make(subject.info, wanted, shares, TileShape())
            if flags.budget is not None:
                plans, chosen = DecodeByHand(flags.budget).plans(subject.info, bench.longest)
                used, words = used.model_copy(update={"decode": plans["last"].decode}), f"{words}; {chosen}"
            used, words = dense_up_to(used, _CROSSOVER), f"{words}, dense up to {_CROSSOVER}"
            if flags.keep is not None:
                rules, kept = kept_by_hand(subject.info, flags.keep, _GENERATED)
                used, words = used.model_copy(update={"kv_cache": rules}), f"{words}; {kept}"
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
