"""A host of a few lines: attention-only layers over plain tensors, paged keys, rows of different lengths.

It uses `runtime.core` as any host would, and nothing of transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.model import ModelInfo
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program, count_step, decode
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.store import Resident

SIZE, PAGE = 16, 16
SCALE = SIZE**-0.5


class PagedKeys:
    """Keys and values of one layer in pages of one pool, in an order that means nothing."""

    def __init__(self, kv_heads: int, rows: int, pages: int, seed: int) -> None:
        order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(seed))
        self.table_BP = order.int().view(rows, pages)
        self.pool = torch.full((rows * pages, kv_heads, PAGE, 2 * SIZE), float("nan"))  # K and V side by side

    def write(self, row: int, first: int, k_GSD: torch.Tensor, v_GSD: torch.Tensor) -> None:
        """The tokens from `first` on."""
        for number, token in enumerate(range(first, first + k_GSD.shape[1])):
            page, slot = self.table_BP[row, token // PAGE], token % PAGE
            self.pool[page, :, slot] = torch.cat((k_GSD[:, number], v_GSD[:, number]), 1)

    def view(self, lengths: list[int], rows: slice | None = None) -> KeyView:
        """All rows, or some of them, at these lengths."""
        k, v = self.pool.split(SIZE, 3)
        table_BP = self.table_BP if rows is None else self.table_BP[rows]
        return KeyView(k, v, torch.tensor(lengths, dtype=torch.int32), table_BP)


class TinyHost:
    """Runs a program: `prompt` fills a row, `step` adds one token to every row."""

    def __init__(self, program: Program, model: ModelInfo, rows: int, pages: int = 16, known: bool = True) -> None:
        source = torch.Generator().manual_seed(0)
        group = model.attention[0]
        self.program, self.known, self.meter = program, known, Meter()
        self.state = DecodeState(program.segments)
        self.weights = [
            torch.randn(3, group.heads * SIZE, group.heads * SIZE, generator=source) / (group.heads * SIZE) ** 0.5
            for _ in program.layers
        ]
        self.kv_heads = group.kv_heads
        self.keys = [PagedKeys(group.kv_heads, rows, pages, seed) for seed, _ in enumerate(program.layers)]
        self.lengths = [0] * rows

    def prompt(self, row: int, x_SE: torch.Tensor) -> torch.Tensor:
        """A prompt, or the next part of one; returns what the layers make of it."""
        past, length = self.lengths[row], self.lengths[row] + x_SE.shape[0]
        for layer, keys in zip(self.program.layers, self.keys, strict=True):
            q_HSD, k_GSD, v_GSD = self._project(layer.layer, x_SE)
            keys.write(row, past, k_GSD, v_GSD)
            own = KeyView(*keys.view([length], slice(row, row + 1)).contiguous(length), torch.tensor([length]))
            out = prefill(
                layer, q_HSD[None], own, Chunk((past,), (length,)), scale=SCALE, fallback=Fallback("cpu"),
                meter=self.meter,
            )  # fmt: skip
            x_SE = x_SE + out[0].transpose(0, 1).flatten(1)
        self.lengths[row] = length
        return x_SE

    def step(self, x_BE: torch.Tensor) -> torch.Tensor:
        """One new token in every row."""
        self.lengths = [length + 1 for length in self.lengths]
        lengths = tuple(self.lengths) if self.known else torch.tensor(self.lengths, dtype=torch.int32)
        self.state.begin(lengths, x_BE.device)
        if self.known:
            count_step(self.program, self.lengths, self.meter)
        for layer, keys in zip(self.program.layers, self.keys, strict=True):
            q_HBD, k_GBD, v_GBD = self._project(layer.layer, x_BE)
            for row, length in enumerate(self.lengths):
                keys.write(row, length - 1, k_GBD[:, row : row + 1], v_GBD[:, row : row + 1])
            q_BH1D, source = q_HBD.transpose(0, 1)[:, :, None], Resident(keys.view(self.lengths))
            out_BH1D = decode(layer, q_BH1D, source, self.state, scale=SCALE, backend="cpu")
            x_BE = x_BE + out_BH1D.flatten(1)
        return x_BE

    def _project(self, layer: int, x_SE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (x_SE @ weight for weight in self.weights[layer])
        heads = [x.unflatten(1, (-1, SIZE)).transpose(0, 1) for x in (q, k, v)]
        return heads[0], heads[1][: self.kv_heads], heads[2][: self.kv_heads]


class Ranks:
    """Threads in step: what each gives to `gather` comes back with what all gave."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._given: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Waits for all ranks."""
        with self._lock:
            self._given.append(x)
        self._barrier.wait(30)
        found = torch.stack(self._given)
        if self._barrier.wait(30) == 0:
            self._given.clear()
        self._barrier.wait(30)
        return found

    def run(self, work: Callable[[int], torch.Tensor], count: int) -> list[torch.Tensor]:
        """`work(rank)` of every rank at once."""
        results: dict[int, torch.Tensor] = {}
        threads = [threading.Thread(target=lambda r=r: results.update({r: work(r)})) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == count, "a rank failed"
        return [results[rank] for rank in range(count)]
