"""Commands from models of options: what is typed arrives, what means nothing or is unread is refused by its flag."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from sparsekv.cli.commands import app, command
from sparsekv.cli.plan import PlanFlags
from sparsekv.planner.flags import Count, Flag, Lengths, Options
from sparsekv.plans.errors import UsageError


class Inner(Options):
    share: Annotated[float, Field(ge=0.0, le=1.0), Flag("A share.", metavar="SHARE")] = 0.5


class Asked(Options):
    name: Annotated[str, Flag("A name.", metavar="NAME", is_argument=True)]
    lengths: Annotated[Lengths, Flag("Lengths.", ("--lengths", "--length"), "LIST")] = ()
    count: Annotated[Count | None, Flag("A count.")] = None
    mode: Annotated[Literal["a", "b"], Flag("A mode.")] = "a"
    checks: Annotated[bool, Flag("Without checks.")] = True
    inner: Inner = Inner()
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


def test_texts_that_mean_nothing_name_the_flag():
    done, _ = call("x", "--lengths", "soon")
    assert isinstance(done.exception, UsageError)
    assert "--lengths" in str(done.exception)


PLAN: dict[str, Any] = {"model": "m", "out": "o"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tile": "64", "profile": "a"}, ("--tile", "--profile")),
        ({"preset": "minference", "profile": "a"}, ("--preset", "--profile")),
        ({"prompts_file": "p", "profile": "a"}, ("--prompts", "--profile")),
        ({"samples": 2, "profile": "a"}, ("--samples", "--profile")),
        ({"tasks": "perplexity", "profile": "a", "no_verify": True}, ("--tasks", "--profile", "--no-verify")),
        ({"tasks": "perplexity", "prompts_file": "p", "no_verify": True}, ("--tasks", "--prompts", "--no-verify")),
        ({"seed": 0, "profile": "a", "no_verify": True}, ("--seed", "--profile", "--no-verify")),
        ({"backend": "cpu", "profile": "a", "cost": "c", "no_verify": True}, ("--backend", "--cost", "--no-verify")),
        ({"target_density": (0.3,), "phases": "decode"}, ("--target-density", "--only decode")),
        ({"families": "a_shape", "phases": "decode"}, ("--families", "--only decode")),
        ({"decode_budget": "5%", "phases": "prefill"}, ("--decode-budget", "--only prefill")),
        ({"offload": True, "phases": "prefill"}, ("--offload", "--only prefill")),
        ({"max_kl": 0.1, "no_verify": True}, ("--max-kl", "--no-verify")),
        ({"prefill_chunk": 512, "no_verify": True}, ("--prefill-chunk", "--no-verify")),
        ({"host": "vllm", "cost": "c"}, ("--host", "--cost")),
    ],
)
def test_flags_of_plan_that_nothing_would_read_are_refused_with_those_that_cancel_them(given, named):
    with pytest.raises(UsageError) as refused:
        PlanFlags(**PLAN, **given)
    assert [word for word in named if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    "given",
    [
        {"tasks": "perplexity", "profile": "a"},  # verification reads them
        {"seed": 3, "profile": "a"},
        {"lengths": (4096,), "profile": "a"},  # some of the profiled ones
        {"families": "a_shape", "preset": "minference"},
        {"samples": 3, "prompts_file": "p"},
        {"backend": "cpu", "profile": "a", "no_verify": True},  # the device cost is measured with it
        {"host": "vllm", "prefill_chunk": 512, "no_verify": True},  # chunks are timed
    ],
)
def test_flags_of_plan_that_something_reads_go_together(given):
    PlanFlags(**PLAN, **given)
