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
from tiny_models import USUAL, random_tokens, tiny_model
from tiny_plans import drops, info_of, plan_for
from torch_state import poisoned_memory
from transformers import Cache, DynamicCache, PreTrainedModel

import sparsekv
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import (
    AShape,
    BlockSparse,
    Budget,
    Dense,
    Pattern,
    TileShape,
    VerticalSlash,
    fraction,
    tokens,
)
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    Eviction,
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.schema import Plan

pytestmark = pytest.mark.filterwarnings("ignore:kv_host_layers.*saves nothing")
SEEDS = [pytest.param(seed, marks=pytest.mark.fuzz if seed >= 30 else ()) for seed in range(500)]


# --- random models and plans ------------------------------------------------------------------------------------------

MANY = 10**6  # tokens, more than any context here
SMALL = TileShape(query=64, key=64)
TILES = (SMALL, SMALL, TileShape(query=128, key=64), TileShape(query=128, key=128))


def random_model(draw: Random) -> PreTrainedModel:
    """Two or three layers of any architecture, head size and GQA ratio; with sliding layers where it has them."""
    architecture, layers = draw.choice(USUAL), draw.randint(2, 3)
    kv_heads = draw.choice([1, 1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3, 4, 7, 16] if kv_heads == 1 else [1, 2, 4])
    options = {}
    if architecture in ("mistral", "mixtral", "phi3"):
        options = {"sliding_window": draw.choice([None, draw.randint(1, 300)])}
    elif architecture in ("gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen3", "smollm3") and draw.random() < 0.5:
        kinds = ["full_attention", *draw.choices(["full_attention", "sliding_attention"], k=layers - 1)]
        options = {"use_sliding_window": True, "sliding_window": draw.randint(1, 300), "layer_types": kinds}
    return tiny_model(
        architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice([4, 8, 12, 16, 32, 64, 80, 128, 256]),
        hidden=-(-draw.choice([32, 64]) // (4 * heads)) * 4 * heads,  # configs want a multiple, experts one of 4
        ffn=32,
        seed=draw.randrange(1 << 30),
        **options,
    )


def random_rules(draw: Random, layers: tuple[int, ...]) -> tuple[Eviction, ...]:
    """Layers that evict, each by a rule of its own."""
    some = [layer for layer in layers if draw.random() < 0.7] or [layers[0]]
    return tuple(_rule(draw, layer) for layer in some)


def _rule(draw: Random, layer: int) -> Eviction:
    keep = draw.choice([0, 1, draw.randint(2, 60), 1000, fraction(round(draw.uniform(0.02, 0.9), 2))])
    return drops(
        (layer,),
        keep,
        sink=draw.choice([0, 1, 4]),
        recent=draw.choice([1, 3, 20]),
        generated=draw.choice([1, 2, 5, 100]),
        observe=draw.choice([1, 4, 30, 500]),
        heads=draw.choice(["max", "per_kv_head"]),
    )


def random_plan(draw: Random, model: PreTrainedModel, ends: list[int]) -> Plan:
    """Both phases or one of them, with buckets that end at, before or behind the `ends` of the calls to come."""
    info = info_of(model)
    prefill = _prefill(draw, info, ends) if draw.random() < 0.85 else None
    decode = _decode(draw, info, ends) if info.full_layers and draw.random() < 0.85 else None
    return plan_for(model, prefill, decode)


def _bounds(draw: Random, ends: list[int]) -> list[int | None]:
    edges = {max(1, draw.choice(ends) + draw.choice([-1, 0, 1])) for _ in range(draw.choice([0, 0, 1, 2]))}
    return [*sorted(edges), None]


def _budget(draw: Random, length: int) -> Budget:
    if draw.random() < 0.4:
        return fraction(draw.choice([1.0, round(draw.uniform(0.01, 1.0), 3)]))
    return tokens(draw.choice([0, 1, draw.randint(0, 40), draw.randint(0, length), MANY]))


def _pattern(draw: Random, length: int) -> Pattern:
    budget = lambda: _budget(draw, length)  # noqa: E731
    last_q = draw.choice([1, 5, 16, 64])
    return draw.choice(
        [
            Dense(),
            AShape(sink=budget(), window=budget()),
            BlockSparse(keep=budget()),
            VerticalSlash(vertical=budget(), slash=budget(), last_q=last_q, max_tiles=budget()),
            VerticalSlash(vertical=budget(), slash=fraction(1.0), last_q=last_q, max_tiles=fraction(1.0)),
        ]
    )


def _prefill(draw: Random, info: ModelInfo, ends: list[int]) -> PrefillPlan:
    buckets, own = [], []
    for bound in _bounds(draw, ends):
        kind = draw.random()
        if kind < 0.2:
            buckets.append(PrefillBucket(up_to=bound, dense=True))
        elif kind < 0.3 and own:
            buckets.append(PrefillBucket(up_to=bound, same_as=draw.choice(own)))
        else:
            groups = [group for layer in range(info.layers) for group in _groups(draw, info, layer, ends[-1])]
            buckets.append(PrefillBucket(up_to=bound, heads=tuple(groups)))
            own += [bound] if bound else []
    return PrefillPlan(tile=draw.choice(TILES), lengths=tuple(buckets))


def _groups(draw: Random, info: ModelInfo, layer: int, length: int) -> list[HeadGroup]:
    heads = list(range(info.group_of(layer).heads))
    draw.shuffle(heads)
    cuts = sorted(draw.choices(range(1, len(heads) + 1), k=draw.randint(1, 3)))
    parts = [heads[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]  # the last heads stay dense
    return [HeadGroup(layer=layer, heads=tuple(sorted(p)), pattern=_pattern(draw, length)) for p in parts if p]


def _decode(draw: Random, info: ModelInfo, ends: list[int]) -> DecodePlan:
    shapes, bounds = _segments(draw, info), _bounds(draw, ends)
    dense = [draw.random() < 0.25 for _ in bounds[:-1]]
    buckets = [
        DecodeBucket(up_to=bound, dense=True) if off else DecodeBucket(
            up_to=bound,
            segments=tuple(shape.model_copy(update={"budget": _decode_budget(draw, ends[-1])}) for shape in shapes),
        )
        for bound, off in zip(bounds, [*dense, False], strict=True)
    ]  # fmt: skip
    follow = [layer for shape in shapes for layer in shape.layers if layer != shape.filter]
    moved = [layer for layer in follow if draw.random() < 0.7] if draw.random() < 0.5 else []
    offload = Offload(layers=tuple(moved), hot=_budget(draw, ends[-1])) if moved else None
    return DecodePlan(lengths=tuple(buckets), offload=offload)


def _decode_budget(draw: Random, length: int) -> DecodeBudget:
    if draw.random() < 0.3:
        at_most = draw.choice([1, draw.randint(1, length), MANY])
        return DecodeBudget(fraction=round(draw.uniform(0.01, 1.0), 3), at_most=at_most)
    return DecodeBudget(tokens=draw.choice([0, 1, draw.randint(0, 30), draw.randint(0, length), MANY]))


def _segments(draw: Random, info: ModelInfo) -> list[Segment]:
    """One or more, each of a filter layer and of layers behind it or of itself too."""
    found: list[Segment] = []
    first = 0
    while first < info.layers:
        filters = [layer for layer in info.full_layers if layer >= first]
        if not filters:
            break
        chooser = draw.choice(filters)
        behind = list(range(chooser + 1, info.layers))
        cut = draw.randint(0, len(behind))
        layers = [layer for layer in behind[:cut] if draw.random() < 0.8]
        if not layers or draw.random() < 0.3:
            layers = [chooser, *layers]
        found.append(_segment(draw, info, chooser, layers))
        first = max(chooser, layers[-1]) + 1
    return found


def _segment(draw: Random, info: ModelInfo, chooser: int, layers: list[int]) -> Segment:
    groups = info.group_of(chooser).kv_heads
    maps = {layer: tuple(draw.randrange(groups) for _ in range(info.group_of(layer).kv_heads)) for layer in layers}
    return Segment(
        filter=chooser,
        layers=tuple(layers),
        budget=DecodeBudget(tokens=0),
        sink=draw.choice([0, 1, 4, 30]),
        recent=draw.choice([1, 3, 20]),
        heads=draw.choice(["max", "per_kv_head", maps]),
    )


# --- rows of tests/core -----------------------------------------------------------------------------------------------


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
    for (answer, logits), (brute_answer, brute_logits) in zip(found, expected, strict=True):
        assert torch.equal(answer, brute_answer)
        torch.testing.assert_close(logits, brute_logits, atol=1e-3, rtol=1e-3)
