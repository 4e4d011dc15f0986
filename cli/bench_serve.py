"""`sparsekv bench serve`: first token, time a token and throughput in vLLM's engine, by a plan and without."""

from __future__ import annotations

from typing import Annotated, Self

import typer
from pydantic import model_validator

from sparsekv.cli.arguments import Output, Subject, device_and_dtype, settings_of
from sparsekv.cli.bench_rows import Benched, HandDensity, HandTile, Timed, print_rows
from sparsekv.cli.output import tell
from sparsekv.planner.flags import Count, Flag, Lengths, OneLength
from sparsekv.planner.options import Kernels, Precision
from sparsekv.plans.patterns import TileShape

_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_OF_HAND = ("density", "crossover", "tile")


class ServeFlags(Benched, Timed, Precision, Kernels, Output):
    """What `bench serve` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Tokens of a prompt, such as 4k,32k; by default as fits the device.", ("--lengths", "--length"), "LIST"),
    ] = ()
    answer: Annotated[Count, Flag("Tokens of an answer.", metavar="N")] = 64
    at_once: Annotated[Count, Flag("Requests that the engine has at a time.", metavar="N")] = 1
    requests: Annotated[Count | None, Flag("In all; as many as at once by default.", metavar="N")] = None
    step_tokens: Annotated[OneLength, Flag("Of a step at most: vLLM's max_num_batched_tokens.", metavar="N")] = 8192
    density: HandDensity = ()
    crossover: Annotated[OneLength, Flag("Without a plan: lengths up to N are dense.", metavar="N")] = 8192
    tile: HandTile = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        self.refuse(_OF_HAND if self.plan else (), "each says what the plan is", "plan")
        return self


def serve(flags: ServeFlags) -> None:
    """Requests through two engines of vLLM in this process, by a plan and dense, in turn."""
    by_hand, machine = any(map(flags.is_given, _OF_HAND)), settings_of(flags)
    from sparsekv.bench.hand_plans import dense_up_to, dummy_plan, hand_plan
    from sparsekv.bench.serve import COLUMNS, Load, ServeBench, bench_serve, served_model, start_engines
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.settled import density_for
    from sparsekv.runtime.vllm.engine_facts import check_installed

    check_installed()
    used = None if by_hand else Subject.named(flags.model, flags.plan, None).plan
    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _LENGTHS[hardware.type]
    loads = tuple(Load(length, flags.answer, flags.at_once, flags.requests or flags.at_once) for length in wanted)
    drawn = (flags.repeats, flags.step_tokens, machine.backend, flags.seed)
    bench = ServeBench(loads, hardware, precision, *drawn)
    words = "given"
    with served_model(flags.model, flags.random_weights, bench.longest) as subject:
        if used is None:
            shares = flags.density or tuple(map(density_for, wanted))
            make = dummy_plan if flags.random_weights else hand_plan
            used, words = make(subject.info, wanted, shares, flags.tile or TileShape())
            used, words = dense_up_to(used, flags.crossover), f"{words}, dense up to {flags.crossover}"
        if subject.note:
            tell(subject.note)
        with start_engines(subject, used, bench) as engines:
            rows = list(bench_serve(engines, subject, words, bench, BarProgress()))
    own = rows[0].data()
    what = ", ".join(str(own[name]) for name in ("model", "device", "dtype", "host"))
    what += f", {own['backend']} kernels, steps of {flags.step_tokens}"
    print_rows(rows, f"{what}; weights: {own['weights']}; plan: {words}", COLUMNS, flags.as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)
