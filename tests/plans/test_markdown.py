"""A plan as Markdown: what show prints, and nothing in it that is markup of its own."""

import re
from pathlib import Path

from plans_samples import full_plan, small_plan

from sparsekv.plans.files import parse_plan
from sparsekv.plans.markdown import cell, markdown, table
from sparsekv.plans.schema import Target
from sparsekv.plans.show import describe

GOLDEN = Path(__file__).parent / "golden" / "v1.yaml"


def test_every_row_of_a_table_has_a_cell_for_each_column() -> None:
    text = markdown(describe(full_plan(), full=True))
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) > 5
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        assert re.fullmatch(r"\|( (---|--:) \|)+", rows[1])


def test_what_show_prints_of_the_golden_plan_is_there() -> None:
    text = markdown(describe(parse_plan(GOLDEN.read_text()), full=True))
    for found in ("**Prefill, tiles of 128 x 64", "| 32k | prefill | 81.2 ms |"):
        assert found in text


def test_a_name_that_would_be_markup_shows_as_it_is() -> None:
    device = "<img src=x> | [a](http://b) @somebody `c` **d** $e$"
    plan = small_plan(targets=(Target(device=device, backend="triton", dtype="float16"),))
    text = markdown(describe(plan))
    (line,) = (line for line in text.splitlines() if "img src" in line)
    assert line.count("|") == 3
    for part in ("<", "](", "@s", "`", "**", "$"):
        assert part not in line
    assert cell("1 x H200, 5%") == "1 x H200, 5%"


def test_a_short_row_is_filled() -> None:
    assert table(("a", "b"), [("1",)], [True, False]) == "| a | b |\n| --: | --- |\n| 1 |  |"
