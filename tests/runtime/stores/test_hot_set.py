"""Stores that share a slot map, through everything that a cache does to them, against plain tensors."""

import copy
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_stores import GROUPS, SIZE, LateMemory, assert_gathers, holds, rows, selecting

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.plans.patterns import Budget, fraction, tokens
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import Layout

SINK, CHOSEN, RECENT = 2, 6, 5
READS = Reads((tokens(CHOSEN),), SINK, RECENT)


class Layers:
    """Some layers of a segment with one slot map, and what they were given."""

    def __init__(self, batch: int, hot: Budget, memory: HostMemory, reads: Reads = READS, count: int = 2) -> None:
        self.batch, self.hot, self.memory, self.reads = batch, hot, memory, reads
        self.stores = [HostStore(hot, memory, reads) for _ in range(count)]
        self.given = [torch.empty(2, batch, GROUPS, 0, SIZE) for _ in range(count)]
        self.slots = SlotMap()
        self.chosen: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.given[0].shape[3]

    def append(self, count: int, seed: int, by_room: bool = False) -> None:
        for layer, store in enumerate(self.stores):
            new = rows(count, seed * 10 + layer, self.batch)
            self.given[layer] = torch.cat((self.given[layer], new), 3)
            if by_room:
                room = store.room(count, Layout.of(new[0]))
                for where, what in zip(room, new, strict=True):
                    where.copy_(what)
                store.commit(*room)
            else:
                store.append(*new)

    def decode(self, seed: int, lists: int = 1, upto: int | None = None, window: int | None = None) -> None:
        """A step of the first `upto` layers: half of the tokens are those of the step before."""
        free = self.length - RECENT - SINK
        if free <= CHOSEN:
            return
        draws = torch.Generator().manual_seed(seed)
        weight = torch.rand(self.batch, lists, free, generator=draws)
        if self.chosen is not None and self.chosen.shape[1] == lists:
            weight.scatter_add_(2, self.chosen[:, :, ::2], torch.ones(self.batch, lists, CHOSEN // 2))
        self.chosen = weight.topk(CHOSEN).indices.sort(2).values
        selection = selecting(self.chosen + SINK, SINK, RECENT)
        for store, (k, v) in list(zip(self.stores, self.given, strict=True))[:upto]:
            assert_gathers(store, selection, k, v, window, self.slots)

    def views(self) -> None:
        for store, (k, v) in zip(self.stores, self.given, strict=True):
            assert store.length == self.length
            if self.length:
                assert holds(store, k, v, self.batch)

    def fork(self) -> "Layers":
        twin = copy.copy(self)
        twin.stores, twin.slots = copy.deepcopy((self.stores, self.slots))
        twin.given = list(self.given)
        return twin

    def reset(self) -> None:
        self.__init__(self.batch, self.hot, self.memory, self.reads, len(self.stores))


@dataclass(frozen=True)
class Op:
    name: str
    number: int = 0


OPS = st.one_of(
    st.builds(Op, st.just("append"), st.sampled_from([1, 1, 1, 3, 64, 150, 400])),
    st.builds(Op, st.just("room"), st.sampled_from([2, 90, 300])),
    st.builds(Op, st.sampled_from(["decode", "decode", "per head", "cancel"]), st.integers(0, 99)),
    st.builds(Op, st.just("reserve"), st.sampled_from([100, 700, 2000])),
    st.builds(Op, st.sampled_from(["view", "fork", "reset", "window"])),
)


@settings(max_examples=60, deadline=None)
@given(
    ops=st.lists(OPS, min_size=4, max_size=25),
    batch=st.sampled_from([1, 2, 16]),
    hot=st.sampled_from([tokens(0), tokens(90), tokens(130), tokens(300), fraction(0.3)]),
    whole=st.sampled_from([0, 250]),
    late=st.booleans(),
)
def test_every_read_gives_what_was_appended(ops, batch: int, hot: Budget, whole: int, late: bool) -> None:
    reads = replace(READS, whole_up_to=whole)
    layers = Layers(batch, hot, LateMemory() if late else HostMemory(), reads)
    others = []  # that were forked off
    for seed, op in enumerate(ops):
        match op.name:
            case "append":
                layers.append(op.number, seed)
            case "room":
                layers.append(op.number, seed, by_room=True)
            case "decode":
                layers.decode(op.number)
            case "per head":
                layers.decode(op.number, GROUPS)
            case "window":
                layers.decode(seed, window=100)
            case "cancel":  # a step that stops behind the first layer's attention
                layers.decode(op.number, upto=1)
            case "reserve":
                for store in layers.stores:
                    store.reserve(op.number)
            case "view":
                layers.views()
            case "fork":
                others.append(layers)
                layers = layers.fork()
            case "reset":
                layers.reset()
    for one in (layers, *others[-2:]):
        one.decode(1)
        one.views()


def test_a_layer_fetches_what_the_first_of_its_segment_missed_and_no_more() -> None:
    layers = Layers(2, tokens(200), HostMemory(), count=3)
    layers.append(500, 0)
    for seed in range(4):
        layers.append(1, 1 + seed)
        layers.decode(seed)
    first, *rest = (store.counts for store in layers.stores)
    assert rest == [first, first]
    assert first.steps == 4
    assert 0 < first.fetched < first.chosen


def test_a_fork_fetches_again_what_it_chooses_and_the_original_does_not() -> None:
    layers = Layers(1, tokens(200), HostMemory())
    layers.append(500, 0)
    layers.decode(0)
    twin = layers.fork()
    again = copy.deepcopy(layers.chosen)
    fetched = layers.stores[0].counts.fetched
    twin.decode(5)
    assert twin.stores[0].counts.fetched - fetched == SINK + CHOSEN
    layers.chosen = again
    fetched = layers.stores[0].counts.fetched
    layers.decode(5)
    assert layers.stores[0].counts.fetched - fetched <= CHOSEN // 2


def test_where_a_row_reads_everything_all_tokens_are_there_and_a_later_step_is_right() -> None:
    layers = Layers(2, tokens(200), HostMemory())
    layers.append(500, 0)
    layers.decode(0)
    k, store = layers.given[0][0], layers.stores[0]
    lengths_B, counts_B = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([500, 500], [ALL, CHOSEN]))
    mixed = Selection(layers.chosen.int() + SINK, counts_B, SINK, RECENT)
    keys, found, _ = store.gather(mixed, lengths_B, None, layers.slots)
    assert found is mixed
    assert torch.equal(keys.k[:, :, :500], k)
    layers.decode(1)


def test_rows_of_other_lengths_find_their_own_recent_tokens() -> None:
    """The ring has the newest tokens of the longest rows; those of others come from the host."""
    layers = Layers(3, tokens(200), HostMemory(), count=1)
    layers.append(500, 0)
    store, (k, v) = layers.stores[0], layers.given[0]
    chosen = torch.tensor([3, 40, 77]).expand(3, 1, -1).int()
    counts_B, lengths_B = torch.tensor([3, 1, 2], dtype=torch.int32), torch.tensor([500, 90, 300], dtype=torch.int32)
    selection = Selection(chosen, counts_B, SINK, RECENT)
    keys, found, _ = store.gather(selection, lengths_B, None, layers.slots)
    tokens_BgM, totals_B = selection.listed(lengths_B)
    assert torch.equal(found.counts_B, totals_B)
    for b, total in enumerate(totals_B.tolist()):
        token, at = (x[b, 0, :total].long() for x in (tokens_BgM, found.chosen_BgN))
        assert torch.equal(keys.k[b][:, at], k[b][:, token])
        assert torch.equal(keys.v[b][:, at], v[b][:, token])
