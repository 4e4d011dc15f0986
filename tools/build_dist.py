"""Builds the sdist and the wheel of the commit that is checked out into dist/, and checks both: `make dist`.

What is built is what git has committed, twice, in two folders: both builds must give the same bytes. The wheel is built
from the unpacked sdist, so that the sdist is enough. At last the wheel is installed into a fresh environment, which
finds its dependencies in that of this Python (with --fetch it gets them from the package index), and runs there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 20_000_000
"""Bytes of the wheel and of the sdist, each, at most: the reference model takes nearly all of them."""
MODEL = "plans/data/tiny-retriever/model.safetensors"
IN_WHEEL = ("sparsekv/py.typed", f"sparsekv/{MODEL}")
IN_SDIST = ("LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", MODEL)
NOT_SHIPPED = {"tests", "tools", "docs", "examples", ".ci", "__pycache__"}
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
SAYS = "The special number for lemon is 4810357. The special number for lemon is"


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds, checks, and prints each file with its size and digest."""
    options = _options(arguments)
    commit, seconds = _git("log", "-1", "--format=%H %ct").split()
    if changed := _git("status", "--porcelain"):
        _tell(f"building {commit[:12]}: {len(changed.splitlines())} changed or new files are not in it")
    with tempfile.TemporaryDirectory() as name:
        built, again = (_build(Path(name, folder), commit, int(seconds)) for folder in ("one", "another"))
        wrong = [*differences(built, again), *faults(*built)]
        if wrong:
            sys.exit("make dist: " + "\n".join(wrong))
        said = _runs_installed(Path(name, "environment"), built[1], options.fetch)
        released = _publish(built, options.out)
    for path in released:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        print(f"{path}: {len(data):,} of {BUDGET:,} bytes, sha256 {digest}")
    print(f"two builds of {commit[:12]} are equal; installed in a fresh environment: {said}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds and checks what is released.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both files")
    parser.add_argument("--fetch", action="store_true", help="install dependencies from the package index")
    return parser.parse_args(arguments)


# --- building ---------------------------------------------------------------------------------------------------------


def _build(folder: Path, commit: str, seconds: int) -> tuple[Path, Path]:
    """The sdist and the wheel of a commit, made in a folder of their own."""
    tree, out = folder / "tree", folder / "dist"
    tree.mkdir(parents=True)
    archive = subprocess.run([*_GIT, "archive", commit], check=True, capture_output=True).stdout
    _unpack(archive, tree)
    out.mkdir()
    sdist = out / _backend("build_sdist", tree, out, seconds)
    sdist.write_bytes(normalised(sdist.read_bytes(), seconds))
    unpacked = folder / "unpacked"
    _unpack(gzip.decompress(sdist.read_bytes()), unpacked)
    (source,) = unpacked.iterdir()
    return sdist, out / _backend("build_wheel", source, out, seconds)


def _backend(step: str, source: Path, out: Path, seconds: int) -> str:
    """Runs a step of the build backend and returns the name of the file that it made."""
    command = [sys.executable, "-c", BUILD, step, str(out)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds)}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make dist: {step} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def normalised(sdist: bytes, seconds: int) -> bytes:
    """The same archive with its members in order, of no user, of one time, and compressed without a time: setuptools
    writes those of the machine."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as source,
        gzip.GzipFile("", "wb", 9, packed, mtime=seconds) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as made,
    ):
        for found in sorted(source.getmembers(), key=lambda member: member.name):
            member = tarfile.TarInfo(found.name)
            member.type, member.size, member.mtime = found.type, found.size, seconds
            member.mode = 0o755 if found.isdir() else 0o644
            made.addfile(member, source.extractfile(found))
    return packed.getvalue()


def _unpack(archive: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    for path in folder.rglob("*"):  # a wheel records modes, which follow the user's mask
        path.chmod(0o755 if path.is_dir() else 0o644)


_GIT = ("git", "-c", "safe.directory=*", "-C", str(ROOT))


def _git(*arguments: str) -> str:
    try:
        return subprocess.run([*_GIT, *arguments], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or error
        sys.exit(f"make dist: expected a clone with git, whose commit is built; found: {told}")


# --- checking ---------------------------------------------------------------------------------------------------------


def differences(built: Sequence[Path], again: Sequence[Path]) -> list[str]:
    """A line for each file of a build that is not the same in the other one."""
    pairs = zip(built, again, strict=True)
    return [f"{one.name}: two builds differ" for one, other in pairs if one.read_bytes() != other.read_bytes()]


def faults(sdist: Path, wheel: Path) -> list[str]:
    """A line for each thing that is wrong with what the two files hold."""
    with tarfile.open(sdist) as archive:
        source = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    with ZipFile(wheel) as packed:
        installed = set(packed.namelist())
        (info,) = (name for name in installed if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(packed.read(info))
    found = [f"{sdist.name}: expected {name} in it, found none" for name in IN_SDIST if name not in source]
    found += [f"{wheel.name}: expected {name} in it, found none" for name in IN_WHEEL if name not in installed]
    for file, names in ((sdist, source), (wheel, installed)):
        found += [f"{file.name}: {name} must not be in it" for name in sorted(names) if _is_private(name)]
        if (size := file.stat().st_size) > BUDGET:
            found.append(f"{file.name}: expected at most {BUDGET:,} bytes, found {size:,}")
    roots = {name.split("/")[0] for name in installed}
    if extra := {root for root in roots if root != "sparsekv" and not root.endswith(".dist-info")}:
        found.append(f"{wheel.name}: expected sparsekv alone, found {', '.join(sorted(extra))} at its top")
    if f"-{metadata['Version']}-" not in wheel.name:
        found.append(f"{wheel.name}: its metadata says version {metadata['Version']}")
    return found


def _is_private(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(NOT_SHIPPED.intersection(parts[:1]) or "__pycache__" in parts)


def _runs_installed(folder: Path, wheel: Path, fetch: bool) -> str:
    """Installs a wheel into a fresh environment, runs it there, and returns its version."""
    venv.create(folder, with_pip=False)
    python, program = folder / "bin" / "python", folder / "bin" / "sparsekv"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *([] if fetch else ["--no-deps", "--no-index"]), str(wheel)])
    (packages,) = folder.glob("lib/python*/site-packages")
    if not fetch:  # a line in a .pth file adds a folder behind this one, and runs none of its .pth files
        (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    version = _run([str(program), "--version"]).strip()
    if f"-{version}-" not in wheel.name:
        sys.exit(f"make dist: expected the version of {wheel.name} from --version, found {version}")
    place = _run([str(python), "-c", "import sparsekv; print(sparsekv.__file__)"]).strip()
    if not Path(place).is_relative_to(packages):
        sys.exit(f"make dist: expected sparsekv of the fresh environment, found {place}")
    call = [str(program), "run", "tiny-retriever", "--dense", "--raw", "--max-new-tokens", "8", "--json", "-p", SAYS]
    answer = json.loads(_run(call))["text"]
    return f"sparsekv --version says {version}, and tiny-retriever answers {answer.strip()!r}"


def _run(command: Sequence[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"make dist: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _publish(built: Sequence[Path], out: Path) -> list[Path]:
    """Puts the files into a folder, each in one step, and returns where they are."""
    out.mkdir(parents=True, exist_ok=True)
    for path in built:
        temporary = out / f".{path.name}.tmp"
        temporary.write_bytes(path.read_bytes())
        temporary.replace(out / path.name)
    return [out / path.name for path in built]


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
