"""The kernel bench on a CPU: every case a row, whatever happens to it."""

import pytest
import torch
from progress import Counting

from sparsekv.bench.kernels import KernelBench, bench_kernels, families_of
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.planner.progress import prefill_work
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape

RELIED_ON = ["name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device"]
SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 32, "tile": TileShape(query=64, key=64), "rounds": 1}


def bench(**options) -> KernelBench:
    return KernelBench(**{"lengths": (512,), "densities": (0.9,), "backends": ("cpu",)} | SMALL | options)


def test_every_length_density_and_pattern_is_a_row_with_all_of_its_numbers():
    rows = list(bench_kernels(bench(lengths=(512, 640), patterns=("vertical_slash", "mixed"))))
    assert [(row.name, row.length) for row in rows] == [
        ("vertical_slash", 512),
        ("mixed", 512),
        ("vertical_slash", 640),
        ("mixed", 640),
    ]
    for row in rows:
        data = row.as_data()
        assert list(data)[:9] == RELIED_ON
        numbers = ("dense_ms", "sparse_ms", "index_ms", "attention_ms", "density", "tflops", "dense_tflops", "mass")
        assert all(data[name] > 0 for name in numbers), data
        assert data["speedup"] == pytest.approx(data["dense_ms"] / data["sparse_ms"])
        assert data["error"] < 1e-3
        assert data["dense_kernel"] in data["dense_peers_ms"]
        assert data["note"] == ""
        assert data["planted"] is True
    assert len(rows) == 4


def test_vertical_slash_heads_sample_as_many_queries_as_asked_for():
    sampled = set()

    def build(patterns, *tensors, **options):
        sampled.update(getattr(pattern, "last_q", None) for pattern in patterns)
        return build_index(patterns, *tensors, **options)

    list(bench_kernels(bench(patterns=("vertical_slash", "a_shape"), last_q=17, build=build)))
    assert sampled == {17, None}
    with pytest.raises(UsageError, match="sampled"):
        bench(last_q=0)


def test_dense_kernels_are_tried_once_a_length():
    rows = list(bench_kernels(bench(lengths=(512, 640), patterns=("a_shape", "block_sparse"))))
    assert rows[0].dense_peers is rows[1].dense_peers
    assert rows[2].dense_peers is rows[3].dense_peers
    assert rows[0].dense_peers is not rows[2].dense_peers


def test_progress_moves_within_a_case_and_ends_whole_whatever_fails():
    def build(patterns, q, *rest, **options):
        if q.shape[2] == 640:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build_index(patterns, q, *rest, **options)

    progress = Counting()
    asked = bench(lengths=(512, 640), patterns=("a_shape",), backends=(), build=build)
    done = [progress.done for row in bench_kernels(asked, progress) if row.backend == "cpu"]
    assert done == [prefill_work(512), 2 * prefill_work(512)]  # dense before the first row
    assert progress.done == progress.total == 2 * (prefill_work(512) + prefill_work(640))


def test_a_row_that_computes_more_than_was_asked_for_says_why():
    few, more = bench_kernels(bench(densities=(0.25, 0.9), patterns=("block_sparse",)))
    assert few.density > 1.1 * few.target_density
    assert "512 at 0.25: more is computed than was asked for" in few.as_data()["note"]
    assert "are 0.583 of the prompt" in few.note  # 8 diagonal tiles, 7 before them and 6 first ones, of 36
    assert (more.density <= 1.1 * more.target_density, more.note) == (True, "")


def test_backends_that_cannot_run_are_rows_with_a_reason():
    rows = list(bench_kernels(bench(backends=(), patterns=("a_shape",))))
    noted = {row.backend: row.note for row in rows if row.sparse_ms is None}
    assert noted.keys() == {"flash", "triton"}
    assert all("cannot run" in note for note in noted.values())
    assert [row.backend for row in rows if row.sparse_ms is not None] == ["cpu"]


def test_a_length_that_does_not_fit_is_a_row_and_the_others_go_on():
    def build(patterns, q, *rest, **options):
        if q.shape[2] == 640:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build_index(patterns, q, *rest, **options)

    rows = list(bench_kernels(bench(lengths=(512, 640, 768), patterns=("a_shape",), build=build)))
    assert [row.note for row in rows] == ["", "out of memory", ""]
    assert rows[1].as_data()["speedup"] is None


def test_a_kernel_that_fails_is_a_row_that_keeps_the_dense_times():
    def broken(*args, **options):
        raise RuntimeError("does not compile")

    (row,) = bench_kernels(bench(patterns=("a_shape",), attend=broken))
    assert row.note == "RuntimeError: does not compile"
    assert row.sparse_ms is None
    assert row.dense_ms > 0


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_a_wrong_output_has_no_time(wrong):
    def off(*args, **options):
        found = prefill_attention(*args, **options)
        return type(found)(found.out_BHSD + wrong, found.lse_BHS)

    (row,) = bench_kernels(bench(patterns=("a_shape",), attend=off))
    assert "wrong" in row.note
    assert row.sparse_ms is None
    assert row.speedup is None


@pytest.mark.parametrize("mix", ["vertical_slash", "a_shape", "block_sparse"])
def test_an_output_that_sees_the_whole_diagonal_tile_has_no_time(mix):
    def leaky(q, k, v, index, chunk, *, scale, backend):
        """Right in the last row of every tile, which sees all of it."""
        found = prefill_attention(q, k, v, index, chunk, scale=scale, backend=backend)
        last_S1 = (torch.arange(q.shape[2]) % index.tile.query == index.tile.query - 1)[:, None]
        return type(found)(torch.where(last_S1, found.out_BHSD, _uncausal(q, k, v, index, scale)), found.lse_BHS)

    (row,) = bench_kernels(bench(lengths=(1024,), patterns=(mix,), attend=leaky))
    assert "wrong" in row.note
    assert row.sparse_ms is None


def _uncausal(q, k, v, index, scale):
    """Every row attends to every key up to the end of its own tile."""
    end = torch.arange(q.shape[2]) // index.tile.query * index.tile.query + index.tile.query
    keep = torch.arange(k.shape[2]) < end[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)


def test_adaptive_heads_are_timed_only_where_they_are_named():
    default = {family for mix in KernelBench(lengths=(8192,)).patterns for family in families_of(mix, 8)}
    assert default == set(families_of("mixed", 8)) == {"vertical_slash", "a_shape", "block_sparse"}
    assert families_of("adaptive", 2) == ("adaptive", "adaptive")
    assert families_of("a_shape+adaptive", 3) == ("a_shape", "adaptive", "a_shape")
    (row,) = bench_kernels(bench(patterns=("a_shape+adaptive",)))
    assert (row.name, row.note) == ("a_shape+adaptive", "")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"backends": ("cuda",)}, "backends"),
        ({"backends": ("reference",)}, "backends"),
        ({"patterns": ("stripes",)}, "patterns"),
        ({"lengths": ()}, "length"),
        ({"densities": (2.0,)}, "density"),
        ({"heads": 3, "kv_heads": 2}, "multiple"),
        ({"rounds": 0}, "round"),
        ({"patterns": ("a_shape",), "last_q": 64}, "last-q"),
        ({"builder": "triton"}, "builder"),
        ({"lengths": (256,)}, "tiles"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_runs(options, word):
    with pytest.raises(UsageError, match=word):
        bench(**options)
