"""Commands that take plans from elsewhere and to it: `import`, `export`, and `publish` beside the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, PlanPlace, Subject, found_source, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_choice import described
from sparsekv.cli.plan_files import check_new, check_replaceable, check_writable, default_plan
from sparsekv.plans.aliases import PLAN_NAME, ModelSource, is_hub_id, resolve_model
from sparsekv.plans.brief import brief, next_command, sentence
from sparsekv.plans.errors import PlanError, UsageError, did_you_mean
from sparsekv.plans.files import MAX_BYTES as MOST_PLAN_BYTES
from sparsekv.plans.files import load_plan, read_bytes, write_bytes, write_plan
from sparsekv.plans.interop import READERS, WRITERS, plan_of, recognised
from sparsekv.plans.interop.source import MAX_BYTES, Source
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.show import cell, target_text, verdict_markdown
from sparsekv.plans.types import format_length


def import_settings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of another tool.", show_default=False)],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME", help="The model, of which config.json is read; or a plan of it."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes; as of `plan` by default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan that is there.")] = False,
    kind: Annotated[
        str | None,
        typer.Option("--from", metavar="TOOL", help=f"By its content, or {', '.join(READERS)}.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a plan of another tool's settings.

    Missing settings come from that method's publication, and each is printed. The plan is `imported`: nothing was
    measured; `verify --write` does that.
    """
    out = out or default_plan(load_plan(plan_file(Path(model))).model.id if _is_plan(model) else model)
    check_replaceable(out, "--out", "plan")
    check_new(out, force)
    data = read_bytes(file, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise PlanError(f"{file}: expected at most {MAX_BYTES:,} bytes, found more; no such file is that long")
    source = Source(file.name, data)
    tool = recognised(source, kind)
    plan, notes = plan_of(source, tool, _described(model))
    write_plan(plan, out)
    if as_json:
        emit_json({"path": str(out), "kind": tool, "model": plan.model.id, "notes": list(notes)})
        return
    emit(f"{out}: imported from {tool} for {plan.model.id}")
    emit(f"next: {next_command(plan, str(out), '' if _is_plan(model) else model)}")
    for note in notes:
        tell(note)


def _is_plan(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _described(name: str) -> ModelInfo:
    if _is_plan(name):  # its model: nothing has to be loaded
        model = load_plan(plan_file(Path(name))).model
        return model.model_copy(update={"fingerprint": model.fingerprint.model_copy(update={"weights": None})})
    return described(Subject.named(name).source or resolve_model(name))


def export(
    plan: PlanPlace,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"{', '.join(WRITERS)}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="A new file; printed by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan in another tool's format, and say what that cannot hold."""
    if to not in WRITERS:
        raise UsageError(f"expected a format of {', '.join(WRITERS)}, found {to!r}{did_you_mean(to, WRITERS)}")
    if out is not None:
        if out.exists():
            raise UsageError(f"expected nothing yet at {out}, found something; choose another name, or remove it first")
        check_writable(out)
    written = WRITERS[to](load_plan(plan_file(plan)))
    if out is not None:
        write_bytes(out, written.data)
    if as_json:
        facts = {"text": written.data.decode()} if out is None else {"path": str(out)}
        emit_json(facts | {"format": to, "lost": list(written.lost)})
        return
    emit(written.data.decode().rstrip("\n") if out is None else f"{out}: written for {to}")
    for line in written.lost:
        tell(f"lost: {line}")


# --- publish ----------------------------------------------------------------------------------------------------------

_UNKNOWN = "YOUR_NAME/YOUR_MODEL"
_PASTE = """\
paste the section into the model card (README.md), name in it the address that you cloned sparsekv from, and tag the \
card `sparsekv`, by which plans are found"""
_RUNNING = """\
```sh
git clone THIS_REPOSITORY sparsekv && pip install ./sparsekv    # there is no release on a package index yet
sparsekv run {repository} --prompt-file book.txt --compare    # dense and sparse, side by side
vllm serve {repository}    # in an environment with sparsekv and vLLM
```"""


def publish(
    plan: PlanPlace,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model's folder, or its hub id.", show_default=False)
    ],
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request on the hub, where the model is not yours.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and upload nothing; print the section.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a plan into its model's folder, or upload it to its hub repository, as sparsekv.yaml.

    Prints a section to paste into the model card: use, device, quality, gain. No card is read or written.
    """
    path = plan_file(plan)
    found = load_plan(path)
    source = found_source(resolve_model(model))
    beside = _path_in(model, source)
    if create_pr and beside is not None:
        raise UsageError(f"expected a hub id beside --create-pr, found the folder {beside.parent}; leave one out")
    check_model(found, described(source))
    data = read_bytes(path, MOST_PLAN_BYTES)
    to, is_new = source.path_or_id, not dry_run
    if beside is not None:
        to, is_new = str(beside), is_new and not (beside.exists() and read_bytes(beside, MOST_PLAN_BYTES) == data)
        if is_new:
            write_bytes(beside, data)
    elif is_new:
        from sparsekv.runtime.hub import upload_plan

        to = upload_plan(source, data, create_pr)
    card = "\n".join(section(found, source))
    if as_json:
        emit_json({"to": to, "written": is_new, "section": card})
        return
    emit(card)
    tell(f"{to}: {'written' if is_new else 'nothing was written' if dry_run else 'as it was'}; {_PASTE}")


def _path_in(model: str, source: ModelSource) -> Path | None:
    """The plan's path in a folder of the user's; None of a hub id."""
    if not source.is_local:
        return None
    path = Path(source.place) / PLAN_NAME
    if not os.path.exists(os.path.expanduser(model)) or path.is_symlink():
        raise UsageError(
            f"expected a folder of yours to copy the plan into, found {path}, which is sparsekv's own or a link, as in "
            "the hub's cache; copy the model first, and name its copy"
        )
    check_replaceable(path, "the plan", "plan")
    return path


# --- the section ------------------------------------------------------------------------------------------------------


def section(plan: Plan, source: ModelSource) -> Iterator[str]:
    named = plan.model.id if source.is_local else source.path_or_id
    lengths = ", ".join(map(format_length, plan.planned_lengths))
    devices = "; ".join(map(target_text, plan.targets))
    yield "## Sparse attention plan\n"
    yield (
        f"[`{PLAN_NAME}`]({PLAN_NAME}) is a plan for sparsekv: what each attention head of {cell(named)} computes of a "
        "long prompt, and which tokens a decode step reads."
        + (f" Planned for prompts of {lengths}." if lengths else "")
        + (f" Made on {cell(devices)}." if devices else "")
    )
    yield f"\n{verdict_markdown(plan, (*brief(plan), sentence(plan)))}\n"
    yield _RUNNING.format(repository=named if is_hub_id(named) else _UNKNOWN)


app = commands.group()
for run, *arguments in (
    (
        import_settings,
        "best_pattern.json --model ./my-model",
        "layers.json --model llama3-8b --from filter-layers -o plan.yaml",
    ),
    (export, "plan.yaml --to minference -o best_pattern.json", "plan.yaml --to index-topk"),
    (publish, "plan.yaml ./my-model --dry-run", "plan.yaml your-name/your-model --create-pr"),
):
    name = run.__name__.removesuffix("_settings")
    commands.add(app, run, *(f"sparsekv {name} {one}" for one in arguments), name=name)
