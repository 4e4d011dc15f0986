"""`bench peers`: every method as published and at the plan's density, in a file that goes on over several runs."""

from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch

from sparsekv.bench import originals, peers, ruler_suite
from sparsekv.bench import suite as suites
from sparsekv.bench.originals import OriginalMode, Ready
from sparsekv.bench.peers_file import PeerRow, PeersFile, PeersRun
from sparsekv.cli import bench
from sparsekv.cli.bench import PeersFlags
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.evaluation import compare
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.tasks import Split, prepare
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.observe import AttentionCall

CASES = [(name, at) for name in peers.METHODS for at in ("published", "equal")]
FEW = {"lengths": "1k", "samples": 1, "tasks": "kv_retrieval", "repeats": 1}


@pytest.fixture
def called(asked, folder):
    """Calls `bench peers`, on the model of the folder unless another one is named."""
    return lambda **options: asked(bench.peers, PeersFlags, **{"model": str(folder)} | options)


def rows_in(out):
    return [*PeersFile.read(PeersRun, out).all(PeerRow).values()]


@pytest.fixture
def one_task(monkeypatch):
    some = MappingProxyType({"fwe": replace(ruler_suite.RULER_SUITE["fwe"], tokens=1)})
    monkeypatch.setattr(ruler_suite, "RULER_SUITE", some)
    monkeypatch.setattr(ruler_suite, "SUITES", {"ruler": some})
    monkeypatch.setattr(suites, "SUITES", {"ruler": some})


def test_every_method_has_its_time_divergence_and_ruler_as_published_and_at_the_density_of_the_plan(
    called, tmp_path, one_task
):
    out, picture = tmp_path / "peers.json", tmp_path / "peers.svg"
    done = called(**FEW, ruler_samples=1, out=out, picture=picture, as_json=True)
    assert done.code == 0, done.err
    rows = {(row.method, row.at): row for row in rows_in(out)}
    assert [key for key in rows if key[1] != "dense"] == [("sparsekv", "plan"), *CASES]
    assert [row.whole_ms > 0 for key, row in rows.items() if key[1] == "dense"] == [True, True]
    plan = rows["sparsekv", "plan"]
    for key in (("sparsekv", "plan"), *CASES):
        row = rows[key]
        assert row.note == "", row
        assert row.whole_ms > 0
        assert row.index_ms > 0
        assert row.attention_ms > 0
        assert 0 < row.density <= 1
        assert row.kl >= 0
        assert 0 <= row.recall <= 100
        assert row.dense_recall == plan.dense_recall
        assert row.timed_density == pytest.approx(row.density, rel=0.3) or key[1] == "plan", row
    for name in peers.METHODS:
        steps = 0.25 if name == "MInference" else 0.15  # so short a prompt has few whole diagonals
        assert rows[name, "equal"].density == pytest.approx(plan.density, rel=steps), rows[name, "equal"]
    assert rows["XAttention", "published"].setting == "tau 0.9"
    assert {row["name"] for row in done.data} >= {"MInference", "MInference at equal density", "sparsekv"}
    assert picture.read_text().startswith("<svg")


def test_a_run_goes_on_where_time_ran_out_and_measures_nothing_twice(called, tmp_path, monkeypatch):
    out = tmp_path / "peers.json"
    call = FEW | {"ruler_samples": 0, "methods": "FlashPrefill,XAttention", "out": out}
    clock = iter(np.arange(0.0, 100.0, 1.0))
    with monkeypatch.context() as patch:
        patch.setattr(peers.time, "monotonic", lambda: next(clock))
        done = called(**call, max_seconds=2.5)
    assert "4 rows are left, from FlashPrefill at 1k on" in done.err
    before = rows_in(out)
    assert {row.at for row in before} == {"dense", "plan"}
    assert called(**call).code == 0
    whole = rows_in(out)
    assert whole[: len(before)] == before
    assert len(whole) == len(before) + 4
    monkeypatch.setattr(peers, "_Length", None)  # nothing is measured any more
    assert called(**call).code == 0
    assert rows_in(out) == whole
    done = called(**call, seed=1)
    assert done.code == 2
    assert "seed: 0 there, 1 here" in done.err


def test_an_original_takes_the_place_of_full_attention_in_prompts_alone(loaded):
    """By a stand-in that gives no attention at all, as the originals need a GPU."""
    seen = []

    def measured(q_BHSD, k_BGSD, v_BGSD):
        seen.append(tuple(q_BHSD.shape))
        return torch.zeros_like(q_BHSD), 0.25

    samples = [*held_out(prepare(loaded.tokenizer, Split.EVALUATION), "kv_retrieval", 512, 1, 0)]
    mode = OriginalMode(Ready(lambda *tensors: measured(*tensors)[0], measured, "none"))
    found = compare(loaded, {"own": mode}, samples, greedy=False)["own"]
    assert len(seen) == loaded.info.layers
    assert {shape[:2] for shape in seen} == {(1, 4)}
    assert found.spent.tiles / found.spent.causal_tiles == 0.25
    assert max(found.kl) > 0
    scaled = AttentionCall(0, *(torch.zeros(1, 1, 2, 16) for _ in "qkv"), Chunk.uniform(1, 0, 2), 1.0, None)
    with pytest.raises(UsageError, match="plain softmax"):
        mode_attend(mode, scaled)


def mode_attend(mode, call):
    """Runs the mode's observer on a call."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(originals, "capture_attention", lambda model, observer: nullcontext(found.append(observer)))
        with mode.running(None):
            return found[0](call)
