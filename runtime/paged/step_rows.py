"""The rows of an engine's step: which are prefill, and which of those a layer runs sparse; and decode by the plan, read
from the engine's own pages.

A layer of a segment is computed by two kernels, as one captured graph serves every step: the engine's for the rows that
attend to everything (short ones, single rows of a prompt, those that the score scratch has no room for), to which the
others have no tokens; ours for the rows that choose, which writes no others. Where the engine has other graphs for
steps in which nothing chooses, ours alone computes all rows: an empty kernel a layer takes a tenth of a small model's
step.

Beside a drafter a request has several decode rows in a step, its newest token and those that are verified, each with a
length and a choice of its own: a verified token is the one that decode without a drafter gives.

Shapes: T tokens of the step, all requests one after another; B requests that decode, R their rows, H query heads, G KV
heads, N pages in memory, S tokens of a page, P pages of a request, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.keys import FLOAT8, PLAIN, KeyView, Requests, Scales, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.core import segments
from sparsekv.runtime.core.program import LayerProgram, Program, decode
from sparsekv.runtime.core.state import DecodeState, Gather
from sparsekv.runtime.paged.metrics import Counters
from sparsekv.runtime.stores.store import Resident

_SCRATCH_SHARE = 256  # of the device's memory for scores: one part in so many
_MOST_SHARES = 4  # where a request has several rows


class DecodeHost:
    """The decode phase of a plan in one worker, of at most so many requests a step, with at most `queries` rows each.
    Captured graphs read from fixed addresses; no state of a row lasts from one step to the next, as the engine may have
    moved the row. All ranks that choose together make one at the same time."""

    def __init__(
        self, program: Program, backend: str, requests: int, longest: int, device: torch.device,
        gather: Gather | None = None, queries: int = 1,
    ) -> None:  # fmt: skip
        self._backend, self._queries, rows = backend, queries, requests * queries
        room = _scratch(program, rows * longest, device, gather, min(queries, _MOST_SHARES))
        scratch = torch.empty(room, dtype=torch.float32, device=device)
        self._state = DecodeState(program.segments, gather, scratch=scratch, carried=program.carried)
        self._lengths_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._request_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self._segments = program.segments
        self._bounds_N = np.array(program.decode_bounds, dtype=np.int64)
        self._from_N = np.array(program.decodes_from)

    def chooses(self, lengths: ArrayLike, least: int | None = 0) -> bool:
        """Returns whether a row may choose, as far as the host knows: by the tokens of each request; `least` as in
        `begin`. None does in a bucket that is dense behind one that is not."""
        return least is not None and bool(self._chooses(lengths, least).any())

    def without_room(self, lengths: Sequence[int]) -> list[bool]:
        """Marks the rows that may choose, at these lengths, but attend to everything for want of scratch. `Budgets.of`
        tells the same, in a time that steps would wait for."""
        wanted, lacks = sum(compress(lengths, self._chooses(lengths))), [False] * len(lengths)
        for segment in self._segments:
            if (room := self._state.room(segment)) < wanted:
                scored = [0 if segment.count(length) == ALL else length for length in lengths]
                ends = accumulate(scored)
                lacks = [lack or (own > 0 and end > room) for lack, own, end in zip(lacks, scored, ends, strict=True)]
        return lacks

    def _chooses(self, lengths: ArrayLike, least: int = 0) -> NDArray[np.bool_]:
        lengths_R = np.asarray(lengths, dtype=np.int64)
        from_R = np.maximum(self._from_N[self._bounds_N.searchsorted(lengths_R)], least)
        return np.asarray(lengths_R >= from_R, np.bool_)

    def count(self, requests: Sequence[range], counters: Counters, least: int | None = 0) -> None:
        """Counts the decode rows of a step, by the tokens that each row of a request attends to at most; rows below 2
        are of steps that an engine makes up."""
        real = [rows for rows in requests if rows and rows[0] > 1]
        long = [length for rows in real if least is not None and rows[-1] >= least for length in rows]
        left = sum(self.without_room(long))
        chosen = int(self._chooses(long).sum()) - left
        counters.decode_sparse += chosen
        counters.decode_dense += sum(map(len, real)) - chosen
        counters.decode_left += left

    def begin(
        self,
        lengths_B: torch.Tensor,
        prompts: Sequence[int],
        table_BP: torch.Tensor,
        part_of: Callable[[], Any] | None,
        least: int | None = 0,
        starts_X: torch.Tensor | None = None,
        rows: int = 0,
        whole: bool = False,
    ) -> DecodeRows:
        """The decode rows of a step that begins.

        Args:
            lengths_B: int32, tokens of each request, the new ones included; 0 for padding.
            prompts: requests whose rows are the end of a prompt: they attend to everything.
            part_of: builds the engine's metadata of these requests where the step has others.
            least: tokens of the shortest request that may choose; None where none may.
            starts_X: int32, the first of the `rows` of each request, then the end of all; None where each has one.
            whole: the rows that do not choose are ours as well.
        """
        alone = starts_X is None
        may_B = self._lengths_R[: len(lengths_B)] if alone else torch.empty_like(lengths_B)
        if least is None:
            may_B.zero_()
        else:
            torch.mul(lengths_B, lengths_B >= least, out=may_B)
        for request in prompts:
            may_B[request].zero_()
        several = None
        if starts_X is not None:  # graphs may have more rows than the requests
            number_R = torch.arange(len(self._lengths_R), dtype=torch.int32, device=starts_X.device)
            torch.searchsorted(starts_X[1:], number_R, right=True, out=self._request_R).clamp_(max=len(lengths_B) - 1)
            self._lengths_R.copy_(_row_lengths(may_B, Requests(self._request_R, starts_X, self._queries)))
            several = Requests(self._request_R[:rows], starts_X, self._queries)
        lengths_R = may_B if several is None else self._lengths_R[:rows]
        self._state.begin(lengths_R, lengths_R.device)
        return DecodeRows(self._state, self._backend, lengths_B, table_BP, part_of, several, whole)

    def warm_up(
        self, layers: Sequence[LayerProgram], pages: tuple[torch.Tensor, torch.Tensor], longest: int,
        softmax: Softmax = PLAIN, scales: Scales | None = None,
    ) -> None:  # fmt: skip
        """Runs layers over rows without tokens, at every number of rows that kernels are compiled for: powers of two,
        and one between, as the splits of a row may halve twice from one to the next."""
        page, size = pages[0].shape[2:]
        most, out_dtype = len(self._lengths_R), pages[0].dtype if scales is None else scales.dtype
        q_dtype = out_dtype if scales is None or scales.q_G is None else FLOAT8
        sizes = {rows << power for power in range(most.bit_length()) for rows in (1, 3)}
        for rows in sorted({min(rows, most) for rows in sizes}):
            table_BP = self._lengths_R.new_zeros((1, -(-longest // page))).expand(rows, -1)
            starts_X = torch.arange(rows + 1, dtype=torch.int32, device=table_BP.device) if self._queries > 1 else None
            step = self.begin(self._lengths_R.new_zeros(rows), (), table_BP, None, 0, starts_X, rows)
            for layer in layers:
                # A filter layer may have another kind of cache than layers of its segment.
                if layer.role.is_sparse and layer.role.can_step(self._state):
                    q_BHD = pages[0].new_zeros((rows, layer.heads, size), dtype=q_dtype)
                    out_BHD = torch.empty_like(q_BHD, dtype=out_dtype)
                    step.attend(layer, q_BHD, pages, out_BHD, 1.0, softmax, scales)


@dataclass(frozen=True)
class DecodeRows:
    """The decode rows of a step: those of its first requests, each of which one kernel computes as a whole."""

    state: DecodeState
    backend: str
    lengths_B: torch.Tensor
    table_BP: torch.Tensor
    part_of: Callable[[], Any] | None
    several: Requests | None  # None where each request has one row
    whole: bool  # also the rows that do not choose
    _rest: dict[Hashable, Any] = field(default_factory=dict)
    _sparse: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def again(self) -> DecodeRows:
        """The same rows in another run of the step: an engine may run it once to compile, and then to capture it, which
        has to compute all that follows from the lengths."""
        lengths_R = self.state.lengths_B
        self.state.begin(lengths_R, lengths_R.device)
        return replace(self, _rest={}, _sparse={})

    @property
    def requests(self) -> range:
        return range(len(self.lengths_B))

    @property
    def rows(self) -> slice:
        return slice(len(self.state.lengths_B))

    def _lengths(self, layer: LayerProgram) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths of the requests that are computed here, and of their rows; 0 for the others: those of which a row
        chooses for this layer. Rows that attend to everything beside one that chooses, at the edge of a bucket, are
        computed with it."""
        key = None if self.whole else layer.role.rows_key
        if key not in self._sparse:
            if self.whole:
                lengths_R = self.lengths_B if self.several is None else _row_lengths(self.lengths_B, self.several)
                self._sparse[key] = self.lengths_B, lengths_R
                return self._sparse[key]
            sparse_R = sparse_B = layer.role.sparse_lengths(self.state, self.backend)
            if self.several is not None:
                request_R = self.several.of_row_B
                most_B = torch.zeros_like(self.lengths_B).scatter_reduce_(0, request_R, sparse_R, "amax")
                sparse_B, sparse_R = self.lengths_B * (most_B > 0), self.state.lengths_B * (most_B > 0)[request_R]
            self._sparse[key] = sparse_B, sparse_R
        return self._sparse[key]

    def left(self, layer: LayerProgram) -> torch.Tensor:
        """int32 [B]: the lengths of the requests that the engine's kernel computes, 0 for the others."""
        return self.lengths_B - self._lengths(layer)[0]

    def rest(self, layer: LayerProgram, metadata: Any, without: Callable[[Any, torch.Tensor], Any]) -> Any:
        """The metadata of the rows that are not computed here, for the engine's kernel; built once a step and segment.
        `without` gives metadata other lengths, 0 for rows that choose."""
        key = layer.role.rows_key
        if key not in self._rest:
            whole = metadata if self.part_of is None else self.part_of()
            self._rest[key] = without(whole, self.left(layer))
        return self._rest[key]

    def attend(
        self, layer: LayerProgram, q_RHD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_RHD: torch.Tensor,
        scale: float, softmax: Softmax = PLAIN, scales: Scales | None = None,
    ) -> None:  # fmt: skip
        """Writes the output of the requests that are computed here, and of no others. Pages are [N, G, S, D] each,
        of any strides; scales are of pages, and maybe queries, in e4m3."""
        if scales is not None:
            pages = pages[0].view(FLOAT8), pages[1].view(FLOAT8)
        keys = KeyView(*pages, self._lengths(layer)[1], self.table_BP, None, softmax, None, scales, self.several)
        decode(
            layer, q_RHD[:, :, None], Resident(keys), self.state, scale=scale, backend=self.backend,
            out_BHQD=out_RHD[:, :, None],
        )  # fmt: skip


