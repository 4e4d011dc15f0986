"""The text of training, calibration and evaluation: divided by file, the same way everywhere."""

from pathlib import Path

import pytest
from reference_model.corpus import source_files, split_files

from sparsekv.planner.tasks import Split

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
