"""Attention of one decode step, all layers one behind the other: by a plan, and by every dense kernel there is.

Every layer has keys and values of its own, as many as a model's cache holds, so that a layer finds nothing of them in a
GPU's cache from the step before. Where some layers have full attention, it is theirs alone that is timed: no plan
concerns the decode of others.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.bench.dense_kernels import FLASH_ATTN, TORCH_KERNELS, flash_attn_4, torch_kernel
from sparsekv.bench.harness import wait_for
from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import DecodePlan
from sparsekv.runtime.core.program import Program, count_step, decode
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter, RunStats
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.pinned import available_bytes, has_room
from sparsekv.runtime.stores.store import Float8, KeySource, Layout, Seen

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of the newest token to all: q [B, H, 1, D], k and v [B, G, S, D]."""

Step = Callable[[], list[torch.Tensor]]
"""The output of every layer, [B, H, 1, D]."""

_OURS = "sparsekv dense"
_AS_ROWS = ", heads of a group as rows"
_SPLITS = 32  # of the keys, for kernels that do not choose by themselves


class Fillable(Protocol):
    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the next tokens can be written."""

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Counts them."""


def kv_bytes(layouts: Iterable[Layout]) -> int:
    """Returns the bytes of the keys and values of one token in all layers."""
    return sum(one.bytes(1) for one in layouts)


def fill(layers: Iterable[Fillable], tokens: int, layouts: Sequence[Layout], seed: int) -> None:
    """Appends random tokens, of normal distribution, the same for one seed and device.

    Linux grants more host memory than there is, and kills the process that writes to it.
    """
    on_host = kv_bytes(layout for layout in layouts if layout.device.type == "cpu")
    if not has_room(tokens * on_host, available_bytes()):
        raise MemoryError("not enough memory for keys and values")
    for number, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
        generator = torch.Generator(layout.device).manual_seed(seed + number)
        k_BGSD, v_BGSD = layer.room(tokens, layout)
        for x_BGSD in (k_BGSD, v_BGSD):
            x_BGSD.normal_(generator=generator)
        layer.commit(k_BGSD, v_BGSD)
        del k_BGSD, v_BGSD, x_BGSD
        wait_for(layout.device)  # what is on its way to host memory takes device memory until it is there


class _Rounded:
    """A store in 8 bits, to be filled."""

    def __init__(self, store: DeviceStore, float8: Float8) -> None:
        self._store, self._float8 = store, float8

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return layout.empty(tokens), layout.empty(tokens)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        room = self._store.room(k_BGSD.shape[2], Float8.layout(Layout.of(k_BGSD)))
        self._float8.fill(room, k_BGSD, v_BGSD)
        self._store.commit(*room)


