"""Logits processors under `exact`: which are supported, and their scores behind rows of different lengths.

Shapes: B batch, Q checked tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.generate import FirstChecked
from sparsekv.runtime.hf.text_rows import Text


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
    """The processors of one call of `generate`.

    Raises:
        UnsupportedError: one of them may depend on more than the scores and the tokens before them.
    """

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
