"""The model a plan was made for: what each layer is, how it is recognised, and whether a plan fits it.

The architecture fingerprint must agree for a plan to mean anything. The weights fingerprint only says whether the
plan's quality was measured on these weights: plans carry over to fine-tunes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsekv.plans.phases import DecodePlan, Eviction, IndexSharing, PrefillBucket, PrefillPlan, Segment
from sparsekv.plans.types import (
    Count,
    Digest,
    FieldError,
    Index,
    JsonObject,
    LayerSet,
    Length,
    Part,
    Text,
    Where,
    canonical_json,
    format_ids,
    ids_of,
)


class AttentionGroup(Part):
    """Layers of one shape and kind. `window` is the layer's own sliding window in tokens, current one included;
    `keys_of` the earlier layer whose keys and values they attend to, as they have none of their own."""

    layers: LayerSet
    kind: Literal["full", "sliding", "linear"]
    heads: Count
    kv_heads: Count
    head_dim: Count
    window: Length | None = None
    keys_of: Index | None = None

    @model_validator(mode="after")
    def _consistent(self) -> AttentionGroup:
        if self.heads % self.kv_heads:
            raise FieldError(f"expected heads to be a multiple of kv_heads, found {self.heads} and {self.kv_heads}")
        if (self.kind == "sliding") != (self.window is not None):
            found = "none" if self.window is None else self.window
            raise FieldError(f"expected a window for sliding layers and for no others, found {found} on {self.kind}")
        return self

    @property
    def caches(self) -> bool:
        """True where its layers have keys and values of their own, and no recurrent state."""
        return self.kind != "linear" and self.keys_of is None


def kv_bytes(groups: Iterable[AttentionGroup], tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of so many tokens in all layers, as numbers of `itemsize` bytes."""
    numbers = sum(len(group.layers) * group.kv_heads * group.head_dim for group in groups if group.caches)
    return 2 * tokens * itemsize * numbers


class Fingerprint(Part):
    """Digests of what the model is (`architecture`) and of sampled weights.

    `sha256-2:` is of the shapes and of the settings by which the same weights compute something else, and ends with the
    first digits of the older `sha256:`, which is of the shapes alone: the two are compared by those.

    `weights` is absent where unknown. `sha256-all:` samples every tensor; `sha256:` is of an older kind, which sampled
    query and key projections alone: the two cannot be compared.
    """

    architecture: Digest
    weights: Digest | None = None

    def weights_difference(self, found: Fingerprint) -> Literal["unknown", "other"] | None:
        """The difference to other weights; None where there is none, or `found` has no fingerprint of them."""
        if found.weights is None or self.weights == found.weights:
            return None
        kinds = {(weights or "").partition(":")[0] for weights in (self.weights, found.weights)}
        return "other" if len(kinds) == 1 else "unknown"


# Values that were rounded to float16 no longer tell what they would have been in bfloat16.
OTHER_WEIGHTS = "other weights, or a fingerprint of another kind (a float32 checkpoint in float16 counts as other)"


def is_model_id(text: str) -> bool:
    """True of a hub id or the name of a folder or file: "organisation/name" or "name", no path."""
    parts = text.split("/")
    return len(parts) <= 2 and not {"", ".", ".."}.intersection(parts) and not text.startswith("~")


def _model_id(text: str) -> str:
    if not is_model_id(text):
        raise ValueError(f"expected a hub id (organisation/name) or the name of a folder, found the path {text!r:.80}")
    return text


class ModelInfo(Part):
    """One checkpoint as a plan sees it. `id` is a hub id or a folder's name, never a path."""

    id: Annotated[Text, AfterValidator(_model_id)]
    revision: Text | None = None
    model_type: Text
    context_length: Length
    rope: JsonObject = Field(default_factory=dict)
    attention: tuple[AttentionGroup, ...]
    fingerprint: Fingerprint

    @model_validator(mode="after")
    def _each_layer_once(self) -> ModelInfo:
        named = [layer for group in self.attention for layer in group.layers]
        twice = [layer for layer, times in Counter(named).items() if times > 1]
        if twice:
            raise FieldError(f"expected each layer in one group, found layers {format_ids(twice)} in two", "attention")
        missing = set(range(max(named, default=0) + 1)).difference(named)
        if missing:
            raise FieldError(f"expected every layer from 0 on, found no group for {format_ids(missing)}", "attention")
        return self

    @model_validator(mode="after")
    def _keys_of_a_like_layer(self) -> ModelInfo:
        shapes = self.by_layer
        for group in self.attention:
            if (owner := group.keys_of) is None:
                continue
            shape = shapes.get(owner)
            of_owner = None if shape is None else shape.model_copy(update={"layers": group.layers, "keys_of": owner})
            if of_owner != group or shape is None or shape.keys_of is not None or owner >= min(group.layers):
                message = f"expected keys_of an earlier layer of the same shape with keys of its own, found {owner}"
                raise FieldError(f"{message} for layers {format_ids(group.layers)}", "attention")
        return self

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.attention)

    @property
    def by_layer(self) -> dict[int, AttentionGroup]:
        return {layer: group for group in self.attention for layer in group.layers}

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend to everything before them, ascending."""
        return tuple(sorted(layer for group in self.attention if group.kind == "full" for layer in group.layers))

    @property
    def sharing(self) -> frozenset[int]:
        """The layers that have no keys of their own, and those whose keys they attend to."""
        groups = [group for group in self.attention if group.keys_of is not None]
        return frozenset(layer for group in groups for layer in (*group.layers, group.keys_of or 0))

    @property
    def largest_head(self) -> int:
        """The largest head size of layers with softmax attention, which kernels have to take."""
        return max(group.head_dim for group in self.attention if group.kind != "linear")

    def group_of(self, layer: int) -> AttentionGroup:
        match = next((group for group in self.attention if layer in group.layers), None)
        if match is None:
            raise IndexError(f"layer {layer} of a model of {self.layers} layers")
        return match


Shapes = dict[int, AttentionGroup]
INDEXED = frozenset(("deepseek_v32", "glm_moe_dsa"))
"""Model types with an indexer in every layer, of which a plan says which layers use it, and nothing else."""


def architecture_fingerprint(shapes: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The digest of what a model is: JSON data, in any order."""
    facts = ({**shapes, "settings": dict(settings)}, dict(shapes))
    whole, older = (hashlib.sha256(canonical_json(data)).hexdigest() for data in facts)
    return f"sha256-2:{whole}:{older[:16]}"


