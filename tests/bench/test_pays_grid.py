"""The grid of cells that compares the rule of an engine with both of its choices."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sparsekv.bench.hand_plans import counted_plan, dummy_plan
from sparsekv.bench.pays_grid import Cell, Timed, cells, read, table, verdict
from sparsekv.bench.serve import ALWAYS, DENSE, SPARSE
from sparsekv.plans.patterns import TileShape
from tests.support.plans_samples import model_info

NEAR = (1.0, 1.01, 0.99, 1.0, 1.0)


def timed(cell: Cell, dense: float, auto: float, always: float, sparse: bool) -> Timed:
    each = {SPARSE: auto, ALWAYS: always, DENSE: dense}
    return Timed(cell, {way: [seconds * noise for noise in NEAR] for way, seconds in each.items()}, sparse)


def test_cells_are_judged_by_paired_times() -> None:
    gaining, lost, slower = (Cell("m", 1, length, 128) for length in (1024, 2048, 4096))
    both = [
        timed(gaining, 2.0, 1.0, 1.0, True),
        timed(lost, 1.5, 1.5, 1.0, False),
        timed(slower, 1.0, 1.25, 1.25, True),
        Timed(Cell("m", 16, 4096, 0), {}, failed="no room"),
    ]
    assert [round(one.gain(SPARSE)[0], 6) for one in both[:3]] == [2.0, 1.0, 0.8]
    told = verdict(both)
    for part in (
        "3 cells, 1 not run", "0.98x of dense: 1 (1 x 4k, 128 new rows)", "1.03x of the faster way's time: 2",
        "sparse in 1 of 2 cells",
    ):  # fmt: skip
        assert part in told
    assert "not run: no room" in table(both)


def test_cells_that_were_run_are_read_again(tmp_path: Path) -> None:
    both = [timed(cell, 2.0, 1.0, 1.0, True) for cell in cells("m", (1, 4), (1024,), (128, 2048, 0))]
    assert [cell.cell.rows for cell in both] == [128, 0, 128, 0]  # new rows are fewer than all
    (path := tmp_path / "grid.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in both))
    assert list(read(path).values()) == both


def test_a_plan_by_hand_has_the_counts_of_equal_scores() -> None:
    info = model_info()
    plan, _ = dummy_plan(info, [2048, 4096], [0.5, 0.4], TileShape(), ("vertical_slash",))
    counted = counted_plan(plan, [2048, 4096])
    assert counted.cost is not None
    for entry, share in zip(counted.cost.lengths, (0.5, 0.4), strict=True):
        assert [counts.layer for counts in entry.computed] == list(info.full_layers)
        for counts in entry.computed:
            assert counts.tiles[0] + counts.columns[0] == pytest.approx(share, abs=0.06)
