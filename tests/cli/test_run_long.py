"""run --offload: where keys and values lie is up to the caller, and changes no token."""

import shutil
from pathlib import Path

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model

from sparsekv.plans.files import load_plan, write_plan

PROMPT = "What is the number? " * 80
SAID = ("--prompt", PROMPT, "--max-new-tokens", 6)
FEW = (*SAID, "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(context=4096)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(sparse_plan(model), folder / "sparsekv.yaml")
    return folder


def test_layers_go_to_the_host_by_number_or_by_name(sparsekv, folder):
    plain = sparsekv("run", folder, "--offload", "always", *FEW).data
    found = {}
    for asked in ("0", "1", "3", "0-1", "0,2"):
        done = sparsekv("run", folder, "--offload", asked, *FEW)
        assert done.code == 0, done.err
        assert done.data["text"] == plain["text"]
        found[asked] = done.data["kv_bytes_host"]
    assert found["0"] == 0 < found["1"] == plain["kv_bytes_host"] < found["0-1"] == found["0,2"] < found["3"]


def test_what_the_plan_permits_is_a_choice_of_the_run(sparsekv, folder):
    never, always, auto, default = (
        sparsekv("run", folder, *how, *FEW)
        for how in (("--offload", "never"), ("--offload", "always"), ("--offload", "auto"), ())
    )
    assert never.data["kv_bytes_host"] == 0 < always.data["kv_bytes_host"]
    assert never.data["text"] == always.data["text"]
    assert "offload auto" not in never.err + always.err
    for done in (auto, default):  # on a CPU nothing is won by moving
        assert done.data["kv_bytes_host"] == 0
        assert "all 3" in done.err


def test_an_offload_that_moves_nothing_is_said_to(sparsekv, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    plan = load_plan(folder / "sparsekv.yaml")
    assert plan.decode is not None
    decode = plan.decode.model_copy(update={"offload": None})
    write_plan(plan.model_copy(update={"decode": decode}), other / "sparsekv.yaml")
    always = ("--offload", "always", *FEW)
    assert "permits" in sparsekv("run", other, *always).err
    assert "decode" in sparsekv("run", folder, *always, "--only", "prefill").err
    assert "moves nothing" not in sparsekv("run", folder, *always).err + sparsekv("run", other, *FEW).err


IDLE = "saves nothing on a CPU"


@pytest.mark.parametrize(
    ("how", "times"),
    [
        (("--offload", "2"), 1),
        (("--offload", "0"), 0),
        (("--offload", "auto"), 0),
    ],
    ids=str,
)
def test_layers_in_host_memory_that_a_cpu_does_not_need_are_said_once_to_save_nothing(sparsekv, folder, how, times):
    done = sparsekv("run", folder, *how, *FEW)
    assert done.code == 0, done.err
    assert done.err.count(IDLE) == times


@pytest.mark.parametrize("how", ["always", "2"])
def test_the_memory_of_a_run_is_told_before_and_reads_no_weights(sparsekv, folder, tmp_path, how):
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    few = ("--set", "max_new_tokens=6", "--json", "--offload", how)
    said, ran = sparsekv("doctor", "--memory", bare, len(PROMPT), *few), sparsekv("run", folder, "--offload", how, *FEW)
    assert said.code == 0, said.err
    data = said.data
    assert (data["prompt_tokens"], data["new_tokens"]) == (len(PROMPT), 6)
    # The last new token is not cached.
    assert data["device"]["kv"] + data["device"]["hot_set"] == pytest.approx(ran.data["kv_bytes_device"], rel=0.01)
    assert data["host"]["kv"] == pytest.approx(ran.data["kv_bytes_host"], rel=0.01)
    assert data["fits"]
    assert data["longest_prompt"] > len(PROMPT)
