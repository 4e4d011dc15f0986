"""The stores of a captured step, through everything that may come between two steps, against plain tensors."""

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_stores import CPU, LateMemory, LateStream, assert_gathers, holds, rows
from plans_samples import model_info
from tiny_plans import decode_plan, segment

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.plans.patterns import tokens
from sparsekv.plans.phases import DecodeBudget
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf import graph_fetches
from sparsekv.runtime.hf.graph_stores import StepStores, obstacle
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.store import HostReads

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
SINK, CHOSEN, RECENT, BATCH, GROUPS = 2, 6, 5, 2, 3
READS = Reads((tokens(CHOSEN),), SINK, RECENT)


def program_of(part):
    return Program.of(None, decode_plan(part), model_info(layers=3, heads=GROUPS, kv_heads=GROUPS))


PROGRAM = program_of(segment(0, (1, 2), CHOSEN, sink=SINK, recent=RECENT))
SEGMENT = PROGRAM.segments[0]
IDS = torch.zeros(BATCH, 1, dtype=torch.int64)


class Cache:
    """A layer on the device and two in host memory, and what they were given."""

    def __init__(self, memory) -> None:
        self.chosen, self.memory = CHOSEN, memory
        self.stores = [DeviceStore(), *(HostStore(tokens(20), memory, READS) for _ in range(2))]
        self.given = [rows(0, 0) for _ in self.stores]

    @property
    def length(self) -> int:
        return self.given[0].shape[3]

    def new(self, count: int, seed: int) -> list[torch.Tensor]:
        """Tokens that are counted as given."""
        new = [rows(count, 10 * seed + layer) for layer in range(3)]
        self.given = [torch.cat(pair, 3) for pair in zip(self.given, new, strict=True)]
        return new

    def append(self, count: int, seed: int) -> None:
        for store, (k, v) in zip(self.stores, self.new(count, seed), strict=True):
            store.append(k, v)

    def fork(self) -> "Cache":
        twin = copy.copy(self)
        twin.stores, twin.given = copy.deepcopy(self.stores), list(self.given)
        return twin

    def choice(self, seed: int) -> Selection:
        """Among the newest of what may be chosen, some of the others."""
        free = self.length - RECENT - SINK
        draws = torch.Generator().manual_seed(seed)
        newest = torch.tensor([[[free - 1]], [[free - 2]]])
        others = torch.stack([torch.randperm(free - 2, generator=draws)[: self.chosen - 1] for _ in range(BATCH)])
        chosen_BgN = torch.cat((others[:, None], newest), 2).sort(2).values + SINK
        return Selection(chosen_BgN.int(), torch.full((BATCH,), self.chosen, dtype=torch.int32), SINK, RECENT)


class Steps:
    """Captured steps, as runtime/hf/graphs.py has them."""

    def __init__(self, program: Program = PROGRAM) -> None:
        self.graphs = {}
        self.program = program
        self.lengths_B = torch.ones(BATCH, dtype=torch.int32)
        self.reads = HostReads()
        self.now = None

    def run(self, cache: Cache, seed: int) -> None:
        """One step, without the count of its token."""
        new = cache.new(1, seed)
        assert not obstacle(self.program, cache.stores, even(cache.length), IDS)
        if self.now is None or not self.now.serves(cache.stores, even(cache.length)):
            for store in cache.stores:
                store.prepare(cache.length)
            key = tuple(store.step_rows() for store in cache.stores)
            if key not in self.graphs:
                self.graphs[key] = StepStores(cache.stores, 4096, self.program, self.lengths_B, self.reads)
            self.now = self.graphs[key]
            self.now.bind(cache.stores)
        self.lengths_B.fill_(cache.length)
        selection = cache.choice(seed)
        stores = [self.now.new_store(layer) for layer in range(3)]
        stores[0].append(*new[0])
        self.now.fetches.fetch(self.program.segments[0], selection)
        for layer in (1, 2):
            stores[layer].append(*new[layer])
            self.check(cache, layer, selection, stores[layer].gather(selection, self.lengths_B))
        self.now.fetches.join()

    def check(self, cache: Cache, layer: int, selection: Selection, gathered) -> None:
        _, found, _ = gathered
        store = cache.stores[layer]
        cached = store.step_memory()[:2]
        (tokens_BgM, totals_B), (at_BgM, found_B) = selection.listed(self.lengths_B), found.listed(self.lengths_B)
        assert torch.equal(found_B, totals_B)
        for b in range(BATCH):
            token, at = (x_BgM[b, 0, : totals_B[b]].long() for x_BgM in (tokens_BgM, at_BgM))
            for rows_BGRD, given_BGSD in zip(cached, cache.given[layer], strict=True):
                assert torch.equal(rows_BGRD[b][:, at], given_BGSD[b][:, token])


def even(length: int) -> tuple[int, ...]:
    """Rows of one length."""
    return (length,) * BATCH


def step(steps: Steps, cache: Cache, seed: int) -> None:
    steps.run(cache, seed)
    for store in cache.stores:
        store.advance(1)


OPS = st.sampled_from(
    ["step", "step", "step", "append", "long append", "eager", "in vain", "fork", "turn", "reserve", "release"]
)


