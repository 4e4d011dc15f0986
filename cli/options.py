"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
Target = Annotated[str | None, typer.Argument(metavar="MODEL", help="A model; a folder's sparsekv.yaml is its plan.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="The plan; by default the one in the model's folder.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="Alias, hub id or folder; the plan's own model by default."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 ...; chosen by default.")
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"] | None,
    typer.Option("--dtype", help="Precision; chosen by default."),
]
Backend = Annotated[
    Literal["auto", "flash", "triton", "cpu", "reference"] | None,
    typer.Option("--backend", help="Kernel backend; chosen by default, see `doctor`."),
]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Go on although the plan was made for another architecture.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=(1 << 32) - 1, help="Seed of samples and of sampling.")]
Tasks = Annotated[
    str | None, typer.Option("--tasks", metavar="NAMES", help="Tasks, separated by commas; all of them by default.")
]
MaxAccuracyDrop = Annotated[
    float | None,
    typer.Option("--max-accuracy-drop", min=0.0, metavar="POINTS", help="Most that a task may lose; 1 by default."),
]
MaxKl = Annotated[
    float | None, typer.Option("--max-kl", min=0.0, metavar="NATS", help="Most mean divergence; no bound by default.")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Most samples run at once.")]
Chunk = Annotated[
    int | None,
    typer.Option("--prefill-chunk", min=1, metavar="N", help="Prefill in pieces of N tokens, which bounds memory."),
]


def given(context: typer.Context) -> dict[str, Any]:
    """The options that were typed, by name; not those left at their defaults."""
    typed = (name for name in context.params if _is_typed(context, name))
    return {name: context.params[name] for name in typed}


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
