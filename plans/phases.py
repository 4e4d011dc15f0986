"""The two phases of a plan, by context length: prefill patterns of query heads, decode segments of layers, cache rules;
and of a model with an indexer in every layer, which layers use theirs.

A phase is a list of length buckets, ascending; the last is open-ended. In decode a layer in no segment attends to
everything; the layers of a segment attend to the first `sink` tokens, to the last `recent` ones, and to those that its
filter layer chose among all between (OmniKV).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from sparsekv.plans.patterns import Budget, Dense, MethodName, Pattern, Registered, TileShape
from sparsekv.plans.types import (
    MAX_LENGTH,
    Count,
    FieldError,
    Flag,
    Index,
    LayerSet,
    Length,
    Natural,
    Part,
    Positive,
    Text,
    format_ids,
    in_order,
)


class Bucket(Part):
    """One range of context lengths, past + chunk: up to a bound, or None."""

    up_to: Length | None
    dense: Flag = False


AnyBucket = TypeVar("AnyBucket", bound=Bucket)


def check_ascending(buckets: Sequence[Bucket]) -> None:
    """Every context length falls in exactly one bucket."""
    bounds = [bucket.up_to for bucket in buckets]
    if not bounds or bounds[-1] is not None:
        raise FieldError("expected a last bucket with `up_to: null`, for every longer context", "lengths")
    for position, (shorter, longer) in enumerate(pairwise(bounds)):
        if shorter is None:
            raise FieldError("expected `up_to: null` in the last bucket only", "lengths", position, "up_to")
        if longer is not None and shorter >= longer:
            message = f"expected ascending lengths, found {shorter} before {longer}"
            raise FieldError(message, "lengths", position + 1, "up_to")


def bucket_of(buckets: Sequence[AnyBucket], length: int) -> AnyBucket:
    """The first bucket that reaches `length` (past + chunk tokens)."""
    return next(bucket for bucket in buckets if bucket.up_to is None or length <= bucket.up_to)


def first_sparse(buckets: Sequence[PrefillBucket] | Sequence[DecodeBucket]) -> int | None:
    """The least context at which a phase is not dense; None where it is at every length."""
    after = 0
    for bucket in buckets:
        lengths = range(after + 1, (bucket.up_to or MAX_LENGTH) + 1)
        index = bisect_left(lengths, True, key=bucket.is_sparse_at)  # a bucket that is sparse stays it up to its end
        if index < len(lengths):
            return lengths[index]
        after = lengths[-1]
    return None


def reach(after: int, up_to: int | None) -> str:
    """The lengths above `after` up to `up_to`: "up to 8,192", "8,193 to 32,768", "above 32,768", "every length"."""
    if not after:
        return "every length" if up_to is None else f"up to {up_to:,}"
    return f"above {after:,}" if up_to is None else f"{after + 1:,} to {up_to:,}"


_PLACE = ("layer", "heads")


class HeadGroup(Part):
    """Query heads of one layer that share a pattern. In a file the pattern's fields stand beside `layer`."""

    layer: Index
    heads: LayerSet
    pattern: Pattern

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, data: Any) -> Any:
        if not isinstance(data, dict) or isinstance(data.get("pattern"), Part):
            return data
        pattern = {key: value for key, value in data.items() if key not in _PLACE}
        return {"pattern": pattern} | {key: data[key] for key in _PLACE if key in data}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = handler(self)
        pattern: dict[str, Any] = data["pattern"]
        return {"layer": data["layer"], "heads": data["heads"]} | pattern


class PrefillBucket(Bucket):
    """One range of context lengths: all dense, or patterns for some heads (the others dense), or as another bucket.

    Groups are sorted by layer and first head; equal patterns of a layer are merged.
    """

    extrapolated: Flag = False
    same_as: Length | None = None
    heads: Annotated[tuple[HeadGroup, ...], FailFast()] = ()  # a flood of wrong groups is refused at the first

    @model_validator(mode="after")
    def _consistent(self) -> PrefillBucket:
        if [self.dense, bool(self.heads), self.same_as is not None].count(True) != 1:
            raise FieldError("expected exactly one of `dense: true`, `heads` and `same_as` in a prefill bucket")
        _check_overlap(self.heads)
        object.__setattr__(self, "heads", _merged(self.heads))
        return self

    def is_sparse_at(self, length: int) -> bool:
        return not self.dense

    def patterns(self, layer: int, heads: int) -> tuple[Pattern, ...]:
        """The pattern of each of the `heads` query heads of a layer; heads that no group names are dense."""
        chosen = {head: group.pattern for group in self.heads if group.layer == layer for head in group.heads}
        return tuple(chosen.get(head, Dense()) for head in range(heads))


