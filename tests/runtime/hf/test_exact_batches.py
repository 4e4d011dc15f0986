"""`exact` over batches of ragged rows: tokens, streams and what criteria are asked are those of dense `generate`.

`pytest -m fuzz` runs more seeds of each kind; a seed is the id of its test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, random_tokens, tiny_model, tiny_tokenizer
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, TextStreamer, WatermarkingConfig
from transformers.generation import logits_process, stopping_criteria

from sparsekv.plans.brief import DRAFTS
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.hf import exact
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.exact import READ_MORE, READ_SCORES, READ_TEXT, Processors

TOKENIZER = tiny_tokenizer()
SUPPORTED = sorted(READ_SCORES | READ_TEXT)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def seeds(few: int, many: int) -> list[Any]:
    return [pytest.param(seed, marks=pytest.mark.fuzz if seed >= few else ()) for seed in range(many)]


@dataclass
class Batch:
    """Random prompts, padded on the left, and how they are answered."""

    draw: Random
    ids: torch.Tensor = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw
        rows, length = draw.choice([1, 2, 2, 3, 4]), draw.choice([1, 12, 20, 40])
        self.ids = random_tokens(rows, length, draw.randrange(1 << 30))
        mask = torch.ones_like(self.ids)
        for row in range(rows):
            mask[row, : draw.choice([0, 0, draw.randrange(length)])] = 0
        self.ids = self.ids * mask
        self.options = {
            "attention_mask": mask,
            "max_new_tokens": draw.randint(1, 24),
            "pad_token_id": draw.choice([0, 7]),
            "eos_token_id": None,
            "do_sample": False,
        }

    def some(self, most: int) -> list[int]:
        """Different tokens."""
        return self.draw.sample(range(VOCABULARY), self.draw.randint(1, most))


def drafted_lengths(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Drafts are of random lengths, whatever the time says."""
    draw = Random(seed)
    monkeypatch.setattr(DraftLength, "next", lambda self, most: draw.choice([n for n in DRAFTS if n <= most]))


def random_drafts(model, draw: Random):
    """A plan whose drafts are good, bad, or now one and now the other."""
    return plan_for(model, None, decode_plan(segment(0, (1, 2), draw.choice([1, 4, 30]), sink=0, recent=1)))


# --- logits processors ------------------------------------------------------------------------------------------------


def by_hand(name: str, *arguments: Any, **named: Any) -> Callable[[Batch], dict[str, Any]]:
    """A processor that `generate` creates for samples alone."""
    return lambda batch: {"logits_processor": [getattr(logits_process, name)(*arguments, **named)]}


