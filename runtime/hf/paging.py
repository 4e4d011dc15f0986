"""Which layers of a model have their keys and values in virtual memory, and how prompts get theirs ahead of need.

A page of 2 MiB is the least that a row can have of a layer's keys, and the most that it has beyond its tokens. Where a
row of the whole context fills `LEAST_PAGES`, that is no more than the eighth by which a device store grows, and a copy
at growth, with old and new side by side, is saved. Smaller layers (SmolLM2 has 1.5 pages at 8K) keep the device store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import Cache, PreTrainedModel

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.cache import SparseLayer, is_autocast
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.stores.page_pool import PagePool, pool_of
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore, token_bytes

LEAST_PAGES = 8


def pays(token: int, context: int, page: int) -> bool:
    """Whether pages of so many bytes pay for keys of `token` bytes."""
    return token * context >= LEAST_PAGES * page


@dataclass(frozen=True, slots=True)
class Paging:
    """Virtual memory of the layers of one model.

    Attributes:
        context: tokens that the model is made for.
        layouts: of each layer, for one row.
        pools: of each layer that is in virtual memory.
    """

    context: int
    layouts: Sequence[Layout]
    pools: dict[int, PagePool]

    @classmethod
    def of(cls, model: PreTrainedModel, context: int) -> Paging:
        """All layers that it pays for, on devices that have it."""
        layouts, pools = layouts_of(model), dict[int, PagePool]()
        for layer, layout in enumerate(layouts):
            pool = pool_of(layout.device)
            if pool is not None and pays(token_bytes(layout), context, pool.driver.granularity):
                pools[layer] = pool
        return cls(context, layouts, pools)

    @property
    def page(self) -> int:
        """Bytes of a page; 0 where no layer is in virtual memory."""
        return next((pool.driver.granularity for pool in self.pools.values()), 0)

    def new_store(self, layer: int) -> VirtualStore | None:
        """An empty store; None for a layer that is not in virtual memory."""
        pool = self.pools.get(layer)
        return None if pool is None else VirtualStore(pool, self.context)

    def expect(self, cache: Cache, lengths: tuple[int, ...], working: int) -> None:
        """Maps pages ahead of a prompt layer by layer, in order, while the device works on the layers before.

        Args:
            cache: of the prompt.
            lengths: of its rows, with the prompt.
            working: bytes that the prompt takes besides.

        Raises:
            UsageError: the memory of a device does not suffice; nothing was mapped.
        """
        layers = [layer for layer in cache.layers if isinstance(layer, SparseLayer) and _is_virtual(layer)]
        if len(set(lengths)) > 1 or any(is_autocast(pool.driver.device.type) for pool in self.pools.values()):
            return
        for pool in {id(pool): pool for pool in self.pools.values()}.values():
            mine = [layer for layer in layers if self.pools.get(layer.layer) is pool]
            missing = sum(self._missing(layer, lengths) for layer in mine)
            self._check(pool, missing, lengths)
            pool.make_way(missing, working)
        for layer in layers:
            layer.expect(max(lengths), replace(self.layouts[layer.layer], batch=len(lengths)))

    def _missing(self, layer: SparseLayer, lengths: tuple[int, ...]) -> int:
        layout = replace(self.layouts[layer.layer], batch=len(lengths))
        return max(0, 2 * token_bytes(layout) * sum(lengths) - layer.store.bytes.device)

    def _check(self, pool: PagePool, missing: int, lengths: tuple[int, ...]) -> None:
        free = pool.driver.available() + pool.bytes
        if missing <= free:
            return
        token = sum(2 * token_bytes(self.layouts[layer]) for layer, mine in self.pools.items() if mine is pool)
        fit = max(lengths) - -(-(missing - free) // (token * len(lengths)))
        raise UsageError(
            f"expected {missing / 2**30:.1f} GiB of device memory for keys and values of {max(lengths):,} tokens in "
            f"{len(lengths)} rows, found {free / 2**30:.1f} GiB; {max(fit, 0):,} tokens a row fit"
        )


def _is_virtual(layer: SparseLayer) -> bool:
    return isinstance(layer.store, VirtualStore)
