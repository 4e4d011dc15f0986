"""What README promises, on the model that ships: a plan, and the right answer with it."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import load_plan

# On a short length, few samples and without its test, whose 288 prompts take minutes.
SHORT = ("--lengths", "1k", "--set", "tasks=niah_single", "--set", "calibration_samples=1", "--no-verify")
SHORT = (*SHORT, "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a document that hides a number, and the plan."""
    from sparsekv.cli.main import main

    folder = tmp_path_factory.mktemp("card")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-retriever").path_or_id)
    sample = make_sample(TASKS["niah_single"], prepare(tokenizer, Split.EVALUATION), 1024, seed=1, index=0)
    (folder / "document.txt").write_text(tokenizer.decode(sample.prompt_ids, skip_special_tokens=True))
    (folder / "answer.txt").write_text(sample.answer.strip())
    call = [str(part) for part in ("plan", "tiny-retriever", "-o", "plan.yaml", *SHORT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stop:
            main(call)
    assert not stop.value.code
    return folder


def test_plan_then_run_finds_the_hidden_number(sparsekv, place, monkeypatch):
    monkeypatch.chdir(place)
    plan = load_plan("plan.yaml")
    assert plan.model.id == "tiny-retriever"
    assert plan.status == "unverified"
    done = sparsekv("run", "--plan", "plan.yaml", "--prompt-file", "document.txt", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert done.data["text"].strip() == (place / "answer.txt").read_text()
    assert done.data["prefill_density"] < 0.95


def test_the_python_calls_of_the_readme(place):
    import sparsekv
    from sparsekv.runtime.hf.load import load_model

    loaded = load_model("tiny-retriever", device="cpu")
    plan = sparsekv.load_plan(place / "plan.yaml")
    ids = loaded.tokenizer((place / "document.txt").read_text(), return_tensors="pt")["input_ids"]
    with sparsekv.apply(loaded.model, plan) as handle:
        out = loaded.model.generate(ids, max_new_tokens=16)
        assert handle.stats().prefill_density < 0.95
    assert loaded.tokenizer.decode(out[0, ids.shape[1] :]).strip() == (place / "answer.txt").read_text()