# What makes `generate` run one of a class.
OPTIONS: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "TemperatureLogitsWarper": by_hand("TemperatureLogitsWarper", 0.7),
    "TopKLogitsWarper": by_hand("TopKLogitsWarper", 5),
    "TopPLogitsWarper": by_hand("TopPLogitsWarper", 0.8),
    "TopHLogitsWarper": by_hand("TopHLogitsWarper", 0.5),
    "MinPLogitsWarper": by_hand("MinPLogitsWarper", 0.1),
    "TypicalLogitsWarper": by_hand("TypicalLogitsWarper", 0.5),
    "EpsilonLogitsWarper": by_hand("EpsilonLogitsWarper", 0.01),
    "EtaLogitsWarper": by_hand("EtaLogitsWarper", 0.01),
    "SuppressTokensLogitsProcessor": lambda batch: {"suppress_tokens": batch.some(60)},
    "InfNanRemoveLogitsProcessor": lambda batch: {"remove_invalid_values": True},
    "LogitNormalization": lambda batch: {"renormalize_logits": True},
    "MinLengthLogitsProcessor": lambda batch: {
        "min_length": batch.ids.shape[1] + batch.draw.randint(1, 30),
        "eos_token_id": batch.some(60),
    },
    "MinNewTokensLengthLogitsProcessor": lambda batch: {
        "min_new_tokens": batch.draw.randint(1, batch.options["max_new_tokens"]),
        "eos_token_id": batch.some(60),
    },
    "RepetitionPenaltyLogitsProcessor": lambda batch: {"repetition_penalty": batch.draw.choice([0.5, 1.2, 3.0])},
    "EncoderRepetitionPenaltyLogitsProcessor": lambda batch: {
        "encoder_repetition_penalty": batch.draw.choice([0.5, 1.2, 3.0])
    },
    "NoRepeatNGramLogitsProcessor": lambda batch: {"no_repeat_ngram_size": batch.draw.randint(1, 3)},
    "EncoderNoRepeatNGramLogitsProcessor": lambda batch: {"encoder_no_repeat_ngram_size": batch.draw.randint(1, 2)},
    "SequenceBiasLogitsProcessor": lambda batch: {
        "sequence_bias": [[[a], batch.draw.uniform(-9, 9)] for a in batch.some(40)]
        + [[[a, b], batch.draw.uniform(-9, 9)] for a in batch.some(60) for b in batch.some(3)]
    },
    "NoBadWordsLogitsProcessor": lambda batch: {
        "bad_words_ids": [[a] for a in batch.some(40)] + [[a, b] for a in batch.some(60) for b in batch.some(3)]
    },
    "ForcedBOSTokenLogitsProcessor": lambda batch: {"forced_bos_token_id": batch.some(1)[0]},
    "ForcedEOSTokenLogitsProcessor": lambda batch: {"forced_eos_token_id": batch.some(1)[0]},
    "ExponentialDecayLengthPenalty": lambda batch: {
        "exponential_decay_length_penalty": (batch.draw.randint(0, 6), 1.3),
        "eos_token_id": batch.some(3),
    },
    "SuppressTokensAtBeginLogitsProcessor": lambda batch: {"begin_suppress_tokens": batch.some(100)},
}


def processed(batch: Batch, *names: str) -> dict[str, Any]:
    """Options of `generate` that create these processors."""
    found = dict(batch.options)
    for name in names:
        given = OPTIONS[name](batch)
        found |= given | {"logits_processor": [*found.get("logits_processor", ()), *given.get("logits_processor", ())]}
    if batch.draw.random() < 0.3:  # as samples, all but one token excluded
        found |= {"do_sample": True, "top_k": 1, "num_return_sequences": batch.draw.choice([1, 2])}
    return found


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("name", SUPPORTED)
def test_processors_give_ragged_rows_the_tokens_of_dense_decoding(model, monkeypatch, name, seed):
    draw, seen = Random(f"{name} {seed}"), []

    def noted(given: list[Any]) -> Processors:
        seen.extend(type(one).__name__ for one in given)
        return Processors(given)

    monkeypatch.setattr(exact, "Processors", noted)
    batch = Batch(draw)
    if name == "ForcedBOSTokenLogitsProcessor":
        batch.ids, batch.options["attention_mask"] = batch.ids[:, -1:], batch.options["attention_mask"][:, -1:]
    options = processed(batch, name, *draw.sample(SUPPORTED, draw.randint(0, 2)))
    drafted_lengths(monkeypatch, seed)
    dense = model.generate(batch.ids, **options)
    with apply(model, random_drafts(model, draw), exact=True):
        assert torch.equal(model.generate(batch.ids, **options), dense)
    assert name in seen


def processor_classes() -> list[type[LogitsProcessor]]:
    found = [one for one in vars(logits_process).values() if isinstance(one, type) and issubclass(one, LogitsProcessor)]
    return [one for one in found if one is not LogitsProcessor]


@pytest.mark.parametrize("kind", processor_classes(), ids=lambda kind: kind.__name__)
def test_every_processor_of_transformers_is_supported_or_refused_by_name(kind):
    one = kind.__new__(kind)
    if kind.__name__ in SUPPORTED:
        assert kind.__name__ in OPTIONS, "a supported processor runs over random batches above"
        Processors([one])
    else:
        with pytest.raises(UnsupportedError, match=kind.__name__):
            Processors([one])


