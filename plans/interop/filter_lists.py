"""Reads and writes which layers choose tokens for the others, as other tools write it: OmniKV's and SparseEngine's
lists, IndexCache's letters, Kascade's maps of heads. All are decode phases, but for letters of a model's own indexers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv.plans.errors import PlanError, PlanMismatchError
from sparsekv.plans.interop.source import Exported, Imported, Source, as_json, layers_of, left_out, whole
from sparsekv.plans.model import INDEXED, ModelInfo
from sparsekv.plans.phases import (
    CHOSEN_SHARE,
    RECENT,
    SINK,
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    IndexSharing,
    Segment,
    followers,
)
from sparsekv.plans.schema import Plan

_FIXED = f"sinks ({SINK}) and recent tokens ({RECENT}): ours, as the file has none"
_LAST = "the choice is by the newest query, over all heads together"
_NO_BUDGET = f"a budget of {CHOSEN_SHARE:.0%} of the context: ours, as the file has none"
_KASCADERECENT = 2
_KINDS = {"full": "F", "shared": "S"}  # of `indexer_types`


# --- OmniKV (ICLR 2025) and SparseEngine ------------------------------------------------------------------------------


def missed_list(source: Source) -> str | None:
    """Names the lack of a file that is no list of filter layers; None where it is one."""
    data = source.json
    if isinstance(data, dict) and ("do_select_layers" in data or "full_attention_layers" in data):
        return None
    return 'no JSON object with "do_select_layers" or "full_attention_layers"'


def read_list(source: Source, model: ModelInfo) -> Imported:
    """OmniKV: layers before the first that chooses, and those that wait for host memory, are dense. SparseEngine: each
    dense layer chooses for those up to the next.
    """
    data: dict[str, Any] = source.json
    notes = [_FIXED, _LAST]
    if "do_select_layers" in data:
        filters = layers_of(data["do_select_layers"], '"do_select_layers"')
        wait = whole(data.get("num_wait_load_layers", 0), '"num_wait_load_layers"')
        waits = range(min(wait, model.layers) + 1)
        dense = {*range(min(filters[0], model.layers)), *(layer + n for layer in filters for n in waits)}
        size = data.get("num_of_selected_tokens")
    else:
        dense = set(layers_of(data["full_attention_layers"], '"full_attention_layers"'))
        filters = tuple(sorted(dense))
        size = data.get("decode_keep_tokens")
    notes += [_NO_BUDGET] if size is None else []
    return _imported(model, filters, dense, _budget(size, model), notes)


def _budget(size: Any, model: ModelInfo) -> DecodeBudget:
    size = CHOSEN_SHARE if size is None else size
    if isinstance(size, float) and 0.0 < size < 1.0:
        return DecodeBudget(fraction=size, at_most=max(1, round(size * model.context_length)))
    return DecodeBudget(tokens=max(1, whole(size, "the number of chosen tokens")))


def write_list(plan: Plan) -> Exported:
    """For SparseEngine's `omnikv` method."""
    segments, lost = _segments(plan)
    sparse = {layer for segment in segments for layer in segment.layers}
    dense = [layer for layer in range(plan.model.layers) if layer not in sparse]
    tokens = max((segment.budget.most for segment in segments), default=1)
    if any(segment.budget.tokens is None for segment in segments) or len({one.budget for one in segments}) > 1:
        lost.append(f"`{_OF_SEGMENTS}.budget`: by segment or as a share: it has one, of {tokens} tokens")
    data = {"sparse_method": "omnikv", "full_attention_layers": ",".join(map(str, dense)), "decode_keep_tokens": tokens}
    return Exported(as_json(data), tuple(lost))


# --- IndexCache -------------------------------------------------------------------------------------------------------


def missed_letters(source: Source) -> str | None:
    """Names the lack of a file that has no letter for each layer; None where it has."""
    wanted = 'neither letters F and S, one a layer, nor JSON with "indexer_types" or an "index_topk_pattern"'
    return None if _letters(source) else wanted


