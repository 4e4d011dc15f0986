"""RULER's prompts of a file, dense beside a plan."""

import gzip
import json
from pathlib import Path

import pytest
from task_tokenizers import REFERENCE_MODEL
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.bench import ruler_prompts
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.load import load_model

LINE = "The special number for {} is {}.\n"
ASKED = "What is the special number for {0} in the text above? The special number for {0} is"


def row(task: str, key: str, value: str) -> dict[str, object]:
    prompt = LINE.format(key, value) + "x = 1\n" * 200 + ASKED.format(key)
    return {"task": task, "length": 2048, "prompt": prompt, "outputs": [value], "tokens": 9}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl.gz"
    rows = [row("niah_single_1", "amber-falcon", "4821375"), row("niah_single_1", "amber-falcon", "4821377")]
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_dense_and_a_plan_answer_the_same_prompts(prompts: Path, tmp_path: Path, capsys) -> None:
    model = load_model(REFERENCE_MODEL, device="cpu").model
    plan, out = tmp_path / "plan.yaml", tmp_path / "out.jsonl"
    local = every_head(model, AShape(sink=tokens(4), window=tokens(16)))
    layers = tuple(range(model.config.num_hidden_layers))
    write_plan(plan_for(model, local, decode_plan(segment(0, layers, 16))), plan)
    ruler_prompts.main([str(REFERENCE_MODEL), str(plan), str(prompts), "-o", str(out), "--device", "cpu"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["method"], each["score"]) for each in found] == [("dense", 1.0)] * 2 + [("plan", 0.0)] * 2
    assert capsys.readouterr().out.splitlines()[1].split() == ["niah_single_1", "2", "100.0", "0.0", "2", "0"]
