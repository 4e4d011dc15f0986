"""run --kv-host-layers: where keys and values lie is up to the caller, and changes no token."""

from pathlib import Path

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model

from sparsekv.plans.files import write_plan

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
    plain = sparsekv("run", folder, *FEW).data
    found = {}
    for asked in ("0", "1", "3", "0-1", "0,2"):
        done = sparsekv("run", folder, "--kv-host-layers", asked, *FEW)
        assert done.code == 0, done.err
        assert done.data["text"] == plain["text"]
        found[asked] = done.data["kv_bytes_host"]
    assert found["0"] == 0 < found["1"] == plain["kv_bytes_host"] < found["0-1"] == found["0,2"] < found["3"]


def test_a_dense_run_places_them_too(sparsekv, folder):
    dense = sparsekv("run", folder, "--dense", *FEW).data
    done = sparsekv("run", folder, "--dense-prefill", "--dense-decode", "--kv-host-layers", 3, *FEW)
    assert done.data["text"] == dense["text"]
    assert done.data["kv_bytes_host"] > 0
    assert done.data["prefill_density"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--kv-host-layers", "4"), "0 to 3 layers"),
        (("--kv-host-layers", "2-5"), "found 3-5"),
        (("--kv-host-layers", "all"), "--kv-host-layers: expected ids"),
        (("--kv-host-layers", "1", "--dense"), "--dense-prefill and --dense-decode"),
    ],
)
def test_layers_that_cannot_be_meant_are_usage_errors(sparsekv, folder, arguments, word):
    done = sparsekv("run", folder, *arguments, *SAID)
    assert (done.code, done.out) == (2, "")
    assert word in done.err
