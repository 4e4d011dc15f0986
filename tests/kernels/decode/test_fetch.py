"""What a captured step fetches from host memory: the choice placed by one kernel, and the rows brought by another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import SlotTable
from sparsekv.kernels.keys import COLUMNS, HOST, HOST_TOKENS, ROWS

place = pytest.importorskip("sparsekv.kernels.decode.place")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
SINK, CHOSEN, RECENT, RING, CAPACITY = 2, 6, 3, 9, 60


def selection_of(choices: list[list[list[int]]], counts: list[int], sink: int) -> Selection:
    padded = [[one + [-1] * (CHOSEN - len(one)) for one in row] for row in choices]
    chosen_BgN = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
    return Selection(chosen_BgN, torch.tensor(counts, dtype=torch.int32, device=DEVICE), sink, RECENT)


@settings(max_examples=10, deadline=None)
@given(
    data=st.data(),
    lists=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 3]),
    spare=st.sampled_from([0, 1, 9]),
    sink=st.sampled_from([0, SINK]),
)
def test_a_step_is_placed_as_by_torch(data, lists: int, batch: int, spare: int, sink: int) -> None:
    most = sink + CHOSEN + RECENT
    table, twin = (SlotTable(batch, lists, sink + CHOSEN + spare, CAPACITY, DEVICE) for _ in range(2))
    into = place.PlacedStep.empty(twin, most, RECENT)
    counts_3 = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    read = [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(20, CAPACITY))
        choice = st.lists(st.integers(sink, length - RECENT - 1), max_size=CHOSEN, unique=True).map(sorted)
        choices = [[data.draw(choice) for _ in range(lists)] for _ in range(batch)]
        counts = [data.draw(st.sampled_from([max(map(len, row)), CHOSEN, ALL])) for row in choices]
        selection = selection_of(choices, counts, sink)
        lengths_B = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        tokens_BgA, totals_B = selection.listed(lengths_B)
        recent_BgA = tokens_BgA >= length - RECENT
        expected = table.place(tokens_BgA.masked_fill(recent_BgA, -1))
        place.place_step(twin, selection, lengths_B, RING, into, counts_3, 5)
        assert torch.equal(into.totals_B, totals_B)
        rows_BgA = torch.where(recent_BgA, table.slots + tokens_BgA % RING, expected.slots_BgM)
        missed_BgA, into_BgA = expected.missed_BgM, expected.into_BgM
        for b in range(batch):
            for g in range(lists):
                total, misses = int(totals_B[b]), int((missed_BgA[b, g] >= 0).sum())
                assert torch.equal(into.rows_BgA[b, g, :total], rows_BgA[b, g, :total])
                assert int(into.misses_Bg[b, g]) == misses
                assert torch.equal(into.missed_BgM[b, g, :misses], missed_BgA[b, g, :misses])
                assert torch.equal(into.into_BgM[b, g, :misses], into_BgA[b, g, :misses])
                read[2] += 5 * misses
        read[0] += 5
        read[1] += 5 * int(((tokens_BgA >= 0) & ~recent_BgA).sum())
        for name in ("slot_of_BgC", "token_BgH", "worth_BgH"):
            assert torch.equal(getattr(twin, name)[:, :, :-1], getattr(table, name)[:, :, :-1]), name
    assert counts_3.tolist() == read


def host_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    host = torch.randn(shape).to(dtype)
    return host.pin_memory() if DEVICE.type == "cuda" else host


def table_of(rows_PBGRD: torch.Tensor, host_CBPGD: torch.Tensor) -> torch.Tensor:
    where = [0] * COLUMNS
    where[2], where[ROWS], where[HOST] = rows_PBGRD.shape[3], rows_PBGRD.data_ptr(), host_CBPGD.data_ptr()
    where[HOST_TOKENS] = len(host_CBPGD)
    return torch.tensor(where, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (40, torch.bfloat16)], ids=str)
def test_what_was_missed_lies_in_its_slots_and_nothing_else_changes(lists, batch, size, dtype) -> None:
    heads, slots, tokens, length = 4, 12, 50, 45
    host_CBPGD = host_tensor(tokens, batch, 2, heads, size, dtype=dtype)
    before, rows_PBGRD = host_CBPGD.clone(), torch.randn(2, batch, heads, slots + RING, size).to(DEVICE, dtype)
    expected_PBGRD = rows_PBGRD.clone()
    placed = place.PlacedStep.empty(SlotTable(batch, lists, slots, tokens, DEVICE), 10 + RECENT, RECENT)
    for b in range(batch):
        for g in range(lists):
            count = (3 * b + 5 * g) % 8 + 1
            missed, into = torch.randperm(tokens)[:count], torch.randperm(slots)[:count].sort().values
            placed.misses_Bg[b, g] = count
            placed.missed_BgM[b, g, :count], placed.into_BgM[b, g, :count] = missed.int(), into.int()
            mine = slice(g * heads // lists, (g + 1) * heads // lists)
            new_PGND = host_CBPGD[missed, b].permute(1, 2, 0, 3)[:, mine].to(DEVICE)
            expected_PBGRD[:, b, mine, into.to(DEVICE)] = new_PGND
    lengths_B = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    where_X, leaving = table_of(rows_PBGRD, host_CBPGD), length - RECENT
    sizes = {"kv_heads": heads, "token_bytes": size * dtype.itemsize, "slots": slots, "ring": RING, "recent": RECENT}
    place.gather_missed(where_X, placed, lengths_B, **sizes, programs=5)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(rows_PBGRD, expected_PBGRD)
    before[leaving] = expected_PBGRD[:, :, :, slots + leaving % RING].transpose(0, 1).cpu()
    assert torch.equal(host_CBPGD, before)


def test_a_token_beyond_the_room_on_the_host_is_not_written() -> None:
    host_CBPGD = host_tensor(8, 1, 2, 1, 16, dtype=torch.float32)
    before, rows_PBGRD = host_CBPGD.clone(), torch.ones(2, 1, 1, 4 + RING, 16, device=DEVICE)
    placed = place.PlacedStep.empty(SlotTable(1, 1, 4, 8, DEVICE), 4 + RECENT, RECENT)
    lengths_B = torch.full((1,), 8 + RECENT, dtype=torch.int32, device=DEVICE)
    sizes = {"kv_heads": 1, "token_bytes": 64, "slots": 4, "ring": RING, "recent": RECENT}
    for beyond in (0, 9):  # behind the last token, and before the first
        place.gather_missed(table_of(rows_PBGRD, host_CBPGD), placed, lengths_B - beyond, **sizes)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host_CBPGD, before)


def test_the_newest_token_goes_to_its_place_in_the_ring() -> None:
    from sparsekv.kernels.decode.place import append_newest
    from sparsekv.kernels.keys import COLUMNS, HEAD, ROW, TOKEN, KeyView

    heads, size, slots = 2, 16, 5
    k, v = (torch.zeros(1, heads, slots + RING, size, device=DEVICE) for _ in range(2))
    new_k, new_v = (torch.randn(1, heads, 1, size, device=DEVICE) for _ in range(2))
    lengths_B = torch.tensor([31], dtype=torch.int32, device=DEVICE)
    where_X = torch.zeros(COLUMNS, dtype=torch.int64, device=DEVICE)
    where_X[[HEAD, TOKEN, ROW]] = torch.tensor([slots + RING, 1, heads * (slots + RING)], device=DEVICE)
    append_newest(KeyView(k, v, lengths_B, None, where_X), new_k, new_v, (slots, RING))
    for cached, new in ((k, new_k), (v, new_v)):
        assert torch.equal(cached[:, :, slots + 30 % RING], new[:, :, 0])
        assert int(cached.any(-1).sum()) == heads
