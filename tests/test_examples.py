"""The examples that need neither the network nor a GPU."""

import runpy
import sys
from pathlib import Path

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import load_model

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_one_for_transformers_takes_an_alias_and_a_plan(tmp_path, monkeypatch, capsys):
    plan, document = tmp_path / "plan.yaml", tmp_path / "document.txt"
    write_plan(Plan(status="unverified", model=load_model("tiny-retriever", device="cpu").info), plan)
    document.write_text("The special number for lemon is 4810357. What is the special number for lemon?")
    monkeypatch.setattr(sys, "argv", ["with_transformers.py", "tiny-retriever", str(document), str(plan)])
    runpy.run_path(str(EXAMPLES / "with_transformers.py"))
    out, err = capsys.readouterr()
    assert out
    assert "prefill_density=1" in err
