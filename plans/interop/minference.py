"""MInference's `best_pattern` files (arXiv 2407.02490), and the `sparse_attention_config.json` of Qwen2.5-1M, which has
the same form: for each layer, by head, `[name, a, b, score]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sparsekv.plans.errors import PlanError, PlanMismatchError
from sparsekv.plans.interop.source import Exported, Imported, Source, as_json, left_out, whole
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, Pattern, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan

QWEN_FILE = "sparse_attention_config.json"
_TILE = TileShape(query=64, key=64)
_LEAST = (30, 50)  # columns and diagonals of every head
_BLOCKS = 100  # of 64 tokens, whatever the file says
_DENSE_UP_TO = 32768  # of Qwen's engine
_LINES = "vertical_and_slash"
_NUMBER = re.compile("[0-9]{1,4}")
_NOTES = (
    "tiles of 64, 64 sampled queries, no bound on the tiles of a row: as published",
    "the tile on the diagonal, the one before it and the first one take the place of the last 100 diagonals and the "
    "first 30 columns, which its kernel always computes",
)


def missed(source: Source) -> str | None:
    """Names the lack of a file that is none of these; None where it is one."""
    found = _layers(source.json)
    if found is None:
        return "no JSON list with an object of heads for each layer"
    entries = [entry for heads in found for entry in heads.values()]
    if not entries or not all(isinstance(entry, list) and len(entry) in (3, 4) for entry in entries):
        return "heads are no lists of a name and two numbers"
    return None


def read(source: Source, model: ModelInfo) -> Imported:
    """One bucket for every length."""
    plan = PrefillPlan(tile=_TILE, lengths=(PrefillBucket(up_to=None, heads=_groups(source, model, least=_LEAST)),))
    return Imported(prefill=plan, notes=_NOTES)


def read_qwen(source: Source, model: ModelInfo) -> Imported:
    """Dense up to 32K tokens, as the engine that read this file was; 30 columns are 130 there."""
    buckets = [PrefillBucket(up_to=None, heads=_groups(source, model, least=(0, 0), few=130))]
    if model.context_length > _DENSE_UP_TO:
        buckets.insert(0, PrefillBucket(up_to=_DENSE_UP_TO, dense=True))
    notes = (*_NOTES, "dense up to 32K tokens, and 30 columns are 130, as in the engine that read such files")
    return Imported(prefill=PrefillPlan(tile=_TILE, lengths=tuple(buckets)), notes=notes)


def write(plan: Plan) -> Exported:
    """The patterns of the longest bucket."""
    if plan.prefill is None:
        raise PlanError("expected a plan with a prefill phase, found none: this format holds nothing else")
    bucket = plan.prefill.bucket(plan.model.context_length)
    lost = {"the score of each head, which no plan has: 1.0 stands for it; MInference does not use it": None}
    lost |= dict.fromkeys(left_out(plan, "prefill"))
    if len(plan.prefill.lengths) > 1:
        lost["`prefill.lengths`: all buckets but that of the longest prompts"] = None
    if plan.prefill.tile != _TILE:
        lost[f"`prefill.tile`: tiles of {plan.prefill.tile.query}: it computes tiles of 64"] = None
    layers = []
    for layer in range(plan.model.layers):
        patterns = bucket.patterns(layer, plan.model.group_of(layer).heads)
        layers.append({str(head): _entry(one, plan.model.context_length, lost) for head, one in enumerate(patterns)})
    return Exported(as_json(layers), tuple(lost))


_OF_PATTERNS = "prefill.lengths.heads.pattern"


def _layers(data: Any) -> list[dict[str, Any]] | None:
    if isinstance(data, dict) and data and all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in data):
        data = [data[key] for key in sorted(data, key=int)]
    is_list = isinstance(data, list) and bool(data)
    return data if is_list and all(isinstance(heads, dict) and heads for heads in data) else None


def _groups(source: Source, model: ModelInfo, least: tuple[int, int], few: int = 30) -> tuple[HeadGroup, ...]:
    layers = _layers(source.json) or []
    if len(layers) != model.layers:
        raise PlanMismatchError(f"expected settings of the {model.layers} layers of {model.id}, found {len(layers)}")
    return tuple(group for layer, heads in enumerate(layers) for group in _of_layer(layer, heads, model, least, few))


def _of_layer(
    layer: int, heads: dict[str, Any], model: ModelInfo, least: tuple[int, int], few: int
) -> Iterator[HeadGroup]:
    count = model.group_of(layer).heads
    if set(heads) != set(map(str, range(count))):
        raise PlanMismatchError(
            f"expected settings of heads 0 to {count - 1} of layer {layer} of {model.id}, found {len(heads)} heads"
        )
    for head in range(count):
        yield HeadGroup(layer=layer, heads=(head,), pattern=_pattern(heads[str(head)], layer, head, least, few))


def _pattern(entry: list[Any], layer: int, head: int, least: tuple[int, int], few: int) -> Pattern:
    name, *sizes = entry[:3]
    where = f"size of layer {layer}, head {head}"
    first, second = (whole(size, where) for size in sizes)
    if name == _LINES:
        columns, diagonals = max(few if first == 30 else first, least[0]), max(second, least[1])
        return VerticalSlash(vertical=tokens(columns), slash=tokens(diagonals), last_q=64, max_tiles=fraction(1.0))
    if name == "stream_llm":
        return AShape(sink=tokens(first), window=tokens(second))
    if name == "block_sparse":
        return BlockSparse(keep=tokens(_BLOCKS * _TILE.key))
    raise PlanError(
        f"expected {_LINES}, stream_llm or block_sparse for layer {layer}, head {head}, found {name!r:.40}; correct it"
    )


def _entry(pattern: Pattern, context: int, lost: dict[str, None]) -> list[Any]:
    if isinstance(pattern, VerticalSlash):
        if pattern.max_tiles.resolve(context) < context:
            lost[f"`{_OF_PATTERNS}.max_tiles`: the bound on the tiles of a row"] = None
        if pattern.last_q != 64:
            lost[f"`{_OF_PATTERNS}.last_q`: it samples 64 queries"] = None
        sizes = {name: getattr(pattern, name).resolve(context) for name in ("vertical", "slash")}
        for (name, size), least in zip(sizes.items(), _LEAST, strict=True):
            if size < least:
                lost[f"`{_OF_PATTERNS}.{name}`: fewer than {least}, which it computes at least"] = None
        return [_LINES, *sizes.values(), 1.0]
    if isinstance(pattern, AShape):
        return ["stream_llm", pattern.sink.resolve(context), pattern.window.resolve(context), 1.0]
    if isinstance(pattern, BlockSparse):
        if pattern.keep.resolve(context) != _BLOCKS * _TILE.key:
            lost[f"`{_OF_PATTERNS}.keep`: block_sparse heads compute {_BLOCKS} tiles of 64"] = None
        return ["block_sparse", _BLOCKS, 800, 1.0]
    if not isinstance(pattern, Dense):
        lost[f"`{_OF_PATTERNS}.pattern`: {pattern.pattern} heads, which stand as dense ones"] = None
    lost["dense heads, which stand as a window over the whole context"] = None
    return ["stream_llm", context, context, 1.0]
