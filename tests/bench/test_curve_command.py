"""eval --curve: our plan and other methods on the same samples, into a file that `show --html` reads."""

from pathlib import Path

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model

from sparsekv.bench.curve_file import read_curve
from sparsekv.plans.files import write_plan

SMALL = ("--length", "1k", "--tasks", "kv_retrieval", "--samples", 1, "--densities", "0.6", "--budgets", "20%")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(context=2048)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(sparse_plan(model), folder / "sparsekv.yaml")
    return folder


def test_a_curve_is_written_and_printed(sparsekv, folder, tmp_path):
    path = tmp_path / "curve.json"
    done = sparsekv("eval", folder, "--curve", path, *SMALL, "--methods", "plan,streamingllm,quest", "--json")
    assert done.code == 0, done.err
    points = read_curve(path)
    assert [(point.phase, point.method) for point in points] == [
        *(("prefill", method) for method in ("plan", "streamingllm")),
        *(("decode", method) for method in ("plan", "quest")),
    ]
    assert [row["density"] for row in done.data["rows"]] == [point.density for point in points]
    assert all(0 < point.density < 1 and point.kl > 0 and point.length == 1024 for point in points)
    again = sparsekv("eval", folder, "--curve", path, *SMALL, "--methods", "quest", "--phases", "decode")
    assert again.code == 0, again.err
    assert "quest" in again.out
    assert len(read_curve(path)) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--methods", "juggling"), "juggling"),
        (("--methods", "kascade"), "--profile"),
        (("--phases", "both"), "--phases"),
        (("--phases", "prefill", "--methods", "quest"), "quest"),
        (("--densities", "2"), "--densities"),
        (("--phase", "decode"), "--phase"),
        (("--length", "4k"), "2048"),
    ],
)
def test_what_no_curve_can_be_made_of_is_refused(sparsekv, folder, tmp_path, arguments, word):
    done = sparsekv("eval", folder, "--curve", tmp_path / "curve.json", *arguments)
    assert (done.code, done.out) == (2, "")
    assert word in done.err
    assert not (tmp_path / "curve.json").exists()


def test_options_of_a_curve_without_one_are_refused(sparsekv, folder):
    done = sparsekv("eval", folder, "--methods", "quest")
    assert done.code == 2
    assert "--curve FILE" in done.err


def test_another_file_is_not_replaced(sparsekv, folder, tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    done = sparsekv("eval", folder, "--curve", tmp_path / "notes.json")
    assert done.code == 2
    assert (tmp_path / "notes.json").read_text() == "{}"
