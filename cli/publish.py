"""`sparsekv publish`: a plan beside its model, with a section of the model card. Uploads nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, PlanPlace, found_source, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable, check_writable
from sparsekv.plans.aliases import PLAN_NAME, ModelSource, is_hub_id, resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import as_text, load_plan, read_bytes, write_bytes
from sparsekv.plans.schema import Plan, check_model

CARD = "README.md"
_MOST = 8 << 20  # bytes of a card
_UNKNOWN = "YOUR_NAME/YOUR_MODEL"


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is and as it is to be; `before` is None where there is none."""

    path: Path
    before: bytes | None
    after: bytes

    @property
    def changes(self) -> bool:
        return self.before != self.after

    def diff(self) -> Iterator[str]:
        """The change, as lines that `patch` reads."""
        old, new = ((data or b"").decode(errors="replace").splitlines() for data in (self.before, self.after))
        source = os.devnull if self.before is None else str(self.path)
        yield from unified_diff(old, new, source, str(self.path), lineterm="")


def publish(
    plan: PlanPlace,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model's folder, or its hub id.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Where both files go; by default the model's folder."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; print what would change.")] = False,
    as_json: Json = False,
) -> None:
    """Put a plan beside its model, and a section with its device, quality and use into the model card.

    Uploads nothing: the command that does is printed. Again changes nothing; of README.md only what is between the
    section's markers, and the tags of the metadata. Of a hub id the config and the card are fetched.
    """
    path = plan_file(plan)
    found = load_plan(path)
    source = found_source(resolve_model(model))
    folder = _folder(model, source, out)
    _check_fits(found, source)
    repository = _repository(found, source)
    files = (_plan_in(folder, path), _card_in(folder, source, found, repository))
    changed = [file for file in files if file.changes]
    if not dry_run:
        for file in changed:
            write_bytes(file.path, file.after)
    _report(files, changed, _upload(repository, folder), dry_run, as_json)


def _folder(model: str, source: ModelSource, out: Path | None) -> Path:
    """The folder that both files go to.

    Raises:
        UsageError: it is not there, or is none of the user's.
    """
    is_own = source.is_local and os.path.exists(os.path.expanduser(model))
    if out is None and not is_own:
        raise UsageError(
            f"expected --out FOLDER beside {model}, which is no folder of yours, found none; name one for both files"
        )
    folder = Path(source.place) if out is None else out
    if not folder.is_dir():
        raise UsageError(f"expected a folder for {PLAN_NAME} and {CARD}, found no {folder}; make it first")
    for path in (folder / PLAN_NAME, folder / CARD):
        if path.is_symlink():
            raise UsageError(
                f"expected a file to write, found the link {path}, as in the hub's cache; name a folder of yours with "
                "--out"
            )
        check_writable(path)
    check_replaceable(folder / PLAN_NAME, "the plan", "plan")
    return folder


def _check_fits(plan: Plan, source: ModelSource) -> None:
    """Refuses the plan of another architecture; weights are not read.

    Raises:
        PlanMismatchError: naming what differs.
    """
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    check_model(plan, describe_config(load_config(source), source.path_or_id))


def _repository(plan: Plan, source: ModelSource) -> str:
    """The hub id that readers are told: the model's, or that of the plan's model, of which the folder is a copy."""
    named = plan.model.id if source.is_local else source.path_or_id
    return named if is_hub_id(named) else _UNKNOWN


def _plan_in(folder: Path, plan: Path) -> _File:
    return _File(folder / PLAN_NAME, _bytes_of(folder / PLAN_NAME), read_bytes(plan, _MOST))


def _card_in(folder: Path, source: ModelSource, plan: Plan, repository: str) -> _File:
    """The card in the folder goes on from what is there, else from that of the model."""
    from sparsekv.cli.model_card import with_plan

    path = folder / CARD
    before = _bytes_of(path)
    card = _own_card(source) if before is None else before
    return _File(path, before, with_plan(as_text(card, str(path), _MOST, UsageError), plan, repository).encode())


def _own_card(source: ModelSource) -> bytes:
    """The card of a model; empty where it has none."""
    if source.is_local:
        return _bytes_of(Path(source.place, CARD)) or b""
    from sparsekv.runtime.hub import download_card

    card = download_card(source)
    return b"" if card is None else read_bytes(card, _MOST)


def _bytes_of(path: Path) -> bytes | None:
    return read_bytes(path, _MOST) if path.exists() else None


def _upload(repository: str, folder: Path) -> str:
    """The command with which a user puts both files on the hub."""
    return f"hf upload {repository} {shlex.quote(str(folder))} . --include {PLAN_NAME} --include {CARD}"


def _report(files: tuple[_File, ...], changed: list[_File], upload: str, dry_run: bool, as_json: bool) -> None:
    diff = "\n".join(line for file in changed for line in file.diff())
    if as_json:
        facts = {"files": [{"path": str(file.path), "changed": file.changes} for file in files], "upload": upload}
        emit_json({"written": bool(changed) and not dry_run, **facts} | ({"diff": diff} if dry_run else {}))
        return
    if dry_run and diff:
        emit(diff)
    for file in files if not dry_run or not changed else ():
        emit(f"{file.path}: {'written' if file.changes else 'as it was'}")
    tell("nothing was written" if dry_run else "nothing was uploaded; with --create-pr where the model is not yours:")
    (tell if dry_run else emit)(upload)


app = commands.app(publish)
