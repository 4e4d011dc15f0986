"""The model that is timed, loaded or of a known shape with random weights made on the device itself, and plans at
stated densities or budgets for a model that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.bench.harness import free_memory
from sparsekv.bench.step_attention import kv_bytes
from sparsekv.bench.structure import diffuse_pattern
from sparsekv.planner.filter_layers import hot_set
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern, TileShape, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
    Selector,
)
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import MAX_ID, format_ids, format_length
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import load_config
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.hf.public_shapes import PUBLIC_SHAPES, config_of
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.stores.pinned import available_bytes, has_room

SELECTORS: tuple[Selector, ...] = get_args(Selector)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model in evaluation mode on its device; no tokenizer is needed to time it."""

    model: PreTrainedModel
    info: ModelInfo
    name: str
    weights: Literal["random", "loaded"]
    note: str = ""


def available_on(device: torch.device) -> int | None:
    """Bytes that a device has left; None where nobody tells."""
    if device.type != "cuda":
        return available_bytes()
    free_memory(device)
    return torch.cuda.mem_get_info(device)[0]


def random_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    layers: int | None = None,
    seed: int = 0,
    cached: int = 0,
    shapes: Mapping[str, dict[str, Any]] = PUBLIC_SHAPES,
    available: Callable[[torch.device], int | None] = available_on,
) -> BenchModel:
    """A model of `name`'s shape with random weights, which never exist in main memory.

    Args:
        name: an alias, folder or hub id: its config is used where it can be had, else `shapes`.
        longest: tokens that it must take; a shorter context is stretched, and the note says so.
        layers: only so many layers, for what one layer costs.
        cached: tokens whose keys and values must fit beside the weights.
        available: bytes that a device has left.

    Raises:
        UsageError: no config and no known shape of that name, it has not so many layers, or the device has not so much
            memory left.
        UnsupportedError: its architecture is not supported.
    """
    config, notes = config_of(name, shapes)
    notes = ["weights are random, so that attention is diffuse and answers mean nothing", *notes]
    if config.max_position_embeddings < longest:
        notes.append(f"context stretched from {format_length(config.max_position_embeddings)}")
        config.max_position_embeddings = longest
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise UsageError(f"expected 1 to {config.num_hidden_layers} layers, found {layers}")
        notes.append(f"{layers} of {config.num_hidden_layers} layers")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    _check_room(config, dtype, cached, available(device))
    on = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on), torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
    return BenchModel(model, describe_model(model, _short(name)), _short(name), "random", "; ".join(notes))


def _check_room(config: Any, dtype: torch.dtype, cached: int, available: int | None) -> None:
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
    weights = sum(weight.nbytes for weight in model.parameters())
    kv = cached * kv_bytes(layouts_of(model))
    if available is None or has_room(weights + kv, available):
        return
    ways = ["a smaller model"]
    ways += ["--dtype bfloat16"] if dtype.itemsize > 2 else []
    ways += ["shorter --lengths"] if has_room(weights, available) else ["fewer --layers of `bench prefill`"]
    raise UsageError(
        f"expected {weights / 2**30:.1f} GiB of memory for {str(dtype).removeprefix('torch.')} weights"
        + (f", {kv / 2**30:.1f} GiB for keys and values" if cached else "")
        + f" and 1 GiB to spare, found {available / 2**30:.1f} GiB available; choose {' or '.join(ways)}"
    )


def describe_named(name: str, random_weights: bool) -> ModelInfo:
    """What is known of a model before its weights are loaded or made.

    Raises:
        UsageError, UnsupportedError: as loading it, or `random_model`, would.
    """
    return describe_config(config_of(name)[0] if random_weights else load_config(name), _short(name))


