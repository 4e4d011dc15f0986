"""A decode method of docs/extending.md: its role, which goes into runtime/core/roles.py."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.plans.patterns import tokens
from sparsekv.runtime.core.roles import Role
from sparsekv.runtime.core.state import DecodeState, Step
from sparsekv.runtime.stores.host import Reads


@dataclass(frozen=True, slots=True)
class EvenSpread(Role):
    """A layer that attends to the newest tokens, and to older ones at equal distances: to others in each layer, and in
    each step, which a number on the device counts.

    Attributes:
        chosen: how many of the older ones.
        recent: how many of the newest.
    """

    is_sparse: ClassVar[bool] = True

    chosen: int
    recent: int

    @property
    def dense_up_to(self) -> int:
        return self.chosen + self.recent

    @property
    def hot_reads(self) -> Reads:
        return Reads((tokens(self.chosen),), 0, self.recent, self.dense_up_to)

    @property
    def rows_key(self) -> Hashable:
        return self

    def reads(self, lengths: Sequence[int]) -> list[int]:
        return [min(length, self.dense_up_to) for length in lengths]

    def gathers(self, lengths: Sequence[int]) -> bool:
        return min(lengths) > self.dense_up_to

    def new_carried(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device=device)

    def sparse_lengths(self, state: DecodeState, backend: str) -> torch.Tensor:
        return state.lengths_B * (state.lengths_B > self.dense_up_to)

    def step(self, step: Step) -> torch.Tensor:
        if step.verifies:
            return step.attend_all()
        lengths_B, steps_1 = step.lengths_B, step.state.carried[step.layer]
        is_sparse_B = lengths_B > self.dense_up_to
        apart_B = ((lengths_B - self.recent) // self.chosen).clamp(min=1)
        first_B = (steps_1.to(lengths_B.device) + step.layer) % apart_B
        steps_1 += is_sparse_B.any().to(steps_1.device)
        number_N = torch.arange(self.chosen, device=lengths_B.device)
        chosen_B1N = (first_B[:, None] + apart_B[:, None] * number_N)[:, None].int()
        counts_B = torch.where(is_sparse_B, self.chosen, ALL).int()
        return step.attend_to(Selection(chosen_B1N, counts_B, sink=0, recent=self.recent))
