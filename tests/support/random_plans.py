"""Random tiny models and random plans for them, the same for the same seed."""

from __future__ import annotations

from random import Random

from tiny_models import USUAL, tiny_model
from tiny_plans import drops, info_of, plan_for
from transformers import PreTrainedModel

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
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Retention,
    Segment,
)
from sparsekv.plans.schema import Plan

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


def random_rules(draw: Random, layers: tuple[int, ...]) -> tuple[Retention, ...]:
    """Layers that evict, each by a rule of its own."""
    some = [layer for layer in layers if draw.random() < 0.7] or [layers[0]]
    return tuple(_rule(draw, layer) for layer in some)


def _rule(draw: Random, layer: int) -> Retention:
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
