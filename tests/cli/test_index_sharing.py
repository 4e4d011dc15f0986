"""A model with indexers by the command line: its plan is made, run, and printed for an engine."""

from pathlib import Path

from model_folders import save_model
from tiny_indexers import planted_model

FEW = ("--lengths", "256", "--set", "tasks=kv_retrieval", "--set", "calibration_samples=1", "--no-verify")


def test_a_plan_of_a_model_with_indexers_is_made_and_run_and_exported(sparsekv, tmp_path: Path) -> None:
    folder = save_model(planted_model("glm_moe_dsa", "FSF"), tmp_path / "model")
    done = sparsekv("plan", folder, *FEW)
    assert done.code == 0, done.err
    assert "1 of 3 layers attend to what the indexers of layers 0 and 2 chose last" in done.out
    done = sparsekv("plan", folder, *FEW, "--force", "--profile-out", tmp_path / "profile")
    assert (done.code, "--profile-out" in done.err) == (2, True), done.err
    line = sparsekv("export", folder, "--to", "index-topk").out
    assert line == '{"index_topk_pattern": "FSF", "indexer_types": null}\n'
    assert "FSF" in sparsekv("show", folder, "--full").out
    run = ("run", folder, "--prompt", "a" * 40, "--max-new-tokens", 2)
    done = sparsekv(*run, "--compare")
    assert (done.code, "all new tokens are the same" in done.out) == (0, True), done.err
    assert "1 of 3 layers attend" in done.err
    for option, word in (
        ("--exact=all", "exact"),
        ("--only=decode", "prefill=False"),
    ):
        done = sparsekv(*run, option)
        assert (done.code, word in done.err) == (2, True), done.err
