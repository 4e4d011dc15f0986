"""Random models under random plans give the logits and the tokens of brute force, whatever comes in between.

`pytest -m fuzz` runs the seeds from 30 on, every other run those before; a seed is the id of its test.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from brute_force import BruteForce
from masks import AmbiguousScoresError
from poison import poisoned_memory
from random_plans import random_model, random_plan
from tiny_models import random_tokens
from transformers import Cache, DynamicCache, PreTrainedModel

import sparsekv
from sparsekv.plans.schema import Plan

SEEDS = [pytest.param(seed, marks=pytest.mark.fuzz if seed >= 30 else ()) for seed in range(500)]
ATTEMPTS = 12  # at scores that rounding does not decide


@dataclass(frozen=True)
class Walk:
    """Calls of a model one behind the other, and those that a copy of the cache goes on with."""

    pieces: tuple[torch.Tensor, ...]
    fork: int | None  # the cache is copied before this piece
    branch: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, draw: Random) -> Walk:
        """Two turns at most, each of chunks cut anywhere and of decode steps."""
        sizes = [size for turn in range(draw.choice([1, 1, 2])) for size in _turn(draw, first=turn == 0)]
        batch, fork = draw.choice([1, 1, 2, 3]), draw.choice([None, draw.randint(1, len(sizes))])
        more = [] if fork is None else _turn(draw, first=False)[-3:]
        text = random_tokens(batch, sum(sizes) + sum(more), draw.randrange(1 << 30)).split([*sizes, *more], 1)
        return cls(text[: len(sizes)], fork, text[len(sizes) :])

    @property
    def batch(self) -> int:
        return self.pieces[0].shape[0]

    @property
    def ends(self) -> list[int]:
        return torch.tensor([piece.shape[1] for piece in self.pieces]).cumsum(0).tolist()

    def logits(self, model: PreTrainedModel, cache: Cache | None) -> torch.Tensor:
        """Of every token, those of the branch last: [B, tokens, vocabulary]."""
        runs: Any = model
        seen, copied = [], None
        for number, piece in enumerate(self.pieces):
            copied = deepcopy(cache) if number == self.fork else copied
            out = runs(piece, past_key_values=cache)
            cache = out.past_key_values
            seen.append(out.logits)
        copied = deepcopy(cache) if self.fork == len(self.pieces) else copied
        seen += [runs(piece, past_key_values=copied).logits for piece in self.branch]
        return torch.cat(seen, 1)


def _turn(draw: Random, *, first: bool) -> list[int]:
    """Tokens of each call. One token behind a past would be a decode step, so that chunks have two or more."""
    length = draw.choice([draw.randint(2, 40), draw.randint(40, 250), draw.randint(250, 500 if first else 300)])
    cuts = sorted(draw.sample(range(2, length), min(draw.choice([0, 0, 1, 2]), max(0, length // 4))))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    chunks = [size if size > 1 or (first and at == 0) else 2 for at, size in enumerate(sizes)]
    return [*chunks, *[1] * draw.randint(0, 6)]


@dataclass(frozen=True)
class Talk:
    """Calls of `generate`, each with all that was said so far."""

    prompt: torch.Tensor
    filled: int  # tokens of the prompt that are cached before the first call
    turns: tuple[torch.Tensor, ...]  # what is said behind each answer but the last
    options: dict[str, Any]
    seed: int
    eos: int | None = None

    @classmethod
    def random(cls, draw: Random) -> Talk:
        """Greedy or sampled, from a filled cache or not, in one turn or two; rows may be equal."""
        length, batch = draw.choice([draw.randint(1, 40), draw.randint(40, 400)]), draw.choice([1, 1, 2, 3])
        prompt = random_tokens(batch, length, draw.randrange(1 << 30))
        prompt = prompt[:1].repeat(batch, 1) if draw.random() < 0.3 else prompt
        options: dict[str, Any] = {"max_new_tokens": draw.choice([1, 2, 8]), "do_sample": draw.random() < 0.5}
        filled, turns, kind = 0, (), draw.choice(["whole", "filled", "turns", "chunks", "several", "no cache"])
        if kind == "filled":
            filled = draw.choice([0, length // 2, length - 1])
        elif kind == "turns":
            turns = (random_tokens(batch, draw.choice([0, 1, draw.randint(2, 100)]), draw.randrange(1 << 30)),)
        elif kind == "chunks":  # without a last one of one token, which would look like a decode step
            sizes = [size for size in range(2, length + 2) if length % size != 1]
            options["prefill_chunk_size"] = draw.choice(sizes or [None])
        elif kind == "several":
            options |= {"num_return_sequences": 3, "do_sample": True}
        elif kind == "no cache":
            options |= {"use_cache": False}
        options |= {"temperature": draw.choice([0.5, 1.3]), "top_k": 20} if options["do_sample"] else {}
        return cls(prompt, filled, turns, options, draw.randrange(1 << 30))

    @property
    def ends(self) -> list[int]:
        new, length = self.options["max_new_tokens"], self.prompt.shape[1]
        return [length, length + new - 1, length + sum(new + said.shape[1] for said in self.turns)]

    def answers(self, model: PreTrainedModel, cache: Cache | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and logits of every call."""
        runs: Any = model
        stop = {"eos_token_id": self.eos, "pad_token_id": 0} if self.eos is not None else {}
        if self.filled:
            cache = runs(self.prompt[:, : self.filled], past_key_values=cache).past_key_values
        said, found = self.prompt, []
        for more in (*self.turns, None):
            torch.manual_seed(self.seed)
            out = runs.generate(
                said, attention_mask=torch.ones_like(said), past_key_values=cache, return_dict_in_generate=True,
                output_logits=True, **self.options, **stop,
            )  # fmt: skip
            found.append((out.sequences, torch.stack(out.logits, 1)))
            cache = out.past_key_values
            said = out.sequences if more is None else torch.cat((out.sequences, more), 1)
        return found

    def by_brute_force(self, draw: Random, model: PreTrainedModel, plan: Plan) -> tuple[Talk, list[Any]]:
        """The answers, in half of the cases with a token of the first one as the end of every answer."""
        with torch.no_grad(), BruteForce(model, plan):
            found = self.answers(model, self.own_cache())
            if draw.random() < 0.5:
                eos = draw.choice(found[0][0][:, self.prompt.shape[1] :].flatten().tolist())
                talk = replace(self, eos=eos)
                return talk, talk.answers(model, self.own_cache())
        return self, found

    def own_cache(self) -> Cache | None:
        return DynamicCache() if self.options.get("use_cache", True) else None


