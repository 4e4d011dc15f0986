"""When a generated text counts as the answer, and that the shipped model gives it."""

import pytest
import torch
from task_tokenizers import REFERENCE_MODEL, kit_named, tokenizer_named
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.planner.tasks import TASKS, Split, make_sample, matches


@pytest.mark.parametrize(
    "generated",
    [
        "12345",
        " 12345",
        "  12345\n",
        "\n12345",
        "12345.",
        "12345. And more 678",
        "12345\n- other-key: 99999",
        "12345<|endoftext|>",
        "12345 6",
    ],
)
def test_the_answer_counts_with_space_around_it_and_whatever_follows(generated: str) -> None:
    assert matches(generated, " 12345")


@pytest.mark.parametrize(
    "generated", ["", " ", "1234", "123456", "12345678", "The 12345", "-12345", "12 345", "1 2345"]
)
def test_other_numbers_longer_numbers_and_late_answers_do_not_count(generated: str) -> None:
    assert not matches(generated, " 12345")


def test_chains_count_as_a_whole() -> None:
    answer = " VAR total_party = VAR odd_total = 29103"
    assert matches("VAR total_party = VAR odd_total = 29103\n", answer)
    assert not matches("VAR total_party = 29103", answer)
    assert not matches("VAR total_party = VAR odd_total = 291034", answer)
    assert not matches("VAR Total_party = VAR odd_total = 29103", answer)


def test_an_answer_that_ends_in_a_word_may_be_followed_by_digits() -> None:
    assert matches("amber-falcon2", "amber-falcon")


# --- the shipped model ------------------------------------------------------------------------------------------------


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
