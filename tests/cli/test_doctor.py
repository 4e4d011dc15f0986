"""doctor: what is installed and which backend runs, and with --memory what a run takes."""

import json
import shutil
from pathlib import Path

import pytest
from model_folders import save_model
from tiny_models import tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.plans.files import write_plan

GPU = ("--device-memory", "1.5GiB", "--host-memory", "1.25 GiB")

HOSTED = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_DTYPE", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its plan, which permits to offload five layers of six, beside it, and without weights."""
    model = tiny_model(context=1 << 20, layers=6)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(plan_for(model, None, decode_plan(segment(0, HOSTED, 64), offload=HOSTED)), folder / "sparsekv.yaml")
    (folder / "model.safetensors").unlink()
    return folder


def test_doctor_names_the_backend_and_why_not_the_others(sparsekv, monkeypatch):
    data = sparsekv("doctor", "--device", "cpu", "--json").data
    assert data["backend"]["name"] == "cpu"
    assert data["backend"]["rejected"].keys() == {"flash", "triton"}
    assert data["virtual_memory"]["page_bytes"] == 0
    assert data["virtual_memory"]["why_not"]
    assert data["versions"]["torch"]
    text = sparsekv("doctor", "--device", "cpu").out
    assert "not triton: " in text
    assert "host memory" in text
    assert text.endswith("\nnext: sparsekv plan MODEL -o plan.yaml\n")
    assert data["host"]["available_bytes"] is None or data["host"]["available_bytes"] > 0
    monkeypatch.setenv("SPARSEKV_BACKEND", "triton")
    assert sparsekv("doctor", "--device", "cpu").code == 2


def test_the_longest_prompt_fits_and_a_longer_one_does_not(sparsekv, folder):
    first = sparsekv("doctor", "--memory", folder, "1k", *GPU, "--json").data
    assert first["fits"]
    longest = first["longest_prompt"]
    fits, fails = (sparsekv("doctor", "--memory", folder, length, *GPU, "--json") for length in (longest, longest + 1))
    assert (fits.code, fails.code) == (0, 1)
    assert (fits.data["fits"], fails.data["fits"]) == (True, False)
    assert fits.data["longest_prompt"] == fails.data["longest_prompt"] == longest
    assert fits.data["device"]["needed"] <= fits.data["device"]["available"] == 3 << 29


@pytest.mark.parametrize(("flag", "value"), [("plan", "x.yaml"), ("device-memory", "8GiB"), ("host-memory", "8GiB")])
def test_what_memory_alone_reads_is_refused_without_it(sparsekv, flag, value):
    done = sparsekv("doctor", f"--{flag}", value, "--device", "cpu")
    assert (done.code, f"beside --{flag}, found none" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("prompt", "answer", "notes", "fits"),
    [
        ((1 << 20) - 256, 256, 0, True),
        ((1 << 20) - 256, 257, 1, True),
        ((1 << 20) - 1, 1, 0, True),
        (1 << 20, 1, 1, False),
    ],
)
def test_a_prompt_that_memory_would_hold_fits_if_the_models_context_does(sparsekv, folder, prompt, answer, notes, fits):
    call = (
        "doctor",
        "--memory",
        folder,
        prompt,
        "--set",
        f"max_new_tokens={answer}",
        "--device-memory",
        "1TiB",
        "--json",
    )
    done = sparsekv(*call, "--host-memory", "1TiB")
    assert done.code == (not fits)
    assert done.data["fits"] == fits == (prompt <= done.data["longest_prompt"])
    assert done.data["longest_prompt"] == (1 << 20) - 1
    assert ["1,048,576" in note for note in done.data["notes"]] == [True] * notes


def test_auto_moves_what_the_plan_permits_once_the_device_is_full(sparsekv, folder):
    auto, never, always = (
        sparsekv("doctor", "--memory", folder, "1k", *GPU, "--offload", how, "--json").data
        for how in ("auto", "never", "always")
    )
    assert auto["host_layers"] == never["host_layers"] == []
    assert always["host_layers"] == list(HOSTED)
    assert never["longest_prompt"] < auto["longest_prompt"] == always["longest_prompt"]
    longest = auto["longest_prompt"]
    full = sparsekv("doctor", "--memory", folder, longest, *GPU)
    assert full.code == 0
    assert "5 of 6 layers (1-5)" in full.out
    assert f" {longest:,} " in full.out
    dense = sparsekv("doctor", "--memory", folder, "1k", *GPU, "--offload", "0-1", "--json").data
    assert dense["host_layers"] == [0, 1]


def test_a_cpu_has_one_memory(sparsekv, folder):
    call = ("doctor", "--memory", folder, "4k", "--device", "cpu", "--host-memory", "2GiB")
    data = sparsekv(*call, "--json").data
    assert data["device"]["available"] is None
    assert data["host"]["needed"] == data["device"]["needed"]
    assert (data["device"]["hot_set"], data["device"]["spare"], data["host"]["kv"]) == (0, 0, 0)
    assert "available" in sparsekv(*call).out
    assert sparsekv(*call[:-1], "1MiB").code == 1  # little is compared too
    large = ("doctor", "--memory", folder, "1m", "--device", "cpu", "--host-memory", "2GiB", "--json")
    assert sparsekv(*large).code == 1
    host = sparsekv(*large).data["host"]
    assert host["needed"] == sparsekv(*large).data["device"]["needed"] + host["spare"]
    assert host["spare"] == 1 << 30
    assert "to spare" in sparsekv(*large[:-1]).out


@pytest.mark.parametrize(
    ("options", "word"),
    [(("2GiB", "--set", "max_new_tokens=9000000"), "fewer new tokens"), (("1KiB",), "SPARSEKV_DTYPE")],
    ids=["answer", "weights"],
)
def test_where_no_prompt_fits_the_option_that_helps_is_named(sparsekv, folder, options, word):
    done = sparsekv("doctor", "--memory", folder, "1k", "--device", "cpu", "--host-memory", *options)
    assert done.code == 1
    assert word in done.out


def test_quantised_weights_are_said_to_be_counted_as_if_they_were_not(sparsekv, folder, tmp_path):
    quantised = shutil.copytree(folder, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (quantised / "config.json").write_text(json.dumps(config))
    said = "quantised"
    assert said in sparsekv("doctor", "--memory", quantised, "1k", *GPU).out
    assert said not in sparsekv("doctor", "--memory", folder, "1k", *GPU).out