def _short(name: str) -> str:
    """A name without the folders before it."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith((".", "/", "~")) else name


def hand_plan(
    info: ModelInfo,
    lengths: Sequence[int],
    densities: Sequence[float],
    tile: TileShape,
    families: Sequence[str] = ("vertical_slash", "a_shape"),
) -> tuple[Plan, str]:
    """A bucket for each length, families assigned to the heads of every full-attention layer in turn; and in words.

    Budgets are such that they come to the density where attention is diffuse, as it is with random weights: the
    diagonals of vertical_slash heads are then scattered, and `max_tiles` is what binds.

    Args:
        densities: one for all lengths, or one for each.

    Raises:
        UsageError: lengths and densities do not pair up, or a family is unknown or has no fixed density.
    """
    if len(densities) not in (1, len(lengths)):
        raise UsageError(f"expected one --density, or one for each of {len(lengths)} lengths, found {len(densities)}")
    paired = sorted(zip(lengths, tuple(densities) * len(lengths) if len(densities) == 1 else densities, strict=True))
    buckets = tuple(
        PrefillBucket(up_to=length if length < max(lengths) else None, heads=_groups(info, patterns))
        for length, share in paired
        for patterns in [[diffuse_pattern(family, length, share, tile) for family in families]]
    )
    shares = ", ".join(f"{share:g}" for _, share in paired)
    words = f"made by hand: {' and '.join(families)} in turn, sized for a density of {shares}, {tile.key} tiles"
    return Plan(status="unverified", model=info, prefill=PrefillPlan(tile=tile, lengths=buckets)), words


def _groups(info: ModelInfo, patterns: Sequence[Pattern]) -> tuple[HeadGroup, ...]:
    return tuple(
        HeadGroup(layer=layer, heads=tuple(range(number, group.heads, len(patterns))), pattern=pattern)
        for group in info.attention
        if group.kind == "full"
        for layer in group.layers
        for number, pattern in enumerate(patterns)
        if number < group.heads
    )


_SINK, _RECENT = 4, 128


@dataclass(frozen=True, slots=True)
class HandDecode:
    """Decode plans made by hand, for every length, that differ in their selectors alone.

    Attributes:
        budget: tokens that a filter layer chooses.
        filters: the filter layers, each of which chooses for all layers up to the next; empty for three by depth.
        selectors: how the last queries weigh in the choice; a plan each.
        window: how many queries all selectors but `last` weigh.
        offload: whether the plans permit the layers of segments to be in host memory, with a hot set of two budgets.
    """

    budget: Budget = field(default_factory=lambda: tokens(2048))
    filters: tuple[int, ...] = ()
    selectors: tuple[str, ...] = ("last",)
    window: int | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.selectors if name not in SELECTORS]
        if unknown or not self.selectors:
            raise UsageError(f"expected selectors of {', '.join(SELECTORS)}, found {(unknown or ['none'])[0]!r:.40}")
        windowed = [name for name in self.selectors if name != "last"]
        if windowed and self.window is None:
            raise UsageError(f"expected --window N beside the selector {windowed[0]}, found none; add --window 16")
        if self.window is not None and not windowed:
            raise UsageError("expected --window beside the selector uniform or exponential, found last alone")
        if self.window is not None and not 1 <= self.window <= MAX_ID + 1:
            raise UsageError(f"expected a window of 1 to {MAX_ID + 1} queries, found {self.window}")

    def plans(self, info: ModelInfo, longest: int) -> tuple[dict[str, Plan], str]:
        """By selector; and in words.

        Args:
            longest: tokens of the longest context, of which a budget that is a share is taken.

        Raises:
            UsageError: a filter layer is none of the model's layers with full attention, or chooses for no layer.
        """
        filters = self.filters or _by_depth(info.full_layers)
        segments = _followers(info.full_layers, filters)
        idle = [layer for layer in filters if not segments[layer]]
        if idle or not filters:
            raise UsageError(
                "expected filter layers with full attention, each with other such layers before the next one to choose "
                f"for (layers {format_ids(info.full_layers) or 'none'} of this model have it), found "
                f"{format_ids(idle) or 'none'}; choose others with --filters"
            )
        at_most = None if self.budget.fraction is None else self.budget.resolve(longest)
        budget = DecodeBudget(tokens=self.budget.tokens, fraction=self.budget.fraction, at_most=at_most)
        plans: dict[str, Plan] = {}
        for selector in cast(tuple[Selector, ...], self.selectors):
            window = (self.window or 1) if selector != "last" else 1
            rows = tuple(
                Segment(
                    filter=layer,
                    layers=layers,
                    budget=budget,
                    sink=_SINK,
                    recent=_RECENT,
                    selector=selector,
                    window=window,
                )
                for layer, layers in segments.items()
            )
            layers = tuple(layer for followers in segments.values() for layer in followers)
            decode = DecodePlan(
                lengths=(DecodeBucket(up_to=None, segments=rows),),
                offload=Offload(layers=layers, hot=hot_set([budget], longest)) if self.offload else None,
            )
            plans[selector] = Plan(status="unverified", model=info, decode=decode)
        words = f"made by hand: filter layers {format_ids(filters)} choose {budget}; {_SINK} sinks, {_RECENT} recent"
        return plans, words


def _by_depth(full: Sequence[int]) -> tuple[int, ...]:
    """Layers 2, 8 and 18 of 32, and where that is in other models: near the filter layers of published plans."""
    count = len(full)
    at = [number for number in (2, max(4, count // 4), max(6, count * 9 // 16)) if number <= count - 2]
    return tuple(full[number] for number in at or [count - 2] if number >= 0)


def _followers(full: Sequence[int], filters: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each filter layer the layers between it and the next; none where it has no full attention itself."""
    ends = (*filters[1:], MAX_ID + 1)
    return {
        layer: tuple(other for other in full if layer < other < end) if layer in full else ()
        for layer, end in zip(filters, ends, strict=False)  # no end is needed where there are no filters
    }
