"""Plans in vLLM's engine, held against the transformers host given the same chunks."""

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from vllm_engine import (
    BUDGET,
    CROSSOVER,
    TILE,
    Oracle,
    generate,
    same,
)
from vllm_replay import PAGE, plan_host_of

from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import PlanError, ShapeError, UsageError
from sparsekv.runtime.paged.step_rows import PrefillRows, StepRows
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats
from sparsekv.runtime.vllm.internals import logger

Prompts = dict[int, list[int]]


def is_sparse(first: int, end: int) -> bool:
    """Whether a chunk has rows enough, in a context that is long enough."""
    return end > CROSSOVER and end - first >= TILE


@pytest.mark.parametrize("seed", range(2))
def test_any_cut_of_a_prompt_is_answered_as_by_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: Prompts, seed: int
) -> None:
    """Each request but the first finds the one before it in the prefix cache: so the cuts are known."""
    source = random.Random(seed)
    prompt = prompts[source.choice((1100, 2000, 2700))]
    hits = sorted(source.sample(range(128, len(prompt), 128), 4))
    outputs = [generate(engine, [prompt[:end]])[0] for end in (*hits, len(prompt))]
    assert [output.num_cached_tokens for output in outputs] == [0, *hits]
    cuts = sorted(
        {
            *hits,
            *(cut for first, end in pairwise((0, *hits, len(prompt))) for cut in range(first + BUDGET, end, BUDGET)),
        }
    )
    answer = sparse(prompt, cuts)
    assert same(outputs[-1], answer)
    stats = serving_stats(engine)
    assert stats.prefill_density == pytest.approx(answer.density, rel=1e-3)
    chunks = list(pairwise((0, *cuts, len(prompt))))
    assert stats.sparse_tokens == sum(end - first for first, end in chunks if is_sparse(first, end)) > 0
    assert stats.sparse_tokens + stats.dense_tokens == len(prompt)


def test_a_few_rows_behind_a_cached_prompt_are_dense(engine: Any, sparse: Oracle, prompts: Prompts) -> None:
    prompt, cached = prompts[2000], 768
    generate(engine, [prompt[:cached]])
    for rows in (1, TILE - 1, 400):
        reset_stats(engine)
        (output,) = generate(engine, [prompt[: cached + rows]])
        assert output.num_cached_tokens == cached
        stats, leaves_out = serving_stats(engine), is_sparse(cached, cached + rows)
        assert (stats.sparse_tokens, stats.dense_tokens) == ((rows, 0) if leaves_out else (0, rows))
        assert leaves_out == (stats.prefill_density < 0.9) == (rows == 400)
        assert same(output, sparse(prompt[: cached + rows], (BUDGET, cached)))


def test_a_kernel_that_fails_leaves_its_chunks_dense_and_each_kind_of_failure_is_told_once(
    engine: Any, dense: Oracle, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, told = plan_host_of(engine), []
    monkeypatch.setattr(
        logger, "warning", lambda message, *args, exc_info: told.append(f"{message % args}: {exc_info!r}")
    )
    with monkeypatch.context() as failing:
        failing.setattr(host, "prefill", raises(torch.OutOfMemoryError))
        (output,) = generate(engine, [prompts[700]])
        assert same(output, dense(prompts[700], ()))
        assert serving_stats(engine).failures == 22  # two chunks, in all layers that are sparse there
        assert len(told) == 1
        assert "OutOfMemoryError" in told[0]
        assert f"prefill by {host.backend} " in told[0]
        engine.reset_prefix_cache()
        failing.setattr(host, "prefill", raises(torch.AcceleratorError))
        generate(engine, [prompts[700]])
        assert len(told) == 2
    reset_stats(engine)
    engine.reset_prefix_cache()
    generate(engine, [prompts[700]])
    assert serving_stats(engine).failures == 0


def raises(error: type[Exception]) -> Callable[..., NoReturn]:
    def fails(*args: object, **named: object) -> NoReturn:
        raise error("of this test")

    return fails


@pytest.mark.parametrize("error", [TypeError, AttributeError, IndexError, RuntimeError, ShapeError, PlanError])
def test_an_error_in_our_code_is_not_turned_into_dense_attention(
    engine: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer,) = engine.apply_model(lambda model: model.model.layers[0].self_attn.attn)
    monkeypatch.setattr(plan_host_of(engine), "prefill", raises(error))
    q_THD = torch.zeros(BUDGET, layer.num_heads, layer.head_size)
    k_TGD, v_TGD = torch.zeros(2, BUDGET, layer.num_kv_heads, layer.head_size)
    cache = torch.zeros(1, layer.num_kv_heads, PAGE, 2 * layer.head_size)
    rows = PrefillRows(0, slice(0, BUDGET), Chunk.uniform(1, 0, BUDGET))
    step = StepRows((0, BUDGET), (rows,), torch.zeros(1, 4, dtype=torch.int32), raises(AssertionError))
    metadata = SimpleNamespace(sparsekv=step)
    with pytest.raises(error, match="of this test"):
        layer.impl.forward(layer, q_THD, k_TGD, v_TGD, cache, metadata, torch.empty_like(q_THD))
    assert serving_stats(engine).failures == 0


def test_without_a_plan_the_engine_is_as_without_us(plain: Any, dense: Oracle, prompts: Prompts) -> None:
    outputs = generate(plain, [prompts[700], prompts[2000]])
    assert [same(output, dense(prompts[n], ())) for output, n in zip(outputs, (700, 2000), strict=True)] == [True, True]
    with pytest.raises(UsageError, match="engine"):
        serving_stats(plain)
