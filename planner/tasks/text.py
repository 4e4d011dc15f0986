"""Text as tokens: pieces encoded one by one, filler text encoded once and sliced at line boundaries, and all the text
of a split as one sequence.

A long context is never tokenised as a whole. Pieces are words with their leading space, numbers, and stretches of fixed
wording: tokenizers split there anyway.
"""

from __future__ import annotations

import enum
import gzip
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsekv.plans.errors import UsageError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_DATA = Path(__file__).parent / "data"
_ANCHOR = "\n"
_WORD = "green"

EncodeBatch = Callable[[list[str]], list[list[int]]]
Decode = Callable[[list[int]], str]

# A line that reads as prose has several words, and little between spaces that is none.
_WORDS_OF_PROSE = 5
_SHARE_OF_PROSE = 0.8
_PLAIN_WORD = re.compile(r"[(\"']?[A-Za-z][a-z'-]*[,.;:)\"']{0,2}")


class TaskError(UsageError):
    """A task cannot be built as asked."""


class Split(enum.Enum):
    """The purpose of a document. Splits share neither seeds nor filler text; see wording.py for sentences and keys."""

    TRAINING = "training"
    CALIBRATION = "calibration"
    VERIFICATION = "verification"
    EVALUATION = "evaluation"


_MOST_CACHED = 300_000  # pieces