class PrefillPlan(Part):
    """Holds what prefill computes. Contexts are counted as past + chunk."""

    tile: TileShape
    lengths: tuple[PrefillBucket, ...]

    @model_validator(mode="after")
    def _consistent(self) -> PrefillPlan:
        check_ascending(self.lengths)
        if self.tile.query % self.tile.key:  # index builders cut query tiles into whole key tiles
            found = f"{self.tile.query} x {self.tile.key}"
            raise FieldError(f"expected query rows that are a multiple of the key rows, found {found}", "tile")
        for position, bucket in enumerate(self.lengths):
            if bucket.same_as is not None and self._named(bucket.same_as) is None:
                names = ", ".join(str(b.up_to) for b in self.lengths if b.up_to and b.same_as is None) or "none"
                message = f"expected the `up_to` of a bucket of its own ({names}), found {bucket.same_as}"
                raise FieldError(message, "lengths", position, "same_as")
        return self

    def _named(self, up_to: int) -> PrefillBucket | None:
        return next((b for b in self.lengths if b.up_to == up_to and b.same_as is None), None)

    def bucket(self, length: int) -> PrefillBucket:
        """The bucket of a context of `length` tokens (past + chunk); `same_as` is followed."""
        found = bucket_of(self.lengths, length)
        named = None if found.same_as is None else self._named(found.same_as)
        return found if named is None else named

    @property
    def rules(self) -> frozenset[str]:
        """Names of the prefill rules from outside."""
        patterns = (group.pattern for bucket in self.lengths for group in bucket.heads)
        return frozenset(pattern.name for pattern in patterns if isinstance(pattern, Registered))

    def skips_at(self, length: int) -> bool:
        """True where budgets of some head leave tiles out there, whatever the prompt."""
        # A window moves with the rows of a tile, budgets are rounded to whole tiles, and some tiles are never left out.
        more = self.tile.mandatory * self.tile.key
        patterns = (group.pattern for group in self.bucket(length).heads)
        return any(pattern.tile_tokens(length) + pattern.most_columns(length) + more < length for pattern in patterns)


def _check_overlap(groups: Iterable[HeadGroup]) -> None:
    seen: dict[int, set[int]] = {}
    for position, group in enumerate(groups):
        named = seen.setdefault(group.layer, set())
        if not named.isdisjoint(group.heads):
            twice = format_ids(named.intersection(group.heads))
            message = f"expected each head once, found heads {twice} of layer {group.layer} again"
            raise FieldError(message, "heads", position)
        named.update(group.heads)


def _merged(groups: Iterable[HeadGroup]) -> tuple[HeadGroup, ...]:
    together: dict[tuple[int, Pattern], list[HeadGroup]] = {}
    for group in groups:
        together.setdefault((group.layer, group.pattern), []).append(group)
    merged = (
        same[0].model_copy(update={"heads": tuple(sorted(head for group in same for head in group.heads))})
        for same in together.values()
    )
    return tuple(sorted(merged, key=lambda group: (group.layer, group.heads[0])))


def _layer_key(key: Any) -> Any:
    """A layer as YAML or JSON may write it. One spelling each: two of one layer would pass for different keys."""
    is_layer = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 5 and str(int(key)) == key
    return int(key) if is_layer else key


HeadMap = Annotated[dict[Annotated[Index, BeforeValidator(_layer_key)], tuple[Index, ...]], AfterValidator(in_order)]
"""For each layer of a segment, and each of its key-value heads: the filter layer's key-value head that chooses."""


