"""What is released: the same bytes from the same commit, nothing in them but what is meant, and a wheel that runs."""

import io
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from build_dist import BUDGET, IN_SDIST, IN_WHEEL, differences, faults, main, normalised

from sparsekv import __version__

ROOT = Path(__file__).resolve().parents[2]


def archive(names: list[str], seconds: int, user: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(f"sparsekv-1.0/{name}")
            member.size, member.mtime, member.uname = len(name), seconds, user
            made.addfile(member, io.BytesIO(name.encode()))
    return packed.getvalue()


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Path]:
    sdist, wheel = tmp_path / "sparsekv-1.0.tar.gz", tmp_path / "sparsekv-1.0-py3-none-any.whl"
    sdist.write_bytes(archive(list(IN_SDIST), 1, "somebody"))
    with ZipFile(wheel, "w") as made:
        for name in IN_WHEEL:
            made.writestr(name, "")
        made.writestr("sparsekv-1.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: sparsekv\nVersion: 1.0\n")
    return sdist, wheel


def test_an_sdist_does_not_depend_on_who_built_it_and_when() -> None:
    one = normalised(archive(["setup.py", "a.py"], 1_600_000_000, "one"), 1_700_000_000)
    other = normalised(archive(["a.py", "setup.py"], 1_500_000_000, "other"), 1_700_000_000)
    assert one == other
    with tarfile.open(fileobj=io.BytesIO(one)) as made:
        assert {member.mtime for member in made} == {1_700_000_000}
        assert made.extractfile("sparsekv-1.0/a.py").read() == b"a.py"


def test_a_sound_build_has_no_faults(built: tuple[Path, Path]) -> None:
    assert faults(*built) == differences(built, built) == []


def test_tests_a_missing_model_another_version_and_too_many_bytes_are_faults(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    sdist.write_bytes(archive([*IN_SDIST[:-1], "tests/test_a.py"], 1, "somebody"))
    other = wheel.with_name("sparsekv-2.0-py3-none-any.whl")
    other.write_bytes(wheel.read_bytes())
    with ZipFile(other, "a") as made:
        made.writestr("tools/__init__.py", bytes(BUDGET))
    found = "\n".join(faults(sdist, other))
    for part in ("model.safetensors", "tests/test_a.py", "tools/__init__.py", "version 1.0", f"{BUDGET:,}"):
        assert part in found
    assert [line.split(":")[0] for line in differences(built, (built[0], other))] == [wheel.name]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_release_is_built_twice_alike_and_runs_where_it_is_installed(tmp_path: Path, capsys) -> None:
    main(["--out", str(tmp_path)])
    assert "tiny-retriever answers '4810357'" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"sparsekv-{__version__}.tar.gz",
        f"sparsekv-{__version__}-py3-none-any.whl",
    }
