"""The rows of the table of tests/core: a tiny model, a plan, a cache, a precision and the calls over it.

A case is a row with a text of which rounding decides no choice, and its logits by brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from brute_force import BruteForce, RoundedCache
from masks import AmbiguousScoresError
from tiny_models import HYBRIDS, MORE, SHARED, USUAL, VOCABULARY, WINDOWED, random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, plan_for, segment
from transformers import Cache, DynamicCache, PreTrainedModel

from sparsekv.plans.patterns import AShape, BlockSparse, Dense, Pattern, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, Eviction, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan

ATTEMPTS = 12  # at scores that rounding does not decide
ONE_PIECE = ("jamba",)  # a prompt in pieces loses their state


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        made: options of `tiny_model`.
        patterns: dealt out to the heads of every layer, at lengths beyond `dense_up_to`.
        options: of `apply`.
        sizes: tokens of each call, one token behind a past being a decode step.
        pads: padding of each row in the first call, and of what it leaves over in later ones, on `side`.
        prefill: in place of the patterns.
        captured: whether its decode steps are run as captured ones, in Triton's interpreter, too.
    """

    family: str = "llama"
    made: dict[str, Any] = field(default_factory=dict)
    patterns: tuple[Pattern, ...] = ()
    dense_up_to: int | None = None
    prefill: PrefillPlan | None = None
    decode: DecodePlan | None = None
    evicting: tuple[Eviction, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (70, 1, 1, 20, 1, 1)
    batch: int = 2
    pads: tuple[int, ...] = ()
    side: str = "left"
    captured: bool = False

    def build(self) -> tuple[PreTrainedModel, Plan]:
        """The model, and its plan."""
        sizes = {} if self.family in HYBRIDS else {"head_dim": 16, "hidden": 32, "ffn": 32}
        model = tiny_model(self.family, **sizes | self.made)
        draw = torch.Generator().manual_seed(0)
        for name, value in model.named_parameters():
            if name.endswith("bias"):  # most are zero in a new model
                torch.nn.init.normal_(value, std=0.3, generator=draw)
        prefill = every_head(model, *self.patterns) if self.patterns else None
        if prefill and self.dense_up_to:
            short = PrefillBucket(up_to=self.dense_up_to, dense=True)
            prefill = prefill.model_copy(update={"lengths": (short, *prefill.lengths)})
        return model, plan_for(model, prefill, self.decode, *self.evicting)

    @property
    def in_host_memory(self) -> bool:
        return bool(self.decode and self.decode.offload) or bool(self.options.get("kv_host_layers"))

    @property
    def looks_back(self) -> bool:
        """Whether a filter layer weighs older queries than the newest."""
        buckets = self.decode.lengths if self.decode else ()
        return any(part.selector != "last" for bucket in buckets for part in bucket.segments)

    @property
    def covers(self) -> bool:
        """Whether all tokens are attended to."""
        buckets = self.decode.lengths if self.decode else ()
        chosen = {part.budget for bucket in buckets for part in bucket.segments}
        return self.patterns in ((), COVERING) and chosen <= {EVERYTHING} and not (self.prefill or self.evicting)

    @property
    def recurrent(self) -> bool:
        return self.family in HYBRIDS and set(self.made.get("layer_types", ())) != {"full_attention"}

    @property
    def steps(self) -> int:
        """Calls that are decode steps."""
        return sum(size == 1 for size in self.sizes[1:])

    @property
    def eight_bits(self) -> dict[str, Any]:
        """The option of `apply`."""
        return {name: value for name, value in self.options.items() if name == "kv_dtype"}


@dataclass(frozen=True)
class Case:
    """A row at work: `expected` are the logits of every token, [B, tokens, vocabulary], `counts` of brute force."""

    row: Row
    model: PreTrainedModel
    plan: Plan
    text: torch.Tensor
    mask: torch.Tensor
    expected: torch.Tensor
    counts: BruteForce

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        return self.text.split(self.row.sizes, 1)

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Of the first call."""
        return self.mask[:, : self.row.sizes[0]]

    def run(
        self,
        number: int,
        cache: Cache | None,
        ids: torch.Tensor | None = None,
        embed: Any = None,
        rows: torch.Tensor | None = None,
    ) -> Any:
        """One call of the model: on other ids than those of the text, on embeddings of its ids, or for some rows."""
        model: Any = self.model
        of = slice(None) if rows is None else rows
        ids = self.pieces[number][of] if ids is None else ids
        given = {"input_ids": ids} if embed is None else {"inputs_embeds": embed(ids)}
        mask = self.mask[of, : sum(self.row.sizes[: number + 1])]
        if self.row.pads and (number % 3 != 1 or not mask[:, -ids.shape[1] :].all()):  # else it need not be given
            given["attention_mask"] = mask
        return model(**given, past_key_values=cache, use_cache=True)

    def logits(self, cache: Cache, before: Callable[[int, Cache], Cache] | None = None) -> torch.Tensor:
        """Of every token; `before` is called ahead of each call and returns the cache to go on with."""
        seen = []
        for number in range(len(self.pieces)):
            cache = before(number, cache) if before else cache
            out = self.run(number, cache)
            cache = out.past_key_values
            seen.append(out.logits)
        return torch.cat(seen, 1)

    def check(self, logits: torch.Tensor, first: int = 0, rows: torch.Tensor | None = None) -> None:
        """These are the logits of the text from token `first` on, but for padding, of all rows or of some."""
        of, columns = slice(None) if rows is None else rows, slice(first, first + logits.shape[1])
        real = self.mask[of, columns].bool()
        found, expected = logits[real], self.expected[of, columns][real]
        if self.row.eight_bits:  # the last bit of a number decides what it is rounded to
            assert (found - expected).norm() < 3e-3 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def _mask_of(row: Row) -> torch.Tensor:
    mask = torch.ones(row.batch, sum(row.sizes), dtype=torch.long)
    for piece in mask.split(row.sizes, 1):
        for b, pad in enumerate(row.pads):
            spare = pad % piece.shape[1]
            piece[b, slice(0, spare) if row.side == "left" else slice(piece.shape[1] - spare, None)] = 0
    return mask


def build_case(row: Row, model: PreTrainedModel, plan: Plan, seed: int) -> Case:
    """A case of a row whose model and plan are given, with the text of a seed.

    Raises:
        AmbiguousScoresError: rounding decides what it chooses.
    """
    mask = _mask_of(row)
    text = _text(row.batch, sum(row.sizes), seed) * mask
    off = dict.fromkeys(phase for phase in ("prefill", "decode") if not row.options.get(phase, True))
    runs = plan.model_copy(update=off | ({"kv_cache": None} if "decode" in off else {}))
    return Case(row, model, plan, text, mask, *_by_brute_force(row, model, runs, text, mask))


def _text(batch: int, length: int, seed: int) -> torch.Tensor:
    """Each token once where that is possible: no choice is right between two that are alike and have no positions."""
    if batch > 1 or length >= VOCABULARY:
        return random_tokens(batch, length, seed)
    return torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(seed))[None, :length] + 1


def _by_brute_force(
    row: Row, model: PreTrainedModel, plan: Plan, text: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, BruteForce]:
    """Padded rows run alone."""
    kind = RoundedCache if row.eight_bits else DynamicCache
    parts, counts = [slice(b, b + 1) for b in range(row.batch)] if row.pads else [slice(None)], []
    whole: torch.Tensor | None = None
    for part in parts:
        columns = mask[part][0].bool()
        sizes = [int(piece.sum()) for piece in columns.split(row.sizes)]
        with torch.no_grad(), BruteForce(model, plan) as brute:
            cache = kind(config=model.config if row.recurrent else None)  # else of sliding layers, which drop tokens
            logits = _logits(model, text[part][:, columns].split(sizes, 1), cache)
        whole = torch.zeros(*text.shape, logits.shape[-1]) if whole is None else whole
        whole[part, columns] = logits
        counts.append(brute)
    assert whole is not None
    return whole, _sum(counts)


def _sum(counts: list[BruteForce]) -> BruteForce:
    first, *others = counts
    for name in ("tiles", "causal", "attended", "cached"):
        setattr(first, name, getattr(first, name) + sum(getattr(other, name) for other in others))
    return first


def _logits(model: Any, pieces: tuple[torch.Tensor, ...], cache: Cache) -> torch.Tensor:
    """With the positions that some hybrids forget."""
    seen, past = [], 0
    for piece in pieces:
        positions = torch.arange(past, past + piece.shape[1])[None]
        seen.append(model(piece, position_ids=positions, past_key_values=cache, use_cache=True).logits)
        past += piece.shape[1]
    return torch.cat(seen, 1)


@cache
def case_of(name: str) -> Case:
    """The case of a row of the table."""
    row = ROWS[name]
    model, plan = row.build()
    for seed in range(ATTEMPTS):
        with suppress(AmbiguousScoresError):
            return build_case(row, model, plan, seed)
    raise AssertionError("expected a text that rounding does not decide")


# --- the table --------------------------------------------------------------------------------------------------------

A_SHAPE = AShape(sink=tokens(1), window=tokens(40))
LINES = VerticalSlash(vertical=tokens(9), slash=tokens(20), last_q=16, max_tiles=tokens(128))
BLOCKS = BlockSparse(keep=tokens(128))
SPARSE = (A_SHAPE, LINES, BLOCKS, Dense())
COVERING = (
    AShape(sink=tokens(1), window=fraction(1.0)),
    BlockSparse(keep=fraction(1.0)),
    VerticalSlash(vertical=fraction(1.0), slash=fraction(1.0), max_tiles=fraction(1.0)),
    Dense(),
)
LONG = (200, 1, 1, 75, 1, 1)
SMALL = {"layers": 3, "heads": 2, "kv_heads": 1}


def _steps(*segments: Any, **options: Any) -> Row:
    return Row(decode=decode_plan(*segments), made={"layers": 4}, **options)


def _keeps(*rules: Eviction, **options: Any) -> Row:
    return Row(evicting=rules, sizes=(58, *[1] * 11, 28, 12, *[1] * 4), **options)


def _decode_rows() -> Iterator[tuple[str, Row]]:
    """What a plan may say of decode."""
    yield "last", _steps(segment(0, (1, 2, 3), 12))
    yield "uniform", _steps(segment(0, (1, 2, 3), 12, selector="uniform", window=5))
    yield "exponential", _steps(segment(0, (1, 2, 3), 12, selector="exponential", window=4))
    yield "a window longer than the context", _steps(segment(0, (1, 2, 3), 12, selector="uniform", window=500))
    yield "per KV head", _steps(segment(0, (1, 2, 3), 12, heads="per_kv_head"))
    yield "a map of heads", _steps(segment(0, (1, 2, 3), 12, heads={1: (1, 0), 2: (1, 1), 3: (0, 1)}))
    yield "dense layers between two segments", _steps(segment(0, (1,), 9), segment(2, (3,), 15))
    yield "no chosen tokens", _steps(segment(0, (1, 2, 3), 0))
    yield "its own choice", _steps(segment(0, (0, 1, 2), 12), segment(3, (3,), 20))
    yield "its own choice by several queries", _steps(segment(1, (1, 2), 12, selector="uniform", window=5))
    yield "its own choice per KV head", _steps(segment(1, (1, 2), 12, heads="per_kv_head"))
    yield "a budget that covers the context at first", _steps(segment(0, (1, 2, 3), 66))
    yield (
        "several queries with sinks",
        _steps(segment(0, (1, 2), 9, selector="exponential", window=3), family="gpt_oss"),
    )
    heads = {"selector": "uniform", "window": 3, "heads": "per_kv_head"}
    yield "several queries under a soft cap", _steps(segment(0, (1, 2), 9, **heads), family="gemma2")
    several = segment(5, (6,), 9, selector="uniform", window=4)  # by a layer without keys of its own
    yield "several queries over shared keys", Row(SHARED, _shared(2), decode=decode_plan(several))
    growing = (
        DecodeBucket(up_to=71, dense=True),
        DecodeBucket(up_to=92, segments=(segment(0, (1, 2), 30),)),
        DecodeBucket(up_to=None, segments=(segment(0, (1, 2), 8),)),
    )
    yield "across buckets", Row(decode=DecodePlan(lengths=growing))
    ends = (DecodeBucket(up_to=71, segments=(segment(0, (1, 2), 4),)), DecodeBucket(up_to=None, dense=True))
    yield "dense beyond the last bucket", Row(decode=DecodePlan(lengths=ends))


def _prefill_rows() -> Iterator[tuple[str, Row]]:
    """What a plan may say of prefill."""
    yield "four patterns", Row(patterns=SPARSE, sizes=(300, 1, 150, 1))
    yield "pieces off a tile", Row(patterns=SPARSE, sizes=(70, 63, 98, 69, 1))
    yield "one row of queries", Row(patterns=SPARSE, sizes=(200, 2, 1, 3, 1), batch=1)
    yield "dense below a length", Row(patterns=(A_SHAPE,), dense_up_to=190, sizes=(150, 1, 38, 1, 100, 30, 1))
    both = {"patterns": SPARSE, "decode": decode_plan(segment(0, (1, 2), 12)), "sizes": LONG}
    yield "both phases", Row(**both)
    yield "both phases, prefill off", Row(options={"prefill": False}, **both)
    yield "both phases, decode off", Row(options={"decode": False}, **both)
    yield "everything", Row(patterns=COVERING, decode=decode_plan(segment(0, (1, 2), EVERYTHING)), sizes=LONG)


def _eviction_rows() -> Iterator[tuple[str, Row]]:
    """What a layer keeps."""
    yield "evicting", _keeps(drops((1, 2), 12))
    yield "evicting per KV head", _keeps(drops((1, 2), 12, heads="per_kv_head"))
    yield "evicting to a share", _keeps(drops((0, 1, 2), fraction(0.2)))
    rules = drops((0,), 20, observe=1), drops((2,), 5, sink=0, recent=9, observe=64, generated=3)
    yield "evicting by two rules", _keeps(*rules)
    yield "evicting all but the ends", _keeps(drops((1, 2), 0))
    yield "evicting with nothing recent", _keeps(drops((1, 2), 10, recent=0))
    yield "evicting all but one answer token", _keeps(drops((1,), 12, generated=1))
    yield "evicting nothing", _keeps(drops((1, 2), 1000))
    both = {"patterns": (A_SHAPE,), "decode": decode_plan(segment(0, (1,), 12))}
    yield "evicting beside sparse layers", _keeps(drops((2,), 12), **both)
    yield "evicting with sinks", _keeps(drops((1, 2), 12), family="gpt_oss")
    yield "evicting under a soft cap", _keeps(drops((1, 2), 12), family="gemma2")
    yield "evicting beside states", _keeps(drops((1, 2), 12), family="qwen3_next")
    yield "evicting in 8 bits", _keeps(drops((0, 2), 20), options={"kv_dtype": "fp8"})


def _cache_rows() -> Iterator[tuple[str, Row]]:
    """Where keys and values lie, in which precision, and of which rows."""
    sparse = segment(0, (1, 2), 12, sink=4, recent=10)
    moved, here = decode_plan(sparse, offload=(1, 2), hot=40), decode_plan(sparse)
    long = {"sizes": (170, *[1] * 6, 60, *[1] * 6)}
    yield "in host memory", Row(decode=moved, **long)
    several = segment(0, (1, 2), 12, selector="uniform", window=5)
    yield "in host memory, several queries", Row(decode=decode_plan(several, offload=(1, 2)), **long)
    heads = decode_plan(segment(0, (1, 2), 12, heads="per_kv_head"), offload=(1,), hot=60)
    yield "in host memory, per KV head", Row(decode=heads, **long)
    yield "dense layers in host memory", Row(patterns=SPARSE, options={"kv_host_layers": (0, 2)}, sizes=(230, 1, 30, 1))
    eight = {"kv_dtype": "fp8"}
    everything = decode_plan(segment(0, (1, 2), EVERYTHING), offload=(1, 2))
    yield "everything, in host memory", Row(patterns=COVERING, decode=everything, sizes=LONG)
    yield "8 bits", Row(patterns=(A_SHAPE,), decode=here, options=eight)
    yield "8 bits, dense", Row(options=eight)
    yield "8 bits, several queries", Row(decode=decode_plan(several), options=eight)
    yield "8 bits in host memory", Row(decode=moved, options=eight, **long)
    rows = {"batch": 4, "pads": (50, 183, 7, 198), "sizes": (200, 1, 1, 30, 1, 1)}
    yield "padded on the left", Row(patterns=SPARSE, decode=here, **rows)
    last = decode_plan(segment(0, (1, 2), 8, selector="uniform", window=3))
    yield "padded on the right", Row(patterns=(A_SHAPE, LINES), decode=last, side="right", **rows)
    yield "padded in 8 bits", Row(decode=here, options=eight, batch=2, pads=(40, 0))


def _captured_rows() -> Iterator[tuple[str, Row]]:
    """Small ones, whose steps run in Triton's interpreter as well."""
    sparse = {"made": SMALL, "sizes": (60, 1, 1, 1), "captured": True}
    part = segment(0, (1, 2), 12, sink=4, recent=10)
    yield "captured, dense", Row(**sparse)
    yield "captured, sparse", Row(decode=decode_plan(part), **sparse)
    yield "captured, its own choice", Row(decode=decode_plan(segment(0, (0, 1), 12, sink=4, recent=10)), **sparse)
    turns = {"sizes": (60, 1, 1, 1, 9, 1, 1)}
    yield "captured, evicting", Row(evicting=(drops((1,), 12, generated=2),), **sparse | turns)
    yield "captured, 8 bits", Row(decode=decode_plan(part), options={"kv_dtype": "fp8"}, **sparse)
    both = {"options": {"kv_dtype": "fp8"}, "evicting": (drops((0, 2), 20),)}
    yield "captured, evicting in 8 bits", Row(**both, **sparse)
    yield "captured, padded", Row(decode=decode_plan(part), pads=(10, 0), **sparse)
    hybrid = {"layers": 4, "heads": 2, "kv_heads": 1, "layer_types": ["linear_attention", "full_attention"] * 2}
    follows = decode_plan(segment(1, (3,), 12, sink=4, recent=10))
    yield "captured, recurrent", Row("qwen3_next", hybrid, decode=follows, sizes=(60, 1, 1, 1), captured=True)
    follows = decode_plan(segment(0, (2, 4, 5), 12, sink=4, recent=10), offload=(2,), hot=40)
    hosted = {"sizes": (130, 1, 1), "batch": 1, "captured": True}
    yield "captured, shared keys", Row(SHARED, _shared(), decode=follows, **hosted)
    moved = decode_plan(part, offload=(1, 2), hot=40)
    yield "captured, in host memory", Row(decode=moved, made=SMALL, **hosted)
    yield "captured, 8 bits in host memory", Row(decode=moved, made=SMALL, options={"kv_dtype": "fp8"}, **hosted)


def _shared(layers: int = 1) -> dict[str, Any]:
    """So many layers, from layer 5 on, attend to the keys of layer 4."""
    kinds = [*["full_attention", "sliding_attention"] * 2, *["full_attention"] * (1 + layers)]
    return {"layers": 5 + layers, "layer_types": kinds, "sliding_window": 24, "num_kv_shared_layers": layers}


LOCAL = {"layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 2], "sliding_window": 24}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # which change the parts of a layer
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "exaone4, no window": ("exaone4", {"sliding_window": None}),
    "glm4_moe, no norms of heads": ("glm4_moe", {"use_qk_norm": False}),
    "granite_swa, bases of ropes": ("granite_swa", {"layer_rope_theta": [1e4, 0, 1e5, 1e4]}),
    "granitemoehybrid, all attend": ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
    "granitemoehybrid, no experts": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "granitemoeshared, nothing shared": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "hunyuan_v1_moe, experts by layer": ("hunyuan_v1_moe", {"moe_topk": [1, 2, 3, 4]}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "nemotron_h, layers of an MLP alone": (
        "nemotron_h",
        {"layers": 5, "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "full_attention"]},
    ),
    "phi, norms of heads": ("phi", {"qk_layernorm": True, "hidden": 128, "head_dim": 32}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "qwen2, a window of 30": ("qwen2", {"use_sliding_window": True, "sliding_window": 30, **LOCAL}),
    "gemma3_text, two of three local": (
        "gemma3_text",
        {
            "head_dim": 256,
            "layers": 6,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "laguna, heads by layer": (
        "laguna",
        {"num_attention_heads_per_layer": [4, 8, 4, 2], "gating": "per-element", **LOCAL},
    ),
}


def _families() -> Iterator[tuple[str, Row]]:
    """Every family, each under one of a few plans, over caches of several kinds."""
    plain = {name: (name, dict(LOCAL) if name in WINDOWED else {}) for name in (*USUAL, *MORE)}
    plain |= {SHARED: (SHARED, _shared()), **{name: (name, {}) for name in HYBRIDS}} | OPTIONS
    for number, (name, (family, made)) in enumerate(plain.items()):
        first, *rest = _full_layers(family, made)
        way = _way(number % (2 if family in HYBRIDS else 5), first, tuple(rest) or (first,))
        sizes = (80, 1, 1, 1) if family in ONE_PIECE else (60, 20, 1, 1, 10, 1)
        layers = {"layers": 3 if family in HYBRIDS else 4}
        yield name, Row(family, layers | made, **{"sizes": sizes, "batch": 1} | way)


def _way(number: int, first: int, rest: tuple[int, ...]) -> dict[str, Any]:
    """A plan and a cache for layers of which `first` chooses for the `rest`."""
    several = segment(first, rest, 9, selector="exponential", window=3, heads="per_kv_head")
    covering = {"patterns": (A_SHAPE, BLOCKS), "decode": decode_plan(segment(first, rest, EVERYTHING))}
    return (
        {"patterns": (A_SHAPE, LINES), "decode": decode_plan(segment(first, rest, 9))},
        {"patterns": (LINES,), "decode": decode_plan(several), "options": {"kv_host_layers": rest[:1]}},
        covering | {"batch": 2, "pads": (30, 0)},
        {"patterns": (LINES, BLOCKS), "evicting": (drops(rest[-1:], 20),)},
        {"decode": decode_plan(segment(first, rest, 12)), "options": {"kv_dtype": "fp8"}},
    )[number]


def _full_layers(family: str, made: dict[str, Any]) -> list[int]:
    """Layers that attend to all tokens and whose keys no other layer reads."""
    if family in HYBRIDS and "layer_types" not in made:
        return [1] if family == "jamba" else [1, 2]
    kinds = made.get("layer_types", ["full_attention"] * 4)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return full[:2] if family == SHARED else full


FAMILIES = dict(_families())
ROWS: dict[str, Row] = dict(
    (*_decode_rows(), *_prefill_rows(), *_eviction_rows(), *_cache_rows(), *_captured_rows(), *FAMILIES.items())
)
