"""Commands between plans and other tools' files: `import` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.arguments import Json, PlanPlace, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable, check_writable
from sparsekv.plans.errors import PlanError, UsageError, did_you_mean
from sparsekv.plans.files import load_plan, read_bytes, write_bytes, write_plan
from sparsekv.plans.interop.formats import READERS, WRITERS, plan_of, recognised
from sparsekv.plans.interop.source import MAX_BYTES, Source
from sparsekv.plans.model import ModelInfo


def import_settings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of another tool.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="NAME", help="That it is for: only its config.json is read.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes.")],
    kind: Annotated[
        str | None,
        typer.Option("--from", metavar="TOOL", help=f"By its content, or {', '.join(READERS)}.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a plan of another tool's settings.

    What the file does not say is taken from that method's publication, and told. The plan is `imported`: nothing of it
    was measured; `verify --write` does that.
    """
    check_replaceable(out, "--out", "plan")
    data = read_bytes(file, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise PlanError(f"{file}: expected at most {MAX_BYTES:,} bytes, found more; no such file is that long")
    source = Source(file.name, data)
    found = recognised(source, kind)
    plan, notes = plan_of(source, found, _described(model))
    write_plan(plan, out)
    if as_json:
        emit_json({"path": str(out), "kind": found, "model": plan.model.id, "notes": list(notes)})
        return
    emit(f"{out}: imported from {found} for {plan.model.id}")
    emit(f"next: sparsekv verify --plan {out} --model {model} --write")
    for note in notes:
        tell(note)


def _described(name: str) -> ModelInfo:
    from sparsekv.cli.arguments import Subject
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    source = Subject.named(name, None, None).source
    return describe_config(load_config(source or name), name)


def export(
    plan: PlanPlace,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"{', '.join(WRITERS)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where it goes; a new file.")],
    as_json: Json = False,
) -> None:
    """Write a plan in another tool's format, and say what that cannot hold."""
    if to not in WRITERS:
        raise UsageError(f"expected a format of {', '.join(WRITERS)}, found {to!r}{did_you_mean(to, WRITERS)}")
    check_writable(out)
    if out.exists():
        raise UsageError(f"expected no file yet in {out}, found one; choose another name, or remove it first")
    written = WRITERS[to](load_plan(plan_file(plan)))
    write_bytes(out, written.data)
    if as_json:
        emit_json({"path": str(out), "format": to, "lost": list(written.lost)})
        return
    emit(f"{out}: written for {to}")
    for line in written.lost:
        tell(f"lost: {line}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(name="import")(import_settings)
app.command(name="export")(export)
