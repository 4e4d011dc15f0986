"""How fast tokens come from host memory, by the kernel that decode steps fetch them with.

Shapes: B batch, G KV heads, M tokens of a list, C tokens on the host, R rows on the device, D head size, P = 2 for key
and value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.bench.harness import once, replayed
from sparsekv.kernels.decode.gather import gather_missed
from sparsekv.kernels.decode.place import PlacedStep
from sparsekv.kernels.keys import CAPACITY, COLUMNS, HOST, HOST_TOKENS, ROWS

_MANY, _FEW = 2048, 200  # tokens
_LISTS = 8  # one after the other, so that nothing is found in a cache of the GPU's


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What fetching random tokens takes.

    Attributes:
        row_bytes: keys and values of a token.
        gbytes_per_second: of 2,048 tokens.
        few_us: microseconds of 200 tokens.
    """

    row_bytes: int
    gbytes_per_second: float
    few_us: float


def link_rate(
    host_CBPGD: torch.Tensor,
    device: torch.device,
    seed: int = 0,
    *,
    programs: int | None = None,
    at_once: int | None = None,
) -> LinkRate:
    """Fetches random tokens into rows of its own.

    Args:
        host_CBPGD: read alone; pinned where the device is a GPU.
        device: that reads it.
        programs, at_once: of the kernel, to try others than it has.
    """
    _, batch, _, heads, size = host_CBPGD.shape
    rows_PBGRD = torch.empty((2, batch, heads, max(1, _MANY // batch), size), dtype=host_CBPGD.dtype, device=device)
    row_bytes = 2 * heads * size * rows_PBGRD.element_size()

    def milliseconds(count: int) -> float:
        each = max(1, count // batch)
        lists = [_random(rows_PBGRD, len(host_CBPGD), each, seed + number) for number in range(_LISTS)]
        tuned = {} if at_once is None else {"at_once": at_once}

        def fetch() -> None:
            for placed in lists:
                gather_missed(
                    where_X, placed, lengths_B, kv_heads=heads, token_bytes=size * rows_PBGRD.element_size(), slots=0,
                    ring=1, recent=2, programs=programs, **tuned,
                )  # fmt: skip

        timed = replayed(fetch, device)
        timed()
        return once(timed, device) / _LISTS

    where_X = _table(rows_PBGRD, host_CBPGD)
    lengths_B = torch.ones(batch, dtype=torch.int32, device=device)  # no token leaves
    many = max(1, _MANY // batch) * batch
    return LinkRate(row_bytes, many * row_bytes / milliseconds(_MANY) / 1e6, milliseconds(_FEW) * 1e3)


def _table(rows_PBGRD: torch.Tensor, host_CBPGD: torch.Tensor) -> torch.Tensor:
    where = [0] * COLUMNS
    where[CAPACITY], where[ROWS], where[HOST] = rows_PBGRD.shape[3], rows_PBGRD.data_ptr(), host_CBPGD.data_ptr()
    where[HOST_TOKENS] = len(host_CBPGD)
    return torch.tensor(where, dtype=torch.int64, device=rows_PBGRD.device)


def _random(rows_PBGRD: torch.Tensor, tokens: int, count: int, seed: int) -> PlacedStep:
    batch, device = rows_PBGRD.shape[1], rows_PBGRD.device
    draws = torch.Generator(device).manual_seed(seed)
    shape = (batch, 1, count)
    missed_BgM = torch.randint(tokens, shape, generator=draws, dtype=torch.int32, device=device)
    into_M = torch.arange(count, dtype=torch.int32, device=device) % rows_PBGRD.shape[3]
    into_BgM = into_M.expand(shape).contiguous()
    misses_Bg = torch.full(shape[:2], count, dtype=torch.int32, device=device)
    return PlacedStep(into_BgM, misses_Bg[:, 0], missed_BgM, into_BgM, misses_Bg)
