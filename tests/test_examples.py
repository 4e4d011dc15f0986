"""The examples that need neither the network nor a GPU."""

import json
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import sparsekv
from sparsekv.kernels.methods import registry
from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan, Target
from sparsekv.runtime.model_config import device_name

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_examples_import_public_names_alone():
    for name in ("with_transformers.py", "with_lm_eval.py"):
        assert "import sparsekv" in (text := (EXAMPLES / name).read_text())
        assert "from sparsekv" not in text


def test_the_one_for_transformers_takes_an_alias_and_a_plan(tmp_path, monkeypatch, capsys):
    plan, document = tmp_path / "plan.yaml", tmp_path / "document.txt"
    loaded = sparsekv.load_model("tiny-retriever", device="cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    target = Target(device=device_name(loaded.model.device), backend="cpu", dtype="float32")
    write_plan(Plan(status="unverified", model=loaded.info, targets=(target,)), plan)
    document.write_text("The special number for lemon is 4810357. What is the special number for lemon?")
    monkeypatch.setattr(sys, "argv", ["with_transformers.py", "tiny-retriever", str(document), str(plan)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)  # such as that of a half precision, in which no CPU plan was made
        runpy.run_path(str(EXAMPLES / "with_transformers.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert out
    assert "prefill_density=1" in err
    monkeypatch.setattr(sys, "argv", ["with_transformers.py", "tiny-retriever", str(document)])
    with pytest.raises(SystemExit, match=r"^error: .*sparsekv\.yaml"):
        runpy.run_path(str(EXAMPLES / "with_transformers.py"), run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["with_transformers.py"])
    with pytest.raises(SystemExit, match=r"MODEL document\.txt"):
        runpy.run_path(str(EXAMPLES / "with_transformers.py"), run_name="__main__")


def test_the_demo_ends_in_its_answers_and_one_sentence():
    ending = runpy.run_path(str(EXAMPLES / "demo.py"), run_name="demo")["ending"]
    dense = {"text": " 7", "prefill_seconds": 4.0}
    compared = {"text": " 7", "prefill_seconds": 2.0, "prefill_density": 0.12, "prefill_speedup": 2.0, "dense": dense}
    *_, answers, blank, sentence = ending(compared, "7").splitlines()
    assert (answers, blank) == ("sparse: 7  (prefill 2.00 s)", "")
    assert sentence == (
        "The plan computes 12% of prefill attention, answers as dense does, and its prefill takes 50% of dense's time."
    )
    assert "answers differently" in ending(compared | {"text": " 8"}, "7")


def test_the_cells_of_the_notebook_run_in_their_order_and_it_holds_no_outputs(monkeypatch):
    cells = json.loads((EXAMPLES / "my_method.ipynb").read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    monkeypatch.delitem(registry(), "largest_key", raising=False)
    names = {"__name__": "a_notebook"}
    for cell in codes:
        exec("".join(cell["source"]), names)
    monkeypatch.delitem(registry(), "largest_key")
    assert names["plan"].prefill.rules == {"largest_key"}
    assert 0 < names["share"] < 1
    assert 0 < names["divergence"] < 0.5
