"""Commands between plans and other tools' files: `import` and `export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import check_new, check_replaceable, check_writable, default_plan
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.errors import PlanError, UnsupportedError, UsageError, did_you_mean, install_command
from sparsekv.plans.files import load_plan, read_bytes, write_bytes, write_plan
from sparsekv.plans.interop.formats import READERS, WRITERS, plan_of, recognised
from sparsekv.plans.interop.source import MAX_BYTES, Source
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.types import format_ids
from sparsekv.runtime.settings import read_settings

_ONNX = "onnx"
_FORMATS = (*WRITERS, _ONNX)


def import_settings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of another tool.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="NAME", help="That it is for, of which config.json is read; or a plan of it."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes; as of `plan` by default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan that is there.")] = False,
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
    out = out or default_plan(load_plan(plan_file(Path(model))).model.id if _is_plan(model) else model)
    check_replaceable(out, "--out", "plan")
    check_new(out, force)
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
    loaded = plan.model.id if _is_plan(model) else model
    emit(f"next: sparsekv verify {shlex.quote(loaded)} --plan {shlex.quote(str(out))} --write")
    for note in notes:
        tell(note)


def _is_plan(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _described(name: str) -> ModelInfo:
    if _is_plan(name):  # its model: nothing has to be loaded
        model = load_plan(plan_file(Path(name))).model
        return model.model_copy(update={"fingerprint": model.fingerprint.model_copy(update={"weights": None})})
    from sparsekv.cli.arguments import Subject
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    source = Subject.named(name).source
    return describe_config(load_config(source or name), name)


def export(
    place: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan, or its folder; for onnx the model.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"{', '.join(_FORMATS)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="Where it goes: a new file, or folder.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="For onnx, where it is not beside the model.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan in another tool's format, or its model as ONNX (float32, or SPARSEKV_DTYPE=float16), and say what
    that cannot hold."""
    if to not in _FORMATS:
        raise UsageError(f"expected a format of {', '.join(_FORMATS)}, found {to!r}{did_you_mean(to, _FORMATS)}")
    if out.exists():
        raise UsageError(f"expected nothing yet at {out}, found something; choose another name, or remove it first")
    if to == _ONNX:
        _export_model(place, plan, out, as_json)
        return
    if plan is not None:
        raise UsageError(f"expected the plan alone for {to}, found --plan, which is for onnx; leave it out")
    check_writable(out)
    written = WRITERS[to](load_plan(plan_file(Path(place))))
    write_bytes(out, written.data)
    if as_json:
        emit_json({"path": str(out), "format": to, "lost": list(written.lost)})
        return
    emit(f"{out}: written for {to}")
    for line in written.lost:
        tell(f"lost: {line}")


def _export_model(place: str, file: Path | None, out: Path, as_json: bool) -> None:
    try:
        from sparsekv.runtime.onnx.export import export as write_model
        from sparsekv.runtime.onnx.export import new_folder
    except ModuleNotFoundError as error:
        raise UsageError(f"expected the package onnx, found none; install it: {install_command('onnx')}") from error
    from sparsekv.cli.arguments import Subject
    from sparsekv.plans.schema import check_model
    from sparsekv.runtime.core.program import Program
    from sparsekv.runtime.hf.load import load_model

    subject = Subject.named(place, file)
    plan = subject.need_plan()
    loaded = load_model(place, device="cpu", dtype="float16" if read_settings().dtype == "float16" else "float32")
    for line in check_model(plan, loaded.info):
        tell(line)
    if plan.retained:
        raise UnsupportedError(
            f"expected a plan that keeps all tokens, found one that evicts some in layers {format_ids(plan.retained)}, "
            "which a graph cannot; export a plan without kv_cache"
        )
    program = Program.of(None, plan.decode, loaded.info)
    with new_folder(out) as made:
        written = out / write_model(loaded.model, plan, program, made).name
        loaded.tokenizer.save_pretrained(made)
        loaded.model.config.save_pretrained(made)
        write_plan(plan, made / PLAN_NAME)
    lost = ["prefill is dense in this graph"] if plan.prefill is not None else []
    if as_json:
        emit_json({"path": str(written), "format": _ONNX, "lost": lost})
        return
    emit(f"{written}: {plan.model.id}, decode by the plan ({plan.status_text})")
    for line in lost:
        tell(line)


app = commands.group()
commands.add(
    app,
    import_settings,
    "sparsekv import best_pattern.json --model ./my-model",
    "sparsekv import layers.json --model llama3-8b --from filter-layers -o plan.yaml",
    name="import",
)
commands.add(
    app,
    export,
    "sparsekv export plan.yaml --to minference -o best_pattern.json",
    "sparsekv export ./my-model --to onnx -o my-model-onnx",
)
