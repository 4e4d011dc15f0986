"""docs/extending.md: the page names the files of examples/extending, and whoever follows it has a green tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = ROOT / "examples" / "extending"
PACKAGES = ("plans", "kernels", "runtime", "planner", "bench", "cli")
CHANGES = [
    (file, hunk)
    for block in re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for file, hunks in re.findall(r"^--- a/(\S+)\n(.*?)(?=^--- a/|\Z)", block, re.MULTILINE | re.DOTALL)
    for hunk in hunks.split("@@\n")
]
# Where the code of an example goes: above which line of which file; or a copy of it.
ABOVE = {
    "strided_pattern.py": ("plans/patterns.py", "Pattern = Annotated["),
    "even_spread.py": ("runtime/core/roles.py", "def _own("),
}
COPIES = {"strided.py": "kernels/index/strided.py"}


def sides(hunk: str) -> tuple[str, str]:
    """The lines before a change, and behind it."""
    lines = hunk.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
    return old, new


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_the_page_names_each_example(example: str) -> None:
    assert f"`examples/extending/{example}`" in PAGE
    assert example in ABOVE or example in COPIES


@pytest.mark.parametrize(("file", "hunk"), CHANGES)
def test_each_change_of_the_page_fits_its_file_or_is_made_already(file: str, hunk: str) -> None:
    text, (old, new) = (ROOT / file).read_text(), sides(hunk)
    assert text.count(new) == 1 or (old and text.count(old) == 1)


def follow(tree: Path) -> None:
    """Takes the steps of the page in a copy of the tree."""
    for example, target in COPIES.items():
        shutil.copy(EXAMPLES / example, tree / target)
    for example, (file, line) in ABOVE.items():
        code = re.split(r"^(?=@|class |def )", (EXAMPLES / example).read_text(), maxsplit=1, flags=re.MULTILINE)[1]
        (tree / file).write_text((tree / file).read_text().replace(f"\n{line}", f"\n{code}\n\n{line}", 1))
    for file, hunk in CHANGES:
        text, (old, new) = (tree / file).read_text(), sides(hunk)
        if new not in text:
            (tree / file).write_text(text.replace(old, new))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it runs the tests that the page names
def test_whoever_follows_the_page_has_a_green_tree(tmp_path: Path) -> None:
    tree, link = tmp_path / "tree", tmp_path / "link" / "sparsekv"
    tree.mkdir()
    for path in map(ROOT.joinpath, (*PACKAGES, "src", "tests", "docs", "zoo", "tools", "examples")):
        shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in filter(Path.is_file, ROOT.glob("[!.]*")):
        shutil.copy(path, tree)
    link.mkdir(parents=True)
    for part in (*(tree / "src" / "sparsekv").iterdir(), *map(tree.joinpath, PACKAGES)):
        (link / part.name).symlink_to(part)
    follow(tree)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    calls = [call.split() for block in blocks for call in re.split(r" && |\n", block) if call.startswith("python")]
    assert sum("pytest" in call for call in calls) == 1
    environment = {**os.environ, "PYTHONPATH": str(link.parent), "OMP_NUM_THREADS": "1"}
    for _, *call in (*calls, ["python", "-c", "from sparsekv.plans.patterns import Strided"]):
        done = subprocess.run([sys.executable, *call], cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