def same_architecture(one: str, other: str) -> bool:
    """Compares two digests by the facts that both of them cover."""
    (older, *digests), (newer, *others) = sorted(text.split(":") for text in (one, other))
    if (older, newer) == ("sha256", "sha256-2"):
        return digests[-1][:16] == others[-1]
    return one == other


def weights_fingerprint(samples: Iterable[tuple[str, bytes]]) -> str:
    """The digest of named samples of weights, in any order."""
    named = sorted(samples)
    if twice := next((one for one, other in pairwise(name for name, _ in named) if one == other), None):
        raise ValueError(f"expected each weight sampled once, found {twice!r} again")
    parts = (part for name, data in named for part in (name.encode(), data))
    # With their lengths, so that no two lists of samples run into the same bytes.
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    return "sha256-all:" + digest.hexdigest()


def differences(expected: ModelInfo, found: ModelInfo) -> tuple[str, ...]:
    """Differences between the model of a plan and another one, a line each; none where the architecture fits."""
    lines = [
        f"{name.replace('_', ' ')}: plan {getattr(expected, name)}, model {getattr(found, name)}"
        for name in ("model_type", "layers", "context_length", "rope")
        if getattr(expected, name) != getattr(found, name)
    ]
    shapes = _shape_differences(expected.by_layer, found.by_layer)
    if same_architecture(expected.fingerprint.architecture, found.fingerprint.architecture):
        # Shapes are compared even so: a sealed plan may have been given others by hand.
        same = (expected.model_type, expected.layers) == (found.model_type, found.layers)
        return () if same and not shapes else (*lines, *shapes)
    unnamed = "the width or a setting that the plan does not name, such as the activation or the epsilon of norms"
    return (*lines, *shapes) or (f"architecture fingerprint: another one, in {unnamed}",)


def _shape_differences(ours: Shapes, theirs: Shapes) -> list[str]:
    where: dict[str, list[int]] = {}
    shared = sorted(ours.keys() & theirs.keys())
    for layer, name in product(shared, ("kind", "heads", "kv_heads", "head_dim", "window", "keys_of")):
        mine, other = getattr(ours[layer], name), getattr(theirs[layer], name)
        if mine != other:
            told = f"{name.replace('_', ' ')}: plan {_told(mine)}, model {_told(other)}"
            where.setdefault(told, []).append(layer)
    return [line if at == shared else f"{line} (layers {format_ids(at)})" for line, at in where.items()]


def _told(fact: object) -> object:
    return "none" if fact is None else fact


def check_fit(
    model: ModelInfo, prefill: PrefillPlan | None, decode: DecodePlan | None, kv_cache: Sequence[Eviction]
) -> None:
    """Every layer and head that the phases name is one the model has.

    Raises:
        FieldError: one is not, or an eviction rule names a layer that another rule, a segment or `offload` names, or
            that has a window, or keeps more than the context.
    """
    shapes = model.by_layer
    for position, bucket in enumerate(prefill.lengths if prefill else ()):
        _check_prefill(bucket, shapes, ("prefill", "lengths", position))
    for position, step in enumerate(decode.lengths if decode else ()):
        for number, segment in enumerate(step.segments):
            _check_segment(segment, shapes, ("decode", "lengths", position, "segments", number))
    if decode and decode.offload:
        _softmax_layers(decode.offload.layers, shapes, ("decode", "offload", "layers"))
        _own_keys(decode.offload.layers, model, "to go to host memory", ("decode", "offload", "layers"))
    _check_eviction(kv_cache, model, decode)


