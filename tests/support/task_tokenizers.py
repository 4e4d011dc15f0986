"""Tokenizers of every kind that the tasks must work with, and kits with little filler text, quick to encode."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tiny_models import tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparsekv.planner.tasks.documents import Kit
from sparsekv.planner.tasks.text import Filler, PieceEncoder, Split, load_filler_text

REFERENCE_MODEL = Path(__file__).parents[2] / "plans" / "data" / "tiny-retriever"
TEXT_CHARACTERS = 60_000
_BEGIN = "<s>"
# How the tokenizers of Llama 3 and Qwen cut text: words with their leading space, up to three digits, line ends.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def byte_level(vocabulary: int, *, single_digits: bool = False, begin: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of Llama 3 and Qwen: pieces encode alike alone and in text."""
    tokenizer = Tokenizer(models.BPE())
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            *digits,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, vocabulary, pre_tokenizers.ByteLevel.alphabet(), begin)


def metaspace(vocabulary: int, *, single_digits: bool = True, begin: bool = True) -> PreTrainedTokenizerFast:
    """BPE as of sentencepiece and Llama 2: a space is put in front of every text, so that pieces encode otherwise."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Punctuation(),  # sentencepiece never merges letters and punctuation
            *digits,
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _trained(tokenizer, vocabulary, sorted({*_training_text(), *map(chr, range(32, 127))}), begin)


def _trained(tokenizer: Tokenizer, vocabulary: int, alphabet: list[str], begin: bool) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_BEGIN],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet) + 10,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_training_text()], trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_BEGIN} $A", special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BEGIN, eos_token=_BEGIN, clean_up_tokenization_spaces=False
    )


@cache
def _training_text() -> str:
    numbers = "".join(f"{i * i % 99991} " for i in range(4000))
    return load_filler_text(Split.CALIBRATION)[-3 * TEXT_CHARACTERS :] + numbers


def _shipped() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(REFERENCE_MODEL)


_MADE = {
    "shipped": _shipped,
    "characters": tiny_tokenizer,
    "byte_level": lambda: byte_level(9000),
    "byte_level_begin": lambda: byte_level(1500, single_digits=True, begin=True),
    "metaspace": lambda: metaspace(3000),
    "metaspace_no_begin": lambda: metaspace(6000, single_digits=False, begin=False),
}
NAMES = tuple(_MADE)


@cache
def tokenizer_named(name: str) -> PreTrainedTokenizerFast:
    return _MADE[name]()


@cache
def kit_named(name: str, split: Split = Split.CALIBRATION) -> Kit:
    return kit_of(tokenizer_named(name), split)


def kit_of(
    tokenizer: PreTrainedTokenizerFast, split: Split = Split.CALIBRATION, characters: int = TEXT_CHARACTERS
) -> Kit:
    encoder = PieceEncoder.of(tokenizer)
    return Kit(split, encoder, Filler.from_text(load_filler_text(split)[:characters], encoder))
