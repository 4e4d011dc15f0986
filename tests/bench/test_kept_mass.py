"""The mass that rows keep, and what the figures of mass say of lost answers."""

import numpy as np
import pytest
import torch
from planner_models import loaded_tiny
from tiny_plans import every_head, plan_for

from sparsekv.bench import kept_mass
from sparsekv.bench.kept_mass import ROWS, figures, kinds, run, tell
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.tasks import Split
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, TileShape, VerticalSlash, tokens

LINES = VerticalSlash(vertical=tokens(9), slash=tokens(40), max_tiles=tokens(96))


@pytest.mark.parametrize("past", [0, 200])
def test_rows_keep_the_share_that_log_sum_exps_say(past):
    heads, rows, tile = (
        (LINES, AShape(sink=tokens(16), window=tokens(48))) * 2,
        64 * 11 + 5,
        TileShape(query=64, key=64),
    )
    q_1HSD, k_1GKD = torch.randn(1, 4, rows, 8), torch.randn(1, 2, past + rows, 8)
    chunk = Chunk.uniform(1, past, past + rows)
    index = build_index(heads, q_1HSD, k_1GKD, chunk, tile, scale=0.7)
    seen_1HSK = mask_of(index, chunk, rows)
    all_1HSK = torch.ones_like(seen_1HSK).tril_(past)
    kept, whole = (
        reference_attention(q_1HSD, k_1GKD, k_1GKD, mask, scale=0.7).lse_BHS for mask in (seen_1HSK, all_1HSK)
    )
    expected_HS = (kept - whole)[0].exp()
    found_RH = kept_mass.kept_mass(q_1HSD, k_1GKD, index, chunk, 0.7)
    at_R = [64 * int(number) + 32 for number in np.linspace(0, 8, ROWS)]
    torch.testing.assert_close(found_RH, expected_HS[:, at_R].T)
    assert found_RH.min() < 0.9


def test_lost_answers_are_looked_for_among_the_lowest_fifth(tmp_path):
    """One head of one layer keeps little where an answer is lost, and all the more elsewhere."""
    random = np.random.default_rng(0)
    usual, found = (random.uniform(0.8, 1.0, (20, 3, 2, 4)).astype(np.float32) for _ in range(2))
    lost = random.permutation(20) < 3
    found[lost, 1, :, 2] -= 0.7
    found[lost, 0] = found[lost, 2] = 1.0
    right = np.stack([np.ones(20, bool), ~lost], 1)
    for name, mass, answers in (("calibration-a", usual, np.ones_like(right)), ("table-a", found, right)):
        np.savez(tmp_path / f"{name}.npz", mass=mass, right=answers, divergence=1.0 - mass.min((1, 2, 3)))
    said = {line.split(": ")[-1]: line for line in tell(tmp_path).splitlines()[1:]}
    assert tell(tmp_path).startswith(f"{tmp_path}: 3 of 20 answers lost; 20 prompts")
    assert "100% of lost" in said["lowest head"]
    assert "100% of lost" in said["head furthest below calibration"]
    assert "100% of lost" not in said["mean"]
    assert set(said) == set(figures(usual, found))


def test_kinds_that_were_run_are_not_run_again(tmp_path, monkeypatch):
    loaded = loaded_tiny()
    plan = plan_for(loaded.model, every_head(loaded.model, LINES))
    kind = next(name for name in kinds() if name.startswith("table"))
    monkeypatch.setattr(kept_mass, "kinds", lambda: {kind: kinds()[kind]})
    write_plan(plan, tmp_path / "plan.yaml")
    run(loaded, tmp_path / "plan.yaml", 400, 2, tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    data = np.load(file)
    assert data["mass"].shape[:2] == (2, loaded.info.layers)
    assert 0 < data["mass"].min() < data["mass"].max() <= 1
    monkeypatch.setattr(kept_mass, "prefill", None)
    run(loaded, tmp_path / "plan.yaml", 400, 2, tmp_path / "out")


def test_no_strange_prompt_is_of_calibration():
    assert all((split is Split.CALIBRATION) == name.startswith("calibration") for name, (split, _) in kinds().items())
