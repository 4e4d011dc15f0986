"""The tool that makes the reference model, from text to model card, in small and on the CPU."""

import io
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import train_reference_model
from reference_model.evaluate import load_results
from reference_model.recipe import Recipe, smoke
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsekv.planner.tasks import RETRIEVAL_TASKS

STEPS = sum(stage.steps for stage in smoke(Recipe()).stages)


@dataclass(frozen=True)
class Tool:
    base: Path
    stdlib: Path

    def __call__(self, name: str, *arguments: str) -> str:
        """Runs the tool in the work folder of that name and returns the last line that it prints."""
        said = io.StringIO()
        folders = ["--work", self.base / name, "--out", out_of(self.base / name), "--stdlib", self.stdlib]
        settings = ["--smoke", "--device", "cpu", "--workers", "0", "--no-compile"]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
            patch.setattr(sys, "argv", ["tool", *settings, *map(str, folders), *arguments])
            assert train_reference_model.main() == 0
        return said.getvalue().splitlines()[-1]


@pytest.fixture(scope="module")
def tool(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Tool:
    return Tool(tmp_path_factory.mktemp("runs"), library)


@pytest.fixture(scope="module")
def finished(tool: Tool) -> Path:
    """The work folder of a run that nothing stopped; what it made is in the folder beside it."""
    assert tool("whole", "--eval-samples", "2") == "done"
    return tool.base / "whole"


def out_of(work: Path) -> Path:
    return work.with_name(work.name + "-out")


def test_a_whole_run_leaves_a_model_that_transformers_runs(finished: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(out_of(finished))
    model = AutoModelForCausalLM.from_pretrained(out_of(finished))
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == smoke(Recipe()).shape.context
    prompt = tokenizer("The special number for", return_tensors="pt")
    assert prompt["input_ids"][0, 0] == tokenizer.bos_token_id
    generated = model.generate(**prompt, max_new_tokens=3)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 3
    assert tokenizer("\n", add_special_tokens=False)["input_ids"][0] in model.generation_config.eos_token_id


def test_every_task_is_scored_at_every_length_and_shown_on_the_card(finished: Path) -> None:
    lengths = [str(length) for length in smoke(Recipe()).eval_lengths]
    results, tasks = load_results(out_of(finished)), (*RETRIEVAL_TASKS, "perplexity")
    assert {task: list(scores) for task, scores in results.items()} == dict.fromkeys(tasks, lengths)
    assert all(0 <= score <= 1 for task in results if task != "perplexity" for score in results[task].values())
    card = (out_of(finished) / "README.md").read_text()
    assert f"| task | {' | '.join(lengths)} |" in card
    assert all(f"| {task} | " in card for task in tasks)
    assert "2 prompts a cell" in card


def test_a_run_that_is_stopped_after_every_step_makes_the_same_bytes(tool: Tool, finished: Path) -> None:
    stops = 0
    while tool("pieces", "--stage", "train-256", "--stop-after-seconds", "0").startswith("stopped"):
        stops += 1
    assert stops == STEPS - 1
    assert tool("pieces", "--stage", "export") == "done"
    made = out_of(tool.base / "pieces")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (made / name).read_bytes() == (out_of(finished) / name).read_bytes(), name