class PieceEncoder:
    """Encodes pieces of text, remembering what it has seen.

    Args:
        encode_batch: texts to token ids, without special tokens.
        bos_ids: what prompts start with; empty for models without a begin token.
        decode: token ids to text; without it, no task whose answers are cut out of encoded text can be built.

    Attributes:
        encode_lines: whole lines of text to token ids, not remembered.
    """

    def __init__(self, encode_batch: EncodeBatch, bos_ids: Sequence[int] = (), decode: Decode | None = None) -> None:
        self.bos_ids = tuple(bos_ids)
        self._decode = decode
        self.encode_lines = encode_batch if _is_concatenative(encode_batch) else _anchored(encode_batch)
        self._cache: dict[str, list[int]] = {}
        self.newline_ids = tuple(self.encode(["\n"]))

    @classmethod
    def of(cls, tokenizer: Any) -> PieceEncoder:
        """For any Hugging Face tokenizer (`transformers`); prompts start as the tokenizer lets every text start."""

        def encode_batch(texts: list[str]) -> list[list[int]]:
            encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return encoded

        bare, whole = list(encode_batch([_WORD])[0]), list(tokenizer(_WORD)["input_ids"])
        begins = range(len(whole) - len(bare) + 1)
        bos_ids = next((whole[:i] for i in begins if whole[i : i + len(bare)] == bare), ())
        return cls(encode_batch, bos_ids, decode=tokenizer.decode)

    def encode(self, pieces: Iterable[str]) -> list[int]:
        return self.encode_all([tuple(pieces)])[0]

    def encode_all(self, sequences: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of many sequences of pieces; what is new to the cache is encoded in one batch."""
        self._learn({piece for pieces in sequences for piece in pieces})
        cache = self._cache
        return [[token for piece in pieces for token in cache[piece]] for pieces in sequences]

    def text_of(self, ids: Iterable[int]) -> str:
        """The text of token ids within a line; decoders that cut off the first space of a text cut nothing here."""
        if self._decode is None:
            raise TaskError("expected an encoder that can decode, found one made without; pass decode=")
        text = self._decode([*self.newline_ids, *ids])
        return text[text.index(_ANCHOR) + 1 :]

    def _learn(self, pieces: set[str]) -> None:
        new = [piece for piece in pieces if piece not in self._cache]
        if not new:
            return
        if len(self._cache) + len(new) > _MOST_CACHED:
            self._cache.clear()
            new = list(pieces)
        self._cache.update(zip(new, self.encode_lines(new), strict=True))


def _is_concatenative(encode_batch: EncodeBatch) -> bool:
    """True where pieces can be encoded by themselves; tokenizers that prepend a space cannot."""
    whole, anchor, piece = encode_batch([_ANCHOR + _WORD, _ANCHOR, _WORD])
    return list(whole) == [*anchor, *piece]


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


@dataclass(frozen=True, slots=True, eq=False)
class Filler:
    """Encoded text.

    Attributes:
        ids: token ids, of any integer type; may be a memory map.
        line_ends: ascending indices just behind every newline; the last is `len(ids)`.
        prose_lines: which lines read as prose, the others as code; None where that was not looked at.
    """

    ids: npt.NDArray[np.integer]
    line_ends: npt.NDArray[np.int64]
    prose_lines: Mask | None = None

    @classmethod
    def from_text(cls, text: str, encoder: PieceEncoder) -> Filler:
        lines = list(io.StringIO(text, newline="\n"))
        encoded = encoder.encode_lines(lines)
        ends = np.cumsum([len(line) for line in encoded], dtype=np.int64)
        ids = np.fromiter((token for line in encoded for token in line), np.int32, int(ends[-1]))
        return cls(ids, ends, np.fromiter(map(_is_prose, lines), np.bool_, len(lines)))

    def followed_by(self, other: Filler) -> Filler:
        ends = np.concatenate([self.line_ends, other.line_ends + len(self.ids)])
        kinds = [kinds for kinds in (self.prose_lines, other.prose_lines) if kinds is not None]
        return Filler(np.concatenate([self.ids, other.ids]), ends, np.concatenate(kinds) if len(kinds) == 2 else None)

    def lines(self, first: int, last: int) -> Filler:
        """Its lines from number `first` to the one before `last`."""
        start = int(self.line_ends[first - 1]) if first else 0
        ends = self.line_ends[first:last]
        kinds = None if self.prose_lines is None else self.prose_lines[first:last]
        return Filler(self.ids[start : int(ends[-1])], ends - start, kinds)

    def excerpt(self, count: int, rng: np.random.Generator) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Exactly `count` tokens that end with a line, and the indices in them where statements may stand.

        The beginning may fall inside a line. Text shorter than `count` repeats from its start.
        """
        if count == 0:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        end = self._end(count, rng)
        return self.before(end, count), self._breaks(end, count)

    def ends(self, count: int) -> npt.NDArray[np.int64]:
        """Ends of excerpts of so many tokens: at any line, where the text repeats within one."""
        return self.line_ends[np.searchsorted(self.line_ends, count) if count <= len(self.ids) else 0 :]

    def before(self, end: int, count: int) -> Ids:
        """The excerpt that ends there."""
        return _before(self.ids, end, count).astype(np.int32)

    def prose(self) -> Filler | None:
        """Its lines of prose and the empty ones behind them, where they are known."""
        if self.prose_lines is None:
            return None
        sizes = np.diff(self.line_ends, prepend=0)
        behind = np.concatenate([[False], self.prose_lines[:-1]])
        chosen = self.prose_lines | (behind & (sizes <= 1))
        return Filler(self.ids[np.repeat(chosen, sizes)], np.cumsum(sizes[chosen]))

    def excerpt_of_kinds(self, count: int, rng: np.random.Generator) -> tuple[Ids, npt.NDArray[np.int64], Mask | None]:
        """An `excerpt` of one token or more, and which of its tokens stand in prose, where that is known."""
        end = self._end(count, rng)
        ids, breaks = self.before(end, count), self._breaks(end, count)
        if self.prose_lines is None:
            return ids, breaks, None
        sizes = np.diff(self.line_ends, prepend=0)
        return ids, breaks, _before(np.repeat(self.prose_lines, sizes), end, count)

    def _end(self, count: int, rng: np.random.Generator) -> int:
        ends = self.ends(count)
        return int(ends[rng.integers(len(ends))])

    def _breaks(self, end: int, count: int) -> npt.NDArray[np.int64]:
        rounds = range(-(-max(count - end, 0) // len(self.ids)), 0, -1)
        ends = [self.line_ends - turn * len(self.ids) for turn in rounds]
        low, high = np.searchsorted(self.line_ends, (max(end - count, 0), end), side="right")
        breaks = np.concatenate([*ends, self.line_ends[low:high]]) - (end - count)
        return breaks[breaks > 0]


def _before(values: npt.NDArray[Any], end: int, count: int) -> npt.NDArray[Any]:
    """The `count` values in front of index `end`, of values that repeat."""
    if end >= count:
        return values[end - count : end]
    return np.resize(np.roll(values, -end)[::-1], count)[::-1]


def _is_prose(line: str) -> bool:
    parts = line.strip().lstrip("#*- ").split()
    words = sum(_PLAIN_WORD.fullmatch(part) is not None for part in parts)
    return words >= max(_WORDS_OF_PROSE, _SHARE_OF_PROSE * len(parts))


def plant(ids: Ids, breaks: npt.NDArray[np.int64], lines: list[list[int]], wanted: Ids) -> tuple[Ids, Mask]:
    """Puts lines into filler, each at the first break at or behind its wanted index.

    `wanted` ascends; lines keep their order.

    Returns:
        The token ids and, for each, whether it is filler.
    """
    sizes = [len(line) for line in lines]
    tokens = np.fromiter((token for line in lines for token in line), np.int32, sum(sizes))
    if not len(ids):
        return tokens, np.zeros(len(tokens), np.bool_)
    positions = breaks[np.minimum(np.searchsorted(breaks, wanted), len(breaks) - 1)]
    is_text = np.ones(len(ids) + len(tokens), np.bool_)
    is_text[np.repeat(positions, sizes) + np.arange(len(tokens))] = False
    planted = np.empty(len(is_text), np.int32)
    planted[is_text] = ids
    planted[~is_text] = tokens
    return planted, is_text


def load_filler_text(split: Split) -> str:
    if split is Split.TRAINING:
        raise TaskError("expected a split whose text is shipped, found training; build a Filler from your own text")
    return gzip.decompress((_DATA / f"{split.value}.txt.gz").read_bytes()).decode()


# --- the text of a split ----------------------------------------------------------------------------------------------

# What is shipped, then installed packages: enough for thirty prompts of 128K. A passage, 64 characters from the first
# letter of a line, stands in it once, and in the text of no other split.
SHORT = 4096  # tokens of a prompt up to which it has text that is shipped, from anywhere in it
# Packages that sparsekv or torch requires, other ones a split. Calibration's is one whose version a plan records.
_FOLDERS: Mapping[Split, str] = MappingProxyType(
    {
        Split.CALIBRATION: "torch/_dynamo/** torch/fx/**",
        Split.VERIFICATION: "scipy/integrate/** scipy/interpolate/** scipy/linalg/** scipy/optimize/** scipy/signal/** "
        "scipy/sparse/** scipy/spatial/** scipy/special/** scipy/stats/** networkx/**",
        Split.EVALUATION: "numpy/** transformers transformers/generation/** transformers/integrations/** "
        "transformers/pipelines/** transformers/utils/**",
    }
)
_PASSAGE = 64  # characters
_LONGEST_LINE = 256  # characters; no tokenizer needs more tokens
# Special tokens of some tokenizer, and characters that small vocabularies lack.
_LEFT_OUT = re.compile(r"<[|/\w]|\[/?[A-Z_]{3,}\]|[^\n -~]")
_PART = 1 << 18  # characters encoded at once
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Shares:
    """The tasks and lengths of a run: first sample 0 of each has text of its own, then sample 1 of each."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]

    def start(self, task: str, length: int, index: int) -> int:
        """The token at which the text of a sample begins; another task has the first one's."""
        sizes = {_reserved(n) for n in (*self.lengths, length) if n > SHORT}
        before = len(self.tasks) * (index * sum(sizes) + sum(size for size in sizes if size < _reserved(length)))
        return before + (self.tasks.index(task) if task in self.tasks else 0) * _reserved(length)


class Corpus:
    """The text of a split, encoded as far as it is read. Behind its end it begins again.

    Args:
        seed: 0 begins with the text that is shipped, another one elsewhere.
    """

    def __init__(self, split: Split, encoder: PieceEncoder, seed: int) -> None:
        self._unread = (Filler.from_text(part, encoder) for part in _parts(split, seed))
        self._read = next(self._unread)

    def share(self, start: int, length: int) -> Filler:
        """The whole lines of a sample's text, `length` tokens or a few more; all text where there is less."""
        wanted = _reserved(length)
        while len(self._read.ids) < start + wanted and (part := next(self._unread, None)) is not None:
            self._read = self._read.followed_by(part)
        text = self._read
        if start + wanted > len(text.ids):
            start %= max(1, len(text.ids) - wanted)
        first, last = np.searchsorted(text.line_ends, (start, min(start + wanted, len(text.ids))))
        return text.lines(int(first) + (start > 0), int(last) + 1)


def _reserved(length: int) -> int:
    """Tokens for the text of one sample, so that it can begin and end with a line."""
    return length + _LONGEST_LINE


def _parts(split: Split, seed: int) -> Iterator[str]:
    texts: Iterator[str]
    if seed == 0:
        texts = (corpus_text(split, shipped) for shipped in (True, False))
    else:
        whole = corpus_text(split, True) + corpus_text(split, False)
        start = whole.rfind("\n", 0, int(len(whole) * (seed * _GOLDEN % 1.0))) + 1
        texts = iter((whole[start:], whole[:start]))
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start + _PART) + 1 or len(text)
            yield text[start:end]
            start = end


@cache
def corpus_text(split: Split, shipped: bool) -> str:
    """Either half of a split's text: what is shipped, or of installed packages."""
    seen: set[str] = set()
    for source in (load_filler_text, _package_text):
        for each in _FOLDERS:
            text = _distinct(source(each), seen)
            if (source is load_filler_text, each) == (shipped, split):
                return text
    raise AssertionError(split)


def _package_text(split: Split) -> str:
    paths = sorted(path for folder in _FOLDERS[split].split() for path in _installed(folder))
    return "\n".join(path.read_bytes().decode("latin-1") for path in paths)


def _installed(folder: str) -> Iterator[Path]:
    package, _, inside = folder.partition("/")
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        yield from Path(root).glob(f"{inside}/*.py".lstrip("/"))


def _distinct(text: str, seen: set[str]) -> str:
    """The lines that begin a passage not seen before, from the last one back: what follows each is then settled."""
    lines: list[str] = []
    behind = ""
    for line in reversed(text.split("\n")):
        passage = f"{line.lstrip(' ')}\n{behind}"[:_PASSAGE]
        if passage in seen or len(line) >= _LONGEST_LINE or _LEFT_OUT.search(line):
            continue
        seen.add(passage)
        lines.append(line)
        behind = f"{line}\n{behind}"[:_PASSAGE]
    return "".join(f"{line}\n" for line in reversed(lines))
