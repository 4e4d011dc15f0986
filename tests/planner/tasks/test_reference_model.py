"""The shipped model on the samples that the tasks make: it answers them."""

import pytest
import torch
from task_tokenizers import REFERENCE_MODEL, kit_named, tokenizer_named
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.planner.tasks import TASKS, Split, make_sample, matches


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(REFERENCE_MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("split", [Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION])
@pytest.mark.parametrize("task", ["niah_single", "kv_retrieval"])
def test_the_shipped_model_answers_in_every_wording(task: str, split: Split, model: PreTrainedModel) -> None:
    sample = make_sample(TASKS[task], kit_named("shipped", split), 1024, seed=0, index=0)
    prompt = torch.from_numpy(sample.prompt_ids).long()[None]
    with torch.inference_mode():
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12)
    answer = generated[0, prompt.shape[1] :].tolist()
    assert answer[: len(sample.answer_ids)] == sample.answer_ids.tolist()
    assert matches(tokenizer_named("shipped").decode(answer, skip_special_tokens=True), sample.answer)
