"""`sparsekv bench`: rows that scripts rely on, and what is refused."""

import json
from pathlib import Path

import pytest

from sparsekv.bench.planning import main
from sparsekv.bench.real_shares import share_at
from sparsekv.cli.bench import HeadlineFlags, KernelFlags, headline, kernels
from sparsekv.planner.records import only_run
from sparsekv.plans.files import load_plan

RELIED_ON = ["name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device"]
KERNELS = {"lengths": (512,), "heads": 2, "kv_heads": 1, "head_dim": 32, "tile": "64", "repeats": 1, "backend": "cpu"}
KERNELS |= {"patterns": "a_shape"}


def test_kernels_prints_a_row_of_every_case_that_can_run(asked):
    done = asked(kernels, KernelFlags, **KERNELS, density="50%", as_json=True)
    assert done.code == 0, done.err
    (row,) = done.data
    assert list(row)[:9] == RELIED_ON
    assert (row["name"], row["length"], row["backend"], row["dtype"]) == ("a_shape", 512, "cpu", "float32")
    assert row["index_ms"] > 0
    done = asked(kernels, KernelFlags, **KERNELS | {"backend": ()}, density="25%,75%")
    assert done.code == 0, done.err
    header, *rows = (line.split() for line in done.out.splitlines() if line.startswith(("pattern", "a_shape")))
    assert [row[header.index("asked")] for row in rows if row[2] == "cpu"] == ["0.25", "0.75"]
    for said in ("torch SDPA", "flash: ", "triton: "):
        assert said in done.out


def test_prefill_follows_the_plan_of_the_folder(sparsekv, folder):
    done = sparsekv("bench", "prefill", folder, "--lengths", 512, "--json")
    assert done.code == 0, done.err
    (row,) = done.data
    assert list(row)[:9] == RELIED_ON
    assert (row["weights"], row["plan"], row["layers"]) == ("loaded", "given", 3)
    assert 0 < row["density"] < 1


def test_decode_follows_the_plan_of_the_folder(sparsekv, folder):
    done = sparsekv("bench", "decode", folder, "--lengths", 256, "--json")
    assert done.code == 0, done.err
    for row in done.data:
        assert list(row)[:9] == RELIED_ON
        assert (row["plan"], row["selector"], row["batch"], row["weights"]) == ("given", "last", 1, "loaded")
        assert 0 < row["density"] < 1
    assert [row["name"] for row in done.data] == ["attention", "token"]


@pytest.mark.parametrize(
    "command",
    [("eval", "--suite", "ruler", "-o"), ("compare", "-o")],
    ids=["suite", "compare"],
)
def test_a_second_run_into_one_file_is_refused_before_it_measures(sparsekv, folder, tmp_path, command):
    out = tmp_path / "results.json"
    with only_run(out):
        done = sparsekv(*command, out, folder, "--lengths", "1k")
    assert (done.code, done.out, out.exists()) == (1, "", False)
    assert f"{out}, found one that is under way" in done.err


def test_the_headline_is_the_rows_of_kernels_prefill_decode_and_drafts(asked, folder, monkeypatch):
    for name in ("NEW_TOKENS", "NEW_EXACT"):
        monkeypatch.setattr(f"sparsekv.bench.token_runs.{name}", 4)
    done = asked(headline, HeadlineFlags, model=str(folder), lengths="1k", repeats=1, as_json=True)
    assert done.code == 0, done.err
    assert {"vertical_slash", "token", "attention", "exact"} <= {row["name"] for row in done.data}
    kernels = [row for row in done.data if row["name"] == "vertical_slash" and row["backend"] == "cpu"]
    assert [row["target_density"] for row in kernels] == [share_at(1024).prefill, 0.05]
    assert ["kernel, at 0.05" in row["note"] for row in kernels] == [False, True]
    assert all(list(row)[:9] == RELIED_ON for row in done.data)
    assert all(row["speedup"] for row in done.data if row["backend"] == "cpu")


# --- planning ---------------------------------------------------------------------------------------------------------


def test_stages_and_memory_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, command = tmp_path / "plan.yaml", ["tiny-retriever", "--layers", "2", "--lengths", "512", "--samples", "1"]
    assert main([*command, "--no-verify", "--device", "cpu", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"profile", "others"} <= found["stage_seconds"].keys()
    assert (found["layers"], found["lengths"], found["status"]) == (2, [512], "unverified")
    assert 0.0 < found["peak_host_gib"] < 64.0
    assert load_plan(out).model.layers == 2
    assert sorted(tmp_path.iterdir()) == [out]