def read_letters(source: Source, model: ModelInfo) -> Imported:
    """F is a layer that chooses for the S layers behind it: by its indexer, or else with attention to everything."""
    letters = _letters(source)
    if len(letters) != model.layers:
        raise PlanMismatchError(
            f"expected a letter for each of {model.layers} layers of {model.id}, found {len(letters)}"
        )
    if letters.startswith("S"):
        raise PlanError("expected a first layer that chooses (F), found S; correct the file")
    if model.model_type in INDEXED:
        return Imported(index_sharing=IndexSharing(pattern=letters))
    full = [layer for layer, letter in enumerate(letters) if letter == "F"]
    size = source.json.get("index_topk") if isinstance(source.json, dict) else None
    notes = [_FIXED, _LAST]
    notes += [_NO_BUDGET] if size is None else []
    return _imported(model, full, set(full), _budget(size, model), notes)


def write_letters(plan: Plan) -> Exported:
    segments, lost = _segments(plan)
    lost.append(f"`{_OF_SEGMENTS}.budget`: the number of chosen tokens")
    sparse = {layer for segment in segments for layer in segment.layers}
    letters = "".join("S" if layer in sparse else "F" for layer in range(plan.model.layers))
    if letters.startswith("S"):
        raise PlanError("expected a plan whose first layer is dense, found a sparse one: these letters cannot say that")
    return Exported((letters + "\n").encode(), tuple(lost))


def write_topk(plan: Plan) -> Exported:
    """For `--hf-overrides` of vLLM, overrides of SGLang, and a config.json of transformers. The last two read
    `indexer_types` first, which the configs of GLM-5 in transformers have: null takes it away."""
    if plan.index_sharing is None:
        raise PlanError(
            "expected a plan with index_sharing, found none: `sparsekv plan` makes one of a model with an indexer in "
            f"every layer ({', '.join(sorted(INDEXED))}); the letters of filter layers are --to indexcache"
        )
    line = json.dumps({"index_topk_pattern": plan.index_sharing.pattern, "indexer_types": None})
    return Exported(f"{line}\n".encode(), tuple(left_out(plan)))


def _letters(source: Source) -> str:
    """One a layer, of a config by `indexer_types` where it has both, as engines read it; empty where there are none."""
    data = source.json
    text: Any = data if isinstance(data, str) else source.text
    if isinstance(data, dict):
        kinds = data.get("indexer_types")
        text = data.get("index_topk_pattern")
        if isinstance(kinds, list):
            text = "".join(_KINDS.get(str(kind), "?") for kind in kinds)
    return text if isinstance(text, str) and re.fullmatch(r"[FS]{1,4096}", text) else ""


# --- Kascade (arXiv 2512.16391) ---------------------------------------------------------------------------------------


def missed_maps(source: Source) -> str | None:
    """Names the lack of a file without maps of heads; None where it has them."""
    table = source.table
    if table is None:
        return "no .npy array of whole numbers, layers by KV heads"
    heads = len(table[0])
    return None if all(0 <= head < heads for row in table for head in row) else "heads that there are none of"


def read_maps(source: Source, model: ModelInfo) -> Imported:
    """Anchor layers choose for those up to the next one: KV head h of layer l attends to what head `map[l][h]` of its
    anchor chose.
    """
    table = source.table or ()
    shape = (model.layers, model.group_of(0).kv_heads)
    if (len(table), len(table[0])) != shape:
        raise PlanMismatchError(
            f"expected maps of {shape[0]} layers with {shape[1]} KV heads, as {model.id} has, found {len(table)} with "
            f"{len(table[0])}"
        )
    named = re.search(r"layers((?:_[0-9]{1,4})+)", source.name)
    identity = tuple(range(shape[1]))
    anchors = tuple(map(int, named[1].split("_")[1:])) if named else ()
    anchors = anchors or tuple(layer for layer, row in enumerate(table) if row == identity)
    if not anchors:
        raise PlanError(
            f"expected anchor layers, whose heads map to themselves ({', '.join(map(str, identity))}), found none in "
            f"{source.name}; name the file by them, such as maps_layers_0_2_8.npy"
        )
    at_most = max(1, round(CHOSEN_SHARE * model.context_length))
    notes = (
        f"a tenth of the context is chosen, as published; no sinks, and the newest {_KASCADERECENT} tokens",
        "prefill is dense: that of the publication chooses by query tiles, which no pattern of a plan does",
        *(() if named else ("anchor layers are those whose heads map to themselves, as the file's name does not say",)),
    )
    budget = DecodeBudget(fraction=CHOSEN_SHARE, at_most=at_most)
    return _imported(model, anchors, set(anchors), budget, notes, dict(enumerate(table)), (0, _KASCADERECENT))


