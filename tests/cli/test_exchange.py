"""import and export: other tools' files in and out."""

import json
from pathlib import Path


def test_import_and_export_by_the_command_line(sparsekv, folder: Path, tmp_path: Path) -> None:
    file, plan, back = tmp_path / "letters.txt", tmp_path / "plan.yaml", tmp_path / "back.txt"
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    file.write_text("F" + "S" * (layers - 1))
    done = sparsekv("import", file, "--model", folder, "-o", plan)
    assert (done.code, "indexcache" in done.out) == (0, True), done.err
    assert sparsekv("validate", plan).code == 0
    done = sparsekv("export", plan, "--to", "indexcache", "-o", back, "--json")
    assert (done.code, back.read_text().strip()) == (0, file.read_text())
    assert done.data["lost"]
    assert sparsekv("export", plan, "--to", "indexcache", "-o", back).code == 2  # it is there
    assert sparsekv("export", plan, "--to", "gguf", "-o", tmp_path / "x").code == 2
