"""What vLLM's engine adds to the prices of sparse prefill, and what it runs in its place.

Its own kernels are timed by themselves, over pages that lie scattered as an engine's do, and not within an engine. The
time to a first token is that of the whole model: at short lengths, where the crossover lies, attention is a few percent
of it, less than what else varies. An engine also takes a minute, and most of the device's memory, to start.

Shapes: H query heads, G KV heads, T tokens of a chunk, S tokens, P pages of a request, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.cost.measure import PrefillHost
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.settings import preset_vllm
from sparsekv.runtime.vllm.engine_facts import TESTED, check_installed
from sparsekv.runtime.vllm.plan_host import Scratch


class VllmHost(PrefillHost):
    """See `PrefillHost`. Dense attention is vLLM's own kernel. For sparse attention a chunk's past is copied from
    pages, and its result into the step's rows.

    Args:
        chunk: most tokens of a prompt in a step (vLLM's `max_num_batched_tokens`); None for what a server has here.
        device: that the model is on.

    Raises:
        UsageError: vLLM is not installed, or its build is for another kind of device.
        UnsupportedError: plans do not run on this device or with this release.
    """

    name = "vllm"
    decodes = False

    def __init__(self, chunk: int | None, device: torch.device) -> None:
        check_installed()
        preset_vllm()
        from sparsekv.runtime.vllm import internals

        kind, release = internals.device_type(), internals.release.partition("+")[0]
        if kind != device.type:
            raise UsageError(f"expected a model on {kind}, which this vLLM is built for, found {device}; use --device")
        if release not in TESTED.get(kind, ()):
            known = " and ".join(f"{', '.join(releases)} on {device}" for device, releases in TESTED.items())
            raise UnsupportedError(f"expected vLLM {known}, found {release} on {kind}; install a tested release")
        self._vllm = internals
        self.chunk = chunk or internals.server_step()
        self.versions = {"vllm": release}

    def dense(
        self, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, chunk: Chunk, scale: float, backend: str
    ) -> Callable[[], object]:
        """vLLM's kernel for these rows, which are the last of their request."""
        cache, table_P = self._pages(k_BGSD)
        q_THD = q_BHTD[0].transpose(0, 1).contiguous()
        return self._vllm.dense_attention(q_THD, cache, table_P, chunk.longest, scale, torch.empty_like(q_THD))

    def copy(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Callable[[], object]:
        """The keys and values of a request from its pages into scratch."""
        _, heads, length, size = k_BGSD.shape
        cache, table_P = self._pages(k_BGSD)
        tokens = len(table_P) * self._vllm.platform.page
        scratch = Scratch(tokens, heads * size, k_BGSD.dtype, k_BGSD.device)
        return partial(scratch.copy, self._vllm.platform.pages_of(cache), table_P, length)

    def take(self, out_BHTD: torch.Tensor) -> None:
        """Writes it as [T, H, D], as an engine's steps have it."""
        out_BHTD[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _pages(self, k_BGSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache that holds so many keys, and a request's pages in it, scattered."""
        _, heads, length, size = k_BGSD.shape
        pages = -(-length // self._vllm.platform.page)
        cache = self._vllm.empty_cache(pages, heads, size, k_BGSD.dtype, k_BGSD.device).normal_()
        order_P = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
        return cache, order_P.to(k_BGSD.device)
