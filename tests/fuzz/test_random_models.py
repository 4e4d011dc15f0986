"""Random models under random plans give the logits and the tokens of brute force, whatever comes in between.

`pytest -m fuzz` runs the seeds from 30 on, every other run those before; a seed is the id of its test.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from brute_force import BruteForce
from core_checks import CHECKS, is_brute_force
from core_rows import ATTEMPTS, Case, Row, build_case
from masks import AmbiguousScoresError
from poison import poisoned_memory
from random_plans import random_model, random_plan, random_rules
from tiny_models import random_tokens
from tiny_plans import plan_for
from transformers import Cache, DynamicCache, PreTrainedModel

import sparsekv
from sparsekv.plans.schema import Plan

pytestmark = pytest.mark.filterwarnings("ignore:kv_host_layers.*saves nothing")
SEEDS = [pytest.param(seed, marks=pytest.mark.fuzz if seed >= 30 else ()) for seed in range(500)]


def _turn(draw: Random, *, first: bool) -> list[int]:
    """Tokens of each call. One token behind a past would be a decode step, so that chunks have two or more."""
    length = draw.choice([draw.randint(2, 40), draw.randint(40, 250), draw.randint(250, 500 if first else 300)])
    cuts = sorted(draw.sample(range(2, length), min(draw.choice([0, 0, 1, 2]), max(0, length // 4))))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    chunks = [size if size > 1 or (first and at == 0) else 2 for at, size in enumerate(sizes)]
    return [*chunks, *[1] * draw.randint(0, 6)]


def random_case(draw: Random, seed: int) -> Case:
    """A model, a plan and a cache; two turns at most, each of chunks cut anywhere and of decode steps."""
    for attempt in range(ATTEMPTS):
        model = random_model(draw)
        sizes = [size for turn in range(draw.choice([1, 1, 2])) for size in _turn(draw, first=turn == 0)]
        plan, full = random_plan(draw, model, [*accumulate(sizes)]), plan_for(model).model.full_layers
        if full and draw.random() < 0.3:
            plan = plan_for(model, plan.prefill, None, *random_rules(draw, full))
        batch = draw.choice([1, 1, 2, 3])
        pads = tuple(draw.randrange(sizes[0]) for _ in range(batch)) if draw.random() < 0.2 else ()
        host = not plan.kv_cache and not (plan.decode and plan.decode.offload) and draw.random() < 0.2
        moved = bool(plan.decode and plan.decode.offload) or host or bool(plan.kv_cache)
        row = Row(
            model.config.model_type,
            prefill=plan.prefill,
            decode=plan.decode,
            evicting=plan.kv_cache or (),
            options=({"kv_host_layers": 1} if host else {}) | ({"kv_dtype": "fp8"} if draw.random() < 0.2 else {}),
            sizes=tuple(sizes),
            batch=batch,
            pads=() if moved else pads,
            side=draw.choice(["left", "right"]),
        )
        with suppress(AmbiguousScoresError):
            return build_case(row, model, plan, ATTEMPTS * seed + attempt)
    raise AssertionError("expected a case that rounding does not decide")


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_a_random_row(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under brute force, and under one other check of tests/core."""
    draw = Random(seed)
    case = random_case(draw, seed)
    is_brute_force(case, monkeypatch)
    check = draw.choice([check for check, applies in CHECKS.items() if applies(case.row)])
    print(check.__name__)
    check(case, monkeypatch)


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
