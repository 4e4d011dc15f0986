"""The small tools of the builders: bits, means of tiles, choices."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.index.block_sparse import mean_pool
from sparsekv.kernels.tiles import count_bits, pack_bits, unpack_bits
from sparsekv.kernels.topk import ascending, best_ascending, blocks, top_ascending

quick = settings(max_examples=60, deadline=None, derandomize=True)


@quick
@given(st.integers(0, 130), st.integers(0, 1 << 20))
def test_bits_come_back_and_are_counted(columns: int, seed: int) -> None:
    bits = torch.rand(3, 2, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = pack_bits(bits)
    assert words.shape[-1] == -(-columns // 32)
    assert torch.equal(unpack_bits(words, columns), bits)
    assert torch.equal(count_bits(words).sum(-1), bits.sum(-1))


@quick
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_choice_takes_the_lowest_index_among_equals(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(values)))
    most = data.draw(st.integers(count, len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])
    listed = top_ascending(torch.tensor([values]).float(), torch.tensor([count]), most, -1)
    assert listed.tolist() == [expected + [-1] * (most - count)]
    assert best_ascending(torch.tensor(values).float(), count).tolist() == expected


def test_marks_beyond_the_width_are_cut_and_not_wrapped() -> None:
    mask = torch.tensor([[True, False, True, True]])
    assert ascending(mask, 2, -1).tolist() == [[0, 2]]


def test_blocks_cover_everything_once() -> None:
    assert [i for part in blocks(10, 4, 12) for i in range(part.start, part.stop)] == list(range(10))
    assert list(blocks(0, 4)) == []
    assert len(list(blocks(5, 1 << 40))) == 5


@quick
@given(st.lists(st.integers(0, 300), min_size=1, max_size=3), st.sampled_from([64, 128]), st.integers(0, 90))
def test_means_leave_padding_out(valid: list[int], size: int, spare: int) -> None:
    rows = max(valid) + spare
    x = torch.randn(len(valid), 2, rows, 4, generator=torch.Generator().manual_seed(rows))
    for b, count in enumerate(valid):
        x[b, :, count:] = torch.nan
    pooled = mean_pool(x, size, valid)
    for b, count in enumerate(valid):
        for t in range(pooled.shape[2]):
            held = x[b, :, t * size : min((t + 1) * size, count)].double().numpy()
            expected = held.mean(1) if held.shape[1] else np.zeros((2, 4))
            np.testing.assert_allclose(pooled[b, :, t].numpy(), expected, atol=1e-5)
