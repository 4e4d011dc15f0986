"""KV stores filled with random tokens, and copies to the host that run as late as they may."""

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import Layout

BATCH, GROUPS, SIZE = 2, 3, 4
CPU = torch.device("cpu")
LAYOUT = Layout(BATCH, GROUPS, SIZE, torch.float32, CPU)
TOKEN_BYTES = 2 * BATCH * GROUPS * SIZE * 4


class LateStream:
    """Does nothing before somebody waits: the worst that a stream of its own may do."""

    def __init__(self):
        self.waiting, self.given = [], 0

    def run(self, work, reads):
        self.given += 1
        self.waiting.append((self.given, work))
        return self.given

    def order(self, done):
        while self.waiting and done is not None and self.waiting[0][0] <= done:
            self.waiting.pop(0)[1]()

    finish = order

    def settle(self):
        self.order(self.given)


class LateMemory(HostMemory):
    """Host memory whose copies are late."""

    def __init__(self):
        super().__init__()
        self.late = LateStream()

    def stream(self, device):
        return self.late


def rows(count: int, seed: int, batch: int = BATCH) -> torch.Tensor:
    """Keys and values."""
    return torch.randn(2, batch, GROUPS, count, SIZE, generator=torch.Generator().manual_seed(seed))


def lengths_of(store, batch: int = BATCH) -> torch.Tensor:
    return torch.full((batch,), store.length, dtype=torch.int32)


def seen_in(store, batch: int = BATCH):
    """Keys and values of all tokens."""
    return store.view(lengths_of(store, batch)).contiguous(store.length)


def holds(store, k, v, batch: int = BATCH) -> bool:
    return all(torch.equal(seen, given) for seen, given in zip(seen_in(store, batch), (k, v), strict=True))


def filled(store, chunks, pieces=False):
    """What was appended, in chunks of these sizes."""
    given = [rows(count, seed) for seed, count in enumerate(chunks)]
    for k, v in given:
        if pieces:
            k_room, v_room = store.room(k.shape[2], Layout.of(k))
            k_room.copy_(k)
            v_room.copy_(v)
            store.commit(k_room, v_room)
        else:
            store.append(k.clone(), v.clone())
    return torch.cat([k for k, _ in given], 2), torch.cat([v for _, v in given], 2)


def selecting(chosen_BgN: torch.Tensor, sink: int = 0, recent: int = 0) -> Selection:
    """All of these in every row."""
    counts_B = torch.full((len(chosen_BgN),), chosen_BgN.shape[2], dtype=torch.int32)
    return Selection(chosen_BgN.int(), counts_B, sink, recent)


def assert_gathers(store, selection, k, v, window=None, slots=None) -> None:
    """What is gathered are the selected ones of these tokens, in order."""
    lengths_B = lengths_of(store, len(k))
    keys, found, left = store.gather(selection, lengths_B, window, slots)
    (tokens_BgM, _), (at_BgM, _) = selection.listed(lengths_B), found.listed(keys.lengths_B)
    if left is None and window is not None:
        tokens_BgM = tokens_BgM.masked_fill(tokens_BgM < lengths_B[:, None, None] - window, -1)
    assert torch.equal(at_BgM < 0, tokens_BgM < 0)
    for b in range(len(k)):
        for g in range(GROUPS):
            at, token = (x[b, min(g, x.shape[1] - 1)].long() for x in (at_BgM, tokens_BgM))
            assert torch.equal(keys.k[b, g, at[at >= 0]], k[b, g, token[token >= 0]])
            assert torch.equal(keys.v[b, g, at[at >= 0]], v[b, g, token[token >= 0]])


def with_more(store, k, v, count, seed):
    """All keys and values, once so many new tokens are appended."""
    new_k, new_v = rows(count, seed, len(k))
    store.append(new_k, new_v)
    return torch.cat((k, new_k), 2), torch.cat((v, new_v), 2)
