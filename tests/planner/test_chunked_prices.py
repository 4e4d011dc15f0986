"""Prices of a host that cuts prompts, and plans for it."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_profile, made_up_reuse, options_for

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, computed_tiles
from sparsekv.planner.allocate import allocate
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.job import check_plannable
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_once, plan_remarks
from sparsekv.planner.predict import causal_tiles, predict
from sparsekv.planner.prices import Prices
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import AShape, Pattern, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.schema import Target


def engine_cost(chunk: int, **changes) -> Prices:
    """The made-up device in vLLM's engine."""
    return made_up_prices(host="vllm", chunk=chunk, **changes)


def test_what_copies_cost_moves_the_crossover() -> None:
    lengths = [made_up_length(length, np.random.default_rng(0), levels=(0.3,)) for length in (2048, 8192)]
    profile, options = made_up_profile(*lengths), options_for(target_density=(0.3, 0.3))
    saved = 0.5 * 4 * causal_tiles(8192, profile.tile)  # of the four heads of a layer, at most
    keys = 4096 + 6144 + 8192
    cheap, dear = (allocate(profile, engine_cost(2048, copies=(0.0, us / keys)), options) for us in (0.0, 3 * saved))
    assert not cheap.bucket(8192).dense
    assert dear.bucket(8192).dense
    assert not dear.bucket(2048).dense, "a prompt of one chunk copies nothing"


def served_profile() -> Profile:
    reuse = made_up_reuse(np.ones((3, 3)))
    return made_up_profile(made_up_length(8192, np.random.default_rng(0)).model_copy(update={"reuse": reuse}))


def test_a_plan_for_vllm_names_it_and_its_chunks() -> None:
    profile, cost = served_profile(), engine_cost(2048)
    options = options_for(target_density=(0.3,), host="vllm")
    plan = compile_once(profile.model, options, profile, cost)
    expected = Target(device=cost.device, host="vllm", backend="cpu", dtype="float32", chunk=2048)
    assert plan.targets == (expected,)
    assert plan.cost == predict(profile, cost, plan.prefill, plan.decode)
    assert any("steps of 2048 tokens" in remark for remark in plan_remarks(plan, options, profile, cost))
    stored = cost.model_copy(update={"kv_dtype": "fp8"})
    assert any("--kv-cache-dtype fp8" in remark for remark in plan_remarks(plan, options, profile, stored))


@pytest.mark.parametrize(("batches", "pays"), [((8,), True), ((1, 8), False)])
def test_decode_must_pay_with_every_batch_that_was_timed(batches, pays: bool) -> None:
    launch = 3000.0  # of choosing; a row of 8192 tokens costs 8192 in each of two layers that follow, eight eight times
    lines = {"decode_dense": (0.0, 1.0), "decode_sparse": (0.0, 1.0), "choice": (4 * launch, 0.0)}
    cost = engine_cost(2048, batches=batches, **lines)
    options = options_for(target_density=(0.3,), host="vllm", filter_layers=(0,), decode_budget=fraction(0.5))
    plan = choose_filter_layers(served_profile(), cost, options)
    assert plan.bucket(8192).dense is not pays


@given(length=st.integers(1, 1 << 20), counts=st.tuples(*[st.integers(0, 1 << 16)] * 3))
def test_shares_of_the_context_are_the_same_tokens_at_the_planned_length(length: int, counts: tuple[int, ...]) -> None:
    vertical, slash, most = (tokens(min(count, length)) for count in counts)
    pattern = VerticalSlash(vertical=vertical, slash=slash, max_tiles=most)
    shares = pattern.of_context(length)
    assert shares.in_tokens(length) == pattern
    for name in ("vertical", "slash", "max_tiles"):
        assert getattr(shares, name).resolve(length) == getattr(pattern, name).resolve(length)
        assert getattr(shares, name).resolve(length // 2) <= getattr(pattern, name).resolve(length) // 2 + 1
    window = AShape(sink=tokens(64), window=tokens(256))
    assert window.of_context(length) is window


def test_a_plan_for_vllm_has_shares_up_to_the_longest_planned_length_and_tokens_beyond() -> None:
    lengths = [made_up_length(length, np.random.default_rng(0), levels=(0.3,)) for length in (1024, 2048)]
    profile, options = made_up_profile(*lengths), options_for(target_density=(0.3, 0.3), crossover=False)
    whole, cut = allocate(profile, made_up_prices(), options), allocate(profile, engine_cost(512), options)
    assert [bucket.up_to for bucket in cut.lengths] == [1024, 2048, None]
    assert (cut.lengths[-1].extrapolated, cut.bucket(3000).heads) == (True, whole.bucket(3000).heads)
    for length in (1024, 2048):
        for layer in range(3):
            chosen = whole.bucket(length).patterns(layer, 4)
            assert cut.bucket(length).patterns(layer, 4) == tuple(one.of_context(length) for one in chosen)


def test_chunks_of_a_prompt_have_the_density_of_the_whole_by_shares_where_diagonals_scatter() -> None:
    length, lines = 4096, VerticalSlash(vertical=tokens(96), slash=tokens(600), max_tiles=tokens(1024))
    shares = lines.of_context(length)
    whole, cut = density(lines, [0, length]), range(0, length + 1, 1024)
    assert density(shares, [0, length]) == whole
    assert density(lines, cut) > 1.3 * whole
    assert whole < density(shares, cut) < 1.15 * whole


def density(pattern: Pattern, ends: Sequence[int]) -> float:
    """Computed tiles over causal tiles of a prompt that is cut at these tokens."""
    generator, tile = torch.Generator().manual_seed(0), TileShape(query=64, key=64)
    q_BHSD, k_BHSD = torch.randn(2, 1, 1, ends[-1], 32, generator=generator)
    computed = causal = 0.0
    for first, end in pairwise(ends):
        chunk, q_BHTD = Chunk.uniform(1, first, end), q_BHSD[:, :, first:end]
        index = build_index((pattern,), q_BHTD, k_BHSD[:, :, :end], chunk, tile, scale=1.0, window=None)
        computed += computed_tiles(index).sum().item()
        causal += chunk.causal_tiles(tile)
    return computed / causal


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_is_refused_before_weights_are_read() -> None:
    profile = made_up_profile(made_up_length(4096, np.random.default_rng(0)))
    with pytest.raises(UsageError, match="vLLM"):
        check_plannable(profile.model, PlanOptions(host="vllm", phases=("prefill",)), "cpu", profile, None)
    check_plannable(profile.model, PlanOptions(phases=("prefill",)), "cpu", profile, engine_cost(2048))
