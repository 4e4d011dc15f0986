"""Writes README's table and docs/results/own.md, with its pictures, from the files of `sparsekv bench own` in
bench/results, each beside the plan that it is of: `python tools/build_own_page.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from wrap_pages import wrapped

from sparsekv.bench.own_file import Half, Name, OwnFile, OwnRun, figures, plan_of
from sparsekv.bench.own_page import Row, markdown, page
from sparsekv.plans.brief import percent
from sparsekv.plans.types import format_length

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README, PAGE, PICTURES = ROOT / "README.md", ROOT / "docs" / "results" / "own.md", ROOT / "docs" / "pictures"
BEGIN, END = "<!-- made by tools/build_own_page.py -->\n", "<!-- end of it -->\n"
_HEAD = """# Models by their own plans

`sparsekv bench own MODEL --vllm-python PATH -o NAME.json` plans a model by defaults, or takes `--plan`, tests the plan,
and times dense beside it in the same process, in turn, where the plan is executed as hosts do by default: sparse where
that is measured to be faster. "Computed" is the share of attention, as counted; behind each gain is the range over
pairs of repeats, of turns that over turns. In transformers dense takes a prompt whole, the plan in the steps that it
was tested with; in vLLM both take equal steps. The session of turns is an agent's: prefix caching is on, each turn adds
its tokens behind all that stood before. The files of this page are in `bench/results`, beside the plans that they are
of.
"""
_NONE = "No model was measured by this command on a GPU yet.\n"


SUMMARY: Row = (
    "model, longest length, status",
    "computes of prefill, decode",
    "transformers: prompt, token",
    "vLLM, 1 and 8 at once: first token",
    "a token",
    "output tokens/s",
    "session of turns",
)


def files() -> dict[str, OwnFile]:
    """The files by their names, which are those of the models: a folder may have had another."""
    found = {path.stem: OwnFile.read(OwnRun, path) for path in sorted(RESULTS.glob("*.json"))}
    for name, file in found.items():
        file.settings = file.settings.model_copy(update={"model": name})
    return found


def readme(text: str, found: Sequence[OwnFile]) -> str:
    """Returns README with a row for each file in its place."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"expected {BEGIN.strip()} and {END.strip()} in {README}, found no pair of them")
    rows = "\n".join(markdown((SUMMARY, *map(summary, found)))) + "\n"
    return before + BEGIN + (rows if found else "") + END + after


def summary(file: OwnFile) -> Row:
    """The row of a model in README, at the longest length of each half."""
    plan, parts = plan_of(file), figures(file)
    longest = plan.lengths[-1]
    shares = f"{percent(longest.prefill)}, {percent(longest.decode)}"
    shown = [figure for figure in parts if figure.length == longest.length or figure.name == "session"]
    found = {(figure.half, figure.name, figure.at_once): figure for figure in shown}

    def told(half: Half, name: Name, *at_once: int) -> str:
        own = [found.get((half, name, many)) for many in at_once]
        return ", ".join(f"{one.gain:.2f}x" if one and one.gain else "-" for one in own)

    return (
        f"{file.settings.model} at {format_length(longest.length)}: {plan.status}",
        shares,
        f"{told('transformers', 'prompt', 1)}, {told('transformers', 'token', 1)}",
        told("vllm", "first token", 1, 8),
        told("vllm", "token", 1, 8),
        told("vllm", "tokens/s", 1, 8),
        told("vllm", "session", 1, 8),
    )


def pages(found: dict[str, OwnFile]) -> str:
    """Returns the page of all files, one after the other."""
    parts = (page(file, f"../pictures/own-{name}.svg") for name, file in found.items())
    told = [re.sub("^#", "##", part, flags=re.MULTILINE) for part in parts] or [_NONE]
    return wrapped("\n".join((_HEAD, *told)))


if __name__ == "__main__":
    from sparsekv.bench.own_picture import write_picture

    measured = files()
    README.write_text(readme(README.read_text(), [*measured.values()]))
    PAGE.write_text(pages(measured))
    for name, file in measured.items():
        write_picture(file, PICTURES / f"own-{name}.svg")
