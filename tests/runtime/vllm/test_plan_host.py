"""The plan of an engine that starts, and the copy of a request's past."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import PlanMismatchError, PlanWarning, UnsupportedError
from sparsekv.plans.files import write_plan
from sparsekv.plans.model import Fingerprint
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.decode import Resident, decode
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.vllm.engine_facts import EngineFacts
from sparsekv.runtime.vllm.engine_options import Options
from sparsekv.runtime.vllm.plan_host import EngineModel, PlanHost, Scratch, start_host
from sparsekv.runtime.vllm.step_decode import DecodeRows

CPU = torch.device("cpu")
FACTS = EngineFacts(release="0.32.0", device="cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plan(model: Any) -> Plan:
    prefill = every_head(model, AShape(sink=tokens(64), window=tokens(64)))
    return plan_for(model, prefill, decode_plan(segment(0, (1,), 64)))


def start(
    model: Any, plan: Plan, folder: Path, facts: EngineFacts = FACTS, captured: bool = False, **options: Any
) -> PlanHost:
    write_plan(plan, folder / "sparsekv.yaml")
    limits = {"longest": 1024, "page": 128, "step": 2048, "requests": 8, "captured": captured}
    engine = EngineModel(str(folder), None, model.config, torch.float32, CPU, **limits)
    return start_host(folder / "sparsekv.yaml", Options(**options), facts, engine)


def test_a_plan_starts_with_scratch_for_the_longest_request(model: Any, plan: Plan, tmp_path: Path) -> None:
    host = start(model, plan, tmp_path)
    assert host.is_sparse(Chunk.uniform(1, 0, 1024))
    group = plan.model.attention[0]
    assert host.scratch.bytes == 2 * (1024 + 128) * group.kv_heads * group.head_dim * 4


@pytest.mark.parametrize(("captured", "asked", "runs"), [(False, None, True), (True, None, False), (True, True, True)])
def test_decode_follows_the_plan_where_it_was_measured_or_is_asked_for(
    model: Any, plan: Plan, tmp_path: Path, captured: bool, asked: bool | None, runs: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        host = start(model, plan, tmp_path, captured=captured, decode=asked)
    assert (host.decode is not None) == runs
    assert any("decode phase" in str(one.message) for one in caught) != runs


def test_selectors_that_remember_queries_are_refused(model: Any, plan: Plan, tmp_path: Path) -> None:
    remembering = decode_plan(segment(0, (1,), 64).model_copy(update={"selector": "uniform", "window": 4}))
    with pytest.raises(UnsupportedError, match="selector"):
        start(model, plan.model_copy(update={"decode": remembering}), tmp_path)


@pytest.mark.parametrize("captured", [False, True])
def test_rows_of_prompts_and_short_ones_attend_to_everything(
    model: Any, plan: Plan, tmp_path: Path, captured: bool
) -> None:
    """By the paged kernels, held against dense attention and against the same rows of contiguous keys."""
    host = start(model, plan, tmp_path, captured=captured, decode=True)
    group, shared = plan.model.attention[0], host.decode
    lengths, is_prompt = [300, 40, 300, 700], [False, False, True, False]
    k_BGSD, v_BGSD = torch.randn(2, 4, group.kv_heads, 768, group.head_dim).unbind()
    table_BP = torch.randperm(24).view(4, 6).int()
    pages = [torch.empty(24, group.kv_heads, 128, group.head_dim) for _ in range(2)]
    for memory, x_BGSD in zip(pages, (k_BGSD, v_BGSD), strict=True):
        memory[table_BP.flatten().long()] = x_BGSD.unflatten(2, (6, 128)).transpose(1, 2).flatten(0, 1)
    rows = DecodeRows(4, torch.tensor(lengths, dtype=torch.int32), table_BP)
    q_BHD = torch.randn(4, group.heads, group.head_dim)
    assert host.begin_decode(lengths, is_prompt, counts=True)
    first, second = (shared.attend(host.program.layers[n], q_BHD, tuple(pages), rows, 0.2) for n in (0, 1))
    state = DecodeState(host.program)
    state.begin([300, 40, 0, 700], CPU)
    contiguous = Resident(KeyView(k_BGSD, v_BGSD, rows.lengths_B))
    for layer, found_BHD in zip(host.program.layers[:2], (first, second), strict=True):
        expected = decode(layer, q_BHD[:, :, None], contiguous, state, scale=0.2, backend="cpu")[:, :, 0]
        torch.testing.assert_close(found_BHD, expected)
    dense = [same_as_dense(q_BHD[n], k_BGSD[n], v_BGSD[n], length, second[n]) for n, length in enumerate(lengths)]
    assert dense == [False, True, True, False]
    assert (host.counters.read().decode_sparse, host.counters.read().decode_dense) == (2, 1)


def same_as_dense(q_HD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor, n: int, found_HD: torch.Tensor) -> bool:
    out = scaled_dot_product_attention(
        q_HD[None, :, None], k_GSD[None, :, :n], v_GSD[None, :, :n], scale=0.2, enable_gqa=True
    )
    return torch.allclose(out[0, :, 0], found_HD, atol=1e-5)


def test_another_models_plan_is_refused_unless_it_is_allowed(model: Any, plan: Plan, tmp_path: Path) -> None:
    fingerprint = Fingerprint(architecture="sha256:" + "0" * 64)
    other = plan.model.model_copy(update={"rope": {"rope_type": "linear"}, "fingerprint": fingerprint})
    changed = plan.model_copy(update={"model": other, "decode": None})
    with pytest.raises(PlanMismatchError, match=r'"allow_mismatch": true'):
        start(model, changed, tmp_path)
    with pytest.warns(PlanWarning, match="another architecture"):
        start(model, changed, tmp_path, allow_mismatch=True)


def test_an_engine_that_cannot_run_the_plan_is_refused(model: Any, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        start(model, plan, tmp_path, EngineFacts(release="0.32.0", device="cpu", speculative="ngram"))


def test_a_plan_that_is_dense_everywhere_says_that_it_changes_nothing(model: Any, plan: Plan, tmp_path: Path) -> None:
    with pytest.warns(PlanWarning, match="changes nothing"):
        start(model, plan.model_copy(update={"prefill": None, "decode": None}), tmp_path)


def test_a_layer_runs_once_for_each_kind_of_patterns_before_prompts_come_and_nothing_is_counted(
    model: Any, plan: Plan, tmp_path: Path
) -> None:
    host = start(model, plan.model_copy(update={"decode": None}), tmp_path)
    group = plan.model.attention[0]
    scratch = host.scratch.zeros(group.kv_heads, group.head_dim, 1024).k  # what a run zeroes
    queries = torch.randn(300, group.heads, group.head_dim)
    for layer, left in zip(host.program.layers[:2], (0.0, 1.0), strict=True):
        scratch.fill_(1.0)
        host.warm_up(layer, queries)
        assert scratch.unique().tolist() == [left]
    assert host.counters.read().prefill_density is None


@pytest.mark.parametrize("length", [1, 16, 17, 100, 128])
def test_a_copied_past_is_the_requests_tokens_in_order_from_pages_of_any_strides(length: int) -> None:
    k_NGDS, v_NGSD = torch.randn(2, 40, 3, 8, 16).unbind()
    pages = k_NGDS.transpose(2, 3), v_NGSD.transpose(2, 3).contiguous()
    table_P = torch.randperm(40)[:8].int()
    table_P[-(-length // 16) :] = 10_000  # behind the end anything may stand
    scratch = Scratch(128, 3 * 8, torch.float32, CPU)
    copied = scratch.copy(pages, table_P, length).contiguous(length)
    lengths_B = torch.tensor([length], dtype=torch.int32)
    expected = KeyView(*pages, lengths_B, table_P[None]).contiguous(length)
    for got, wanted in zip(copied, expected, strict=True):
        assert torch.equal(got, wanted)
