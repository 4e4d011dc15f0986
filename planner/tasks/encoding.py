"""Encoding of documents piece by piece, so that a long context is never tokenised as a whole.

Pieces are words with their leading space, numbers, and stretches of fixed wording: tokenizers split there anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sparsekv.planner.tasks.types import Ids, TaskError

_CACHE_ENTRIES = 300_000
_ANCHOR = "\n"
_WORD = "green"

EncodeBatch = Callable[[list[str]], list[list[int]]]


class PieceEncoder:
    """Encodes pieces of text, remembering what it has seen.

    Args:
        encode_batch: texts to token ids, without special tokens.
        bos_ids: what prompts start with; empty for models without a begin token.
    """

    def __init__(self, encode_batch: EncodeBatch, bos_ids: Sequence[int] = ()) -> None:
        self.bos_ids = tuple(bos_ids)
        self._encode = encode_batch if _is_concatenative(encode_batch) else _anchored(encode_batch)
        self._cache: dict[str, list[int]] = {}
        self.newline_ids = tuple(self.encode(["\n"]))

    @classmethod
    def of(cls, tokenizer: Any) -> PieceEncoder:
        """For any Hugging Face tokenizer (`transformers`); prompts start as the tokenizer lets every text start."""

        def encode_batch(texts: list[str]) -> list[list[int]]:
            encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return encoded

        return cls(encode_batch, _put_in_front(encode_batch([_WORD])[0], tokenizer(_WORD)["input_ids"]))

    @classmethod
    def of_raw(cls, tokenizer: Any, bos_ids: Sequence[int] = ()) -> PieceEncoder:
        """For a `tokenizers.Tokenizer`: several times faster than the wrapper of `transformers`."""

        def encode_batch(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        return cls(encode_batch, bos_ids)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Token ids of one run of pieces."""
        return self.encode_all([tuple(pieces)])[0]

    def encode_all(self, runs: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of many runs of pieces; what is new to the cache is encoded in one batch."""
        self._learn({piece for run in runs for piece in run})
        cache = self._cache
        return [[token for piece in run for token in cache[piece]] for run in runs]

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Token ids of whole lines of text, not remembered."""
        return self._encode(lines)

    def _learn(self, pieces: set[str]) -> None:
        new = [piece for piece in pieces if piece not in self._cache]
        if not new:
            return
        if len(self._cache) + len(new) > _CACHE_ENTRIES:
            self._cache.clear()
            new = list(pieces)
        self._cache.update(zip(new, self._encode(new), strict=True))


def as_ids(tokens: Sequence[int]) -> Ids:
    """Token ids as an array."""
    return np.asarray(tokens, dtype=np.int32)


def _is_concatenative(encode_batch: EncodeBatch) -> bool:
    """Whether pieces can be encoded by themselves; tokenizers that prepend a space cannot."""
    whole, anchor, piece = encode_batch([_ANCHOR + _WORD, _ANCHOR, _WORD])
    return list(whole) == [*anchor, *piece]


def _put_in_front(bare: Sequence[int], whole: Sequence[int]) -> Sequence[int]:
    """What `whole` has in front of `bare`."""
    extra = range(len(whole) - len(bare) + 1)
    return next((whole[:i] for i in extra if list(whole[i : i + len(bare)]) == list(bare)), ())


def _anchored(encode_batch: EncodeBatch) -> EncodeBatch:
    """Encodes every piece behind a newline and cuts the newline off."""
    anchor = list(encode_batch([_ANCHOR])[0])

    def encode(texts: list[str]) -> list[list[int]]:
        encoded = [list(ids) for ids in encode_batch([_ANCHOR + text for text in texts])]
        for text, ids in zip(texts, encoded, strict=True):
            if ids[: len(anchor)] != anchor:
                raise TaskError(
                    "expected a tokenizer that keeps a newline apart from what follows, found one that merges it with "
                    f"{text[:20]!r}; give your own calibration prompts"
                )
        return [ids[len(anchor) :] for ids in encoded]

    return encode
