"""The tool that makes the shipped filler text."""

import gzip
import platform
import sys
from pathlib import Path

import build_filler_text
import pytest
from reference_model.corpus import split_files, standard_library

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
