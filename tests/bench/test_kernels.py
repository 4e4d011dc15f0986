"""The kernel bench on a CPU: every case a row, whatever happens to it."""

from dataclasses import replace

import pytest
import torch
from progress import Counting

from sparsekv.bench import kernels
from sparsekv.bench.kernels import KernelBench, bench_kernels
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.planner.progress import prefill_work
from sparsekv.plans.patterns import TileShape

SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 32, "tile": TileShape(query=64, key=64), "rounds": 1}


def bench(**options) -> KernelBench:
    asked = {"lengths": (512,), "densities": (0.9,), "backends": ("cpu",), "patterns": ("a_shape",)}
    return KernelBench(**asked | SMALL | options)


@pytest.fixture
def no_room_for_640(monkeypatch):
    def build(patterns, q, *rest, **options):
        if q.shape[2] == 640:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build_index(patterns, q, *rest, **options)

    monkeypatch.setattr(kernels, "build_index", build)


def test_every_length_density_and_pattern_is_a_row_with_all_of_its_numbers():
    rows = list(bench_kernels(bench(lengths=(512, 640), patterns=("vertical_slash", "mixed"))))
    cases = [(row.name, row.length) for row in rows]
    assert cases == [("vertical_slash", 512), ("mixed", 512), ("vertical_slash", 640), ("mixed", 640)]
    numbers = ("dense_ms", "sparse_ms", "index_ms", "attention_ms", "density", "tflops", "dense_tflops", "mass")
    for data in (row.data() for row in rows):
        assert all(data[name] > 0 for name in numbers), data
        assert data["error"] < 1e-3
        assert data["dense_kernel"] in data["dense_peers_ms"]
        assert (data["note"], data["planted"]) == ("", True)
    assert rows[0].peers is rows[1].peers is not rows[2].peers  # dense is tried once a length
    assert rows[2].peers is rows[3].peers


def test_a_length_that_does_not_fit_is_a_row_the_others_go_on_and_progress_ends_whole(no_room_for_640):
    progress = Counting()
    rows = list(bench_kernels(bench(lengths=(512, 640, 768)), progress))
    assert [row.note for row in rows] == ["", "out of memory", ""]
    assert rows[1].speedup is None
    assert progress.done == progress.total == 2 * sum(map(prefill_work, (512, 640, 768)))


def test_backends_that_cannot_run_are_rows_with_a_reason():
    rows = list(bench_kernels(bench(backends=())))
    assert {row.backend for row in rows if row.note and row.sparse_ms is None} == {"flash", "triton"}
    assert [row.backend for row in rows if row.sparse_ms is not None] == ["cpu"]


def _broken(found, q, k, v, index, scale):
    raise RuntimeError("does not compile")


def _uncausal(found, q, k, v, index, scale):
    """Right in the last row of every tile, which sees all of it: every row sees up to the end of its own tile."""
    end = torch.arange(q.shape[2]) // index.tile.query * index.tile.query + index.tile.query
    keep = torch.arange(k.shape[2]) < end[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)
    last_S1 = (torch.arange(q.shape[2]) % index.tile.query == index.tile.query - 1)[:, None]
    return torch.where(last_S1, found.out_BHSD, out)


@pytest.mark.parametrize("mix", ["vertical_slash", "a_shape", "block_sparse"])
@pytest.mark.parametrize(
    "wrong",
    [
        _broken,
        _uncausal,
        lambda found, *given: found.out_BHSD + 0.5,
        lambda found, *given: found.out_BHSD + float("nan"),
    ],
)
def test_an_output_that_fails_or_is_wrong_has_no_time_and_keeps_the_dense_ones(monkeypatch, mix, wrong):
    def attend(q, k, v, index, chunk, *, scale, backend):
        found = prefill_attention(q, k, v, index, chunk, scale=scale, backend=backend)
        return replace(found, out_BHSD=wrong(found, q, k, v, index, scale))

    monkeypatch.setattr(kernels, "prefill_attention", attend)
    (row,) = bench_kernels(bench(lengths=(1024,), patterns=(mix,)))
    assert (row.sparse_ms, row.speedup) == (None, None)
    assert row.note
    assert row.dense_ms > 0
