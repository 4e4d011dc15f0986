"""The decode rows of an engine's step, from pages, against each row alone."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from plans_samples import model_info
from tiny_plans import segment

from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, in_8_bits, scaled
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan
from sparsekv.runtime.core.program import Program, decode
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.paged.metrics import Counters
from sparsekv.runtime.paged.step_rows import DecodeHost
from sparsekv.runtime.stores.store import Resident

HEADS, GROUPS, SIZE, PAGE, ROWS, LONGEST = 4, 2, 64, 16, 8, 320
BUDGET = DecodeBudget(tokens=40)
PLAN = DecodePlan(
    lengths=(
        DecodeBucket(up_to=90, dense=True),
        DecodeBucket(up_to=None, segments=(segment(0, (1,), BUDGET), segment(2, (2, 3), BUDGET, heads="per_kv_head"))),
    )
)
PROGRAM = Program.of(None, PLAN, model_info(layers=4, heads=HEADS, kv_heads=GROUPS))
UNTOUCHED = 7.0

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
BACKENDS = ["cpu", pytest.param("triton", marks=needs_interpreter)]


def host_of(backend: str, device: str = "cpu", scratch: int | None = None) -> DecodeHost:
    host = DecodeHost(PROGRAM, backend, ROWS, LONGEST, torch.device(device))
    if scratch is not None:
        host._state.scratch = torch.empty(scratch, device=device)
    return host


class Rows:
    """Random queries of every layer, pages and a block table."""

    def __init__(self, rows: int, device: str = "cpu", seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        pages = LONGEST // PAGE
        cache = torch.randn(rows * pages + 1, GROUPS, PAGE, 2 * SIZE, generator=source).to(device)
        self.pages = cache.split(SIZE, -1)
        self.table_BP = (torch.randperm(rows * pages, generator=source).int() + 1).view(rows, pages).to(device)
        self.q_LBHD = torch.randn(len(PROGRAM.layers), rows, HEADS, SIZE, generator=source).to(device)
        self.out_LBHD = torch.full_like(self.q_LBHD, UNTOUCHED)

    def step(
        self, host: DecodeHost, lengths_B: torch.Tensor, prompts: tuple[int, ...] = (), whole: bool = False
    ) -> None:
        """Every layer of a step."""
        rows = host.begin(lengths_B, prompts, self.table_BP, None, whole=whole)
        for layer, q_BHD, out_BHD in zip(PROGRAM.layers, self.q_LBHD, self.out_LBHD, strict=True):
            rows.attend(layer, q_BHD, self.pages, out_BHD, SIZE**-0.5)

    def alone(self, row: int, length: int, dense: bool = False) -> torch.Tensor:
        """[L, H, D]: all layers of one row, by torch operations."""
        lengths_B, state, found = torch.tensor([length], dtype=torch.int32), DecodeState(PROGRAM.segments), []
        keys = KeyView(*(x.cpu() for x in self.pages), lengths_B, self.table_BP[row, None].cpu())
        state.begin((length,), lengths_B.device)
        for layer, q_BHD in zip(PROGRAM.layers, self.q_LBHD.cpu(), strict=True):
            q_BH1D = q_BHD[row, None, :, None]
            one = decode(layer, q_BH1D, Resident(keys), state, scale=SIZE**-0.5, backend="cpu", verifies=dense)
            found.append(one[0, :, 0])
        return torch.stack(found)

    def check(self, lengths: tuple[int, ...], choosing: tuple[int, ...]) -> None:
        """Rows that choose have their output; the others are not written to."""
        for row, length in enumerate(lengths):
            found_LHD = self.out_LBHD[:, row].cpu()
            if row in choosing:
                torch.testing.assert_close(found_LHD, self.alone(row, length), rtol=1e-4, atol=1e-4)
            else:
                assert (found_LHD == UNTOUCHED).all(), row


def as_lengths(lengths: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_rows_that_choose_are_written(backend: str) -> None:
    """Beside them: short ones, the single row of a long prompt, padding, and one that its budget covers."""
    lengths = (300, 91, 90, 240, 0, 72, 131)
    rows = Rows(len(lengths))
    rows.step(host_of(backend), as_lengths(lengths), prompts=(3,))
    rows.check(lengths, choosing=(0, 1, 6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_do_not_choose_attend_to_everything_where_no_other_kernel_computes_them(backend: str) -> None:
    """The same rows, and one that the rule leaves dense."""
    lengths = (300, 91, 90, 240, 0, 72, 131)
    rows, host = Rows(len(lengths)), host_of(backend)
    rows.step(host, as_lengths(lengths), (3,), whole=True)
    for row, length in enumerate(lengths):
        if length:
            wanted_LHD = rows.alone(row, length, dense=row == 3)
            torch.testing.assert_close(rows.out_LBHD[:, row], wanted_LHD, rtol=1e-4, atol=1e-4)
    step = host.begin(as_lengths(lengths), (3,), rows.table_BP, None, least=200, whole=True)
    for layer, q_BHD, out_BHD in zip(PROGRAM.layers, rows.q_LBHD, rows.out_LBHD, strict=True):
        step.attend(layer, q_BHD, rows.pages, out_BHD, SIZE**-0.5)
    torch.testing.assert_close(rows.out_LBHD[:, 6], rows.alone(6, 131, dense=True), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.out_LBHD[:, 0], rows.alone(0, 300), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [False, True], ids=["queries in float32", "queries in 8 bits"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_in_8_bits_are_those_of_the_numbers_that_they_stand_for(backend: str, queries: bool) -> None:
    lengths, rows = (300, 91, 90, 240, 0, 72, 131), Rows(7)
    k_G, v_G, q_G = torch.rand(3, GROUPS) * 0.1 + 0.01
    dtype = torch.bfloat16 if queries else torch.float32
    scales = Scales(k_G, v_G, dtype, q_G if queries else None)
    pages = tuple(in_8_bits(x, scale_G) for x, scale_G in zip(rows.pages, (k_G, v_G), strict=True))
    rows.pages = tuple(scaled(x, scale_G, torch.float32) for x, scale_G in zip(pages, (k_G, v_G), strict=True))
    out_LBHD, q_LBHD = rows.out_LBHD.to(dtype), rows.q_LBHD
    if queries:
        of_H = q_G.repeat_interleave(HEADS // GROUPS)[:, None]
        q_LBHD = (rows.q_LBHD / of_H).to(FLOAT8)
        rows.q_LBHD = q_LBHD.float() * of_H
    host = host_of(backend)
    host.warm_up(PROGRAM.layers, pages, LONGEST, scales=scales)
    step = host.begin(as_lengths(lengths), (3,), rows.table_BP, None)
    for layer, q_BHD, out_BHD in zip(PROGRAM.layers, q_LBHD, out_LBHD, strict=True):
        step.attend(layer, q_BHD, pages, out_BHD, SIZE**-0.5, scales=scales)
    for row in range(len(lengths)):
        found_LHD = out_LBHD[:, row].float()
        if row in (0, 1, 6):
            near = 2e-2 if queries else 1e-4
            torch.testing.assert_close(found_LHD, rows.alone(row, lengths[row]), rtol=near, atol=near)
        else:
            assert (found_LHD == UNTOUCHED).all(), row


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_the_scratch_are_left_to_the_dense_kernel_and_counted(backend: str) -> None:
    lengths, counters = (300, 80, 200, 120), Counters()
    rows, host = Rows(len(lengths)), host_of(backend, scratch=(HEADS + GROUPS) * 430)
    host._state._tables.clear()
    rows.step(host, as_lengths(lengths))
    host.count([range(length, length + 1) for length in lengths], counters)
    # Of the first segment, whose scores are one list, the scratch holds 516 tokens.
    assert (rows.out_LBHD[2:, 2:] == UNTOUCHED).all()
    assert (counters.decode_sparse, counters.decode_dense, counters.decode_left) == (1, 3, 2)


@pytest.mark.parametrize("seed", range(8))
def test_the_host_knows_which_rows_choose_as_the_device_does(seed: int) -> None:
    source = random.Random(seed)
    shares = [DecodeBudget(fraction=source.uniform(0.05, 1.0), at_most=source.choice([30, 1000])) for _ in range(4)]
    buckets = (
        DecodeBucket(up_to=90, dense=True),
        DecodeBucket(up_to=200, segments=(segment(0, (1,), shares[0]), segment(2, (3,), shares[1]))),
        DecodeBucket(up_to=320, segments=(segment(0, (1,), shares[2]), segment(2, (3,), shares[3]))),
        DecodeBucket(up_to=None, dense=True),
    )
    program = Program.of(None, DecodePlan(lengths=buckets), model_info(layers=4, heads=HEADS, kv_heads=GROUPS))
    host = DecodeHost(program, "cpu", ROWS, LONGEST, torch.device("cpu"))
    host._state.scratch = torch.empty(source.randrange(1, ROWS * LONGEST * 2 * HEADS))
    lengths = [source.randrange(1, LONGEST) for _ in range(ROWS)]
    held_SB = host._state.budgets(torch.device("cpu")).of(as_lengths(tuple(lengths)), "cpu")[0] != ALL
    wanted_SB = torch.tensor([[one.count(length) != ALL for length in lengths] for one in program.segments])
    assert [host.chooses([length]) for length in lengths] == wanted_SB.any(0).tolist()
    assert host.chooses(lengths, 100) == any(c and n >= 100 for c, n in zip(wanted_SB.any(0), lengths, strict=True))
    assert not host.chooses([50, *range(321, 400)])  # dense behind the last bucket that chooses
    assert host.chooses(np.array(lengths).view(Whole)) == bool(wanted_SB.any())
    assert host.without_room(lengths) == (wanted_SB & ~held_SB).any(0).tolist()


class Whole(np.ndarray):
    """Not looked at one by one: steps wait for it."""

    def __iter__(self) -> Any:
        raise AssertionError

    tolist = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_beside_a_drafter_is_a_step_of_its_own(backend: str) -> None:
    """Requests of four rows, one of which lies across the edge of a bucket, of one row, of the end of a prompt, of few
    tokens, and padding; a graph has rows behind the last one."""
    counts, ends = (4, 4, 1, 4, 3, 0), (300, 92, 120, 240, 60, 0)
    host = DecodeHost(PROGRAM, backend, ROWS, LONGEST, torch.device("cpu"), queries=4)
    host._lengths_R.fill_(-1)
    rows, table_RP = Rows(18), torch.arange(1, 121, dtype=torch.int32).view(6, 20)
    starts_X = torch.tensor((0, *counts)).cumsum(0).int()
    step = host.begin(as_lengths(ends), (3,), table_RP, None, 0, starts_X, 18)
    lengths = [end - left for count, end in zip(counts, ends, strict=True) for left in range(count - 1, -1, -1)]
    assert host._lengths_R.tolist() == [*lengths[:9], *[0] * 4, *lengths[13:], *[0] * (4 * ROWS - 16)]
    for layer, q_RHD, out_RHD in zip(PROGRAM.layers, rows.q_LBHD, rows.out_LBHD, strict=True):
        step.attend(layer, q_RHD, rows.pages, out_RHD, SIZE**-0.5)
        assert step.rest(layer, None, lambda _, others_B: others_B.tolist()) == [0, 0, 0, 240, 60, 0]
    rows.table_BP = table_RP.repeat_interleave(torch.tensor(counts), 0)
    rows.check((*lengths, 0, 0), choosing=tuple(range(9)))
    whole = host.begin(as_lengths(ends), (3,), table_RP, None, 0, starts_X, 18, whole=True)
    for layer, q_RHD, out_RHD in zip(PROGRAM.layers, rows.q_LBHD, rows.out_LBHD, strict=True):
        whole.attend(layer, q_RHD, rows.pages, out_RHD, SIZE**-0.5)
    for row, length in enumerate(lengths):
        wanted_LHD = rows.alone(row, length, dense=row in range(9, 13))
        torch.testing.assert_close(rows.out_LBHD[:, row], wanted_LHD, rtol=1e-4, atol=1e-4)
    counters = Counters()
    host.count(
        [range(end - count + 1, end + 1) for count, end in zip(counts, ends, strict=True) if end != 240], counters
    )
    assert (counters.decode_sparse, counters.decode_dense) == (7, 5)


def test_a_row_is_computed_alike_wherever_it_stands_in_the_batch() -> None:
    """vLLM moves rows between steps; the host is the same."""
    lengths, host, rows = (300, 91, 70, 240), host_of("cpu"), Rows(4)
    rows.step(host, as_lengths(lengths))
    first_LBHD, order = rows.out_LBHD.clone(), [3, 1, 0, 2]
    rows.table_BP, rows.q_LBHD = rows.table_BP[order], rows.q_LBHD[:, order]
    rows.out_LBHD.fill_(UNTOUCHED)
    rows.step(host, as_lengths(lengths)[order])
    assert torch.equal(rows.out_LBHD, first_LBHD[:, order])


def test_the_lengths_that_graphs_read_stay_where_they_are() -> None:
    host, rows = host_of("cpu"), Rows(3)
    first = host.begin(as_lengths((300, 1, 2)), (), rows.table_BP, None).state.lengths_B
    assert (
        host.begin(as_lengths((5, 300)), (0,), rows.table_BP[:2], None).state.lengths_B.data_ptr() == first.data_ptr()
    )
    assert first.tolist() == [0, 300, 2]


def test_vllms_metadata_is_asked_for_once_a_segment_with_no_tokens_in_rows_that_choose() -> None:
    rows, asked = Rows(3).table_BP, []
    step = host_of("cpu").begin(as_lengths((300, 50, 200)), (2,), rows, None)

    def without(metadata: Any, lengths_B: torch.Tensor) -> Any:
        asked.append((metadata, lengths_B.tolist()))
        return len(asked)

    assert [step.rest(layer, "whole", without) for layer in PROGRAM.layers] == [1, 1, 2, 2]
    assert asked == [("whole", [0, 50, 200])] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_one_captured_step_serves_rows_that_grow_come_and_go(whole: bool) -> None:
    host, rows, lengths_B = host_of("triton", "cuda"), Rows(4, "cuda"), as_lengths((1, 1, 1, 1), "cuda")
    host.warm_up(PROGRAM.layers, rows.pages, LONGEST)
    rows.step(host, lengths_B)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = host.begin(lengths_B, (), rows.table_BP, None, whole=whole)
        for layer, q_BHD, out_BHD in zip(PROGRAM.layers, rows.q_LBHD, rows.out_LBHD, strict=True):
            step.attend(layer, q_BHD, rows.pages, out_BHD, SIZE**-0.5)
    for lengths, choosing in (((300, 40, 91, 0), (0, 2)), ((90, 301, 92, 120), (1, 2, 3)), ((1, 1, 1, 1), ())):
        lengths_B.copy_(as_lengths(lengths))
        rows.out_LBHD.fill_(UNTOUCHED)
        graph.replay()
        rows.check(lengths, tuple(row for row, length in enumerate(lengths) if length) if whole else choosing)


@pytest.mark.gpu
def test_one_captured_step_serves_requests_of_any_rows() -> None:
    """Requests that verify drafts, grow, have one row, or none; the graph has rows behind the last one."""
    host = DecodeHost(PROGRAM, "triton", 4, LONGEST, torch.device("cuda"), queries=4)
    rows, table_BP = Rows(8, "cuda"), torch.arange(1, 61, dtype=torch.int32, device="cuda").view(3, 20)
    lengths_B, starts_X = as_lengths((300, 200, 0), "cuda"), as_lengths((0, 4, 8, 8), "cuda")
    host.warm_up(PROGRAM.layers, rows.pages, LONGEST)
    graph = torch.cuda.CUDAGraph()
    for launch in (nullcontext(), torch.cuda.graph(graph)):
        torch.cuda.synchronize()
        with launch:
            step = host.begin(lengths_B, (), table_BP, None, 0, starts_X, 8)
            for layer, q_RHD, out_RHD in zip(PROGRAM.layers, rows.q_LBHD, rows.out_LBHD, strict=True):
                step.attend(layer, q_RHD, rows.pages, out_RHD, SIZE**-0.5)
    for ends, counts in (((300, 200, 0), (4, 4, 0)), ((301, 92, 80), (1, 4, 3)), ((40, 120, 0), (2, 1, 0))):
        lengths_B.copy_(as_lengths(ends))
        starts_X.copy_(torch.tensor((0, *counts)).cumsum(0))
        rows.out_LBHD.fill_(UNTOUCHED)
        graph.replay()
        lengths = [end - left for count, end in zip(counts, ends, strict=True) for left in range(count - 1, -1, -1)]
        owners = torch.arange(3).repeat_interleave(torch.tensor(counts))
        rows.table_BP = table_BP[owners.cuda()]
        chosen = tuple(row for row, owner in enumerate(owners.tolist()) if ends[owner] > 90)
        rows.check((*lengths, *[0] * (8 - len(lengths))), chosen)


def test_all_ranks_have_as_much_scratch_as_the_one_that_has_least() -> None:
    least = torch.tensor([1000], dtype=torch.int32).view(torch.float32)
    host = DecodeHost(PROGRAM, "cpu", ROWS, LONGEST, torch.device("cpu"), lambda x: torch.stack((x, least)))
    assert host._state.scratch.numel() == 1000
    assert host_of("cpu")._state.scratch.numel() > 1000
