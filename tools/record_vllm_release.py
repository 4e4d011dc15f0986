"""Records what a release of vLLM has of what we use, from its wheel: python tools/record_vllm_release.py WHEEL OUT.json

Names and parameters alone, so that tests compare the contract (tools/vllm_contract.py) with releases that are not
installed. Run it again for every recorded release where the contract names something new; a test says so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from zipfile import ZipFile

from vllm_contract import DRAFT_CALLS, DRAFTS, EITHER, METADATA, WORKERS, Sources, calls_on, names_on

DEVICES = ("cpu", "cuda")


def sources_of(wheel: Path) -> Sources:
    """The Python files in a wheel."""
    archive = ZipFile(wheel)
    files = set(archive.namelist())

    def read(module: str) -> str | None:
        base = module.replace(".", "/")
        found = next((name for name in (f"{base}/__init__.py", f"{base}.py") if name in files), None)
        return None if found is None else archive.read(found).decode()

    return Sources(read)


def recorded(sources: Sources) -> dict[str, object]:
    """Returns of each place the names that we use and it has, and all fields of a step's metadata."""
    names: dict[str, list[str]] = {}
    for device in DEVICES:
        for places in (names_on(device), *EITHER[device], DRAFTS, WORKERS[device]):
            for place, used in places.items():
                has = sources.names(place) or frozenset()
                names[place] = sorted({*names.get(place, ()), *has.intersection(used)})
    names[f"{METADATA}!"] = sorted(sources.names(f"{METADATA}!") or ())
    calls = {call: sources.parameters(call) for device in DEVICES for call in (*calls_on(device), *DRAFT_CALLS)}
    return {"names": names, "calls": calls}


def main(wheel: str, out: str) -> None:
    """Writes the record."""
    version = re.match(r"vllm-([^-]+)-", Path(wheel).name)
    if version is None:
        raise SystemExit(f"expected a wheel named vllm-VERSION-..., found {wheel}")
    data = {"release": version[1], **recorded(sources_of(Path(wheel)))}
    Path(out).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
