"""A plan as Markdown: what show prints, and nothing in it that is markup of its own."""

import re
import unicodedata
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sparsekv.plans.brief import sentence, sentences
from sparsekv.plans.files import load_plan
from sparsekv.plans.show import cell, table, verdict_markdown

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "qwen2.5-coder-0.5b.yaml"

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
HOSTILE = "<img src=x> | [a](http://b) @some `c` **d** $e$ #12 _f_ ~~g~~ \u202eh &amp; www.i.org \\"
PARTS = [*"_*`|[]()<>&#@~$\\!-+=.:1\t\n \x1b", *TURNS, "#12", "@a", "http://", "www.", "word", "1. "]


def read(text: str) -> list[str]:
    """The texts that a reader of Markdown sees, none of them marked up."""
    blocks = [token.children or [] for token in PARSER.parse(text) if token.type == "inline"]
    assert all(part.type == "text" for parts in blocks for part in parts)
    return [found for parts in blocks if (found := "".join(part.content for part in parts))]


def as_named(name: str) -> str:
    """The name in a line, with escapes for what turns text around or does not show."""
    line = " ".join(name.split())
    return "".join(ascii(c)[1:-1] if c in TURNS or unicodedata.category(c) == "Cc" else c for c in line)


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=12).map("".join).filter(str.strip))
@example(HOSTILE)
@settings(max_examples=300, deadline=None)
def test_any_name_shows_as_it_is_wherever_it_stands(name: str) -> None:
    made, named = cell(name), as_named(name).replace("\u200b", "")
    places = {
        made: [named],
        f"- a\n- {made}": ["a", named],
        f"a {made} b": [f"a {named} b"],
        table(("n", "m"), [(name, "z")]): ["n", "m", named, "z"],
    }
    for text, shown in places.items():
        assert [one.replace("\u200b", "") for one in read(text)] == shown
        assert not any(re.search(r"[#@]\w", one) for one in read(text))  # which GitHub links where it shows
        assert not re.search(r"://|www\.", text, re.IGNORECASE)  # and these where they are written


def test_the_sentence_of_a_test_is_one_item_of_a_list() -> None:
    plan = load_plan(MEASURED)
    items = verdict_markdown(plan, sentences(plan, "plan.yaml")).split("\n- ")
    assert cell(sentence(plan)) in items
