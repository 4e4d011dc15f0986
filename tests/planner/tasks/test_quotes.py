"""Quoted passages: each stands further up, at the distance meant for it, and its beginning says which one is meant."""

import numpy as np
import pytest
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.planner.tasks import QUOTE_TASKS, TASKS, Filler, Kit, Sample, Split, TaskError, make_sample
from sparsekv.planner.tasks.text import load_filler_text

CUE = 16


def sample(task: str, length: int, index: int = 0, tokenizer: str = "shipped") -> Sample:
    return make_sample(TASKS[task], kit_named(tokenizer), length, seed=2, index=index)


def quotations(made: Sample, tokenizer: str) -> list[tuple[int, int]]:
    """Tokens that repeat earlier ones, half-open, in the prompt with its answer: behind each frame and a cue."""
    kit = kit_named(tokenizer)
    line = kit.wording.quoted if TASKS[made.task].prose else kit.wording.repeated
    frame = np.asarray(kit.encoder.encode([line]), np.int32)
    starts = [first + len(frame) + CUE for first in places(made.prompt_ids, frame)]
    assert starts[-1] == len(made.prompt_ids)
    return [(start, start + len(made.answer_ids)) for start in starts]


def places(ids: np.ndarray, part: np.ndarray) -> list[int]:
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(part))
    return np.flatnonzero((windows == part).all(1)).tolist()


def distances(made: Sample, tokenizer: str = "shipped") -> list[int]:
    ids = np.concatenate([made.prompt_ids, made.answer_ids])
    found = []
    for first, end in quotations(made, tokenizer):
        earlier, itself = places(ids, ids[first - CUE : first])  # twice: what is quoted, and the quotation
        assert itself == first - CUE
        assert ids[earlier : earlier + CUE + end - first].tolist() == ids[first - CUE : end].tolist()
        found.append(itself - earlier)
    return found


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", QUOTE_TASKS)
def test_what_is_asked_for_stands_once_further_up_behind_the_beginning_that_is_given(task: str, tokenizer: str) -> None:
    for index in range(4):
        made = sample(task, 1500, index, tokenizer)
        assert len(distances(made, tokenizer)) == 6
        assert len(made.answer_ids) == 32


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", QUOTE_TASKS)
def test_the_answer_says_what_its_tokens_say_but_for_digits_that_may_go_on(task: str, tokenizer: str) -> None:
    made = sample(task, 1024, 1, tokenizer)
    newline = tokenizer_named(tokenizer)("\n", add_special_tokens=False)["input_ids"]
    text = str(tokenizer_named(tokenizer).decode([*newline, *made.answer_ids.tolist()]))
    assert made.answer
    assert text[text.index("\n") + 1 :].rstrip("0123456789") == made.answer


def test_prose_is_told_from_code_line_by_line() -> None:
    lines = {
        "    Return the name of the first file that was found.\n": True,
        "# This is where a caller would look for it, if at all.\n": True,
        "        return self._defaults.get(dest, default=None)\n": False,
        "    if not found:\n": False,
        "\n": False,
    }
    filler = Filler.from_text("".join(lines), kit_named("shipped").encoder)
    assert filler.prose_lines is not None
    assert filler.prose_lines.tolist() == list(lines.values())


@pytest.mark.parametrize("task", QUOTE_TASKS)
def test_more_tokens_than_there_is_text_quote_the_last_repetition(task: str) -> None:
    encoder = kit_named("shipped").encoder
    kit = Kit(Split.CALIBRATION, encoder, Filler.from_text(load_filler_text(Split.CALIBRATION)[:9000], encoder))
    made = make_sample(TASKS[task], kit, 3 * len(kit.filler.ids), seed=0, index=0)
    assert len(made.prompt_ids) + len(made.answer_ids) == 3 * len(kit.filler.ids)
    for first, end in quotations(made, "shipped"):
        ids = np.concatenate([made.prompt_ids, made.answer_ids])
        nearest = places(ids[: first - 1], ids[first - CUE : first])[-1]
        assert ids[nearest + CUE : nearest + CUE + end - first].tolist() == ids[first:end].tolist()


@pytest.mark.parametrize("task", QUOTE_TASKS)
def test_a_length_that_holds_no_quotation_is_refused_with_one_that_would(task: str) -> None:
    with pytest.raises(TaskError, match="longer") as error:
        sample(task, 60)
    enough = int(str(error.value).split()[3]) + len(kit_named("shipped").encoder.bos_ids)
    assert len(sample(task, enough).answer_ids) > 0