def _unambiguous(answers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for _, logits in answers:
        best = logits.topk(2).values
        if (best[..., 0] - best[..., 1]).min() < 1e-4:
            raise AmbiguousScoresError


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_of_chunks_steps_and_copies_are_those_of_brute_force(seed: int) -> None:
    draw, expected = Random(seed), None
    for _ in range(ATTEMPTS):
        model, walk = random_model(draw), Walk.random(draw)
        plan = random_plan(draw, model, walk.ends)
        try:
            with torch.no_grad(), BruteForce(model, plan):
                expected = walk.logits(model, DynamicCache())
            break
        except AmbiguousScoresError:
            continue
    assert expected is not None
    backend, poison = draw.choice(["auto", "auto", "reference"]), draw.random() < 0.5
    made = draw.choice([lambda _: None, lambda _: DynamicCache(), lambda handle: _new_cache(draw, handle, walk)])
    memory = poisoned_memory() if poison else nullcontext()
    with torch.no_grad(), sparsekv.apply(model, plan, backend=backend) as handle, memory:
        found = walk.logits(model, made(handle))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def _new_cache(draw: Random, handle: Any, walk: Walk) -> Cache:
    """With room for all that comes, or for less."""
    return handle.new_cache(draw.choice([walk.ends[-1], max(1, walk.ends[0] - 1)]), walk.batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_generate_gives_the_tokens_of_brute_force(seed: int) -> None:
    draw, expected = Random(seed), None
    for _ in range(ATTEMPTS):
        model, talk = random_model(draw), Talk.random(draw)
        plan = random_plan(draw, model, talk.ends)
        try:
            talk, expected = talk.by_brute_force(draw, model, plan)
            _unambiguous(expected)
            break
        except AmbiguousScoresError:
            continue
    assert expected is not None
    rows = talk.prompt.shape[0] * talk.options.get("num_return_sequences", 1)
    ours = talk.options.get("use_cache", True) and draw.random() < 0.3
    with torch.no_grad(), sparsekv.apply(model, plan) as handle:
        cache = handle.new_cache(talk.ends[-1], rows) if ours else draw.choice([None, talk.own_cache()])
        with poisoned_memory() if draw.random() < 0.5 else nullcontext():
            found = talk.answers(model, cache)
    for (tokens, logits), (brute_tokens, brute_logits) in zip(found, expected, strict=True):
        assert torch.equal(tokens, brute_tokens)
        torch.testing.assert_close(logits, brute_logits, atol=1e-3, rtol=1e-3)
