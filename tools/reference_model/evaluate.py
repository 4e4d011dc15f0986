"""Stage `evaluate`: exact match of greedy answers on the evaluation split, through `transformers` as users run it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from reference_model.formats import TRAINED
from reference_model.recipe import Recipe
from reference_model.tokenizer import load_tokenizer, piece_encoder
from sparsekv.planner.tasks import (
    Filler,
    Kit,
    Sample,
    Split,
    load_filler_text,
    make_samples,
    matches,
)

RESULTS_FILE = "results.json"
_BATCH_TOKENS = 262_144

Results = dict[str, dict[str, float]]  # task -> length -> accuracy, or perplexity


def evaluate(recipe: Recipe, out: Path, device: torch.device, deadline: float) -> bool:
    """Scores every task of the recipe and perplexity at every length, a cell at a time; goes on where it stopped.

    Returns:
        Whether all cells are done.
    """
    kit = _kit(out)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    tokenizer = load_tokenizer(out)
    for length in recipe.eval_lengths:
        for name in (*recipe.shares, "perplexity"):
            results = load_results(out)
            if str(length) in results.get(name, {}):
                continue
            if time.monotonic() >= deadline:
                return False
            began = time.perf_counter()
            samples = list(make_samples(TRAINED[name], kit, length, recipe.seed, recipe.eval_samples))
            score = _perplexity(model, samples) if name == "perplexity" else _accuracy(model, samples, tokenizer)
            results.setdefault(name, {})[str(length)] = score
            _save_results(out, results)
            print(f"{name} at {length}: {score:.4g} ({time.perf_counter() - began:.0f} s)", flush=True)
    return True


def load_results(out: Path) -> Results:
    """Measured so far for these weights; empty where the weights have changed since."""
    path = out / RESULTS_FILE
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    results: Results = stored["results"] if stored["weights"] == _weights_hash(out) else {}
    return results


def _save_results(out: Path, results: Results) -> None:
    stored = {"weights": _weights_hash(out), "results": results}
    (out / RESULTS_FILE).write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def _weights_hash(out: Path) -> str:
    return "sha256:" + hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def _kit(out: Path) -> Kit:
    tokenizer = load_tokenizer(out)
    encoder = piece_encoder(tokenizer)
    return Kit(Split.EVALUATION, encoder, Filler.from_text(load_filler_text(Split.EVALUATION), encoder))


def _equal_lengths(samples: list[Sample]) -> Iterator[list[Sample]]:
    """Batches of prompts that need no padding: a padding mask would take the slow path of attention."""
    groups: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[len(sample.prompt_ids), 0 if sample.answer else len(sample.answer_ids)].append(sample)
    for (length, _), group in groups.items():
        size = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(group), size):
            yield group[first : first + size]


@torch.inference_mode()
def _accuracy(model: LlamaForCausalLM, samples: list[Sample], tokenizer: Tokenizer) -> float:
    right = 0
    for batch in _equal_lengths(samples):
        prompts = torch.from_numpy(np.stack([sample.prompt_ids for sample in batch])).long().to(model.device)
        new_tokens = max(len(sample.answer_ids) for sample in batch) + 2
        generated = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens)
        texts = tokenizer.decode_batch(generated[:, prompts.shape[1] :].tolist())
        right += sum(matches(text, sample.answer) for text, sample in zip(texts, batch, strict=True))
    return right / len(samples)


@torch.inference_mode()
def _perplexity(model: LlamaForCausalLM, samples: list[Sample]) -> float:
    total, count = 0.0, 0
    for batch in _equal_lengths(samples):
        ids = torch.from_numpy(np.stack([np.concatenate([s.prompt_ids, s.answer_ids]) for s in batch])).long()
        ids = ids.to(model.device)
        scored = len(batch[0].answer_ids)
        logits = model(ids, logits_to_keep=scored + 1, use_cache=False).logits[:, :-1].float()
        targets = ids[:, -scored:]
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return math.exp(total / count)
