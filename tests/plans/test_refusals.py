"""Plans that are refused: each block of tests/data/refused_plans.txt is one change to a sound plan, and the message.

A change is `PATH: VALUE` in the data, `PATH -` for a field that is left out, `'TEXT' => 'TEXT'` in the file itself, or
`= TEXT` for another file altogether.
To add one, or to change a message, edit its line `$ ...` there and run
`WRITE_MESSAGES=1 python -m pytest tests/plans/test_refusals.py`, which writes the rest.
"""

from __future__ import annotations

import copy
import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import Golden
from plans_samples import full_plan

from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import dump_plan, parse_plan, with_digest
from sparsekv.plans.schema import to_data
from sparsekv.plans.yaml_io import to_yaml

REFUSED = Golden(Path(__file__).parents[1] / "data" / "refused_plans.txt")
FULL, TEXT = to_data(with_digest(full_plan())), dump_plan(full_plan())


def changed(line: str) -> str | bytes:
    """The text of the plan behind the change."""
    if line.startswith("= "):
        return literal_eval(line.removeprefix("= "))
    if line.startswith(("'", '"')):
        written, instead = (literal_eval(part) for part in line.split(" => "))
        assert written in TEXT
        return TEXT.replace(written, instead, 1)
    path, value = re.fullmatch(r"(\S+?)(?:: (.*)| -)", line).groups()
    data: dict[str, Any] = copy.deepcopy(FULL)
    *inner, last = (int(step) if step.isdigit() else step for step in path.split("."))
    place: Any = data
    for step in inner:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = yaml.safe_load(value)
    return to_yaml(data)


def placed(message: str, line: str) -> str:
    """The message without what follows from the rest of the plan: a line counts from that of a changed text."""
    if line.startswith("= "):
        return message
    edited = TEXT[: TEXT.index(literal_eval(line.split(" => ")[0]))].count("\n") + 1 if " => " in line else None
    number = re.compile(r"(?m)(?<=^a\.yaml, line )\d+")
    return number.sub(lambda found: f"{int(found[0]) - edited:+}" if edited else "N", message)


@pytest.mark.parametrize("line", REFUSED.blocks)
def test_a_change_is_refused_as_it_was(line: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_plan(changed(line), "a.yaml", sealed=False)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None, "no chain of library errors"
    REFUSED.check(line, placed(str(refused.value).partition("\nCorrect the file")[0], line))
