"""Tells what the decode steps of an engine attended to, apart from what it answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm_engine import DECODE_BOUND, NEW

from sparsekv.runtime.paged.step_rows import DecodeHost, DecodeRows

SPARSE_FROM_DENSE = 1.1  # between what `apart` gives for answers decoded alike, and for sparse beside dense decode


@dataclass
class Steps:
    """Holds what was seen of the steps of an engine in this process."""

    chosen: list[tuple[int, int]] = field(default_factory=list)  # filter layer and length of each row that chose
    mixed: int = 0  # layers that were launched over a choice in steps that held other rows as well


@contextmanager
def recorded_choices() -> Iterator[Steps]:
    """The rows that choose by the device's own lengths and budgets, which the counts of the host only repeat. It waits
    for the device, so nothing may be captured meanwhile; captured steps are seen as they begin."""
    steps, begin, attend = Steps(), DecodeHost.begin, DecodeRows.attend

    def recording_begin(self: Any, *args: Any, **kwargs: Any) -> DecodeRows:
        rows = begin(self, *args, **kwargs)
        for segment in self._state._segments:
            lengths = rows.state.choosing(segment, rows.backend).tolist()
            steps.chosen += [(segment.filter, length) for length in lengths if length]
        return rows

    def recording_attend(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.mixed += self.part_of is not None
        attend(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeHost, "begin", recording_begin)
        patch.setattr(DecodeRows, "attend", recording_attend)
        yield steps


def apart(one: Any, other: Any) -> float:
    """Returns the mean distance of two outputs in the log-probabilities of likely tokens, over the decoded tokens
    before the first in which they differ: there both decoded the same ones. A token that is likely in one alone counts
    as the least likely of the other.

    For the prompt of 2,000 tokens whose answer a plan loses, rounding keys and queries at random to 8 bits gives 0.8 at
    most, to bfloat16 0.2, and sparse beside dense decode 1.4 at least (28 and 64 pairs, in the transformers host).
    """
    far = []
    tokens = zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True)
    both = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
    for number, ((own, its), pair) in enumerate(zip(tokens, both, strict=True)):
        if own != its:
            break
        mine, theirs = ({token: at.logprob for token, at in likely.items()} for likely in pair)
        if number:  # the first is the prompt's
            far += [abs(_of(mine, token) - _of(theirs, token)) for token in {*mine, *theirs}]
    return sum(far) / len(far)


def _of(likely: dict[int, float], token: int) -> float:
    return likely.get(token, min(likely.values()))


def likely_answers(engine: Any, asked: list[list[int]]) -> list[Any]:
    """Greedy answers with the five likeliest tokens beside each, by an engine with nothing cached."""
    from vllm import SamplingParams

    assert engine.reset_prefix_cache()
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=5)
    return list(engine.generate([{"prompt_token_ids": one} for one in asked], greedy, use_tqdm=False))


def check_rows_that_choose(engines: dict[str, Any], prompts: dict[int, list[int]]) -> None:
    """Rows choose beside chunks of prompts in an eager engine, in a captured one and in none that is dense.

    Nearly all steps that decode for the prompt of 2,000 tokens hold chunks of others. Which tokens an answer ends in is
    decided by rounding, so what is compared comes before: the rows that choose on the device, and how sure the model is
    of the tokens that all engines give.
    """
    lengths = (200, 2000, 700, 2700)
    expected = [length + new for length in lengths if length > DECODE_BOUND for new in range(1, NEW)]
    found, launched = {}, {}
    for name, engine in engines.items():
        with recorded_choices() as steps:
            found[name] = likely_answers(engine, [prompts[length] for length in lengths])[1]
        chose = [] if name == "dense" else expected
        assert sorted(steps.chosen) == [(layer, length) for layer in (1, 6) for length in chose], name
        launched[name] = steps.mixed
    assert launched["eager"] == launched["captured"] > launched["dense"] == 0
    from_dense = {name: apart(found[name], found["dense"]) for name in ("eager", "captured")}
    assert min(from_dense.values()) > SPARSE_FROM_DENSE, from_dense
    assert apart(found["eager"], found["captured"]) < SPARSE_FROM_DENSE


def chi_square(counts: Counter[Any], others: Counter[Any]) -> tuple[float, int]:
    """Chi-square of two samples of one size, and its degrees of freedom; what is rare is taken together."""
    pairs = [(counts[key], others[key]) for key in {*counts, *others} if counts[key] + others[key] >= 10]
    rest = [
        sum(sample.values()) - sum(column)
        for sample, column in zip((counts, others), zip(*pairs, strict=True), strict=True)
    ]
    pairs += [(rest[0], rest[1])] if sum(rest) else []
    return sum((x - y) ** 2 / (x + y) for x, y in pairs), len(pairs) - 1
