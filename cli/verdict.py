"""The end of `plan`, `verify` and `show`: the status of a plan, each length in a row, its test, the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from textwrap import wrap

from sparsekv.cli.output import WIDTH
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.brief import LENGTH_HEADER, brief, length_rows, sentence
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import columns


def verdict(plan: Plan, file: str, *, model: str = "") -> tuple[str, ...]:
    """Lines of text: the status, each length, who chooses or what is evicted, the test in a sentence, and the next
    command.
    """
    table = columns([LENGTH_HEADER, *length_rows(plan)], right=range(len(LENGTH_HEADER))).splitlines()
    return (f"{file}: {plan.status_text}", *table, *sentences(plan, file, model))


def sentences(plan: Plan, file: str, model: str = "") -> tuple[str, ...]:
    """The lines of `verdict` below its table."""
    return (*brief(plan), *wrap(sentence(plan), WIDTH), f"next: {next_command(plan, file, model)}")


def markdown(plan: Plan, lines: Iterable[str]) -> str:
    """The table of lengths, and lines below it, as Markdown."""
    from sparsekv.plans.markdown import cell, table  # loads rich

    told = "\n".join(f"- {cell(line)}" for line in lines)
    return f"{table(LENGTH_HEADER, length_rows(plan), [True] * len(LENGTH_HEADER))}\n\n{told}"


def next_command(plan: Plan, file: str, model: str = "") -> str:
    """The command to go on with: `run` where the plan is verified, or dense; `plan` where it missed its test, or the
    model answers too few of its tasks; else `verify`."""
    named = f"{shlex.quote(model)} " if model not in ("", plan.model.id) else ""
    place = f"{named}--plan {shlex.quote(file)}"
    if plan.status == "verified" or plan.is_dense:
        return f"sparsekv run {place}"
    if plan.quality and plan.quality.missed:
        return denser_command(plan, file, model)
    if plan.quality and not all(cell.judged for cell in plan.quality.cells):
        return f"{_plan_command(plan, file, model)} --prompts FILE --force"
    return f"sparsekv verify {place} --write"


def denser_command(plan: Plan, file: str, model: str = "") -> str:
    """The command that makes another plan; of one that evicts tokens, one that keeps more of them."""
    retain = plan.provenance.settings.get("retain")
    more = f" --retain {retain + 0.1:.2g}" if isinstance(retain, float) and retain < 0.9 else ""
    return f"{_plan_command(plan, file, model)}{more} --force"


def _plan_command(plan: Plan, file: str, model: str) -> str:
    out = file if file.endswith(".yaml") else PLAN_NAME
    return f"sparsekv plan {shlex.quote(model or plan.model.id)} -o {shlex.quote(out)}"