def test_processors_of_later_releases_and_of_users_are_refused_by_name(monkeypatch):
    own = type("TopKLogitsWarper", (logits_process.TopKLogitsWarper,), {})
    later = type("LaterLogitsProcessor", (LogitsProcessor,), {})
    monkeypatch.setattr(logits_process, "LaterLogitsProcessor", later, raising=False)
    for one in (own(3), later()):
        with pytest.raises(UnsupportedError, match=type(one).__name__):
            Processors([one])


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]},
        {"watermarking_config": WatermarkingConfig()},
        {"logits_processor": [lambda ids, scores: scores]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_are_refused_before_the_prompt_runs(model, options):
    passes = []
    with apply(model, random_drafts(model, Random(0)), exact=True):
        hook = model.register_forward_pre_hook(lambda *args: passes.append(1))
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            model.generate(random_tokens(2, 20), max_new_tokens=3, **options)
        hook.remove()
    assert not passes


def test_the_page_names_the_options_that_the_table_supports_and_refuses():
    page = (Path(__file__).parents[3] / "docs/exact.md").read_text()
    tables = {"Supported processors": READ_SCORES | READ_TEXT, "Refused processors": READ_MORE}
    for heading, options in tables.items():
        named = re.search(rf"- {heading}: (.*?)\n(?:- |\n)", page, re.DOTALL)
        assert set(re.findall(r"`(\w+)`", named[1])) == set(options.values())


# --- stopping criteria ------------------------------------------------------------------------------------------------


@dataclass
class Recording(StoppingCriteria):
    """Notes what it was asked, and answers by `rule(ids, calls)`."""

    rule: Callable[[torch.Tensor, int], Any]
    asked: list[list[list[int]]] = field(default_factory=list)

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.tolist())
        return self.rule(input_ids, len(self.asked))


def some_rows_stop(ids: torch.Tensor, calls: int) -> torch.Tensor:
    return ids[:, -2:].sum(1) % 5 == 0


def all_stop_where_two_rows_agree(ids: torch.Tensor, calls: int) -> torch.Tensor:
    return torch.full((len(ids),), len(ids) > 1 and bool((ids[0] % 8 == ids[1] % 8)[-1]))


def a_row_stops_by_what_another_has(ids: torch.Tensor, calls: int) -> torch.Tensor:
    return ids.roll(1, 0)[:, -1] % 6 == 0


RULES = (
    some_rows_stop,
    all_stop_where_two_rows_agree,
    a_row_stops_by_what_another_has,
    lambda ids, calls: torch.full((len(ids),), calls == 9),  # remembers, as a limit of time does
    lambda ids, calls: calls == 7,
)


class Streamed:
    """A streamer of any number of rows."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def random_stops(batch: Batch) -> Callable[[], dict[str, Any]]:
    """Makes options of `generate`: any mixture of the ways to stop, with new criteria and a new streamer each time."""
    draw = batch.draw
    ends, texts = draw.choice([None, *batch.some(1), batch.some(6)]), draw.choice([None, None, batch.some(4)])
    rules = draw.sample(RULES, draw.choice([0, 0, 1, 1, 2]))
    marked = draw.random() < 0.2  # a criterion has an eos_token_id: rows are padded
    limit = draw.choice([None, None, draw.randint(1, 50)])
    own = draw.choice([None, None, batch.some(6)])
    streams, seconds = draw.random() < 0.5, draw.choice([None, None, draw.randint(2, 9)])
    new = {"max_length": batch.ids.shape[1] + draw.randint(1, 24)} if draw.random() < 0.3 else {}
    pads = ends is not None or own is not None or marked or draw.random() < 0.5

    def made() -> dict[str, Any]:
        criteria: list[StoppingCriteria] = [Recording(rule) for rule in rules]
        if marked and criteria:
            criteria[0].eos_token_id = None
        if limit is not None:
            criteria.append(stopping_criteria.MaxLengthCriteria(limit))
        if own is not None:
            criteria.append(stopping_criteria.EosTokenCriteria(own))
        found = batch.options | new | {"eos_token_id": ends, "stopping_criteria": criteria, "max_time": seconds}
        if new:
            del found["max_new_tokens"]
        if not pads:
            found["pad_token_id"] = None
        if texts is not None:
            found |= {"stop_strings": [TOKENIZER.decode([one]) for one in texts], "tokenizer": TOKENIZER}
        if streams:
            found["streamer"] = Streamed()
        return found

    return made


def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from one look at the time to the next."""
    now = iter(range(10**6))
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: next(now)))


