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


class Reads(Enum):
    """The arguments of a processor, as a function."""

    SCORES = "the scores"  # all rows and positions may be processed at once
    TEXT = "the scores and the tokens before them"
    MORE = "more than that: refused"


# By class of transformers: the option of `generate` that creates it, and what it reads. Any other class is refused.
PROCESSORS: dict[str, tuple[str, Reads]] = {
    "TemperatureLogitsWarper": ("temperature", Reads.SCORES),
    "TopKLogitsWarper": ("top_k", Reads.SCORES),
    "TopPLogitsWarper": ("top_p", Reads.SCORES),
    "TopHLogitsWarper": ("top_h", Reads.SCORES),
    "MinPLogitsWarper": ("min_p", Reads.SCORES),
    "TypicalLogitsWarper": ("typical_p", Reads.SCORES),
    "EpsilonLogitsWarper": ("epsilon_cutoff", Reads.SCORES),
    "EtaLogitsWarper": ("eta_cutoff", Reads.SCORES),
    "SuppressTokensLogitsProcessor": ("suppress_tokens", Reads.SCORES),
    "InfNanRemoveLogitsProcessor": ("remove_invalid_values", Reads.SCORES),
    "LogitNormalization": ("renormalize_logits", Reads.SCORES),
    "MinLengthLogitsProcessor": ("min_length", Reads.TEXT),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", Reads.TEXT),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", Reads.TEXT),
    "EncoderRepetitionPenaltyLogitsProcessor": ("encoder_repetition_penalty", Reads.TEXT),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", Reads.TEXT),
    "EncoderNoRepeatNGramLogitsProcessor": ("encoder_no_repeat_ngram_size", Reads.TEXT),
    "SequenceBiasLogitsProcessor": ("sequence_bias", Reads.TEXT),
    "NoBadWordsLogitsProcessor": ("bad_words_ids", Reads.TEXT),
    "ForcedBOSTokenLogitsProcessor": ("forced_bos_token_id", Reads.TEXT),
    "ForcedEOSTokenLogitsProcessor": ("forced_eos_token_id", Reads.TEXT),
    "ExponentialDecayLengthPenalty": ("exponential_decay_length_penalty", Reads.TEXT),
    "SuppressTokensAtBeginLogitsProcessor": ("begin_suppress_tokens", Reads.TEXT),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": ("guidance_scale", Reads.MORE),
    "PrefixConstrainedLogitsProcessor": ("prefix_allowed_tokens_fn", Reads.MORE),
    "WatermarkLogitsProcessor": ("watermarking_config", Reads.MORE),
    "SynthIDTextWatermarkLogitsProcessor": ("watermarking_config", Reads.MORE),
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
            if reads is Reads.MORE:
                raise UnsupportedError(
                    f"expected logits processors that are functions of the scores and the text before them, found "
                    f"{type(one).__name__} ({option}); leave it out, or generate without exact"
                )

    @property
    def read_text(self) -> bool:
        """True where one of them reads the text."""
        return any(_entry(one)[1] is Reads.TEXT for one in self.given)

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


def _entry(one: object) -> tuple[str, Reads]:
    if type(one) is FirstChecked:
        return "sparsekv", Reads.SCORES
    name = type(one).__name__
    if type(one) is not getattr(logits_process, name, None):
        return "logits_processor", Reads.MORE
    return PROCESSORS.get(name, ("logits_processor", Reads.MORE))
