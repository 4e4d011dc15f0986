"""Prompts of the caller with their answers, measured like samples of a task, by length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sparsekv.planner.evaluation.batches import MOST_TEXT, EvalSamples
from sparsekv.planner.fixed_test import RUNGS, SIZES
from sparsekv.planner.options import GivenPrompt, Settled, digest_of_prompts
from sparsekv.planner.profile.calibration import OWN_ANSWER, Seen, tell_copies, whole_prompt
from sparsekv.planner.tasks import Kit, PieceEncoder, Sample
from sparsekv.planner.tasks.text import Ids
from sparsekv.plans.errors import PromptError
from sparsekv.plans.types import format_length

NEAR_END = 0.7  # of a length: with fixed budgets a bucket is sparsest at its end
_NOT_COUNTED = "the others are copies of those, or of prompts that are calibrated on, and do not count"


@dataclass(frozen=True, slots=True)
class GivenSamples(EvalSamples):
    """Prompts of the caller in place of samples of tasks, as one task: each is drawn once."""

    given: Mapping[int, Sequence[Sample]] = field(default_factory=dict)  # by length

    @classmethod
    def of(cls, samples: EvalSamples, given: Sequence[Sample]) -> GivenSamples:
        """These but for copies at the lengths of `samples`, in an order that follows from their seed. A length has
        those that are at most that long and longer than the one before it; the longest has all that are longer."""
        by_length: dict[int, list[Sample]] = {length: [] for length in samples.lengths}
        for at in np.random.default_rng(samples.seed).permutation(len(given)):
            longer = (length for length in samples.lengths if given[at].length <= length)
            by_length[min(longer, default=max(samples.lengths))].append(replace(given[at], task="prompts"))
        different = {length: _different(near, length) for length, near in by_length.items()}
        for length, near in by_length.items():
            tell_copies(different[length], near, length, _NOT_COUNTED)
        return cls.at(samples, different)

    @classmethod
    def at(cls, samples: EvalSamples, given: Mapping[int, Sequence[Sample]]) -> GivenSamples:
        settings = {setting.name: getattr(samples, setting.name) for setting in fields(EvalSamples)}
        return cls(**settings | {"tasks": ("prompts",), "lengths": tuple(given)}, given=given)

    def check_fit(self, kit: Kit) -> None:
        """Raises PromptError where a length has no prompt, or none has."""
        if not self.given:
            raise PromptError(
                "expected prompts that no earlier attempt at the plan saw, found none left of those that were set "
                "aside; plan anew with more --prompts"
            )
        for length, samples in self.given.items():
            if not samples:
                raise PromptError(f"expected prompts for every length, found none of {length} tokens; pass --lengths")

    def drawn(self, kit: Kit, length: int) -> list[Sample]:
        """Those of a length that are next; fewer than asked for, or none, at the end."""
        return list(self.given[length][self.first : self.first + self.samples])


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Prompts of the caller that were set aside, as samples of the lengths that they come near the end of; the longer
    ones as text that is cut there.

    Attributes:
        digest: of the prompts, whatever their lengths.
        by_length: in the order of `set_aside`, none a copy (see `Seen`) of another one of that length, or of a prompt
            that is calibrated on.
        least: of a test.
    """

    digest: str
    by_length: Mapping[int, Sequence[Sample]]
    least: int

    @classmethod
    def of(
        cls, tokenizer: Any, calibrated: Iterable[GivenPrompt], aside: Sequence[GivenPrompt], options: Settled
    ) -> HeldOut:
        """Compares prompts as they are at each length; a `PlanWarning` says where some are copies."""
        encoder = PieceEncoder.of(tokenizer)
        known, own = ([_tokens(tokenizer, one) for one in some] for some in (calibrated, aside))
        whole = [_sample(tokenizer, encoder, one) if one.answer else None for one in aside]
        found, different = {}, {}
        for length in options.lengths:
            near = (_at_length(*one, length) for one in zip(own, whole, strict=True))
            found[length] = [sample for sample in near if sample]
            different[length] = _different(found[length], length, known)
        _check_enough(found, different, len(aside), least := SIZES[options.verify].own)
        for length, some in found.items():
            tell_copies(different[length], some, length, _NOT_COUNTED, "held-out prompts")
        return cls(digest_of_prompts(aside), different, least)

    @property
    def count(self) -> int:
        """Samples of the length that has most of them."""
        return max(map(len, self.by_length.values()))

    def part(self, number: int) -> HeldOut | None:
        """The samples of a plan that is tried, from 0, which no earlier one saw; None where none are left.

        Each part has enough for a test, as long as there are.
        """
        parts = min(len(RUNGS) + 1, max(1, sum(map(len, self.by_length.values())) // self.least))
        split = {length: samples[number::parts] for length, samples in self.by_length.items() if samples[number::parts]}
        return replace(self, by_length=split) if number < parts and split else None


def _check_enough(
    drawn: Mapping[int, Sequence[Sample]], different: Mapping[int, Sequence[Sample]], aside: int, fewest: int
) -> None:
    near, left = (sum(map(len, side.values())) for side in (drawn, different))
    if not near:
        raise PromptError(
            f"expected prompts of more than {round(NEAR_END * min(drawn))} tokens among the {aside} that are set aside "
            "to verify on, found none; give longer ones, shorter --lengths, or --no-verify"
        )
    if not left or left < fewest <= near:
        each = ", ".join(f"{len(different[n])} of {len(texts)} at {format_length(n)}" for n, texts in drawn.items())
        raise PromptError(
            f"expected at least {fewest} different texts among the prompts that are set aside to verify on, found "
            f"{each}: cut there, the others are copies, of each other or of prompts that are calibrated on; give "
            "one prompt of each text and more texts, longer --lengths, or --no-verify"
        )


def _different(samples: Iterable[Sample], length: int, others: Iterable[Ids] = ()) -> list[Sample]:
    """The samples without copies of earlier ones, or of other tokens, which are cut at the length."""
    seen = Seen(length)
    for ids in others:
        seen.add(ids[:length])
    return [sample for sample in samples if seen.is_new(whole_prompt(sample).ids)]


def _at_length(ids: Ids, whole: Sample | None, length: int) -> Sample | None:
    """A prompt that comes near the end of a length, with its own answer if it has one; None of a shorter one."""
    if whole and NEAR_END * length < whole.length <= length and 0 < len(whole.answer_ids) <= MOST_TEXT:
        return replace(whole, task="prompts")
    ids = ids[:length]
    if len(ids) <= max(NEAR_END * length, OWN_ANSWER):
        return None
    return Sample(ids[:-OWN_ANSWER], ids[-OWN_ANSWER:], "", "prompts", len(ids))


def _tokens(tokenizer: Any, given: GivenPrompt) -> Ids:
    return np.asarray(tokenizer(given.text, verbose=False)["input_ids"], np.int32)


def samples_of(tokenizer: Any, prompts: Iterable[GivenPrompt], context: int) -> list[Sample]:
    """Prompts as samples, tokenized as they are; no chat template is put around them."""
    encoder = PieceEncoder.of(tokenizer)
    samples = []
    for number, given in enumerate(prompts, start=1):
        sample, where = _sample(tokenizer, encoder, given), given.source or f"prompt {number}"
        if sample.length > context:
            raise PromptError(
                f"expected prompts and answers within the model's context of {context} tokens, found {sample.length} "
                f"in {where}; shorten it"
            )
        if not 0 < len(sample.answer_ids) <= MOST_TEXT:
            raise PromptError(
                f"expected answers of 1 to {MOST_TEXT} tokens, found {len(sample.answer_ids)} in {where}; give its "
                "beginning"
            )
        samples.append(sample)
    return samples


def _sample(tokenizer: Any, encoder: PieceEncoder, given: GivenPrompt) -> Sample:
    text = given.prompt.rstrip(" ")  # tokenizers put a space to the word behind it
    answer = given.prompt[len(text) :] + given.answer
    prompt, whole = (list(tokenizer(one, verbose=False)["input_ids"]) for one in (text, text + answer))
    is_prefix = whole[: len(prompt)] == prompt  # otherwise a token spans both, and the answer is tokenized by itself
    answer_ids = whole[len(prompt) :] if is_prefix else encoder.encode([answer])
    length = len(prompt) + len(answer_ids)
    return Sample(np.asarray(prompt, np.int32), np.asarray(answer_ids, np.int32), answer, given.task, length)
