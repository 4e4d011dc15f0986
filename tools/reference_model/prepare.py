"""Stage `prepare`: the training text as a tokenizer and an array of tokens."""

from pathlib import Path

import numpy as np

from reference_model.corpus import split_files
from reference_model.recipe import Recipe
from reference_model.tokenizer import FILE_NAME, load_tokenizer, piece_encoder, train_tokenizer
from sparsekv.planner.tasks.documents import Kit
from sparsekv.planner.tasks.text import Filler, Split

TOKENS_FILE = "tokens.npy"


def is_prepared(work: Path) -> bool:
    """Whether the stage is done."""
    return (work / FILE_NAME).exists() and (work / TOKENS_FILE).exists()


def prepare(recipe: Recipe, library: Path, work: Path) -> None:
    """Trains the tokenizer on the training files and encodes them, uint16, a newline at the end of every file."""
    files = split_files(library, Split.TRAINING)
    texts = [file.text for file in files]
    tokenizer = train_tokenizer(texts, recipe.shape.vocab)
    tokens = np.concatenate([np.asarray(tokenizer.encode(text).ids, np.uint16) for text in texts])
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / FILE_NAME))
    np.save(work / TOKENS_FILE, tokens)
    print(f"prepared {len(files)} files, {sum(map(len, texts))} characters, {len(tokens)} tokens")


def training_kit(work: Path) -> Kit:
    """What training documents are built from; the tokens are a memory map that worker processes share."""
    tokenizer = load_tokenizer(work)
    encoder = piece_encoder(tokenizer)
    tokens = np.load(work / TOKENS_FILE, mmap_mode="r")
    (newline,) = encoder.newline_ids
    line_ends = np.flatnonzero(np.asarray(tokens) == newline).astype(np.int64) + 1
    return Kit(Split.TRAINING, encoder, Filler(tokens, line_ends))