class DecodeBudget(Budget):
    """Says how many tokens a filter layer chooses. A fraction is of all cached tokens and comes to `at_most` so many,
    which sizes lists and the hot set."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 2})

    at_most: Positive | None = None

    @model_validator(mode="after")
    def _bounded(self) -> DecodeBudget:
        if (self.fraction is None) == (self.at_most is not None):
            raise ValueError("expected `at_most: n` beside the fraction of a decode budget, and beside no other budget")
        return self

    @property
    def most(self) -> int:
        """Tokens at any length."""
        found = self.tokens if self.at_most is None else self.at_most
        assert found is not None
        return found

    def resolve(self, length: int) -> int:
        """Tokens to choose in a context of `length` tokens, rounded up, at most `length`."""
        return min(self.most, super().resolve(length))

    def __str__(self) -> str:
        return super().__str__() if self.at_most is None else f"{super().__str__()}, at most {self.at_most}"


# Of decode, where nobody says otherwise: the share of the context that is chosen, and tokens beside it.
CHOSEN_SHARE, SINK, RECENT = 0.1, 4, 128
Selector = Literal["last", "uniform", "exponential"]


class Segment(Part):
    """Layers that attend to what the layer `filter` chose, to the first `sink` tokens and to the last `recent` ones.

    The filter layer attends to everything and comes before its layers; or it is the first of them and chooses for
    itself as well: it reads all keys to score them, and of the values only those of the tokens that it attends to.

    Tokens are chosen among those between, generated ones included; `budget` counts chosen tokens alone. Where all three
    cover the context, its layers attend to everything.

    `selector` weighs the last `window` queries: `last` takes the last one only, `uniform` all alike, `exponential`
    halves from one to the next older. `heads: max` makes one choice for all heads, `per_kv_head` one a key-value
    head. `scope: local` lets each tensor-parallel rank choose by its own heads.
    """

    filter: Index
    layers: LayerSet
    budget: DecodeBudget
    sink: Natural = 4
    recent: Positive
    selector: Selector = "last"
    window: Count = 1
    scope: Literal["global", "local"] = "global"
    heads: Literal["max", "per_kv_head"] | HeadMap = "max"

    def __str__(self) -> str:
        return f"{self.filter} -> {format_ids(self.layers)}"

    @model_validator(mode="before")
    @classmethod
    def _has_recent(cls, data: Any) -> Any:
        if isinstance(data, dict) and "recent" not in data:
            raise ValueError(
                "expected `recent`, the newest tokens that every step attends to, found none: this plan was compiled "
                "before decode had it; compile it again with `sparsekv plan MODEL -o PLAN`"
            )
        return data

    @property
    def filter_is_sparse(self) -> bool:
        """True where the filter layer attends to its own choice."""
        return self.filter == self.layers[0]

    def chosen_tokens(self, length: int) -> int | None:
        """The number of tokens chosen among `length` cached ones; None where the layers attend to everything."""
        budget = self.budget.resolve(length)
        return budget if self.sink + budget + self.recent < length else None

    def read_tokens(self, layer: int, length: int) -> int:
        """Tokens among `length` cached ones that one of its layers reads in a step; one of which only the key is read
        counts half."""
        chosen, scored = self.chosen_tokens(length), length // 2 if layer == self.filter else 0
        return length if chosen is None else min(length, scored + self.sink + chosen + self.recent)

    @model_validator(mode="after")
    def _consistent(self) -> Segment:
        if self.filter > self.layers[0]:
            raise FieldError(
                "expected a filter layer before the other layers of its segment, "
                f"found {self.filter} for {format_ids(self.layers)}"
            )
        if isinstance(self.heads, dict) and set(self.heads) != set(self.layers):
            raise FieldError(
                f"expected a head map for each layer of {format_ids(self.layers)}, found {format_ids(self.heads)}",
                "heads",
            )
        return self


def followers(filters: Sequence[int], layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """The layers that each filter layer chooses for: all behind it up to the next one."""
    ends, others = (*filters[1:], None), tuple(layers)
    return {
        first: tuple(layer for layer in others if first < layer and (end is None or layer < end))
        for first, end in zip(filters, ends, strict=False)  # no end is needed where there are no filters
    }


class DecodeBucket(Bucket):
    """One range of context lengths: all dense, or segments in ascending order."""

    segments: tuple[Segment, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> DecodeBucket:
        if self.dense == bool(self.segments):
            raise FieldError("expected exactly one of `dense: true` and `segments` in a decode bucket")
        for position, (before, after) in enumerate(pairwise(self.segments), start=1):
            if before.filter >= after.filter or before.layers[-1] >= after.layers[0]:
                found = f"{before} before {after}"
                message = f"expected segments in ascending order that share no layer, found {found}"
                raise FieldError(message, "segments", position)
        others = (segment.filter for segment in self.segments if not segment.filter_is_sparse)
        if both := self.sparse_layers.intersection(others):
            message = f"expected filter layers outside the segments of others, found {format_ids(both)} in one"
            raise FieldError(message, "segments")
        return self

    def is_sparse_at(self, length: int) -> bool:
        """True where its segments choose tokens: with a short context they attend to everything."""
        return any(segment.chosen_tokens(length) is not None for segment in self.segments)

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers that attend to chosen tokens only."""
        return frozenset(layer for segment in self.segments for layer in segment.layers)


class Offload(Part):
    """Layers whose keys and values live in host memory, with a `hot` set of rows kept on the device."""

    layers: LayerSet
    hot: Budget


