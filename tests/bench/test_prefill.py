"""The prefill bench on tiny models: dense and sparse of the same model, and what is said of random weights."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import every_head, info_of, plan_for

from sparsekv.bench.prefill import SPARSE, PrefillBench, PrefillRuns, bench_prefill, layer_flops
from sparsekv.bench.random_model import BenchModel, hand_plan
from sparsekv.bench.random_model import random_model as make
from sparsekv.plans.aliases import ALIASES
from sparsekv.plans.errors import PlanMismatchError, PromptError, UsageError
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.runtime.hf.architecture import ARCHITECTURES
from sparsekv.runtime.hf.describe import attention_modules
from sparsekv.runtime.hf.public_shapes import PUBLIC_SHAPES

CPU, TILE = torch.device("cpu"), TileShape(query=64, key=64)
STATIC = AShape(sink=tokens(64), window=tokens(64))


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(layers=2, context=1024)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


@pytest.fixture(scope="module")
def plan(subject):
    return plan_for(subject.model, every_head(subject.model, STATIC))


def rows_of(subject, plan, runs=PrefillRuns, **options):
    bench = PrefillBench(**{"lengths": (512,), "repeats": 1} | options)
    return list(bench_prefill(subject, plan, "static", bench, runs=runs))


def changed(change):
    """Runs prefills, and gives back what `change` makes of (way, ids, layers, run), or raises what it raises."""

    class Changed(PrefillRuns):
        def run(self, way, ids_1S, layers=None):
            return change(way, ids_1S, layers, super().run(way, ids_1S, layers))

    return Changed


def test_a_row_has_both_times_the_density_and_every_way_to_run_dense(subject, plan):
    (row,) = rows_of(subject, plan, lengths=(512,), repeats=3)
    data = row.as_data()
    assert list(data)[:9] == [
        "name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device"
    ]  # fmt: skip
    assert data["speedup"] == pytest.approx(data["dense_ms"] / data["sparse_ms"])
    assert 0 < data["density"] < 1
    assert data["tflops"] > 0
    assert data["dense_peers_ms"].keys() == {"transformers, SDPA", "sparsekv dense"}
    assert data["dense_kernel"] == min(data["dense_peers_ms"], key=data["dense_peers_ms"].get)
    assert (data["weights"], data["plan"]) == ("random", "static")
    assert "random" in data["note"]
    assert data["kv_bytes_device"] == 2 * 2 * 2 * 512 * 32 * 4  # k and v, layers, heads, tokens, size, bytes
    assert data["dense_peak_bytes"] is None


def test_the_model_is_what_it_was_afterwards(subject, plan):
    before = subject.model.config._attn_implementation
    rows_of(subject, plan, dense_layers=1)
    assert subject.model.config._attn_implementation == before
    assert len(attention_modules(subject.model)) == 2


def test_in_pieces_the_same_tiles_are_computed(subject, plan):
    (whole,), (pieces,) = rows_of(subject, plan), rows_of(subject, plan, chunk=256)
    assert pieces.density == pytest.approx(whole.density)


@pytest.mark.parametrize("hosted", [None, 2])
def test_the_fastest_dense_kernel_is_a_peer_wherever_sparse_keeps_its_rows(plan, hosted):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert "transformers, flash-attn-4" in PrefillRuns(on_gpu, plan, PrefillBench((1,), kv_host_layers=hosted)).dense


def timed_as(milliseconds):
    """Runs of 1 and of 2 layers take so long."""
    return changed(
        lambda way, ids, layers, run: run if layers is None else replace(run, milliseconds=milliseconds[layers - 1])
    )


def test_dense_of_a_layer_is_multiplied_and_the_row_says_so(subject, plan):
    (row,) = rows_of(subject, plan, timed_as((30.0, 50.0)), dense_layers=1)
    assert row.dense_ms == 30 + 1 * 20
    assert row.dense_peers.timed_ms.keys() == {"transformers, SDPA", "sparsekv dense"}
    assert "1 measured layer" in row.note


@pytest.mark.parametrize("options", [{"dense_layers": 1}, {}])
def test_sparse_is_repeated_also_where_dense_is_not(subject, plan, options):
    sparse = []

    def watch(way, ids, layers, run):
        if way == SPARSE:
            sparse.append(run)
        elif not options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run

    (row,) = rows_of(subject, plan, changed(watch), repeats=4, **options)
    assert len(sparse) == 1 + 4  # one warms up
    assert row.sparse_ms == statistics.median(run.milliseconds for run in sparse[1:])
    assert (row.dense_ms is None) == (not options) or "took no longer" in str(row.dense_peers.refused)


def test_a_layer_that_takes_no_time_is_not_multiplied(subject, plan):
    (row,) = rows_of(subject, plan, timed_as((50.0, 30.0)), dense_layers=1)
    assert row.dense_ms is None
    assert row.speedup is None
    assert "cannot be multiplied" in row.dense_peers.refused["sparsekv dense"]


def test_of_a_very_long_prompt_the_way_that_is_fastest_on_a_part_of_it_runs_alone(subject, plan):
    ran = []

    def ours_is_faster(way, ids, layers, run):
        if way == SPARSE:
            return run
        ran.append((way, ids.shape[1], layers))
        return run if layers is None else replace(run, milliseconds=layers * (50.0 if "sparsekv" in way else 80.0))

    (row,) = rows_of(subject, plan, changed(ours_is_faster), ranked_from=512)
    theirs, ours = "transformers, SDPA", "sparsekv dense"
    parts = [(way, 128, layers) for way in (theirs, ours) for layers in (1, 2)]
    assert list(dict.fromkeys(ran)) == [*parts, (ours, 512, None)]
    assert list(row.dense_peers.timed_ms) == [ours]
    assert row.dense_peers.refused == {theirs: "1.60 times the time of sparsekv dense at 128 tokens"}


def test_of_a_very_long_prompt_the_next_way_runs_where_the_fastest_does_not_fit(subject, plan):
    def theirs_is_faster(way, ids, layers, run):
        if layers is None and way == "transformers, SDPA":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run if layers is None else replace(run, milliseconds=layers * (80.0 if "sparsekv" in way else 50.0))

    (row,) = rows_of(subject, plan, changed(theirs_is_faster), ranked_from=512)
    assert list(row.dense_peers.timed_ms) == ["sparsekv dense"]
    assert row.dense_peers.refused == {"transformers, SDPA": "out of memory"}


def test_a_row_names_the_backend_that_ran_and_not_the_one_that_failed(subject, plan):
    (row,) = rows_of(subject, plan, changed(lambda way, ids, layers, run: replace(run, backend="slower")))
    assert row.backend == "slower"
    assert "cpu failed, and slower replaced it" in row.note


def test_a_sparse_run_that_fails_leaves_the_dense_times(subject, plan):
    def failing(way, ids, layers, run):
        if way == SPARSE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run

    (row,) = rows_of(subject, plan, changed(failing))
    assert row.sparse_ms is None
    assert row.dense_ms > 0
    assert "sparse: out of memory" in row.note


def test_a_repeat_that_fails_leaves_what_was_measured(subject, plan):
    runs = []

    def failing(way, ids, layers, run):
        runs.append(run)
        if len(runs) == 8:  # each of the three ways runs twice, and then they take turns
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run

    (row,) = rows_of(subject, plan, changed(failing), repeats=5)
    assert len(runs) == 8
    assert row.sparse_ms > 0
    assert row.dense_ms > 0
    assert "repeat 2 failed" in row.note
    assert "out of memory" in row.note


def test_a_row_says_when_torch_built_the_indices_because_triton_failed(subject, plan):
    failed = changed(lambda way, ids, layers, run: replace(run, builder_failed="no kernel image"))
    (row,) = rows_of(subject, plan, failed)
    assert "torch built the indices, which is slower: Triton failed (no kernel image)" in row.note


def test_what_cannot_be_timed_is_refused_before_anything_runs(subject, plan):
    with pytest.raises(PromptError, match="1024"):
        rows_of(subject, plan, lengths=(2048,))
    with pytest.raises(UsageError, match="dense-layers"):
        rows_of(subject, plan, dense_layers=2)
    with pytest.raises(UsageError, match="kv-host-layers"):
        rows_of(subject, plan, kv_host_layers=3)
    other = tiny_model(layers=3)
    with pytest.raises(PlanMismatchError):
        rows_of(subject, plan_for(other, every_head(other, STATIC)))
    with pytest.raises(UsageError):
        PrefillBench(lengths=(), repeats=1)


@pytest.mark.parametrize("name", ["transformers, SDPA", "sparsekv dense"])
def test_without_some_layers_the_model_runs_and_gets_them_back(subject, plan, name):
    seen = []
    runs = PrefillRuns(subject.model, plan, PrefillBench((1,)))
    ids = torch.ones(1, 64, dtype=torch.long)
    whole = layer_flops(subject.model, 64)
    hook = attention_modules(subject.model)[1].register_forward_hook(lambda *call: seen.append(1))
    runs.run(name, ids, layers=1)
    assert not seen
    runs.run(name, ids)
    hook.remove()
    assert seen
    assert layer_flops(subject.model, 64) == whole


@pytest.mark.parametrize("way", [SPARSE, "sparsekv dense"])
def test_layers_go_to_the_host_in_every_way_and_have_their_room_before_the_clock_starts(
    subject, plan, monkeypatch, way
):
    from sparsekv.runtime.stores.pinned import HostMemory

    running, taken, real = [], [], HostMemory.take

    def take(self, nbytes, device):
        taken.append((bool(running), nbytes))
        return real(self, nbytes, device)

    monkeypatch.setattr(HostMemory, "take", take)
    hook = subject.model.register_forward_pre_hook(lambda *call: running.append(1))
    runs = PrefillRuns(
        subject.model, plan, PrefillBench((1,), kv_host_layers=2)
    )  # those of contexts beyond the hot set
    runs.run(way, torch.ones(1, 1280, dtype=torch.long), layers=1)
    hook.remove()
    assert running
    assert taken
    assert not any(in_time for in_time, _ in taken)


def test_a_model_of_one_layer_runs_every_way_also_at_great_length():
    model = tiny_model(layers=1, context=1024)
    one = BenchModel(model, info_of(model), "tiny", "random", "")
    (row,) = rows_of(one, plan_for(model, every_head(model, STATIC)), ranked_from=512)
    assert row.dense_peers.timed_ms.keys() == {"transformers, SDPA", "sparsekv dense"}
    assert not row.dense_peers.refused


# --- plans made by hand, models with random weights -------------------------------------------------------------------


def test_a_plan_by_hand_has_a_bucket_a_length_and_a_pattern_for_every_head(subject):
    made, words = hand_plan(subject.info, (1024, 512), (0.3, 0.5), TILE)
    assert [bucket.up_to for bucket in made.prefill.lengths] == [512, None]
    for bucket in made.prefill.lengths:
        kinds = {pattern.pattern for layer in range(2) for pattern in bucket.patterns(layer, 4)}
        assert kinds == {"vertical_slash", "a_shape"}
    (row,) = rows_of(subject, made, lengths=(1024,))
    assert row.density == pytest.approx(0.3, abs=0.1)
    assert "made by hand: vertical_slash and a_shape in turn, sized for a density of 0.5, 0.3" in words
    with pytest.raises(UsageError, match="densit"):
        hand_plan(subject.info, (512, 1024), (0.5, 0.3, 0.1), TILE)


def test_random_weights_have_the_shape_of_the_config_and_a_note():
    made = make("tiny-retriever", device=CPU, dtype=torch.bfloat16, longest=65536, layers=2, seed=1)
    assert made.weights == "random"
    assert (made.info.layers, made.info.context_length) == (2, 65536)
    assert made.info.attention[0].heads == 4
    assert made.model.dtype == torch.bfloat16
    assert not made.model.training
    for said in ("random", "stretched from 32k", "2 of 12 layers"):
        assert said in made.note
    same = make("tiny-retriever", device=CPU, dtype=torch.bfloat16, longest=512, layers=2, seed=1)
    assert torch.equal(made.model.lm_head.weight, same.model.lm_head.weight)


def test_random_weights_leave_the_random_state_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make("tiny-retriever", device=CPU, dtype=torch.float32, longest=512, layers=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_known_shape_stands_in_where_no_config_can_be_had():
    smaller = PUBLIC_SHAPES["llama3-8b"] | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    smaller |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
    made = make("llama3-8b", device=CPU, dtype=torch.float32, longest=512, shapes={"llama3-8b": smaller})
    assert (made.info.layers, made.info.attention[0].kv_heads) == (2, 2)
    assert "table" in made.note
    with pytest.raises(UsageError) as unknown:
        make("someone/unheard-of", device=CPU, dtype=torch.float32, longest=512)
    assert "llama3-8b" in unknown.value.__notes__[0]


def test_public_shapes_are_of_aliases_and_of_supported_architectures():
    types = {alias.name: alias.model_type for alias in ALIASES}
    for name, shape in PUBLIC_SHAPES.items():
        assert types[name] == shape["model_type"] in ARCHITECTURES
        assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0
    assert {"llama3-8b", "llama3.1-8b", "qwen2.5-7b-1m", "qwen3-8b", "yi-9b-200k"} <= PUBLIC_SHAPES.keys()


def test_more_layers_than_there_are_cannot_be_kept():
    with pytest.raises(UsageError, match="12 layers"):
        make("tiny-retriever", device=CPU, dtype=torch.float32, longest=512, layers=13)


@pytest.mark.parametrize(
    ("dtype", "cached", "gib", "said"),
    [
        (torch.float32, 0, 25, "29.9 GiB .* float32 weights and .* found 25.0 GiB .* bfloat16 or fewer --layers"),
        (torch.float32, 131072, 25, "29.9 GiB .* 32.0 GiB for keys .* bfloat16 or fewer --layers"),
        (torch.bfloat16, 0, 12, "15.0 GiB .* bfloat16 weights and .* found 12.0 GiB .* smaller model or fewer"),
        (torch.bfloat16, 131072, 25, "15.0 GiB .* 16.0 GiB for keys .* found 25.0 GiB .* or shorter --lengths"),
    ],
)
def test_weights_that_do_not_fit_in_memory_are_refused_before_they_are_made(dtype, cached, gib, said):
    with pytest.raises(UsageError, match=said):
        make("llama3-8b", device=CPU, dtype=dtype, longest=131072, cached=cached, available=lambda device: gib << 30)