def check_sharing(model: ModelInfo, sharing: IndexSharing | None, phases: Iterable[object]) -> None:
    """Raises FieldError unless a model with indexers has `index_sharing` alone, of all its layers, and no other model
    has it."""
    if model.model_type not in INDEXED:
        if sharing is not None:
            known = " or ".join(sorted(INDEXED))
            raise FieldError(f"expected a model of type {known}, found {model.model_type}", "index_sharing")
        return
    if sharing is None or any(phases):
        found = "no index_sharing" if sharing is None else "other phases beside it"
        raise FieldError(f"expected index_sharing alone in a plan of {model.model_type}, found {found}", "model")
    if len(sharing.pattern) != model.layers:
        message = f"expected a letter for each of {model.layers} layers, found {len(sharing.pattern)}"
        raise FieldError(message, "index_sharing", "pattern")


def _check_prefill(bucket: PrefillBucket, shapes: Shapes, path: tuple[Where, ...]) -> None:
    for group in bucket.heads:
        _softmax_layers((group.layer,), shapes, (*path, "heads", _names(group.layer, group.heads[-1]), "layer"))
        heads = shapes[group.layer].heads
        if group.heads[-1] >= heads:
            message = f"expected heads 0 to {heads - 1} of layer {group.layer}, found {format_ids(group.heads)}"
            raise FieldError(message, *path, "heads", _names(group.layer, group.heads[-1]), "heads")


def _names(layer: int, head: int) -> Callable[[dict[str, Any]], bool]:
    # By content: in memory the groups of a layer are merged and sorted, in the file they may stand anywhere.
    return lambda item: item["layer"] == layer and head in ids_of(item["heads"])


def _check_segment(segment: Segment, shapes: Shapes, path: tuple[Where, ...]) -> None:
    _softmax_layers((segment.filter,), shapes, (*path, "filter"))
    if (kind := shapes[segment.filter].kind) != "full":
        message = f"expected a filter layer with full attention, found layer {segment.filter}, which is {kind}"
        raise FieldError(message, *path, "filter")
    _softmax_layers(segment.layers, shapes, (*path, "layers"))
    source = shapes[segment.filter].kv_heads
    for layer in segment.layers if segment.heads != "max" else ():
        own = shapes[layer].kv_heads
        heads, entries = (segment.heads[layer], own) if isinstance(segment.heads, dict) else (range(own), source)
        if len(heads) != entries or max(heads) >= source:
            each = f"each one of the {source} key-value heads of layer {segment.filter}"
            raise FieldError(f"expected {entries} entries, {each}, found {list(heads)}", *path, "heads")


def _check_eviction(rules: Sequence[Eviction], model: ModelInfo, decode: DecodePlan | None) -> None:
    seen: set[int] = set()
    shapes = model.by_layer
    for number, rule in enumerate(rules):
        path = ("kv_cache", number, "layers")
        _softmax_layers(rule.layers, shapes, path)
        if twice := seen.intersection(rule.layers):
            raise FieldError(f"expected one rule a layer, found a second for {format_ids(twice)}", *path)
        seen.update(rule.layers)
        if rule.is_lossy:
            _check_lossy(rule, model, decode, path)


def _check_lossy(rule: Eviction, model: ModelInfo, decode: DecodePlan | None, path: tuple[Where, ...]) -> None:
    shapes, context = model.by_layer, model.context_length
    if windowed := [layer for layer in rule.layers if shapes[layer].window is not None]:
        message = f"expected layers with full attention to drop tokens, found {format_ids(windowed)} with a window"
        raise FieldError(message, *path)
    _own_keys(rule.layers, model, "to drop tokens", path)
    offloaded = decode.offload.layers if decode and decode.offload else ()
    if both := set(rule.layers).intersection(offloaded):
        raise FieldError(f"expected layers that are not offloaded to drop tokens, found {format_ids(both)}", *path)
    named = decode.sparse_layers | decode.filter_layers if decode else frozenset()
    if joined := named.intersection(rule.layers):
        message = f"expected layers outside every decode segment to drop tokens, found {format_ids(joined)} in one"
        raise FieldError(message, *path)
    if rule.kept_tokens(context) == context:
        message = f"expected to keep fewer tokens than the context of {context}, found a rule that keeps all of it"
        raise FieldError(message, *path[:-1], "keep")


def _own_keys(layers: Iterable[int], model: ModelInfo, what: str, path: tuple[Where, ...]) -> None:
    if shared := model.sharing.intersection(layers):
        message = f"expected layers that share their keys and values with no other layer {what}, found"
        raise FieldError(f"{message} {format_ids(shared)}", *path)


def _softmax_layers(layers: Iterable[int], shapes: Shapes, path: tuple[Where, ...]) -> None:
    for layer in layers:
        if layer not in shapes:
            raise FieldError(f"expected layers 0 to {len(shapes) - 1} of the model, found {layer}", *path)
        if shapes[layer].kind == "linear":
            raise FieldError(f"expected layers with softmax attention, found {layer}, which is linear", *path)
