"""Virtual memory for the layers of a model that it pays for, and for prompts ahead of need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import Cache, PreTrainedModel

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.cache import SparseLayer, is_autocast
from sparsekv.runtime.hf.memory import MemoryModel, Request
from sparsekv.runtime.hf.placement import Placement, layouts_of
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.float8 import Float8
from sparsekv.runtime.stores.page_pool import PagePool, pool_of
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore


@dataclass(frozen=True, slots=True)
class Paging:
    """Virtual memory of the layers of one model.

    Attributes:
        sizes: what a prompt takes.
        layouts: of each layer, for one row.
        pools: of each layer that is in virtual memory.
    """

    sizes: MemoryModel
    layouts: Sequence[Layout]
    pools: dict[int, PagePool]

    @classmethod
    def of(cls, model: PreTrainedModel, sizes: MemoryModel) -> Paging:
        """All layers that it pays for, on devices that have it."""
        layouts = layouts_of(model)
        pools = {layer: pool_of(layouts[layer].device) for layer in sizes.paged}
        return cls(sizes, layouts, {layer: pool for layer, pool in pools.items() if pool is not None})

    def without(self) -> Paging:
        """No layer in virtual memory."""
        return replace(self, pools={})

    def new_store(self, layer: int) -> DeviceStore:
        """An empty one on the device."""
        pool = self.pools.get(layer)
        return DeviceStore() if pool is None else VirtualStore(pool, self.sizes.size.info.context_length)

    def relieve(self) -> bool:
        """Gives the pages back that no cache uses, before something is tried again; whether there were any."""
        return any([pool.trim() for pool in self.pools.values()])

    def expect(self, cache: Cache, lengths: tuple[int, ...], placement: Placement) -> None:
        """Maps pages ahead of a prompt layer by layer, in order, while the device works on the layers before.

        Args:
            cache: of the prompt.
            lengths: of its rows, with the prompt.
            placement: of its other layers.

        Raises:
            UsageError: the memory of a device does not suffice; nothing was mapped.
            ShapeError: the cache has another number of rows.
        """
        virtual = {
            layer: layer.store
            for layer in cache.layers
            if isinstance(layer, SparseLayer) and isinstance(layer.store, VirtualStore)
        }
        if not virtual or any(is_autocast(pool.driver.device.type) for pool in self.pools.values()):
            return
        cached = next(iter(virtual.values())).lengths or (0,) * len(lengths)
        new = max(map(int.__sub__, lengths, cached))  # the longest row need not be the one with most new tokens
        layouts = {layer: replace(self.layouts[layer.layer], batch=len(lengths)) for layer in virtual}
        request = Request(max(lengths), batch=len(lengths), chunk=new)
        for pool in {id(pool): pool for pool in self.pools.values()}.values():
            mine = [layer for layer in virtual if self.pools.get(layer.layer) is pool]
            with pool.first():  # what nobody uses any more is free then
                missing = sum(virtual[layer].missing(lengths, layer.stored(layouts[layer])) for layer in mine)
                self._check(pool, missing, lengths)
                pool.make_way(missing, lambda: self.sizes.use(request, placement).prefill)
        for layer, layout in layouts.items():
            layer.expect(lengths, layout)

    def _check(self, pool: PagePool, missing: int, lengths: tuple[int, ...]) -> None:
        free = pool.driver.available() + pool.bytes
        if missing <= free:
            return
        layouts = [self.layouts[layer] for layer, mine in self.pools.items() if mine is pool]
        token = sum((Float8.layout(one) if self.sizes.float8 else one).bytes(1) for one in layouts)
        fit = max(lengths) - -(-(missing - free) // (token * len(lengths)))
        raise UsageError(
            f"expected {missing / 2**30:.1f} GiB of device memory for keys and values of {max(lengths):,} tokens in "
            f"{len(lengths)} rows, found {free / 2**30:.1f} GiB; {max(fit, 0):,} tokens a row fit"
        )
