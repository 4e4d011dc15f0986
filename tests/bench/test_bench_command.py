"""bench: rows that scripts rely on, and what is refused."""

from importlib.util import find_spec
from shutil import copyfile

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan

RELIED_ON = ["name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device"]
KERNELS = ("bench", "kernels", "--lengths", 512, "--heads", 2, "--kv-heads", 1, "--head-dim", 32, "--tile", 64)
KERNELS += ("--density", "50%", "--repeats", 1, "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_model(context=1024)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(sparse_plan(model), folder / "sparsekv.yaml")
    return folder


def test_kernels_prints_rows_with_the_keys_that_scripts_rely_on(sparsekv):
    done = sparsekv(*KERNELS, "--patterns", "a_shape", "--backend", "cpu", "--json")
    assert done.code == 0, done.err
    (row,) = done.data
    assert list(row)[:9] == RELIED_ON
    assert (row["name"], row["length"], row["backend"], row["dtype"]) == ("a_shape", 512, "cpu", "float32")
    assert row["index_ms"] > 0
    assert "planted" in done.err


def test_kernels_says_for_people_what_is_planted_what_was_found_and_who_cannot_run(sparsekv):
    done = sparsekv(*KERNELS, "--patterns", "mixed")
    assert done.code == 0, done.err
    for said in ("planted, not taken from a model", "torch SDPA", "speedup", "columns", "not", "flash: ", "triton: "):
        assert said in done.out


def test_kernels_says_which_density_was_asked_for_and_why_more_is_computed(sparsekv):
    done = sparsekv(*KERNELS, "--patterns", "a_shape", "--backend", "cpu", "--density", "25%,75%")
    assert done.code == 0, done.err
    header, *rows = (line.split() for line in done.out.splitlines() if line.startswith(("pattern", "a_shape")))
    assert [row[header.index("asked")] for row in rows] == ["0.25", "0.75"]
    assert done.out.count("more is computed than was asked for") == 1


def test_kernels_that_could_not_be_timed_are_a_failure(sparsekv):
    done = sparsekv(*KERNELS, "--patterns", "a_shape", "--backend", "triton", "--json")
    assert done.code == 1
    assert "cannot run" in done.data[0]["note"]
    assert "--backend" not in done.data[0]["note"]
    assert "nothing could be measured" in done.err


def test_prefill_follows_the_plan_of_the_folder(sparsekv, folder):
    done = sparsekv("bench", "prefill", folder, "--lengths", 512, "--repeats", 1, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    (row,) = done.data
    assert list(row)[:9] == RELIED_ON
    assert (row["weights"], row["plan"], row["layers"]) == ("loaded", "given", 3)
    assert 0 < row["density"] < 1


def test_tiles_are_asked_for_only_where_the_plan_is_made_by_hand(sparsekv, folder):
    done = sparsekv("bench", "prefill", folder, "--lengths", 512, "--tile", 64, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert "leave --tile out" in done.err


def test_prefill_with_random_weights_says_that_they_are_and_what_the_plan_is(sparsekv, folder):
    call = (
        "bench",
        "prefill",
        folder,
        "--random-weights",
        "--layers",
        1,
        "--lengths",
        "2k,512",
        "--density",
        "0.3,50%",
    )
    done = sparsekv(*call, "--tile", 64, "--repeats", 1, "--device", "cpu")
    assert done.code == 0, done.err
    for said in ("weights: random", "made by hand", "density of 0.5, 0.3", "stretched from 1k", "1 of 3 layers", "2k"):
        assert said in done.out
    assert "weights are random" in done.err


DECODE = ("--lengths", 256, "--repeats", 1, "--device", "cpu")


def test_decode_follows_the_plan_of_the_folder(sparsekv, folder):
    done = sparsekv("bench", "decode", folder, *DECODE, "--json")
    assert done.code == 0, done.err
    attention, token = done.data
    for row in (attention, token):
        assert list(row)[:9] == RELIED_ON
        assert (row["plan"], row["selector"], row["batch"], row["weights"]) == ("given", "last", 1, "loaded")
        assert 0 < row["density"] < 1
    assert attention["gbytes_per_second"] > 0
    assert token["unmodified_ms"] > 0
    assert "random" in done.err


def test_decode_by_hand_says_for_people_what_is_random_and_what_the_plan_is(sparsekv, folder):
    by_hand = ("--budget", 32, "--filters", 0, "--selector", "exponential", "--window", 4, "--batch", 2)
    done = sparsekv("bench", "decode", folder, "--random-weights", *DECODE[2:], "--lengths", 2048, *by_hand)
    assert done.code == 0, done.err
    for said in (
        "weights: random",
        "made by hand: filter layers 0 choose 32",
        "values are random",
        "stretched from 1k",
        "exponential 4",
        "unmodified ms",
        "dense at 2k, batch 2, token: ",
        "dense at 2k, batch 2, attention: ",
    ):
        assert said in done.out


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (("--selector", "median"), "median"),
        (("--selector", "uniform"), "--window"),
        (("--window", "8"), "--window"),
        (("--filters", "9"), "found 9"),
        (("--filters", "1-0"), "--filters"),
        (("--lengths", "64k"), "1024"),
        (("--lengths", "16"), "or more"),
        (("--batch", "1,0"), "--batch"),
        (("--budget", "0"), "--budget"),
        (("--plan", "x.yaml", "--budget", "2k"), "choose one"),
        (("--budget", "2k", "--allow-mismatch"), "--allow-mismatch"),
        (("--miss-rate", "10%"), "--offload always"),
        (("--budget", "32", "--offload", "always", "--miss-rate", "10%"), "expected a GPU for --miss-rate"),
        (("--budget", "32", "--offload", "always", "--miss-rate", "10%,20%"), "one share"),
    ],
)
def test_a_decode_that_cannot_be_timed_is_refused_before_the_model_is_loaded(sparsekv, folder, tmp_path, call, word):
    copyfile(folder / "config.json", tmp_path / "config.json")  # weights would be missed
    done = sparsekv("bench", "decode", tmp_path, *call, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert word in done.err
    assert "weights" not in done.err


def test_decode_from_host_memory_stands_beside_decode_on_the_device(sparsekv, folder):
    call = ("bench", "decode", folder, *DECODE[2:], "--lengths", 256, "--budget", 32, "--filters", 0)
    done = sparsekv(*call, "--offload", "always", "--random-weights")
    assert done.code == 0, done.err
    for said in ("--offload always", "made by hand: filter layers 0 choose 32", "offloaded ms", "ratio", "link GB/s"):
        assert said in done.out
    (row,) = sparsekv(*call, "--offload", "never", "--json").data
    assert row["device_ms"] > 0
    assert row["offloaded_ms"] is None


def test_decode_by_a_plan_that_permits_no_host_memory_is_not_offloaded(sparsekv, folder, tmp_path):
    plan = plan_for(tiny_model(context=1024), decode=decode_plan(segment(0, (1, 2), 20)))
    write_plan(plan, path := tmp_path / "device.yaml")
    done = sparsekv("bench", "decode", folder, "--plan", path, *DECODE, "--offload", "always", "--allow-mismatch")
    assert (done.code, done.out) == (2, "")
    assert "plan --offload" in done.err


def test_a_decode_whose_smallest_case_does_not_fit_in_memory_is_refused(sparsekv, folder):
    call = ("--random-weights", "--budget", 32, "--filters", 0, "--lengths", "1024k", "--batch", 8192)
    done = sparsekv("bench", "decode", folder, *call, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert "shorter --lengths" in done.err


def test_a_case_of_a_plan_that_offloads_is_tried_whatever_the_device_has(sparsekv, folder, tmp_path):
    plan = plan_for(tiny_model(context=1024), decode=decode_plan(segment(0, (1, 2), 20), offload=(2,)))
    write_plan(plan, path := tmp_path / "offload.yaml")
    call = ("--random-weights", "--plan", path, "--allow-mismatch", "--lengths", "1024k", "--batch", 8192)
    done = sparsekv("bench", "decode", folder, *call, "--device", "cpu")
    assert done.code == 1
    assert "out of memory" in done.out


def test_a_decode_by_a_plan_without_that_phase_is_refused(sparsekv, folder, tmp_path):
    model = tiny_model(context=1024)
    write_plan(Plan(status="unverified", model=sparse_plan(model).model), path := tmp_path / "prefill.yaml")
    done = sparsekv("bench", "decode", folder, "--plan", path, *DECODE)
    assert done.code == 2
    assert "--budget" in done.err


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (("kernels", "--lengths", "soon"), "--lengths"),
        (("kernels", "--lengths", ""), "--lengths"),
        (("kernels", "--heads", "9" * 30), "--heads"),
        (("kernels", "--backend", ""), "--backend"),
        (("kernels", "--density", "0"), "--density"),
        (("kernels", "--patterns", "stripes"), "stripes"),
        (("kernels", "--backend", "reference"), "reference"),
        (("kernels", "--lengths", "1k", "--heads", "3", "--kv-heads", "2"), "multiple"),
        (("prefill", "tiny-retriever", "--layers", "2"), "--random-weights"),
        (("prefill", "tiny-retriever", "--plan", "x.yaml", "--density", "0.1"), "--density"),
        (("prefill", "tiny-retriever", "--random-weights", "--layers", "1", "--patterns", "adaptive"), "adaptive"),
        (("prefill", "tiny-retriever", "--random-weights", "--layers", "1", "--density", "0.1,0.2"), "--density"),
        (("prefill", "nowhere-to-be-found"), "nowhere-to-be-found"),
        (("prefill", "tiny-retriever", "--density", "0.1", "--allow-mismatch"), "--allow-mismatch"),
        (("neither",), "neither"),
    ],
)
def test_what_cannot_be_timed_is_a_usage_error(sparsekv, call, word):
    done = sparsekv("bench", *call)
    assert (done.code, done.out) == (2, "")
    assert word in done.err


def test_serve_without_vllm_says_what_to_install(sparsekv):
    if find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    done = sparsekv("bench", "serve", "tiny-retriever", "--json")
    assert done.code == 2
    assert "pip install 'sparsekv[vllm]'" in done.data["error"]["message"]


def test_serve_takes_a_plan_or_one_made_by_hand(sparsekv, folder):
    done = sparsekv("bench", "serve", folder, "--plan", folder / "sparsekv.yaml", "--density", "20%")
    assert done.code == 2
    assert "choose one" in done.err
