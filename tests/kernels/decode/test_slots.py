"""A slot map, against one that is written out with dictionaries."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.decode import slots
from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import SlotMap, SlotTable

CPU = torch.device("cpu")
CAPACITY = 40


class Row:
    """The slots of one list: the token of each, and what it is worth."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.token: dict[int, int] = {}
        self.worth = [0] * slots

    def place(self, listed: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The slot of every listed token, and (token, slot) of those that are new."""
        self.worth = [worth - worth // 16 for worth in self.worth]
        slot_of = {token: slot for slot, token in self.token.items()}
        hits = {slot_of[token] for token in listed if token in slot_of}
        for slot in hits:
            self.worth[slot] += slots.USE
        missed = [token for token in listed if token >= 0 and token not in slot_of]
        others = sorted(set(range(self.slots)) - hits, key=lambda slot: (self.worth[slot], slot))
        new = list(zip(missed, sorted(others[: len(missed)]), strict=True))
        for token, slot in new:
            self.token[slot], self.worth[slot] = token, slots.USE
        slot_of = {token: slot for slot, token in self.token.items()}
        return [slot_of.get(token, -1) if token >= 0 else -1 for token in listed], new


CHOICE = st.lists(st.integers(0, CAPACITY - 1), max_size=8, unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lists=st.sampled_from([1, 2]), batch=st.sampled_from([1, 3]), spare=st.sampled_from([0, 1, 9]))
def test_the_tokens_that_are_worth_least_make_room(data, lists: int, batch: int, spare: int) -> None:
    table = SlotTable(batch, lists, 8 + spare, CAPACITY, CPU)
    expected = [[Row(8 + spare) for _ in range(lists)] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 6))):
        choices = [[data.draw(CHOICE) for _ in range(lists)] for _ in range(batch)]
        gaps = data.draw(st.integers(0, 3))  # tokens that are none, in front of the others
        rows = [[[-1] * min(gaps, 8 - len(one)) + one for one in row] for row in choices]
        padded = torch.tensor([[one + [-1] * (8 - len(one)) for one in row] for row in rows], dtype=torch.int32)
        placed = table.place(padded)
        for b in range(batch):
            for g in range(lists):
                found, new = expected[b][g].place(padded[b, g].tolist())
                assert placed.slots_BgM[b, g].tolist() == found
                rest = [-1] * (8 - len(new))
                assert placed.missed_BgM[b, g].tolist() == [token for token, _ in new] + rest
                assert placed.into_BgM[b, g].tolist() == [slot for _, slot in new] + rest
                present = [expected[b][g].token.get(slot, -1) for slot in range(8 + spare)]
                assert table.present_BgH[b, g].tolist() == present


@settings(max_examples=30, deadline=None)
@given(choices=st.lists(CHOICE, min_size=3, max_size=8), more=st.sampled_from([0, 7]))
def test_a_table_that_is_loaded_goes_on_as_the_one_it_comes_from(choices, more: int) -> None:
    def place(table: SlotTable, one: list[int]) -> list[torch.Tensor]:
        placed = table.place(torch.tensor([[one + [-1] * (8 - len(one))]], dtype=torch.int32))
        return [placed.slots_BgM, placed.missed_BgM, placed.into_BgM, table.present_BgH]

    table, other = SlotTable(1, 1, 10, CAPACITY, CPU), SlotTable(1, 1, 10, CAPACITY + more, CPU)
    place(table, choices[0])
    place(other, choices[1])
    other.load(table.contents())
    for one in choices[2:]:
        assert all(map(torch.equal, place(table, one), place(other, one)))
    other.clear()
    assert all(map(torch.equal, place(SlotTable(1, 1, 10, CAPACITY, CPU), choices[0]), place(other, choices[0])))


def place_one_by_one(table: SlotTable, tokens: list[int]) -> None:
    for token in tokens:
        table.place(torch.tensor([[[token]]], dtype=torch.int32))


def test_a_token_that_is_chosen_no_more_goes_however_often_it_was() -> None:
    table = SlotTable(1, 1, 2, CAPACITY, CPU)
    place_one_by_one(table, [5] * 500)
    assert table.worth_BgH.max() < 1 << (slots.USE << slots.AGEING).bit_length()
    place_one_by_one(table, [6, 7] * 30)
    assert sorted(table.present_BgH[0, 0].tolist()) == [6, 7]


def test_addresses_stay_where_a_captured_step_has_them() -> None:
    table = SlotTable(1, 1, 4, CAPACITY, CPU)
    tensors = [tensor for tensor in vars(table).values() if isinstance(tensor, torch.Tensor)]
    before = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
    for first in range(0, 20, 3):
        table.place(torch.arange(first, first + 4, dtype=torch.int32).view(1, 1, 4))
    assert [(x.data_ptr(), x.shape) for x in vars(table).values() if isinstance(x, torch.Tensor)] == before


def choice(tokens: list[int], length: int, count: int | None = None) -> tuple[Selection, torch.Tensor]:
    chosen = torch.tensor([[tokens]], dtype=torch.int32)
    counts = torch.tensor([len(tokens) if count is None else count], dtype=torch.int32)
    return Selection(chosen, counts, 1, 2), torch.tensor([length], dtype=torch.int32)


def test_layers_with_the_same_choice_get_the_same_step_and_its_misses() -> None:
    shared, sizes = SlotMap(), {"most": 6, "slots": 8, "capacity": CAPACITY, "hot_from": 24}
    first = shared.place(*(asked := choice([3, 9, 25], 30)), **sizes)
    assert shared.place(*asked, **sizes) is first
    assert first.tokens_BgM.tolist() == [[[0, 3, 9, 25, 28, 29]]]
    assert first.missed.token.tolist() == [0, 3, 9]  # the others need no slot
    assert (first.slotted, first.missed.newest, first.reads_all) == (3, 9, False)
    second = shared.place(*choice([3, 11, 25], 31), **sizes)
    assert second.before is first.state
    assert second.missed.token.tolist() == [11]
    assert sorted(second.present.token.tolist()) == [0, 3, 9, 11]
    assert len(shared.place(*choice([3, 11, 25], 32), **sizes).missed) == 0
    assert shared.place(*choice([3, 11, 25], 32, ALL), **sizes).reads_all


@pytest.mark.parametrize("changed", [{"slots": 9}, {"capacity": CAPACITY + 1}], ids=["slots", "capacity"])
def test_a_map_of_another_size_begins_anew(changed) -> None:
    shared, sizes = SlotMap(), {"most": 6, "slots": 8, "capacity": CAPACITY, "hot_from": 24}
    shared.place(*choice([3, 9, 25], 30), **sizes)
    assert shared.place(*choice([3, 9, 25], 31), **sizes | changed).missed.token.tolist() == [0, 3, 9]


def test_a_copy_of_a_map_begins_anew() -> None:
    shared, sizes = SlotMap(), {"most": 6, "slots": 8, "capacity": CAPACITY, "hot_from": 24}
    shared.place(*choice([3, 9, 25], 30), **sizes)
    assert copy.deepcopy(shared).place(*choice([3, 9, 25], 30), **sizes).missed.token.tolist() == [0, 3, 9]
