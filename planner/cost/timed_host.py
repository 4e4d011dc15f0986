"""The program that runs a plan, as far as its attention has a price.

Shapes: B batch, H query heads, G KV heads, S tokens, T tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from sparsekv.kernels.backends import decode_attention, dense_prefill
from sparsekv.kernels.keys import KeyView, full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.schema import HostName
from sparsekv.runtime.stores.float8 import Float8


class Host:
    """Says how the program that runs the plan attends, as far as that has a price: here transformers, which takes whole
    prompts, dense by the fastest kernel of our own, in a contiguous cache.

    Attributes:
        name: of the host.
        chunk: most tokens of a prompt at once; None is all.
        versions: of what is timed here and nowhere else.

    Args:
        float8: whether keys and values are cached in 8 bits.
    """

    name: HostName = "transformers"
    chunk: int | None = None
    versions: Mapping[str, str] = MappingProxyType({})

    def __init__(self, float8: bool = False) -> None:
        self.float8 = float8

    def dense(
        self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, chunk: Chunk, scale: float, backend: str
    ) -> Callable[[], object]:
        """A launch of its dense attention of a chunk."""
        return partial(dense_prefill, q_BHTD, k_BGSD, v_BGSD, chunk, scale=scale, backend=backend)

    def copy(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Callable[[], object] | None:
        """Returns what comes before sparse attention of a chunk with a past; None for nothing."""
        return None

    def take(self, out_BHTD: torch.Tensor) -> None:
        """Runs what comes after sparse attention."""

    def views(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, rows: int, copies: int) -> list[KeyView]:
        """Such keys and values of a step's rows, as often as steps need to read them cold."""
        if self.float8:
            stored = Float8()
            written = [stored.rounded(k_BGSD, v_BGSD) for _ in range(copies)]
            return [stored.view(full_view(*both)) for both in written]
        return [full_view(k_BGSD, v_BGSD), *(full_view(k_BGSD.clone(), v_BGSD.clone()) for _ in range(copies - 1))]

    def dense_step(self, q_BH1D: torch.Tensor, keys: KeyView, scale: float, backend: str) -> Callable[[], object]:
        """A launch of its dense attention of a decode step."""
        return partial(decode_attention, q_BH1D, keys, scale=scale, backend=backend)

    def idle_step(self, q_BH1D: torch.Tensor, keys: KeyView, scale: float) -> Callable[[], object] | None:
        """Returns what a layer launches for rows that attend to everything where none does; None for nothing."""
        return None
