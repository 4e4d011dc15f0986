"""import and export: other tools' files in and out."""

import json
from pathlib import Path

from sparsekv.plans.files import load_plan


def test_import_and_export_by_the_command_line(sparsekv, folder: Path, tmp_path: Path) -> None:
    file, plan, back = tmp_path / "letters.txt", tmp_path / "a plan.yaml", tmp_path / "back.txt"
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    file.write_text("F" + "S" * (layers - 1))
    done = sparsekv("import", file, "--model", folder, "-o", plan)
    assert (done.code, "indexcache" in done.out) == (0, True), done.err
    assert f"--plan '{plan}' --write" in done.out
    assert sparsekv("validate", plan).code == 0
    again = sparsekv("import", file, "--model", plan, "-o", tmp_path / "again.yaml")  # of the model of a plan
    assert (again.code, load_plan(tmp_path / "again.yaml")) == (0, load_plan(plan))
    done = sparsekv("export", plan, "--to", "indexcache", "-o", back, "--json")
    assert (done.code, back.read_text().strip()) == (0, file.read_text())
    assert done.data["lost"]
    assert sparsekv("export", plan, "--to", "indexcache", "-o", back).code == 2  # it is there
    assert sparsekv("export", plan, "--to", "gguf", "-o", tmp_path / "x").code == 2


def test_verifying_an_imported_plan_makes_it_a_measured_one(sparsekv, folder: Path, tmp_path: Path) -> None:
    file, plan = tmp_path / "letters.txt", tmp_path / "plan.yaml"
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    file.write_text(json.dumps({"index_topk_pattern": "F" + "S" * (layers - 1), "index_topk": 64}))
    assert sparsekv("import", file, "--model", folder, "-o", plan).code == 0
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    for length, is_chosen in ((context, False), (1024, True)):  # a plan that names no length is made for the context
        call = ("verify", folder, "--plan", plan, "--lengths", length)
        done = sparsekv(*call, "--json", *(["--write"] if is_chosen else []))
        assert any("--lengths" in reason for reason in done.data["reasons"]) == is_chosen
    assert done.code == 0, done.err
    written = load_plan(plan)
    assert (written.status, written.quality is not None) == ("unverified", True)
    assert written.model.fingerprint.weights is not None