@pytest.mark.parametrize("seed", seeds(20, 300))
def test_rows_stop_and_are_filled_up_as_dense_decoding_has_them(model, monkeypatch, seed):
    draw = Random(seed)
    batch = Batch(draw)
    made, plan = random_stops(batch), random_drafts(model, draw)
    drafted_lengths(monkeypatch, seed)
    clock(monkeypatch)
    want, found = made(), made()
    dense = model.generate(batch.ids, **want)
    with apply(model, plan, exact=True):
        assert torch.equal(model.generate(batch.ids, **found), dense)
    for expected, other in zip(want["stopping_criteria"], found["stopping_criteria"], strict=True):
        assert getattr(other, "asked", None) == getattr(expected, "asked", None)
    assert getattr(found.get("streamer"), "seen", None) == getattr(want.get("streamer"), "seen", None)


def test_a_criterion_of_stop_strings_goes_before_the_option(model, monkeypatch):
    drafted_lengths(monkeypatch, 0)
    ids, options = random_tokens(1, 20, 1), {"max_new_tokens": 20, "do_sample": False}
    early, late = (TOKENIZER.decode([token]) for token in model.generate(ids, **options)[0, [22, 34]])
    own = stopping_criteria.StopStringCriteria(TOKENIZER, late)
    options |= {"tokenizer": TOKENIZER, "stop_strings": early, "stopping_criteria": [own]}
    dense = model.generate(ids, **options)
    assert dense.shape[1] == 35
    with apply(model, random_drafts(model, Random(0)), exact=True):
        assert torch.equal(model.generate(ids, **options), dense)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_went_on_are_cached_for_a_next_turn(model, monkeypatch, seed):
    """Without an eos token all rows are equally long, whichever stopped first."""
    drafted_lengths(monkeypatch, seed)
    ids, more = random_tokens(3, 20, seed), random_tokens(3, 9, seed + 50)
    options = {"max_new_tokens": 20, "do_sample": False}

    def talk() -> torch.Tensor:
        cache = DynamicCache()
        criteria = [Recording(some_rows_stop)]
        first = model.generate(ids, past_key_values=cache, stopping_criteria=criteria, **options)
        assert cache.get_seq_length() == first.shape[1] - 1
        return model.generate(torch.cat((first, more), 1), past_key_values=cache, **options)

    dense = talk()
    with apply(model, random_drafts(model, Random(seed)), exact=True):
        assert torch.equal(talk(), dense)


def test_several_rows_are_refused_by_a_streamer_of_one(model):
    with apply(model, random_drafts(model, Random(0)), exact=True), pytest.raises(ValueError, match="batch size 1"):
        model.generate(random_tokens(2, 20), max_new_tokens=3, streamer=TextStreamer(TOKENIZER))


def test_rows_that_must_be_padded_without_a_padding_token_are_refused(model):
    criterion = Recording(some_rows_stop)
    criterion.eos_token_id = None
    with apply(model, random_drafts(model, Random(0)), exact=True):
        model.generation_config.pad_token_id, was = None, model.generation_config.pad_token_id
        try:
            with pytest.raises(UsageError, match="pad_token_id"):
                model.generate(random_tokens(2, 20), max_new_tokens=3, stopping_criteria=[criterion])
        finally:
            model.generation_config.pad_token_id = was