# --- all of them ------------------------------------------------------------------------------------------------------


def _imported(
    model: ModelInfo, filters: Sequence[int], dense: set[int], budget: DecodeBudget, notes: Sequence[str],
    maps: Mapping[int, tuple[int, ...]] | None = None, kept: tuple[int, int] = (SINK, RECENT),
) -> Imported:  # fmt: skip
    """Segments from the layers that choose, of which each does for those that are not dense up to the next."""
    if max((*filters, *dense)) >= model.layers:
        raise PlanMismatchError(
            f"expected layers below {model.layers}, as {model.id} has, found {max((*filters, *dense))}"
        )
    segments = []
    for chosen_by, layers in followers(filters, sorted(set(range(model.layers)) - dense)).items():
        if not layers:
            continue
        heads: Any = {layer: maps[layer] for layer in layers} if maps else "max"
        segments.append(
            Segment(filter=chosen_by, layers=layers, budget=budget, sink=kept[0], recent=kept[1], heads=heads)
        )
    if not segments:
        raise PlanError("expected layers that others choose for, found that all attend to everything; correct the file")
    return Imported(
        decode=DecodePlan(lengths=(DecodeBucket(up_to=None, segments=tuple(segments)),)), notes=tuple(notes)
    )


_OF_SEGMENTS = "decode.lengths.segments"


def _segments(plan: Plan) -> tuple[tuple[Segment, ...], list[str]]:
    """Those of the longest bucket, and what such formats do not hold."""
    if plan.decode is None or not (segments := plan.decode.bucket(plan.model.context_length).segments):
        raise PlanError("expected a plan whose decode is sparse, found none: this format holds nothing else")
    itself = f"`{_OF_SEGMENTS}.filter`: layers that attend to their own choice stand as sparse layers of no filter"
    hands = f"`{_OF_SEGMENTS}.filter`: which layer chooses where other dense ones lie between: the last of these does"
    told = {
        "`decode.offload`: layers in host memory: all stay on the device": plan.decode.offload,
        "`decode.lengths`: all buckets but that of the longest contexts": len(plan.decode.lengths) > 1,
        f"`{_OF_SEGMENTS}.sink`, `{_OF_SEGMENTS}.recent`: the number of sinks and of recent tokens": any(
            (one.sink, one.recent) != (SINK, RECENT) for one in segments
        ),
        f"`{_OF_SEGMENTS}.selector`, `{_OF_SEGMENTS}.window`: queries that choose besides the newest": any(
            one.selector != "last" for one in segments
        ),
        f"`{_OF_SEGMENTS}.heads`: choices by KV head and maps of heads: one choice for all heads": any(
            one.heads != "max" for one in segments
        ),
        f"`{_OF_SEGMENTS}.scope`: choices by tensor-parallel rank": any(one.scope != "global" for one in segments),
        itself: any(one.filter_is_sparse for one in segments),
        hands: any(_changes_hands(one, segments) for one in segments if not one.filter_is_sparse),
    }
    return segments, [*left_out(plan, "decode"), *(line for line, holds in told.items() if holds)]


def _changes_hands(segment: Segment, segments: Sequence[Segment]) -> bool:
    """True where a layer of the segment has another dense layer than its filter as the last before it."""
    sparse = {layer for one in segments for layer in one.layers}
    return any(layer not in sparse for layer in range(segment.filter + 1, segment.layers[-1]))
