"""`sparsekv plan`: profile a model and compile its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli.options import (
    Backend,
    Batch,
    Chunk,
    Device,
    Dtype,
    Json,
    MaxAccuracyDrop,
    MaxKl,
    Seed,
    Tasks,
    given,
)
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.planning import PlanFiles, compile_to_file, recompile_to_file
from sparsekv.cli.scores import quality_table
from sparsekv.cli.values import budget_from, layers_from, lengths_from, names_from, shares_from, tile_from

if TYPE_CHECKING:
    from sparsekv.planner.plan import PlanResult


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes.", show_default=False)],
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="LENGTHS", help="Context lengths, such as 4k,16k,32k.")
    ] = None,
    target_density: Annotated[
        str | None,
        typer.Option("--target-density", metavar="SHARES", help="Share of the tiles to compute: one, or one a length."),
    ] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option("--target-speedup", metavar="X", help="How much faster prefill attention must become, instead."),
    ] = None,
    only: Annotated[Literal["prefill", "decode"] | None, typer.Option("--only", help="Plan this phase alone.")] = None,
    no_crossover: Annotated[
        bool, typer.Option("--no-crossover", help="Sparse at every length, also where dense is faster.")
    ] = False,
    preset: Annotated[
        Literal["minference"] | None, typer.Option("--preset", help="A published search as it was.")
    ] = None,
    families: Annotated[
        str | None,
        typer.Option("--families", metavar="NAMES", help="Patterns: a_shape,vertical_slash,block_sparse,adaptive."),
    ] = None,
    tile: Annotated[Literal["64", "128"] | None, typer.Option("--tile", help="Rows and columns of a tile.")] = None,
    filter_rule: Annotated[
        Literal["dp", "omnikv", "fixed"] | None, typer.Option("--filter-rule", help="How filter layers are chosen.")
    ] = None,
    filter_layers: Annotated[
        str | None, typer.Option("--filter-layers", metavar="LAYERS", help="These filter layers, such as 2,8,18.")
    ] = None,
    decode_budget: Annotated[
        str | None,
        typer.Option("--decode-budget", metavar="BUDGET", help="Tokens that sparse layers see: 2048, or a share: 10%."),
    ] = None,
    decode_loss: Annotated[
        float | None,
        typer.Option("--decode-loss", min=0.0, metavar="SHARE", help="Most attention mass lost to the choice."),
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep the rows of sparse layers in host memory.")] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Own calibration prompts: JSON lines, or a text.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, metavar="N", help="Calibration samples a length.")
    ] = None,
    tasks: Tasks = None,
    max_accuracy_drop: MaxAccuracyDrop = None,
    max_kl: MaxKl = None,
    verify_samples: Annotated[
        int | None,
        typer.Option("--verify-samples", min=1, metavar="N", help="Held-out samples a task and length."),
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Leave the plan unverified.")] = False,
    profile_out: Annotated[Path | None, typer.Option("--profile-out", metavar="FILE", help="Keep the profile.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Use a profile that was kept.")
    ] = None,
    cost_out: Annotated[
        Path | None, typer.Option("--cost-out", metavar="FILE", help="Keep the measured device cost.")
    ] = None,
    cost: Annotated[
        Path | None, typer.Option("--cost", metavar="FILE", help="Use a device cost that was kept.")
    ] = None,
    seed: Seed = 0,
    batch: Batch = None,
    prefill_chunk: Chunk = None,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Profile a model, choose what each head computes, verify it on held-out prompts, and write the plan."""
    from sparsekv.planner.options import check_used

    check_used(given(context))
    from sparsekv.plans.aliases import resolve_model

    resolve_model(model)  # before the files: where there is no model, a plan finds no folder of it either
    files = PlanFiles(out, profile, profile_out, cost, cost_out, prompts)
    files.check()
    from sparsekv.cli.calibration import own_prompts
    from sparsekv.cli.subject import Subject, backend_named, load
    from sparsekv.planner.options import Gate, PlanOptions
    from sparsekv.planner.profile.profile_data import for_profile

    asked: dict[str, Any] = {
        "lengths": _read(lengths_from, lengths, "--lengths"),
        "target_density": _read(shares_from, target_density, "--target-density"),
        "target_speedup": target_speedup,
        "phases": (only,) if only else None,
        "crossover": not no_crossover,
        "preset": preset,
        "families": _read(names_from, families, "--families"),
        "tile": tile_from(tile),
        "filter_rule": filter_rule or (None if filter_layers is None else "fixed"),
        "filter_layers": _read(layers_from, filter_layers, "--filter-layers"),
        "decode_budget": _read(budget_from, decode_budget, "--decode-budget"),
        "decode_loss": decode_loss,
        "offload": offload,
        "prompts": own_prompts(prompts) if prompts else None,
        "samples": samples,
        "tasks": _read(names_from, tasks, "--tasks"),
        "gate": Gate(1.0 if max_accuracy_drop is None else max_accuracy_drop, max_kl),
        "verify_samples": 0 if no_verify else verify_samples,
        "seed": seed,
        "batch": batch,
        "prefill_chunk": prefill_chunk,
        "backend": backend_named(backend),
    }
    options = PlanOptions(**{name: value for name, value in asked.items() if value is not None})
    measured = files.read()
    if measured.profile is not None:
        for_profile(options, measured.profile)  # says what is not in it before a model is loaded
    if no_verify and measured.profile is not None and measured.cost is not None:
        result = recompile_to_file(model, options, files, measured.profile, measured.cost)
    else:
        loaded = load(Subject(model, None, None, from_plan=False), device, dtype)
        result = compile_to_file(loaded, options, files, measured)
    _tell(result, out, as_json)


def _read(how: Callable[[str, str], Any], text: str | None, flag: str) -> Any:
    return None if text is None else how(text, flag)


def _tell(result: PlanResult, out: Path, as_json: bool) -> None:
    from sparsekv.plans.schema import to_data

    quality = result.quality
    if as_json:
        emit_json(
            {
                "path": str(out),
                "status": result.plan.status,
                "prefill_density": result.prefill_density,
                "predicted_speedup": result.predicted_speedup,
                "filter_layers": list(result.filter_layers),
                "quality": None if quality is None else to_data(quality),
                "seconds": round(result.seconds, 3),
            }
        )
    else:
        emit("\n".join(_lines(result, out)))
    for remark in result.remarks:
        tell(remark)


def _lines(result: PlanResult, out: Path) -> Iterator[str]:
    if result.quality is not None:
        yield quality_table(result.quality) + "\n"
    yield f"{out}: {result.plan.status}, in {result.seconds:.0f} s"
    if result.prefill_density is not None:
        yield f"prefill computes {result.prefill_density:.3f} of the tiles at the longest length"
    if result.predicted_speedup is not None:
        yield f"predicted speedup of attention there: {result.predicted_speedup:.2f}x"
    if result.filter_layers:
        yield f"filter layers of decode: {', '.join(map(str, result.filter_layers))}"
