"""Decides which layers keep their keys and values in host memory.

A plan's `decode.offload` permits it for layers whose decode attends to chosen tokens only; a run chooses: `always` all
of these, `never` none, `auto` as few as the device's memory asks for (memory.py knows how many those are). At extreme
lengths a caller may have to move more, or other, layers than that, or have no decode plan at all: 1M tokens of an 8B
model are 137 GB.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from sparsekv.plans.errors import PlanWarning, UnsupportedError, UsageError
from sparsekv.plans.patterns import Budget, tokens
from sparsekv.plans.phases import DecodePlan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.hf.describe import config_of, decoder_of
from sparsekv.runtime.model_config import attention_groups
from sparsekv.runtime.stores.store import Layout

# Recent tokens kept on the device where no plan says: a few MB a layer, and what decode adds leaves in no hurry.
_HOT = tokens(1024)


OffloadMode = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The layers in host memory, and how many of their most recent tokens are on the device all the same."""

    layers: frozenset[int] = frozenset()
    hot: Budget = _HOT


def warn_of_host_layers(device: torch.device, mode: OffloadMode | None, layers: int | Sequence[int] | None) -> None:
    """Warns (`PlanWarning`) where a caller asks for layers in host memory, and the device is the host."""
    if device.type == "cpu" and (layers or mode == "always"):
        option = f"offload {mode} (--offload)" if not layers else "kv_host_layers (--offload N or LAYERS)"
        warnings.warn(
            f"{option} saves nothing on a CPU, where the device's memory is the host's; it takes a copy of recent "
            "tokens beside. Leave it out, unless it is to be tried without a GPU",
            PlanWarning,
            stacklevel=3,
        )


def place_layers(
    decode: DecodePlan | None,
    count: int,
    asked: int | Sequence[int] | None,
    mode: OffloadMode = "always",
    staying: frozenset[int] = frozenset(),
) -> Placement:
    """Where the keys and values of a model go, as far as that does not depend on a length.

    Args:
        asked: which layers go to the host, or how many, in place of what the plan says; None leaves it to the plan.
            Of a number, layers that the plan offloads come first, then those whose decode is sparse at the longest
            contexts (they read only chosen tokens back), then others; among each, the last ones.
        mode: what is made of the plan's permission; with "auto", the layers are those that may go.
        staying: layers that stay on the device, as they share keys and values with others or evict tokens.
    """
    offload = decode.offload if decode else None
    hot = offload.hot if offload else _HOT
    if asked is None:
        permitted = offload.layers if offload and mode != "never" else ()
        return Placement(frozenset(permitted), hot)
    numbers = tuple(asked) if isinstance(asked, Sequence | Set) and not isinstance(asked, str) else (asked,)
    if any(type(number) is not int for number in numbers):  # True is none either
        raise UsageError(f"expected kv_host_layers to be a number of layers, or several of them, found {asked!r:.40}")
    if isinstance(asked, int):
        most = count - len(staying)
        if not 0 <= asked <= most:
            raise UsageError(f"expected 0 to {most} layers in host memory{_without(staying)}, found {asked}")
        first = set(offload.layers if offload else ())
        sparse = decode.follower_layers if decode else ()
        ranked = sorted({*range(count)} - staying, key=lambda layer: (layer not in first, layer not in sparse, -layer))
        return Placement(frozenset(ranked[:asked]), hot)
    if others := {*asked}.difference({*range(count)} - staying):
        expected = f"layers of 0-{count - 1} in host memory{_without(staying)}"
        raise UsageError(f"expected {expected}, found {format_ids(others)}")
    return Placement(frozenset(asked), hot)


def _without(staying: frozenset[int]) -> str:
    return f" (not {format_ids(staying)}, which share keys and values or evict tokens)" if staying else ""


def spill_order(decode: DecodePlan | None, length: int) -> tuple[int, ...]:
    """The layers that a plan permits to offload, those first of which a step at this length reads least, then the
    last."""
    if decode is None or decode.offload is None:
        return ()
    reads = dict.fromkeys(decode.offload.layers, length)
    for segment in decode.bucket(length).segments:
        chosen = segment.chosen_tokens(length)
        if chosen is not None:
            reads |= dict.fromkeys(segment.layers, segment.sink + chosen + segment.recent)
    return tuple(sorted(decode.offload.layers, key=lambda layer: (reads[layer], -layer)))


def layouts_of(model: PreTrainedModel) -> list[Layout]:
    """The layout of a row in each layer that has keys and values of its own: the others come behind."""
    groups = {layer: group for group in attention_groups(config_of(model)) for layer in group.layers}
    decoder: Any = decoder_of(model)
    # of any parameter, a norm's at last: quantised projections may show none
    devices = [next(module.parameters()).device for module in decoder.layers]
    return [
        Layout(1, groups[layer].kv_heads, groups[layer].head_dim, model.dtype, device)
        for layer, device in enumerate(devices)
        if groups[layer].keys_of is None
    ]


@dataclass(frozen=True, slots=True)
class FixedRows:
    """The layers whose rows all have one length and stay as they are: none is moved, repeated or left out."""

    evicting: frozenset[int] = frozenset()
    in_host_memory: frozenset[int] = frozenset()

    def refuse(self, expected: str, found: str, instead: str) -> None:
        """Raises UnsupportedError where there are such layers; the plan can be changed, or what was asked for."""
        if self.evicting:
            why, changed = f"layers {format_ids(self.evicting)} evict tokens", "apply a plan without kv_cache"
        elif self.in_host_memory:
            why = f"layers {format_ids(self.in_host_memory)} are in host memory"
            changed = "apply the plan with offload='never'"
        else:
            return
        raise UnsupportedError(f"expected {expected}, as {why}, found {found}; {instead}, or {changed}")
