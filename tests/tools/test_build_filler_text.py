"""The text of training, calibration and evaluation: divided by file, and the tool that makes what is shipped."""

import gzip
import platform
import re
import sys
from pathlib import Path

import build_filler_text
import pytest
from reference_model.corpus import source_files, split_files, standard_library

from sparsekv.planner.tasks import Split, load_filler_text

HELD_OUT = (Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION)
SHIPPED = Path(__file__).parents[2] / "planner" / "tasks" / "data"


def build(library: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tool", "--stdlib", str(library), "--out", str(out)])
        build_filler_text.main()


def test_text_is_the_files_of_its_split_and_the_notice_names_where_they_are_from(library: Path, tmp_path: Path) -> None:
    build(library, tmp_path)
    for split in HELD_OUT:
        made = gzip.decompress((tmp_path / f"{split.value}.txt.gz").read_bytes()).decode()
        assert made == "".join(file.text for file in split_files(library, split))
    assert f"Python {platform.python_version()}, Copyright" in (tmp_path / "NOTICE").read_text()


@pytest.mark.skipif(
    f"Python {platform.python_version()}," not in (SHIPPED / "NOTICE").read_text()
    or not (standard_library() / "test" / "test_json").is_dir(),
    reason="the shipped text is of another Python, or this one is not complete",
)
def test_the_shipped_text_is_what_the_tool_makes(tmp_path: Path) -> None:
    build(standard_library(), tmp_path)
    for split in HELD_OUT:
        assert gzip.decompress((tmp_path / f"{split.value}.txt.gz").read_bytes()).decode() == load_filler_text(split)
    assert (tmp_path / "NOTICE").read_text() == (SHIPPED / "NOTICE").read_text()


def test_every_copyright_inside_the_shipped_text_is_named_in_the_notice_of_the_package() -> None:
    text = "\n".join(load_filler_text(split) for split in HELD_OUT)
    lines = re.findall(r"^[# ]*((?:Copyright .*?\d{4}|\(c\) Copyright).*)", text, re.MULTILINE)
    notice = (SHIPPED.parents[2] / "NOTICE").read_text()
    assert len({*lines}) > 10
    assert {line for line in lines if line not in notice and "Python Software Foundation" not in line} == set()


# --- which files, and of which split ----------------------------------------------------------------------------------


TEXT = "some words of a file\n" * 20


def test_every_file_belongs_to_one_split(library: Path) -> None:
    names = [{file.name for file in split_files(library, split)} for split in Split]
    assert sum(map(len, names)) == len(set().union(*names)) == len(list(source_files(library)))
    assert len(names[0]) > 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("short.py", "x = 1\n"),
        ("zero.py", TEXT + "\0"),
        ("numbers.py", "1234567890\n" * 50),
        ("foreign.py", "größere Wörter\n" * 50),
        ("long.py", "x" * 2000),
        ("encodings/names.py", TEXT),
        ("site-packages/other.py", TEXT),
        ("test_codecmaps_jp.py", TEXT),
        ("notes.txt", TEXT),
    ],
)
def test_tables_and_foreign_files_are_left_out(tmp_path: Path, name: str, text: str) -> None:
    for path, content in ((name, text), ("kept.py", TEXT.replace("\n", "\r\n").rstrip())):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content, newline="")
    assert [(file.name, file.text) for file in source_files(tmp_path)] == [("kept.py", TEXT)]