class StepAttention:
    """Random queries of one step, and the keys and values of all layers.

    Args:
        layouts: of its layers, for the batch.
        length: tokens of each row, the new one included.
        softmax: of every layer; kernels of others compute it without sinks and caps.

    Raises:
        What an allocation raises.
    """

    def __init__(
        self,
        info: ModelInfo,
        layouts: tuple[Layout, ...],
        length: int,
        backend: str,
        seed: int,
        softmax: Softmax = PLAIN,
        float8: bool = False,
    ) -> None:
        self._info = info
        self._backend = backend
        self._softmax = softmax
        self._device = layouts[0].device
        self._lengths = (length,) * layouts[0].batch
        self._timed = info.full_layers or tuple(range(info.layers))
        groups = info.by_layer
        owners = [layer if (owner := groups[layer].keys_of) is None else owner for layer in self._timed]
        stores = {owner: DeviceStore() for owner in owners}
        for owner, store in stores.items():
            store.reserve(length, Float8.layout(layouts[owner]) if float8 else layouts[owner])
        scales = {owner: Float8() for owner in stores if float8}
        rounded = [_Rounded(stores[owner], own) for owner, own in scales.items()]
        fill(rounded or [*stores.values()], length, [layouts[owner] for owner in stores], seed)
        self._stores = [stores[owner] for owner in owners]
        self._float8 = [scales[owner] for owner in owners if float8]
        queries = [
            replace(layouts[owner], heads=groups[layer].heads).empty(1)
            for layer, owner in zip(self._timed, owners, strict=True)
        ]
        generator = torch.Generator(self._device).manual_seed(seed)
        self._queries = [q_BH1D.normal_(generator=generator) for q_BH1D in queries]

    def by_plan(self, plan: DecodePlan | None) -> Step:
        """The step as the runtime computes it; without a plan by its dense kernel."""
        program = self._program(plan)
        state, lengths = DecodeState(program.segments), self._lengths
        sources: list[KeySource] = [Seen(store, partial(replace, softmax=self._softmax)) for store in self._stores]
        if self._float8:
            sources = [Seen(source, own.view) for source, own in zip(sources, self._float8, strict=True)]
        # A captured step never learns the lengths.
        known = (
            torch.tensor(lengths, dtype=torch.int32, device=self._device) if self._device.type == "cuda" else lengths
        )

        def step() -> list[torch.Tensor]:
            state.begin(known, self._device)
            return [
                decode(layer, q_BH1D, source, state, scale=q_BH1D.shape[-1] ** -0.5, backend=self._backend)
                for layer, q_BH1D, source in zip(program.layers, self._queries, sources, strict=True)
            ]

        return step

    def dense(self) -> dict[str, Step]:
        """The step by every dense kernel that there may be for these tensors."""
        calls: dict[str, Step] = {_OURS: self.by_plan(None)}
        if self._float8:
            return calls
        return calls | {name: partial(self._each_layer, attend) for name, attend in _kernels(self._device).items()}

    def counted(self, plan: DecodePlan) -> RunStats:
        """Returns what the step attends to by the plan."""
        count_step(self._program(plan), self._lengths, meter := Meter())
        return meter.read()

    def _program(self, plan: DecodePlan | None) -> Program:
        program = Program.of(None, plan, self._info)
        return replace(program, layers=tuple(program.layers[layer] for layer in self._timed))

    def _each_layer(self, attend: Attend) -> list[torch.Tensor]:
        groups, found = self._info.by_layer, []
        for layer, q_BH1D, store in zip(self._timed, self._queries, self._stores, strict=True):
            seen = slice(-min(store.length, groups[layer].window or store.length), None)
            found.append(attend(q_BH1D, *(x_BGSD[:, :, seen] for x_BGSD in store.tensors)))
        return found


def _kernels(device: torch.device) -> dict[str, Attend]:
    kernels: dict[str, Attend] = {"torch SDPA": partial(scaled_dot_product_attention, enable_gqa=True)}
    if device.type == "cuda":
        kernels = {name: partial(torch_kernel, kernel, causal=False) for name, kernel in TORCH_KERNELS.items()}
    kernels |= {f"{name}{_AS_ROWS}": partial(_grouped, attend) for name, attend in kernels.items()}
    if device.type == "cuda":
        # Otherwise it would repeat keys and values.
        kernels[f"torch math{_AS_ROWS}"] = partial(_grouped, partial(torch_kernel, SDPBackend.MATH, causal=False))
        kernels[FLASH_ATTN] = flash_attn_4
        kernels[f"{FLASH_ATTN}, {_SPLITS} splits"] = partial(flash_attn_4, num_splits=_SPLITS)
        kernels["FlashInfer"] = _flashinfer
    return kernels


def _grouped(attend: Attend, q_BH1D: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """The query heads of a KV head as rows of one head: keys are read once whatever the kernel."""
    return attend(q_BH1D.unflatten(1, (k_BGSD.shape[1], -1)).squeeze(3), k_BGSD, v_BGSD).reshape_as(q_BH1D)


def _flashinfer(q_BH1D: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """Raises ImportError where it is not installed, RuntimeError for a batch."""
    attend: Any = import_module("flashinfer").single_decode_with_kv_cache
    if q_BH1D.shape[0] > 1:
        raise RuntimeError("its kernel for contiguous keys takes one row")
    out_HD: torch.Tensor = attend(q_BH1D[0, :, 0], k_BGSD[0], v_BGSD[0], kv_layout="HND", use_tensor_cores=True)
    return out_HD[None, :, None]
