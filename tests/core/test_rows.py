"""Every row of the table of models, plans, caches and precisions, under every check that applies to it.

A family of models is under those alone that depend on its layers, unless some have a state.
"""

from __future__ import annotations

import pytest
import torch
from core_checks import (
    CHECKS,
    exact_answers_are_those_of_dense_attention,
    is_brute_force,
    is_the_unmodified_model_where_nothing_is_left_out,
    runs_in_pieces_of_rows_and_heads,
)
from core_rows import FAMILIES, ROWS, case_of

pytestmark = pytest.mark.filterwarnings("ignore:kv_host_layers.*saves nothing")
OF_FAMILIES = (
    is_brute_force,
    runs_in_pieces_of_rows_and_heads,
    is_the_unmodified_model_where_nothing_is_left_out,
    exact_answers_are_those_of_dense_attention,
)
PAIRS = [
    pytest.param(name, check, id=f"{name}: {check.__name__}")
    for name, row in ROWS.items()
    for check, applies in CHECKS.items()
    if applies(row) and (name not in FAMILIES or row.recurrent or check in OF_FAMILIES)
]


@pytest.mark.parametrize(("name", "check"), PAIRS)
@torch.no_grad()
def test_a_row(name: str, check, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case_of(name), monkeypatch)
