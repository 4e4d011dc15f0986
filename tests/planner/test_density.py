"""Density is one thing: what is predicted, what a run counts, and what tiles add up to by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planner_models import TILE, bare_job, made_up_prices, quick_options
from tiny_models import tiny_model, tiny_tokenizer

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_once
from sparsekv.planner.profile.profiler import profile
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

SLIDING = {"sliding_window": 200, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS = {
    "full": ("llama", {}),
    "windows": ("qwen2", {**SLIDING, "use_sliding_window": True}),
    "windows and norms": ("gemma3_text", SLIDING),
    "soft caps": ("gemma2", SLIDING),
    "sinks": ("gpt_oss", SLIDING),
    "recurrent": ("qwen3_next", {}),
}


def loaded(kind: str) -> LoadedModel:
    architecture, options = MODELS[kind]
    model = tiny_model(architecture, **options)
    return LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/tiny"))


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_counts_the_density_that_was_predicted(kind: str) -> None:
    """On the prompt that was profiled."""
    own = loaded(kind)
    options = settle(quick_options(lengths=(512,), verify="none", phases=("prefill",), row_stride=1), 4096, "cpu")
    job = bare_job(own, options)
    measured = profile(job)
    plan = compile_once(own.info, options, measured, made_up_prices(tile=measured.tile))
    (found,) = plan.cost.lengths
    (prompt,) = job.calibration_prompts(512, 1)
    ids_1S = torch.from_numpy(prompt.ids[: prompt.answer_start].astype("int64"))[None]
    with apply(own.model, plan) as handle, torch.no_grad():
        own.model(ids_1S)
        density = handle.stats().prefill_density
    assert density == pytest.approx(found.prefill.density, rel=0.02)
    assert 0.0 < density < 1.0


@given(
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 700)), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 900),
    tile=st.sampled_from([TILE, TileShape(), TileShape(query=128, key=64)]),
)
def test_tiles_of_dense_attention_are_those_that_a_key_of_its_window_lies_in(rows, window, tile: TileShape) -> None:
    chunk = Chunk(tuple(past for past, _ in rows), tuple(past + new for past, new in rows))
    expected = 0
    for past, new in rows:
        for first in range(past, past + new, tile.query):
            own = range(first, min(first + tile.query, past + new))
            seen = {key // tile.key for i in own for key in range(max(0, i + 1 - (window or i + 1)), i + 1)}
            expected += len(seen)
    assert chunk.causal_tiles(tile, window) == expected
