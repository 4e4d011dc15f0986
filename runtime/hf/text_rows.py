"""The rows of a batch that `exact` generates: they grow at different rates, and end where dense decoding ends them.

Dense `generate` asks its stopping criteria once a step, of the whole batch. A row that has stopped is padded where one
of them has an `eos_token_id`; else it goes on until all rows have stopped. Here the criteria are asked in the same
order, of the same tokens, as soon as every row has come so far; what rows have beyond is cut when they stop.

Shapes: B batch, Q checked tokens, T tokens of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.runtime.hf.generate import FirstChecked


@dataclass(frozen=True, slots=True)
class Stops:
    """The stopping criteria of one call of `generate`, sorted by how they are asked."""

    longest: int  # tokens of a row, the prompt included
    ends: frozenset[int]
    others: StoppingCriteriaList
    pad: int | None  # fills rows that have stopped; None: they go on until all have

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, prompt: int, pad: torch.Tensor | None) -> Stops:
        """The criteria that transformers made or was given.

        Args:
            prompt: its tokens; one more is generated, whatever the criteria say.
            pad: the padding token, if there is one.
        """
        ends: set[int] = set()
        limits, others = [], StoppingCriteriaList()
        for one in criteria:
            if type(one) is stopping_criteria.EosTokenCriteria:
                ends.update(one.eos_token_id.flatten().tolist())
            elif type(one) is stopping_criteria.MaxLengthCriteria:
                limits.append(one.max_length)
            else:
                others.append(one)
        pads = any(hasattr(one, "eos_token_id") for one in criteria)
        if pads and pad is None:
            raise UsageError(
                "expected a padding token beside stopping criteria that have an eos_token_id, found none; give "
                "generate a pad_token_id"
            )
        longest = max(min(limits), prompt + 1)
        return cls(longest, frozenset(ends), others, int(pad) if pads and pad is not None else None)


@dataclass(slots=True)
class Text:
    """The tokens of all rows so far."""

    ids_BT: torch.Tensor  # with room for the longest; drafts stand behind the end of a row
    stops: Stops
    lengths: list[int]  # padding included
    padding: list[int]  # tokens of the prompt that are not cached
    complete: list[bool]  # rows that do not grow any more
    stopped: list[bool]  # rows that a criterion has stopped
    asked: int  # tokens of each row that the criteria have seen
    earlier: int = 0  # columns that were cached before these tokens

    @classmethod
    def of(cls, ids_BS: torch.Tensor, stops: Stops) -> Text:
        """Prompts with room for answers."""
        batch, tokens = ids_BS.shape
        ids_BT = ids_BS.new_zeros((batch, stops.longest + DRAFTS[-1]))  # complete rows are drafted behind, too
        ids_BT[:, :tokens] = ids_BS
        return cls(ids_BT, stops, [tokens] * batch, [0] * batch, [False] * batch, [False] * batch, tokens)

    @property
    def cached(self) -> list[int]:
        """Tokens of each row that the cache has: all but the last."""
        return [length - 1 - padding for length, padding in zip(self.lengths, self.padding, strict=True)]

    @property
    def columns(self) -> int:
        """Columns of the cache: all but the last of the longest text."""
        return self.earlier + max(self.lengths) - 1

    def growing(self) -> list[int]:
        return [row for row, complete in enumerate(self.complete) if not complete]

    def rows_by_length(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for row in self.growing():
            found[self.lengths[row]].append(row)
        return found

    def with_drafts(self, drafted: int) -> torch.Tensor:
        """[B, Q]: the last token of each row and its draft."""
        begins = [length - 1 for length in self.lengths]
        return torch.stack([row[at : at + drafted + 1] for row, at in zip(self.ids_BT, begins, strict=True)])

    def put(self, ids_B: torch.Tensor, drafted: int) -> None:
        """Writes a token of each row behind so many drafted ones."""
        if len(set(self.lengths)) == 1:
            self.ids_BT[:, self.lengths[0] + drafted] = ids_B
            return
        for row, length in enumerate(self.lengths):
            self.ids_BT[row, length + drafted] = ids_B[row]

    def extend(self, row: int, tokens: Iterable[int]) -> None:
        """Counts tokens that were written behind a row, up to one that completes it."""
        for token in tokens:
            self.lengths[row] += 1
            if token in self.stops.ends or self.lengths[row] == self.stops.longest:
                self.complete[row] = True
                return

    def settle(self, streamer: Any) -> None:
        """Asks the criteria of each step that all rows have come to, and streams it. Once all rows have stopped, what
        they have beyond the last step is cut."""
        while not all(self.stopped) and all(self.lengths[row] > self.asked for row in self.growing()):
            self.asked += 1
            for row, stops in enumerate(self._stops_here()):
                if stops and not self.stopped[row]:
                    self._stop(row)
            if streamer is not None:
                streamer.put(self.first(self.asked)[:, -1].cpu())
        if all(self.stopped):
            self.lengths = [min(length, self.asked) for length in self.lengths]

    def first(self, tokens: int) -> torch.Tensor:
        """[B, tokens]: the first tokens of each row, padded behind its end."""
        found_BT = self.ids_BT[:, :tokens].clone()
        for row, length in zip(found_BT, self.lengths, strict=True):
            if length < tokens:
                row[length:] = self.stops.pad
        return found_BT

    def _stops_here(self) -> list[bool]:
        ends = [full and length == self.asked for full, length in zip(self.complete, self.lengths, strict=True)]
        if not self.stops.others:
            return ends
        found: list[bool] = self.stops.others(self.first(self.asked), None).tolist()
        return [end or other for end, other in zip(ends, found, strict=True)]

    def _stop(self, row: int) -> None:
        self.stopped[row] = True
        if self.stops.pad is not None:
            self.complete[row], self.lengths[row] = True, self.asked


class ProcessorReads(Enum):
    """The arguments of a processor, as a function."""

    SCORES = "the scores"  # all rows and positions may be processed at once
    TEXT = "the scores and the tokens before them"
    MORE = "more than that: refused"


# By class of transformers: the option of `generate` that creates it, and what it reads. Any other class is refused.
PROCESSORS: dict[str, tuple[str, ProcessorReads]] = {
    "TemperatureLogitsWarper": ("temperature", ProcessorReads.SCORES),
    "TopKLogitsWarper": ("top_k", ProcessorReads.SCORES),
    "TopPLogitsWarper": ("top_p", ProcessorReads.SCORES),
    "TopHLogitsWarper": ("top_h", ProcessorReads.SCORES),
    "MinPLogitsWarper": ("min_p", ProcessorReads.SCORES),
    "TypicalLogitsWarper": ("typical_p", ProcessorReads.SCORES),
    "EpsilonLogitsWarper": ("epsilon_cutoff", ProcessorReads.SCORES),
    "EtaLogitsWarper": ("eta_cutoff", ProcessorReads.SCORES),
    "SuppressTokensLogitsProcessor": ("suppress_tokens", ProcessorReads.SCORES),
    "InfNanRemoveLogitsProcessor": ("remove_invalid_values", ProcessorReads.SCORES),
    "LogitNormalization": ("renormalize_logits", ProcessorReads.SCORES),
    "MinLengthLogitsProcessor": ("min_length", ProcessorReads.TEXT),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", ProcessorReads.TEXT),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", ProcessorReads.TEXT),
    "EncoderRepetitionPenaltyLogitsProcessor": ("encoder_repetition_penalty", ProcessorReads.TEXT),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", ProcessorReads.TEXT),
    "EncoderNoRepeatNGramLogitsProcessor": ("encoder_no_repeat_ngram_size", ProcessorReads.TEXT),
    "SequenceBiasLogitsProcessor": ("sequence_bias", ProcessorReads.TEXT),
    "NoBadWordsLogitsProcessor": ("bad_words_ids", ProcessorReads.TEXT),
    "ForcedBOSTokenLogitsProcessor": ("forced_bos_token_id", ProcessorReads.TEXT),
    "ForcedEOSTokenLogitsProcessor": ("forced_eos_token_id", ProcessorReads.TEXT),
    "ExponentialDecayLengthPenalty": ("exponential_decay_length_penalty", ProcessorReads.TEXT),
    "SuppressTokensAtBeginLogitsProcessor": ("begin_suppress_tokens", ProcessorReads.TEXT),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": ("guidance_scale", ProcessorReads.MORE),
    "PrefixConstrainedLogitsProcessor": ("prefix_allowed_tokens_fn", ProcessorReads.MORE),
    "WatermarkLogitsProcessor": ("watermarking_config", ProcessorReads.MORE),
    "SynthIDTextWatermarkLogitsProcessor": ("watermarking_config", ProcessorReads.MORE),
}


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of one call of `generate`."""

    given: LogitsProcessorList

    def __post_init__(self) -> None:
        for one in self.given:
            option, reads = _entry(one)
            if reads is ProcessorReads.MORE:
                raise UnsupportedError(
                    f"expected logits processors that are functions of the scores and the text before them, found "
                    f"{type(one).__name__} ({option}); leave it out, or generate without exact"
                )

    @property
    def read_text(self) -> bool:
        """True where one of them reads the text."""
        return any(_entry(one)[1] is ProcessorReads.TEXT for one in self.given)

    def at(self, text: Text, drafted: int, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B, V]: the scores behind each row's text and its first drafted tokens; of complete rows, any.

        A processor may hold something of each row, such as its padding: it is always given the whole batch, once for
        each length that a row has."""
        if not self.read_text:
            return self._apply(text.ids_BT[:, :1], scores_BV)
        found_BV = scores_BV.clone()
        for length, rows in text.rows_by_length().items():
            processed_BV = self._apply(text.ids_BT[:, : length + drafted], scores_BV)
            for row in rows:
                found_BV[row] = processed_BV[row]
        return found_BV

    def behind_each(self, text: Text, scores_BQV: torch.Tensor) -> torch.Tensor:
        """[B, Q, V]: the scores behind each row's text and none, one, two, ... drafted tokens."""
        if not self.read_text:
            flat = self._apply(text.ids_BT[:1, :1].expand(scores_BQV.shape[0] * scores_BQV.shape[1], 1),
                               scores_BQV.flatten(0, 1))  # fmt: skip
            return flat.view_as(scores_BQV)
        return torch.stack([self.at(text, number, scores) for number, scores in enumerate(scores_BQV.unbind(1))], 1)

    def _apply(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.given(ids, scores)  # type: ignore[arg-type]
        return found


def _entry(one: object) -> tuple[str, ProcessorReads]:
    if type(one) is FirstChecked:
        return "sparsekv", ProcessorReads.SCORES
    name = type(one).__name__
    if type(one) is not getattr(logits_process, name, None):
        return "logits_processor", ProcessorReads.MORE
    return PROCESSORS.get(name, ("logits_processor", ProcessorReads.MORE))
