"""`sparsekv bench serve`: first token, time a token and throughput in vLLM's engine, by a plan and without."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsekv.cli import arguments
from sparsekv.cli.bench_rows import print_rows
from sparsekv.cli.output import tell
from sparsekv.plans.errors import UsageError

_LENGTHS = {"cuda": "32k,128k", "cpu": "4k"}
_CROSSOVER = "8k"


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.")],
    plan: arguments.PlanFile = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the model's shape, made by vLLM.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            "--length",
            metavar="LIST",
            help="Tokens of a prompt, such as 4k,32k; by default as fits the device.",
        ),
    ] = None,
    answer: Annotated[int, typer.Option(min=1, max=arguments.MOST, metavar="N", help="Tokens of an answer.")] = 64,
    at_once: Annotated[
        int, typer.Option(min=1, max=arguments.MOST, metavar="N", help="Requests that the engine has at a time.")
    ] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, max=arguments.MOST, metavar="N", help="In all; as many as at once by default.")
    ] = None,
    step_tokens: Annotated[
        str, typer.Option(metavar="N", help="Of a step at most: vLLM's max_num_batched_tokens.")
    ] = "8k",
    density: arguments.HandDensity = None,
    crossover: Annotated[
        str | None, typer.Option(metavar="N", help="Without a plan: lengths up to N are dense; 8k by default.")
    ] = None,
    tile: arguments.Tile = None,
    repeats: arguments.Repeats = 3,
    seed: arguments.Seed = 0,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    as_json: arguments.Json = False,
) -> None:
    """Requests through two engines of vLLM in this process, by a plan and dense, in turn."""
    given = None if lengths is None else arguments.lengths_from(lengths, "--lengths")
    named = arguments.settings(None, dtype, backend).backend
    (budget,) = arguments.lengths_from(step_tokens, "--step-tokens")
    by_hand = density is not None or crossover is not None or tile is not None
    if by_hand and plan is not None:
        raise UsageError(
            "expected --plan, or --density, --crossover and --tile of a plan made by hand, found both; choose one"
        )
    from sparsekv.bench.hand_plans import dense_up_to, dummy_plan, hand_plan
    from sparsekv.bench.serve import COLUMNS, Load, ServeBench, bench_serve, served_model, start_engines
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.targets import density_for
    from sparsekv.runtime.vllm.engine_facts import check_installed

    check_installed()
    used = None if by_hand else arguments.Subject.named(model, plan, None).plan
    hardware, precision = arguments.device_and_dtype(None, dtype)
    wanted = given or arguments.lengths_from(_LENGTHS[hardware.type], "--lengths")
    loads = tuple(Load(length, answer, at_once, requests or at_once) for length in wanted)
    bench = ServeBench(loads, hardware, precision, repeats, budget, named, seed)
    words = "given"
    with served_model(model, random_weights, bench.longest) as subject:
        if used is None:
            (edge,) = arguments.lengths_from(crossover or _CROSSOVER, "--crossover")
            shares = tuple(map(density_for, wanted)) if density is None else arguments.shares_from(density, "--density")
            make = dummy_plan if random_weights else hand_plan
            used, words = make(subject.info, wanted, shares, arguments.tile_from(tile))
            used, words = dense_up_to(used, edge), f"{words}, dense up to {edge}"
        if subject.note:
            tell(subject.note)
        with start_engines(subject, used, bench) as engines:
            rows = list(bench_serve(engines, subject, words, bench, BarProgress()))
    own = rows[0].data()
    what = (
        f"{own['model']}, {own['device']}, {own['dtype']}, {own['host']}, {own['backend']} kernels, steps of {budget}"
    )
    print_rows(rows, f"{what}; weights: {own['weights']}; plan: {words}", COLUMNS, as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)
