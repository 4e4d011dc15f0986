"""The rows of an engine step that decode by a plan, from vLLM's own pages.

Nothing of a step lives in a row's place beyond it: vLLM moves rows when requests end. What a captured step reads lies
at fixed addresses, and the lengths by which rows choose are 0 where a row is not to: where it is a token of a prompt,
and behind the last request.

Shapes: B requests, H query heads, D head size, N pages in memory, G KV heads, S tokens of a page, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.core.budgets import counts_of, scored_tokens
from sparsekv.runtime.core.decode import Resident, decode
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.state import DecodeState

_SPARE = 512  # a captured step may have more rows than requests can run


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first requests of a step, which have one row each.

    Attributes:
        count: how many; their rows are the first of the step.
        lengths_B: tokens of each, int32 on the device.
        table_BP: the block table.
    """

    count: int
    lengths_B: torch.Tensor
    table_BP: torch.Tensor


class StepDecode:
    """Decode by a plan in one worker: what its layers share in a step.

    Args:
        program: of the layers.
        backend: of decode attention.
        requests: most that run at once.
        longest: tokens of the longest one.
        captured: whether steps are captured as CUDA graphs: then the host knows no lengths inside of one.
    """

    def __init__(
        self, program: Program, backend: str, requests: int, longest: int, device: torch.device, captured: bool
    ) -> None:
        self._program, self._backend, self._captured = program, backend, captured
        self._segments = [layer.filters for layer in program.filters if layer.filters]
        self._lengths_B = torch.zeros(requests + _SPARE, dtype=torch.int32, device=device)
        heads = max(layer.heads for layer in program.filters)
        room = heads * min(scored_tokens(heads), requests * longest) if device.type == "cuda" else 0
        self.state = DecodeState(program, scratch=torch.empty(room, dtype=torch.float32, device=device))
        self.failed = False  # in the step under way, which goes on dense

    @property
    def bytes(self) -> int:
        """Of the device that are held between steps."""
        scratch = self.state.scratch
        return self._lengths_B.nbytes + (0 if scratch is None else scratch.nbytes)

    def begin(self, lengths: Sequence[int]) -> bool:
        """Begins a step.

        Args:
            lengths: by which rows choose: 0 for one that attends to everything.

        Returns:
            Whether some row chooses.
        """
        self.failed = False
        if self._captured:
            self._fill(lengths)
            self.state.begin(self._lengths_B[: len(lengths)], self._lengths_B.device)
        else:
            self.state.begin(lengths, self._lengths_B.device)
        return any(segment.count(length) != ALL for segment in self._segments for length in set(lengths))

    def _fill(self, lengths: Sequence[int]) -> None:
        padded = torch.zeros(len(self._lengths_B), dtype=torch.int32, device="cpu", pin_memory=self._lengths_B.is_cuda)
        padded[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        self._lengths_B.copy_(padded, non_blocking=True)  # pinned memory is not used again before that is done

    def sparse_rows(self, lengths: Sequence[int]) -> int:
        """How many of the rows choose, in the segment where most do."""
        counts = (counts_of(segment, self._program, lengths) for segment in self._segments)
        return max(sum(count != ALL for count in some) for some in counts)

    def attend(
        self,
        layer: LayerProgram,
        q_BHD: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: DecodeRows,
        scale: float,
    ) -> torch.Tensor:
        """[B, H, D]: attention of the rows in a layer that chooses or follows a choice.

        Args:
            layer: what the layer computes.
            q_BHD: the queries.
            pages: keys and values, [N, G, S, D] each; the new ones are there already.
            rows: of the step that was begun.
            scale: softmax scale.
        """
        keys = KeyView(*pages, rows.lengths_B, rows.table_BP)
        out_BH1D = decode(layer, q_BHD[:, :, None], Resident(keys), self.state, scale=scale, backend=self._backend)
        return out_BH1D[:, :, 0]


def decodes(layer: LayerProgram) -> bool:
    """Whether a layer has a part in sparse decode."""
    return layer.filters is not None or layer.follows is not None


def single_rows(starts: Sequence[int]) -> int:
    """How many of a step's first requests have one row: vLLM sorts those that decode to the front."""
    count = 0
    while count + 1 < len(starts) and starts[count + 1] - starts[count] == 1:
        count += 1
    return count