@settings(max_examples=6, deadline=None)
@given(ops=st.lists(OPS, min_size=4, max_size=9), first=st.sampled_from([40, 120]))
def test_every_step_reads_what_was_given(ops, first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_fetches, "stream_for", lambda device: LateStream())
        memory = LateMemory()
        caches, steps = [Cache(memory), Cache(memory)], Steps()
        for number, cache in enumerate(caches):
            cache.append(first + 30 * number, number)
        for seed, op in enumerate(ops, 10):
            cache = caches[0]
            match op:
                case "step":
                    step(steps, cache, seed)
                case "append" | "long append":
                    cache.append(3 if op == "append" else 90, seed)
                case "eager":
                    cache.append(1, seed)
                    for store, (k, v) in zip(cache.stores, cache.given, strict=True):
                        assert_gathers(store, cache.choice(seed), k, v)
                case "in vain":  # the step runs again, as single launches
                    before = cache.given
                    steps.run(cache, seed)
                    cache.given = before
                    cache.append(1, seed)
                case "fork":
                    caches[1] = cache.fork()
                case "turn":
                    caches.reverse()
                case "release":  # as when the model has changed
                    steps.graphs, steps.now = {}, None
                case "reserve":
                    for store in cache.stores:
                        store.reserve(cache.length + 200)
        for cache in caches:
            step(steps, cache, 99)
            for store, (k, v) in zip(cache.stores, cache.given, strict=True):
                assert holds(store, k, v)


def long_cache() -> Cache:
    cache = Cache(LateMemory())
    cache.append(120, 0)
    return cache


def test_caches_that_take_turns_find_their_slots_as_they_left_them() -> None:
    steps, caches, alone = Steps(), [long_cache(), long_cache()], Steps()
    for seed in (1, 2, 1):  # what an undisturbed cache fetches
        step(alone, caches[0], seed)
    expected, caches[0] = alone.reads.collect().fetched, long_cache()
    for seed in (1, 2, 1):
        for cache in caches:
            step(steps, cache, seed)
    assert steps.reads.collect().fetched == 2 * expected
    assert len(steps.graphs) == 1


def test_a_step_that_is_released_takes_along_what_it_knew_of_slots() -> None:
    steps, caches = Steps(), [long_cache(), long_cache()]
    for cache in caches:
        step(steps, cache, 1)
    for seed in range(2, 9):  # in other slots than before the turn of the other cache
        step(steps, caches[0], seed)
    steps.graphs, steps.now = {}, None
    steps.reads.reset()
    step(steps, caches[0], 1)  # which looks at every row
    assert steps.reads.collect().fetched == 2 * BATCH * (SINK + CHOSEN)


def test_a_cache_that_is_let_go_of_leaves_nothing_with_the_step() -> None:
    steps, caches = Steps(), [long_cache(), long_cache()]
    step(steps, caches[0], 1)
    state = weakref.ref(caches[0].stores[1].rows.slot_state)
    caches.pop(0)
    step(steps, caches[0], 1)
    assert state() is None


def test_a_bound_step_does_not_serve_lengths_that_are_read_as_a_whole() -> None:
    steps, cache = Steps(), long_cache()
    step(steps, cache, 1)
    assert steps.now.serves(cache.stores, even(cache.length + 1))
    assert not steps.now.serves(cache.stores, even(SINK + CHOSEN + RECENT))


def test_caches_of_several_capacities_share_a_step_whose_budget_is_a_fraction() -> None:
    budget = DecodeBudget(fraction=0.05, at_most=2 * CHOSEN)
    reads, part = Reads((budget,), SINK, RECENT), segment(0, (1, 2), budget, sink=SINK, recent=RECENT)
    steps, kinds = Steps(program_of(part)), []
    for length in (119, 159, 219):  # the last one chooses more than the first has room for
        cache = Cache(LateMemory())
        cache.stores[1:] = [HostStore(tokens(90), cache.memory, reads) for _ in range(2)]
        for store in cache.stores:
            store.reserve(length + 1)
        cache.append(length, length)
        cache.chosen = budget.resolve(length + 1)
        step(steps, cache, 1)
        kinds.append(cache.stores[1].hot_set)
    assert len(set(kinds)) == 3
    assert len(steps.graphs) == 1


def test_where_a_budget_of_longer_contexts_covers_the_capacity_steps_are_not_captured_yet() -> None:
    """Of two buckets, the context is in that with the smaller budget."""
    cache = long_cache()
    cache.stores[1:] = [HostStore(tokens(20), LateMemory(), Reads((tokens(CHOSEN), tokens(2000)), SINK, RECENT))] * 2
    for store in cache.stores[1:]:
        store.append(*rows(120, 1))
    assert cache.stores[1].is_long()
    assert "1 to 32768 slots, found 5 and 0" in obstacle(PROGRAM, cache.stores, even(121), IDS)


def test_what_is_not_to_be_counted_is_not() -> None:
    reads = HostReads()
    reads.on_device(CPU).add_(1)
    with reads.uncounted():
        reads.on_device(CPU).add_(5)
    assert (reads.collect(), reads.collect().steps) == (HostReads(1, 1, 1), 1)


def test_why_a_step_is_not_captured() -> None:
    cache, short = long_cache(), Cache(LateMemory())
    short.append(30, 0)
    assert obstacle(PROGRAM, short.stores, even(31), IDS) == obstacle(PROGRAM, cache.stores, even(121), IDS) == ""
    dense = Program.of(None, None, model_info(layers=3, heads=GROUPS, kv_heads=GROUPS))
    assert "layer 1" in obstacle(dense, cache.stores, even(121), IDS)
    assert "holds 2" in obstacle(PROGRAM, cache.stores, even(121), IDS[:1])
    assert SEGMENT.count(12) == ALL
    assert "at this length" in obstacle(PROGRAM, cache.stores, even(12), IDS)
