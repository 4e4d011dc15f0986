"""The program that runs a plan, as far as its attention has a price.

vLLM's kernels are timed by themselves, over pages that lie scattered as an engine's do, and not within an engine. The
time to a first token is that of the whole model: at short lengths attention is a few percent of it, less than what else
varies. An engine also takes a minute, and most of the device's memory, to start.

Shapes: B batch, H query heads, G KV heads, S tokens, T tokens of a chunk, P pages of a request, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from sparsekv.kernels.backends import decode_attention, dense_prefill
from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.schema import HostName
from sparsekv.runtime.paged.plan_host import Scratch
from sparsekv.runtime.settings import preset_vllm
from sparsekv.runtime.stores.float8 import Float8
from sparsekv.runtime.vllm.settings import TESTED, check_installed, known_releases

_FINITE = 0x7F  # bytes below it are numbers in e4m3


class Host:
    """Says how the program that runs the plan attends, as far as that has a price: here transformers, which takes whole
    prompts, dense by the fastest kernel of our own, in a contiguous cache.

    Attributes:
        name: of the host.
        chunk: most tokens of a prompt at once; None is all.
        batches: rows of the decode steps that are timed.
        versions: of what is timed here and nowhere else.

    Args:
        float8: whether keys and values are cached in 8 bits.
    """

    name: HostName = "transformers"
    chunk: int | None = None
    batches: tuple[int, ...] = (1,)
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


@dataclass(frozen=True, slots=True, eq=False)
class PagedKeys(KeyView):
    """Keys and values in the cache of a layer of vLLM."""

    cache: Any = None


class VllmHost(Host):
    """See `Host`. Dense attention is vLLM's own kernel. For sparse prefill a chunk's past is copied from pages, and its
    result into the step's rows; sparse decode reads pages, behind a launch of vLLM's kernel for rows that there are
    none of.

    Args:
        chunk: most tokens of a prompt in a step (vLLM's `max_num_batched_tokens`); None for what a server has here.
        device: that the model is on.
        float8: whether keys and values are cached in 8 bits.

    Raises:
        UsageError: vLLM is not installed, or its build is for another kind of device.
        UnsupportedError: plans do not run on this device or with this release.
    """

    name = "vllm"
    batches = (1, 8)

    def __init__(self, chunk: int | None, device: torch.device, float8: bool = False) -> None:
        super().__init__(float8)
        check_installed()
        preset_vllm()
        from sparsekv.runtime.vllm import internals

        kind, release = internals.device_type(), internals.release.partition("+")[0]
        if kind != device.type:
            raise UsageError(f"expected a model on {kind}, which this vLLM is built for, found {device}; use --device")
        if kind not in TESTED:
            raise UnsupportedError(
                f"expected vLLM {known_releases()}, found {release} on {kind}; install a tested release"
            )
        self._vllm = internals
        self.chunk = chunk or internals.server_step()
        self.versions = {"vllm": release}

    def dense(
        self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, chunk: Chunk, scale: float, backend: str
    ) -> Callable[[], object]:
        """vLLM's kernel for these rows, which are the last of their request."""
        cache, table_P = self._pages(k_BGSD)
        q_THD = q_BHTD[0].transpose(0, 1).contiguous()
        return self._launch(q_THD, cache, table_P[None], [chunk.longest], scale)

    def copy(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Callable[[], object]:
        """The keys and values of a request from its pages into scratch."""
        _, heads, length, size = k_BGSD.shape
        cache, table_P = self._pages(k_BGSD)
        scratch = Scratch(length, heads * size, k_BGSD.dtype, k_BGSD.device)
        scales = self._scales(heads, k_BGSD)
        return partial(scratch.copy, self._vllm.platform.pages_of(cache), table_P, length, scales)

    def take(self, out_BHTD: torch.Tensor) -> None:
        """Writes it as [T, H, D], as an engine's steps have it."""
        out_BHTD[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def views(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, rows: int, copies: int) -> list[KeyView]:
        """In pages, each row's own."""
        found: list[KeyView] = []
        for _ in range(copies):
            cache, table_P = self._pages(k_BGSD, rows)
            lengths_B = torch.full((rows,), k_BGSD.shape[2], dtype=torch.int32, device=k_BGSD.device)
            k_NGSD, v_NGSD = self._vllm.platform.pages_of(cache)
            scales = self._scales(k_BGSD.shape[1], k_BGSD)
            if scales is not None:
                k_NGSD, v_NGSD = k_NGSD.view(FLOAT8), v_NGSD.view(FLOAT8)
            found.append(PagedKeys(k_NGSD, v_NGSD, lengths_B, table_P.view(rows, -1), scales=scales, cache=cache))
        return found

    def dense_step(self, q_BH1D: torch.Tensor, keys: KeyView, scale: float, backend: str) -> Callable[[], object]:
        """vLLM's kernel for a row of each request."""
        return self._step(q_BH1D, keys, keys.lengths_B.tolist(), scale)

    def idle_step(self, q_BH1D: torch.Tensor, keys: KeyView, scale: float) -> Callable[[], object]:
        """The same where all rows are ours; a kernel that does not take empty rows computes them in vain."""
        lengths = keys.lengths_B.tolist()
        return self._step(q_BH1D, keys, [0] * len(lengths) if self._vllm.platform.takes_empty else lengths, scale)

    def _step(self, q_BH1D: torch.Tensor, keys: KeyView, lengths: Sequence[int], scale: float) -> Callable[[], object]:
        assert isinstance(keys, PagedKeys)
        assert keys.table_BP is not None
        return self._launch(q_BH1D[:, :, 0].contiguous(), keys.cache, keys.table_BP, lengths, scale)

    def _launch(
        self, q_THD: torch.Tensor, cache: torch.Tensor, table_BP: torch.Tensor, lengths: Sequence[int], scale: float
    ) -> Callable[[], object]:
        out_THD, scales = torch.empty_like(q_THD), self._scales(cache.shape[1], q_THD)
        if scales is not None and q_THD.is_cuda:  # an engine has rounded them before
            scales = replace(scales, q_G=torch.ones_like(scales.k_G))
            q_THD = q_THD.to(FLOAT8)
        return self._vllm.engine_dense_attention(q_THD, cache, table_BP, lengths, scale, out_THD, scales)

    def _scales(self, heads: int, like: torch.Tensor) -> Scales | None:
        """Returns the scales of a cache in 8 bits, whose price does not depend on what they are."""
        of_G = torch.ones(heads, dtype=torch.float32, device=like.device)
        return Scales(of_G, of_G, like.dtype) if self.float8 else None

    def _pages(self, k_BGSD: torch.Tensor, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache that holds so many keys of each row, and the rows' pages in it, scattered."""
        _, heads, length, size = k_BGSD.shape
        pages = rows * -(-length // self._vllm.platform.page)
        dtype = torch.uint8 if self.float8 else k_BGSD.dtype
        cache = self._vllm.empty_cache(pages, heads, size, dtype, k_BGSD.device)
        cache.random_(0, _FINITE) if self.float8 else cache.normal_()
        order_P = torch.randperm(pages, generator=torch.Generator().manual_seed(0), device="cpu").int()
        return cache, order_P.to(k_BGSD.device)
