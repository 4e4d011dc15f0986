"""Hypothesis strategies: any plan, JSON data, and damage done to text and to data."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from plans_samples import digest_of

from sparsekv.plans.model import AttentionGroup, Fingerprint, ModelInfo, is_model_id
from sparsekv.plans.patterns import AShape, BlockSparse, Budget, Dense, Pattern, TileShape, VerticalSlash
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.quality import CellScore, Excludes, LengthScore, Quality
from sparsekv.plans.schema import Plan, Provenance

LAYERS, HEADS, KV_HEADS = 6, 4, 2

shares = st.floats(1e-6, 1.0)
counts = st.integers(0, 1 << 21)
decode_budgets = st.builds(DecodeBudget, tokens=counts) | st.builds(
    DecodeBudget, fraction=shares, at_most=st.integers(1, 1 << 20)
)
budgets = st.builds(Budget, tokens=counts) | st.builds(Budget, fraction=shares)
# Text that a file can hold: everything but halves of surrogate pairs.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(1 << 63) + 1, (1 << 63) - 1) | texts
json_values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(texts, json_values, max_size=4)
patterns: st.SearchStrategy[Pattern] = st.one_of(
    st.builds(Dense),
    st.builds(AShape, sink=budgets, window=budgets),
    st.builds(VerticalSlash, vertical=budgets, slash=budgets, last_q=st.integers(1, 1024), max_tiles=budgets),
    st.builds(BlockSparse, keep=budgets),
)


TILES = tuple(TileShape(query=query, key=key) for query, key in ((64, 64), (128, 64), (128, 128)))


@st.composite
def bounds(draw: st.DrawFn) -> list[int | None]:
    """Upper bounds of one to four buckets, the last open."""
    return [*sorted(draw(st.sets(st.integers(1, 1 << 20), max_size=3))), None]


@st.composite
def head_groups(draw: st.DrawFn) -> tuple[HeadGroup, ...]:
    """A pattern for some heads of some layers."""
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    chosen = draw(st.lists(st.sampled_from(places), min_size=1, max_size=12, unique=True))
    return tuple(HeadGroup(layer=layer, heads=(head,), pattern=draw(patterns)) for layer, head in chosen)


@st.composite
def prefill_plans(draw: st.DrawFn) -> PrefillPlan:
    """Buckets that are dense, sparse, or as an earlier one."""
    buckets: list[PrefillBucket] = []
    for bound in draw(bounds()):
        own = [bucket.up_to for bucket in buckets if bucket.same_as is None]
        kind = draw(st.sampled_from(["dense", "heads", "same_as"] if own else ["dense", "heads"]))
        given: dict[str, Any] = {"extrapolated": draw(st.booleans())}
        given |= {"dense": True} if kind == "dense" else {}
        given |= {"heads": draw(head_groups())} if kind == "heads" else {}
        given |= {"same_as": draw(st.sampled_from(own))} if kind == "same_as" else {}
        buckets.append(PrefillBucket(up_to=bound, **given))
    return PrefillPlan(tile=draw(st.sampled_from(TILES)), lengths=tuple(buckets))


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Filter layers and what they choose for, ascending."""
    marks = sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=2, max_size=4)))
    pairs = list(zip(marks[::2], marks[1::2], strict=False))
    maps, alone = (
        st.sampled_from(["max", "per_kv_head", None]),
        draw(st.booleans()),
    )  # filters choose for themselves too
    return tuple(
        Segment(
            filter=first,
            layers=tuple(range(first + (not alone), last + 1)),
            budget=draw(decode_budgets),
            sink=draw(st.integers(0, 64)),
            recent=draw(st.integers(1, 512)),
            selector=draw(st.sampled_from(["last", "uniform", "exponential"])),
            window=draw(st.integers(1, 64)),
            scope=draw(st.sampled_from(["global", "local"])),
            heads=draw(maps) or {layer: (1,) * KV_HEADS for layer in range(first + (not alone), last + 1)},
        )
        for first, last in pairs
    )


@st.composite
def decode_plans(draw: st.DrawFn) -> DecodePlan:
    """Buckets that are dense or hold segments; some of the sparse layers may be offloaded."""
    buckets, shared = [], draw(segments())
    for bound in draw(bounds()):
        chosen = tuple(part.model_copy(update={"budget": draw(decode_budgets)}) for part in shared)
        chosen = chosen if draw(st.booleans()) else ()
        buckets.append(DecodeBucket(up_to=bound, segments=chosen) if chosen else DecodeBucket(up_to=bound, dense=True))
    filters = {part.filter for part in shared}
    sparse = sorted({layer for bucket in buckets for layer in bucket.sparse_layers} - filters)
    offload = Offload(layers=tuple(sparse), hot=draw(budgets)) if sparse and draw(st.booleans()) else None
    return DecodePlan(lengths=tuple(buckets), offload=offload)


positive = st.floats(0, 1e6)
portions = st.none() | st.floats(0, 1)
length_scores = st.builds(
    LengthScore,
    length=st.integers(1, 1 << 20),
    density=shares,
    read=shares,
    kl=positive,
    floor=positive,
    upper=positive,
    worst=positive,
    agreed=st.none() | portions,
)
cells = st.builds(
    CellScore, task=names, length=st.integers(1, 1 << 20), prompts=st.integers(1, 99), answered=st.integers(0, 99)
)
qualities = st.builds(
    Quality,
    test=st.sampled_from(["small", "full", "prompts"]),
    run=st.integers(1, 9),
    level=shares,
    step=st.none() | st.integers(1, 1 << 20),
    cells=st.lists(cells, max_size=3).map(tuple),
    lengths=st.lists(length_scores, max_size=3, unique_by=lambda one: one.length).map(tuple),
    excludes=st.none() | st.builds(Excludes, net_loss=shares),
)
_GROUP = AttentionGroup(layers=tuple(range(LAYERS)), kind="full", heads=HEADS, kv_heads=KV_HEADS, head_dim=8)
models = st.builds(
    ModelInfo,
    id=names.filter(is_model_id),
    revision=st.none() | names,
    model_type=names,
    context_length=st.integers(1, 1 << 21),
    rope=json_objects,
    attention=st.just((_GROUP,)),
    fingerprint=st.just(Fingerprint(architecture=digest_of("1"))),
)
plans = st.builds(
    Plan,
    status=st.sampled_from(["imported", "unverified"]),
    model=models,
    prefill=st.none() | prefill_plans(),
    decode=st.none() | decode_plans(),
    quality=st.none() | qualities,
    provenance=st.builds(Provenance, versions=st.dictionaries(names, names, max_size=3), settings=json_objects),
    extensions=json_objects,
)

TOKENS = [
    *("{", "}", "[", "]", ": ", ",", "- ", "? ", "&a ", "*a", "!!str ", "<<: ", "# ", "'", '"', "|", ">", "%"),
    *("---\n", "...\n", "\t", "\n", "  ", "\r", "\x00", "\x85", "\ufeff"),
    *(".nan", ".inf", "-1", "1e999", "null", "true", "no", "0x1"),
]


@st.composite
def damaged_texts(draw: st.DrawFn, text: str) -> str:
    """`text` after a few edits: characters or lines dropped, moved or doubled, odd tokens put in."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 40)))
        piece = draw(st.sampled_from(["", text[start:stop] * 2, *TOKENS]) | texts)
        text = text[:start] + piece + text[stop:]
    return text
