"""A worker of vLLM that counts the choices in which tensor-parallel ranks differ; they should not."""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.core.state import Gather
from sparsekv.runtime.vllm.engine_host import plan_host
from sparsekv.runtime.vllm.internals import worker_class

_Worker: Any = worker_class()


class ComparingWorker(_Worker):
    """vLLM's own worker, which has the choices of its plan compared: also in graphs, which are captured later."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        host = plan_host(self.get_model())
        state = None if host is None or host.decode is None else host.decode._state
        self.differences: RankDifferences | None = None
        if state is not None and state.gather is not None:
            self.differences = state._on_choice = RankDifferences(state.gather, self.device)

    def rank_differences(self) -> int | None:
        """Choices in which ranks differed so far; None where they choose nothing together. Waits for the device."""
        return None if self.differences is None else self.differences.count


class RankDifferences:
    """Counts the choices in which ranks differ that choose together, on the device, so in captured graphs too."""

    def __init__(self, gather: Gather, device: torch.device) -> None:
        self._gather = gather
        self._count_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, segment: SegmentProgram, selection: Selection) -> None:
        """Compares a choice, a digest a row."""
        if segment.across_ranks:
            all_RB = self._gather(digests(selection).view(torch.float32)).view(torch.int32)
            self._count_1 += (all_RB != all_RB[0]).any(0).sum()

    @property
    def count(self) -> int:
        """Waits for the device."""
        return int(self._count_1)


def digests(selection: Selection) -> torch.Tensor:
    """int32 [B]: of the tokens that each row has chosen, which ascend. Rows that attend to everything have 0."""
    chosen_BgN, counts_B = selection.chosen_BgN, selection.counts_B
    at_N = torch.arange(chosen_BgN.shape[2], device=chosen_BgN.device)
    hashed_BgN = (chosen_BgN.long() + 1) * (2 * at_N + 1) * 2_654_435_761 % 2_147_483_629
    return hashed_BgN.masked_fill(at_N >= counts_B[:, None, None], 0).sum((1, 2)).remainder(2_147_483_629).int()