class DecodePlan(Part):
    """Holds what decode attends to. Contexts are counted as all cached tokens.

    Buckets that are sparse differ in budgets alone, so that one step, captured once, serves every length.
    """

    lengths: tuple[DecodeBucket, ...]
    offload: Offload | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DecodePlan:
        check_ascending(self.lengths)
        _check_shared(self.lengths)
        offloaded = frozenset(self.offload.layers if self.offload else ())
        if dense := offloaded - self.sparse_layers:
            message = f"expected offloaded layers to be in a segment, found {format_ids(dense)} always dense"
            raise FieldError(message, "offload", "layers")
        if read := self.filter_layers & offloaded:
            message = f"expected offloaded layers that read chosen tokens alone, found filter layers {format_ids(read)}"
            raise FieldError(message, "offload", "layers")
        return self

    def bucket(self, length: int) -> DecodeBucket:
        return bucket_of(self.lengths, length)

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers of a segment, the same at every length that is sparse."""
        return frozenset[int]().union(*(bucket.sparse_layers for bucket in self.lengths))

    @property
    def filter_layers(self) -> frozenset[int]:
        """Layers that choose, and so read all keys."""
        return frozenset(segment.filter for bucket in self.lengths for segment in bucket.segments)

    @property
    def follower_layers(self) -> frozenset[int]:
        """Layers that read chosen tokens alone."""
        return self.sparse_layers - self.filter_layers


def _check_shared(buckets: Sequence[DecodeBucket]) -> None:
    """Raises FieldError unless the segments of all sparse buckets differ in nothing but their budgets."""
    rest = [[part.model_dump(exclude={"budget"}) for part in bucket.segments] for bucket in buckets]
    sparse = [position for position, bucket in enumerate(buckets) if bucket.segments]
    if other := next((position for position in sparse[1:] if rest[position] != rest[sparse[0]]), None):
        message = "expected the segments of every sparse length to differ in their budgets alone, found others"
        raise FieldError(message, "lengths", other, "segments")


BUILT_IN_SCORE = "attention_sum"

_RULE = ("sink", "recent", "generated", "score", "observe", "heads")


class Eviction(Part):
    """Says which tokens some layers keep of a prompt once it is complete: all, or a few, which is lossy.

    Of `n` cached tokens a layer keeps the first `sink`, the last `recent`, and between them the `keep` with the highest
    score; of the tokens generated behind them the newest `generated`. The score `attention_sum` is the attention of the
    prompt's last `observe` queries, summed over neighbouring tokens and the query heads of a KV head; another one is a
    method from outside (kernels/methods.py). `heads: max` makes one choice for all KV heads, `per_kv_head` one each. A
    fraction is of all tokens so far, evicted ones included.
    """

    layers: LayerSet
    keep: Literal["all"] | Budget
    sink: Natural | None = None
    recent: Natural | None = None
    generated: Positive | None = None
    score: MethodName | None = None
    observe: Positive | None = None
    heads: Literal["max", "per_kv_head"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Eviction:
        given = [name for name in _RULE if getattr(self, name) is not None]
        if self.keep == "all" and given:
            raise FieldError(f"expected nothing beside `keep: all`, found {', '.join(given)}")
        if self.keep != "all" and len(given) < len(_RULE):
            missing = ", ".join(name for name in _RULE if name not in given)
            raise FieldError(f"expected {missing} beside a budget in `keep`, found none")
        if self.is_lossy and self.kept_tokens(MAX_LENGTH) == 0:
            raise FieldError("expected a rule that keeps something of a prompt, found one that keeps nothing", "keep")
        return self

    @property
    def is_lossy(self) -> bool:
        return self.keep != "all"

    @property
    def is_built_in(self) -> bool:
        return self.score in (None, BUILT_IN_SCORE)

    def chosen_tokens(self, length: int) -> int:
        """The number of tokens chosen by score in a context of `length`, where there are as many."""
        return length if self.keep == "all" else self.keep.resolve(length)

    def kept_tokens(self, length: int) -> int:
        """Tokens that a layer keeps of a prompt, where `length` is all so far."""
        return min(length, (self.sink or 0) + self.chosen_tokens(length) + (self.recent or 0))

    def cached_tokens(self, prompt: int) -> int:
        """Tokens that a layer has room for behind a prompt of that length, generated ones included."""
        return self.kept_tokens(prompt) + (self.generated or 0)


def _letters(pattern: str) -> str:
    if pattern.strip("FS") or not pattern.startswith("F"):
        raise ValueError(f"expected a letter a layer, F or S and first an F, found {pattern!r:.40}")
    return pattern


class IndexSharing(Part):
    """Layers of a model with an indexer in each, a letter a layer: F chooses tokens by its own indexer, S attends to
    those that the last F before it chose (IndexCache, arXiv 2603.12201). `lengths` are those that it was measured at.
    """

    pattern: Annotated[Text, AfterValidator(_letters)]
    lengths: Annotated[tuple[Length, ...], AfterValidator(lambda lengths: tuple(sorted({*lengths})))] = ()

    @property
    def choosing(self) -> tuple[int, ...]:
        return tuple(layer for layer, letter in enumerate(self.pattern) if letter == "F")

    @property
    def reused(self) -> frozenset[int]:
        """The layers that attend to the choice of an earlier one."""
        return frozenset(range(len(self.pattern))).difference(self.choosing)
