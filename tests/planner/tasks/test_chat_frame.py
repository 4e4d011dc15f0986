"""Prompts as a user's message: the tokens of the rendered template, exact in length, the reply begun with the cue."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from task_tokenizers import NAMES, kit_named, tokenizer_named
from transformers import PreTrainedTokenizerFast

from sparsekv.planner.tasks import (
    RETRIEVAL_TASKS,
    TASKS,
    Kit,
    Sample,
    make_sample,
)
from sparsekv.planner.tasks.documents import ChatFrame, DocumentRequest, Draws
from sparsekv.plans.errors import PlanWarning

TEMPLATE = (
    "{{ bos_token }}System: be brief.\n{% for m in messages %}User: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Reply:\n{% endif %}"
)
CHATTING = ("quote_text", "quote_code", *RETRIEVAL_TASKS, "niah_multivalue", "niah_multiquery")


def templated(name: str, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_named(name)
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    own.chat_template = template
    return own


def chat_kit(name: str, template: str = TEMPLATE) -> Kit:
    plain = kit_named(name)
    return Kit(plain.split, plain.encoder, plain.filler, ChatFrame.of(templated(name, template), plain.encoder))


def text(name: str, sample: Sample) -> str:
    return str(tokenizer_named(name).decode(sample.prompt_ids.tolist(), skip_special_tokens=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", CHATTING)
def test_prompt_and_longest_answer_have_the_length_with_the_frame(task: str, name: str) -> None:
    kit = chat_kit(name)
    assert kit.chat is not None
    room = 900 - len(kit.chat.before_ids) - len(kit.chat.after_ids)
    sample = make_sample(TASKS[task], kit, 900, seed=0, index=0)
    assert len(sample.prompt_ids) + TASKS[task].longest_answer(kit.encoder, room) == 900
    assert sample.prompt_ids[: len(kit.chat.before_ids)].tolist() == list(kit.chat.before_ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", ["niah_single", "kv_retrieval", "two_stage", "variable_tracking"])
def test_the_reply_begins_with_the_cue_behind_the_question(task: str, name: str) -> None:
    system, prompt = text(name, make_sample(TASKS[task], chat_kit(name), 900, seed=0, index=0)).split("User: ", 1)
    message, reply = prompt.split("\nReply:\n")
    assert system.endswith("System: be brief.\n")
    assert message.endswith(("above?", "?", "value.", "number."))
    assert reply.endswith((" is", ":", " ="))


CONVERSATION = (
    "{{ bos_token }}{% for m in messages %}{{ '<U>' if m.role == 'user' else '<A>' }}{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<A>{% endif %}"
)
ONE_MESSAGE = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_second_question_follows_the_first_answer_as_in_the_rendered_conversation(name: str) -> None:
    kit, longest = chat_kit(name, CONVERSATION), TASKS["second_question"].longest_answer(kit_named(name).encoder, 900)
    sample = make_sample(TASKS["second_question"], kit, 900, seed=0, index=0)
    assert len(sample.past_ids) + longest == 900
    (turn,) = sample.later
    whole = np.concatenate([sample.past_ids, sample.answer_ids])
    decoded = str(tokenizer_named(name).decode(whole.tolist(), skip_special_tokens=True))
    messages = re.findall("(?s)<[UA]>(.*?)(?:</>|$)", decoded)
    roles = ("user", "assistant", "user", "assistant")
    told = [{"role": role, "content": message} for role, message in zip(roles, messages, strict=True)]
    rendered = templated(name, CONVERSATION).apply_chat_template(told, tokenize=False)
    assert rendered.removeprefix(tokenizer_named(name).bos_token or "") == decoded + "</>"
    first = text(name, replace(sample, prompt_ids=turn.reply_ids))
    assert messages[1].endswith(first)
    assert messages[3].endswith(sample.answer)
    keys = [re.search(r"special number for (\S+) is", reply)[1] for reply in messages[1::2]]
    assert keys[0] != keys[1]
    for key, reply in zip(keys, messages[1::2], strict=True):
        assert f"The special number for {key} is{reply.rpartition(' is')[2]}.\n" in messages[0]


@pytest.mark.parametrize(
    "kit", [kit_named("shipped"), chat_kit("shipped", ONE_MESSAGE)], ids=["none", "of one message"]
)
def test_without_a_template_of_several_messages_a_second_question_is_a_line_behind_the_first_answer(kit: Kit) -> None:
    sample = make_sample(TASKS["second_question"], kit, 900, seed=0, index=0)
    (turn,) = sample.later
    lines = str(tokenizer_named("shipped").decode(sample.past_ids.tolist(), skip_special_tokens=True)).split("\n")
    assert lines[-2].startswith("What is the special number")
    assert lines[-2].endswith(text("shipped", replace(sample, prompt_ids=turn.reply_ids)))
    assert lines[-1] == text("shipped", replace(sample, prompt_ids=turn.prompt_ids)).strip()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [512, 2048, 20_000])
def test_a_turn_asks_for_a_number_that_was_planted_in_it_or_before(length: int, name: str) -> None:
    kit, task = chat_kit(name, CONVERSATION), TASKS["turns"]
    sample = make_sample(task, kit, length, seed=0, index=1)
    assert len(sample.past_ids) + task.longest_answer(kit.encoder, length) == length
    assert len(sample.prompt_ids) >= length // 2 - 64
    assert len(sample.later) + 1 == task.questions(length)
    told_ids, keys = sample.prompt_ids, list[str]()
    for reply_ids, prompt_ids in (*sample.later, (sample.answer_ids, sample.answer_ids[:0])):
        told, answered_ids = text(name, replace(sample, prompt_ids=told_ids)), np.concatenate([told_ids, reply_ids])
        reply = text(name, replace(sample, prompt_ids=answered_ids)).removeprefix(told)
        (key,) = re.findall(r"special number for (\S+) is$", told.rstrip())
        assert f"The special number for {key} is{reply}." in told
        keys.append(key)
        told_ids = np.concatenate([answered_ids, prompt_ids])
    assert len({*keys}) == len(keys)


def test_the_last_turn_asks_for_a_number_of_the_first_prompt_half_of_the_time_else_of_any_turn() -> None:
    kit, turns, asked_for = kit_named("shipped"), 4, []
    for seed in range(300):
        made = TASKS["turns"].document(kit, DocumentRequest(4096, turns), Draws(np.random.default_rng(seed)))
        parts = [kit_text(ids.tolist()) for ids in np.split(made.context_ids, made.cuts)]
        asked_for += [turn for turn, part in enumerate(parts) if f"{made.queries[-1].answer}." in part]
    shares = np.bincount(asked_for) / len(asked_for)
    assert len(asked_for) == 300
    assert shares == pytest.approx([0.5 + 0.5 / turns, *[0.5 / turns] * (turns - 1)], abs=0.09)


def kit_text(ids: list[int]) -> str:
    return kit_named("shipped").encoder.text_of(ids)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no') }}", r"one that fails \(no\)"),
        ("{{ messages[0].content | upper }}", "0 times"),
        ("{{ messages[0].content + messages[0].content }}", "2 times"),
    ],
)
def test_a_template_that_cannot_be_split_is_left_out_with_a_warning(template: str, found: str) -> None:
    with pytest.warns(PlanWarning, match=found):
        assert chat_kit("shipped", template).chat is None


def test_a_template_is_the_same_every_day_and_leaves_no_room_to_think() -> None:
    dated = "{{ date_string }}{% if enable_thinking is false %}!{% endif %}{{ messages[0].content }}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat = chat_kit("shipped", dated).chat
    assert chat is not None
    assert kit_text(list(chat.before_ids)) == "26 Jul 2024!"
