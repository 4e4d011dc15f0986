"""Makes the filler text that ships with the tasks: `python tools/build_filler_text.py`.

The bytes depend on the Python version: the shipped files are made with the one that their NOTICE names.
"""

import argparse
import gzip
import platform
from pathlib import Path

import source_tree

source_tree.make_importable()

from reference_model.corpus import split_files, standard_library  # noqa: E402

from sparsekv.planner.tasks.text import Split  # noqa: E402

_DATA = Path(__file__).resolve().parent.parent / "planner" / "tasks" / "data"

_NOTICE = """Filler text of the task generators

calibration.txt.gz, verification.txt.gz and evaluation.txt.gz are concatenated source files of the standard library of
Python {version}, Copyright (c) Python Software Foundation; All Rights Reserved. They are distributed
under the Python Software Foundation License Version 2, https://docs.python.org/3.11/license.html
Nothing in the files was changed; line ends are newlines.

Made by tools/build_filler_text.py: a file belongs to one of them by the SHA-256 of `filler/` and its path below the
library's folder, 6, 3 and 3 in 100 files; larger files and tables of data are left out.
The reference model was trained on the remaining files only.
"""


def main() -> None:
    """Writes the files and their notice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--out", type=Path, default=_DATA)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split in (Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION):
        files = split_files(options.stdlib, split)
        text = "".join(file.text for file in files).encode()
        (options.out / f"{split.value}.txt.gz").write_bytes(gzip.compress(text, 9, mtime=0))
        print(f"{split.value}: {len(files)} files, {len(text)} bytes")
    (options.out / "NOTICE").write_text(_NOTICE.format(version=platform.python_version()))


if __name__ == "__main__":
    main()
