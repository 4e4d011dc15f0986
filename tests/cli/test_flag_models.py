"""Commands from models of options: what is typed arrives, what means nothing or is unread is refused by its flag."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from sparsekv.cli.commands import app, command
from sparsekv.cli.plan import PlanFlags
from sparsekv.planner.flags import Count, Flag, Key, Lengths, Options


class Inner(Options):
    share: Annotated[float, Field(ge=0.0, le=1.0), Flag("A share.", metavar="SHARE")] = 0.5


class Asked(Inner):
    name: Annotated[str, Flag("A name.", metavar="NAME", is_argument=True)]
    lengths: Annotated[Lengths, Flag("Lengths.", ("--lengths", "--length"), "LIST")] = ()
    count: Annotated[Count | None, Flag("A count.")] = None
    mode: Annotated[Literal["a", "b"], Flag("A mode.")] = "a"
    checks: Annotated[bool, Flag("Without checks.")] = True
    budget: Annotated[Lengths, Key("A key.", "LIST")] = ()
    sure: Annotated[bool, Key("Another.", "true")] = False
    unspelled: int = 0


def call(*typed: str) -> tuple[Any, list[Asked]]:
    seen: list[Asked] = []

    def run(flags: Asked) -> None:
        """Runs."""
        seen.append(flags)

    return CliRunner().invoke(app(command(run)), list(typed)), seen


def test_what_is_typed_arrives_and_nothing_else_counts_as_given():
    typed = ("x", "--length", "4k,8k", "--count", "2", "--mode", "a", "--no-checks", "--share", "0.25")
    done, (flags,) = call(*typed)
    assert done.exit_code == 0
    assert flags == Asked(name="x", lengths=(4096, 8192), count=2, mode="a", checks=False, share=0.25)
    assert flags.is_given("mode")
    assert flags.is_given("share")
    _, (bare,) = call("x")
    assert bare == Asked(name="x")
    assert bare.model_fields_set == {"name"}


@pytest.mark.parametrize(
    "typed", [("--count", "0"), ("--mode", "c"), ("--share", "2"), ("--unspelled", "1"), ("--lengths",)]
)
def test_values_out_of_bounds_are_wrong_usage_that_names_the_flag(typed):
    done, seen = call("x", *typed)
    assert (done.exit_code, seen) == (2, [])
    assert typed[0] in done.output


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("budgets=4k", "did you mean budget"),
        ("count=3", "the flag --count"),
        ("unspelled=1", "expected one of budget, sure"),
        ("budget", "budget=LIST"),
        ("budget=4q", "--set budget: "),
        ("sure=perhaps", "--set sure: "),
    ],
)
def test_a_key_that_means_nothing_is_told_what_may_have_been_meant(typed, said):
    done, seen = call("x", "--set", typed)
    assert (seen, said in str(done.exception)) == ([], True)


def test_help_lists_keys_and_examples_in_groups():
    lines = CliRunner().invoke(app(command(unread), "sparsekv plan a"), ["--help"]).output.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["Arguments:", "Options:", "Keys of --set:", "Examples:"]
    assert any(line.split()[:1] == ["budget=LIST"] for line in lines)
    assert "  sparsekv plan a" in lines


def unread(flags: Asked) -> None:
    """Runs."""


PLAN: dict[str, Any] = {"model": "m", "out": "o"}


@pytest.mark.parametrize(
    "given",
    [
        {"tasks": "perplexity", "profile": "a"},  # verification reads them
        {"lengths": (4096,), "profile": "a"},  # some of the profiled ones
        {"families": "a_shape", "preset": "minference"},
        {"backend": "cpu", "profile": "a"},
    ],
)
def test_flags_of_plan_that_something_reads_go_together(given):
    PlanFlags(**PLAN, **given)