def _row_lengths(lengths_B: torch.Tensor, several: Requests) -> torch.Tensor:
    """int32 [R]: tokens that each row attends to; 0 where its request has none, and behind the last row of all."""
    request_R = several.of_row_B
    number_R = torch.arange(len(request_R), dtype=torch.int32, device=request_R.device)
    left_R = several.starts_X[1:][request_R] - number_R
    return ((lengths_B[request_R] - left_R + 1) * (left_R > 0)).clamp_(min=0)


def _scratch(program: Program, tokens: int, device: torch.device, gather: Gather | None, shares: int = 1) -> int:
    """Returns room for the scores of as many tokens as all rows of a step can have, as far as there is memory for it:
    on the rank that has least, since rows that one has no room for attend to everything on all."""
    memory = segments.SCORE_BYTES
    if device.type == "cuda":
        memory = min(memory, torch.cuda.get_device_properties(device).total_memory // _SCRATCH_SHARE)
    wanted = tokens * max((segment.query_heads + segment.lists for segment in program.segments), default=0)
    room = min(wanted, shares * memory // 4)
    if gather is None:
        return room
    room_1 = torch.tensor([room], dtype=torch.int32, device=device)
    return int(gather(room_1.view(torch.float32)).view(torch.int32).min())  # bits: not every backend gathers integers


@dataclass(frozen=True, slots=True)
class PrefillRows:
    request: int  # its row in the block table
    tokens: slice  # its rows among those of the step
    chunk: Chunk  # where they lie in the request


@dataclass(frozen=True, slots=True)
class Rest:
    """Contiguous rows that are left to the engine's own kernel in a layer where others run sparse."""

    tokens: slice  # their rows among those of the step
    metadata: Any  # what the engine's kernel takes for these rows alone


@dataclass(frozen=True)
class StepRows:
    """The prefill rows of a step, and the metadata of any part of it.

    Attributes:
        starts: the first row of each request, then the end of the last one. Requests without rows are padding.
        part_of: builds what the engine's kernel takes for the requests from the first to before the second number.
    """

    starts: tuple[int, ...]
    prefill: tuple[PrefillRows, ...]  # a chunk of each request that prefills; none where all of them are dense
    table: torch.Tensor  # the block table, int32 [requests, pages]
    part_of: Callable[[int, int], Any]
    decode: DecodeRows | None = None  # the rows that decode, where some may attend to a choice
    prompts: tuple[Any, ...] = ()  # rows of prompts, of evicting layers, as the engine's eviction has them
    _built: dict[frozenset[int], tuple[Rest, ...]] = field(default_factory=dict)

    def rest(self, done: frozenset[int]) -> tuple[Rest, ...]:
        """The requests that are not `done`, in contiguous ranges; built once a step: most layers leave the same ones.
        Requests are sorted by their rows: those that decode follow one another."""
        if done not in self._built:
            runs = contiguous_ranges(self.starts, done)
            self._built[done] = tuple(
                Rest(slice(self.starts[first], self.starts[end]), self.part_of(first, end)) for first, end in runs
            )
        return self._built[done]


def contiguous_ranges(starts: Sequence[int], done: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Intervals of requests that have rows and are not `done`, as long as they can be."""
    ranges: list[tuple[int, int]] = []
    for request, (first, end) in enumerate(pairwise(starts)):
        if first == end or request in done:
            continue
        if ranges and ranges[-1][1] == request:
            ranges[-1] = (ranges[-1][0], request + 1)
        else:
            ranges.append((request, request + 1))
    return tuple(ranges)


def prefill_rows(
    starts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool], decoded: int = 1
) -> tuple[PrefillRows, ...]:
    """The chunks of a step.

    Args:
        starts: the first row of each request, then the end of the last one. Requests without rows are padding.
        lengths: tokens of each request, the new ones included.
        prefilling: whether a request's prompt is still being computed.
        decoded: rows that a request decodes in a step at most: its newest token, and those that a drafter proposed.
            More are always prefill: a prompt, or what is computed again after a preemption.
    """
    requests = enumerate(zip(pairwise(starts), lengths, prefilling, strict=True))
    return tuple(
        PrefillRows(request, slice(first, end), Chunk.uniform(1, length - (end - first), length))
        for request, ((first, end), length, unfinished) in requests
        if end - first > (0 if unfinished else decoded)
    )


def behind_decode(starts: Sequence[int], prefilling: Sequence[bool], decoded: int = 1) -> list[bool]:
    """The prompts behind the last request that decodes; arguments as in `prefill_rows`. An engine may sort by the
    number of rows alone, so that a single row of a prompt may lie before others that decode; it is computed with
    those."""
    decoding = (0 < end - first <= decoded for first, end in pairwise(starts))
    both = enumerate(zip(decoding, prefilling, strict=True))
    last = max((request for request, (few, prompt) in both if few and not prompt), default=-1)
    return [prompt and request > last for request, prompt in enumerate(prefilling)]


def decode_rows(starts: Sequence[int], prefill: Sequence[PrefillRows]) -> int:
    """Requests that decode: the first of the step, with the padding behind them; see `behind_decode`."""
    return min((rows.request for rows in prefill), default=len(starts) - 1)
