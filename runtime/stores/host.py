"""A KV store in host memory with a hot set on the compute device.

Each token is in exactly one place: the most recent ones in a ring on the device (token t in slot t modulo ring
size), all before them in pinned host memory, token-major, so that one token's keys and values of all heads are one
contiguous read. What the ring takes from the device and what lies on the host add up to a DeviceStore of the same
tokens. Source of the idea: OmniKV (ICLR 2025), the context bank.

Shapes: B batch, G KV heads, S tokens, C tokens on the host, R slots of the ring, M wanted tokens, D head size,
P = 2 for key and value; g is 1 (a choice shared by all heads) or G.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.plans.budget import Budget
from sparsekv.runtime.stores.base import Gathered, check_rows, grown

_COPY_TOKENS = 16_384  # packing a long prompt in pieces bounds the device memory it takes


class HostStore:
    """Keys and values in host memory, but for a hot set of the most recent tokens.

    Args:
        hot: how many of the most recent tokens stay on the compute device; a fraction counts of the allocated tokens.
    """

    def __init__(self, hot: Budget) -> None:
        self._hot = hot
        self._capacity = 0  # tokens allocated, on the device and the host together
        self._length = 0
        self._hot_start = 0  # tokens before it lie on the host, the others in the ring
        self._host_CBPGD: torch.Tensor | None = None
        self._ring_PBGRD: torch.Tensor | None = None
        self.fetched_tokens = 0  # read from the host by gather so far, counted per batch row and choice

    @property
    def length(self) -> int:
        """Tokens held for each batch row."""
        return self._length

    @property
    def bytes_device(self) -> int:
        """Bytes of the ring."""
        return 0 if self._ring_PBGRD is None else self._ring_PBGRD.untyped_storage().nbytes()

    @property
    def bytes_host(self) -> int:
        """Bytes of the host part."""
        return 0 if self._host_CBPGD is None else self._host_CBPGD.untyped_storage().nbytes()

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Puts the new tokens into the ring and moves those it has no room for to the host.

        The copies to the host run behind the compute; every read of them is ordered after them.
        """
        check_rows(None if self._ring_PBGRD is None else self._ring_PBGRD[0], k_BGSD, v_BGSD)
        old, new = self._length, self._length + k_BGSD.shape[2]
        self._reserve(k_BGSD, new)
        hot_start = max(self._hot_start, new - self._buffers()[0].shape[3])
        self._evict(self._hot_start, min(old, hot_start))
        self._to_host(old, hot_start, k_BGSD.detach(), v_BGSD.detach())
        self._to_ring(max(old, hot_start), new, k_BGSD.detach(), v_BGSD.detach())
        self._length, self._hot_start = new, hot_start

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, brought to the compute device for as long as the caller holds them."""
        ring_PBGRD, host_CBPGD = self._buffers()
        pairs, batch, heads, _, size = ring_PBGRD.shape
        whole_PBGSD = ring_PBGRD.new_empty((pairs, batch, heads, self._length, size))
        for first in range(0, self._hot_start, _COPY_TOKENS):
            stop = min(first + _COPY_TOKENS, self._hot_start)
            piece = host_CBPGD[first:stop].to(whole_PBGSD.device, non_blocking=True)
            whole_PBGSD[:, :, :, first:stop] = piece.permute(2, 1, 3, 0, 4)
        hot = self._slots_of(self._hot_start, self._length)
        whole_PBGSD[:, :, :, self._hot_start :] = ring_PBGRD[:, :, :, hot]
        return whole_PBGSD[0], whole_PBGSD[1]

    def gather(self, rows: DecodeRows) -> Gathered:
        """The wanted rows alone, side by side; only those that are not hot are read from the host."""
        device = rows.tokens_BGN.device
        tail = torch.arange(rows.tail_start, rows.tail_stop, device=device, dtype=rows.tokens_BGN.dtype)
        tokens_BgN = rows.tokens_BGN
        wanted_BgM = torch.cat((tokens_BgN, tail.expand(*tokens_BgN.shape[:2], -1)), dim=2)
        found_PBGMD = self._from_ring(wanted_BgM)
        self._fetch_cold(wanted_BgM, found_PBGMD)
        count = tokens_BgN.shape[2]
        places = torch.arange(count, device=device, dtype=tokens_BgN.dtype).expand_as(tokens_BgN)
        renumbered = torch.where(tokens_BgN < 0, tokens_BgN, places)
        return Gathered(found_PBGMD[0], found_PBGMD[1], DecodeRows(renumbered, count, wanted_BgM.shape[2]))

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring and host part."""
        assert self._ring_PBGRD is not None, "nothing was appended to this store yet"
        assert self._host_CBPGD is not None
        return self._ring_PBGRD, self._host_CBPGD

    def _slots_of(self, first: int, stop: int) -> torch.Tensor:
        ring_PBGRD, _ = self._buffers()
        return torch.arange(first, stop, device=ring_PBGRD.device) % max(ring_PBGRD.shape[3], 1)

    def _reserve(self, like_BGSD: torch.Tensor, needed: int) -> None:
        capacity = grown(self._capacity, needed)
        if capacity == self._capacity:
            return
        batch, heads, _, size = like_BGSD.shape
        slots = self._hot.resolve(capacity)
        ring = like_BGSD.new_empty((2, batch, heads, slots, size), requires_grad=False)
        pinned = like_BGSD.device.type == "cuda"
        host = torch.empty((capacity - slots, batch, 2, heads, size), dtype=like_BGSD.dtype, pin_memory=pinned)
        if self._length:
            old_ring, old_host = self._buffers()
            moved = torch.arange(self._hot_start, self._length, device=ring.device) % max(slots, 1)
            ring[:, :, :, moved] = old_ring[:, :, :, self._slots_of(self._hot_start, self._length)]
            if pinned:  # earlier copies to the host may still be under way
                torch.cuda.current_stream(like_BGSD.device).synchronize()
            host[: self._hot_start] = old_host[: self._hot_start]
        self._ring_PBGRD, self._host_CBPGD, self._capacity = ring, host, capacity

    def _evict(self, first: int, stop: int) -> None:
        if first >= stop:
            return
        leaving_PBGSD = self._buffers()[0][:, :, :, self._slots_of(first, stop)]
        self._write_host(first, leaving_PBGSD[0], leaving_PBGSD[1])

    def _to_host(self, first: int, stop: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        for begin in range(0, stop - first, _COPY_TOKENS):
            end = min(begin + _COPY_TOKENS, stop - first)
            self._write_host(first + begin, k_BGSD[:, :, begin:end], v_BGSD[:, :, begin:end])

    def _write_host(self, first: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        packed_SBPGD = torch.stack((k_BGSD, v_BGSD)).permute(3, 1, 0, 2, 4).contiguous()
        self._buffers()[1][first : first + packed_SBPGD.shape[0]].copy_(packed_SBPGD, non_blocking=True)

    def _to_ring(self, first: int, stop: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if first >= stop:
            return
        ring_PBGRD, slots, count = self._buffers()[0], self._slots_of(first, stop), stop - first
        ring_PBGRD[0].index_copy_(2, slots, k_BGSD[:, :, -count:])
        ring_PBGRD[1].index_copy_(2, slots, v_BGSD[:, :, -count:])

    def _from_ring(self, wanted_BgM: torch.Tensor) -> torch.Tensor:
        """[P, B, G, M, D]; rows of tokens that are not hot hold anything."""
        ring_PBGRD, _ = self._buffers()
        pairs, batch, heads, slots, size = ring_PBGRD.shape
        shape = (pairs, batch, heads, wanted_BgM.shape[2], size)
        if slots == 0:
            return ring_PBGRD.new_zeros(shape)
        slot_BgM = wanted_BgM.clamp(min=0).long() % slots
        return ring_PBGRD.gather(3, slot_BgM[None, :, :, :, None].expand(shape))

    def _fetch_cold(self, wanted_BgM: torch.Tensor, into_PBGMD: torch.Tensor) -> None:
        """Reads the wanted tokens that lie on the host. Waits for the device: the host must know which."""
        _, host_CBPGD = self._buffers()
        wanted = wanted_BgM.cpu()
        batch, head, place = ((wanted >= 0) & (wanted < self._hot_start)).nonzero(as_tuple=True)
        if not len(place):
            return
        self.fetched_tokens += len(place)
        token, device = wanted[batch, head, place].long(), into_PBGMD.device
        if wanted.shape[1] == 1:
            rows_nPGD = host_CBPGD[token, batch].to(device)
            into_PBGMD[:, batch.to(device), :, place.to(device)] = rows_nPGD
        else:
            rows_nPD = host_CBPGD[token, batch, :, head].to(device)
            into_PBGMD[:, batch.to(device), head.to(device), place.to(device)] = rows_nPD.transpose(0, 1)
