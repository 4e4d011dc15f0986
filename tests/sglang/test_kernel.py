"""Caches in 8 bits and the measured rule, over a stand-in for SGLang's kernel on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from operators import Operators
from plans_samples import counts
from sglang_engine import BUDGET, LONGEST, SLOTS, Asked, Engine, plan_of, prompt_of
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.keys import FLOAT8, PLAIN, Scales
from sparsekv.runtime.core.pays import NEVER, Pays, Thresholds
from sparsekv.runtime.core.timed_layers import Place, Timers

CPU = torch.device("cpu")


@pytest.fixture
def paged(engine: Engine, planned: Any) -> Any:
    """The plan over the stand-in."""
    from sglang_paged import PagedBackend

    from sparsekv.runtime.sglang.planned_backend import OnCuda, with_methods

    ours = with_methods(PagedBackend(engine.runner), OnCuda)
    vars(ours).update(plan_of(planned))
    return ours


def test_keys_in_8_bits_are_read_as_they_were_stored(
    engine: Engine, planned: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an engine whose cache has the same numbers in full: prompts with a past and without, and chosen tokens."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    lengths = (900, 200, 1100, 730)
    layers = [layer for layer in engine.runner.model.modules() if isinstance(layer, RadixAttention)]
    by = {layer.layer_id: (torch.tensor(0.02 + 0.01 * layer.layer_id), torch.tensor(0.05)) for layer in layers}

    def answers(backend: Any) -> list[Any]:
        engine.use(backend)
        asked = [Asked(prompt_of(length), 12, at=number // 2) for number, length in enumerate(lengths)]
        return [(request.tokens, request.logprobs) for request in engine.answer(asked)]

    def rounded(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attend_rounded(q: torch.Tensor, k: Any, v: Any, layer: Any, *given: Any, **named: Any) -> torch.Tensor:
            k, v = (
                (x / scale).to(FLOAT8).to(x.dtype) * scale for x, scale in zip((k, v), by[layer.layer_id], strict=True)
            )
            return attend(q, k, v, layer, *given, **named)

        return attend_rounded

    exact = answers(paged)
    for name in ("forward_extend", "forward_decode"):
        monkeypatch.setattr(paged, name, rounded(getattr(paged, name)), raising=False)
    expected = answers(paged)
    assert [tokens for tokens, _ in exact] != [tokens for tokens, _ in expected]  # rounding matters here
    monkeypatch.undo()
    paged.token_to_kv_pool = MHATokenToKVPool(SLOTS, 1, FLOAT8, 2, 32, len(layers), "cpu", False)
    own = {}
    for layer in layers:
        monkeypatch.setattr(layer, "k_scale", by[layer.layer_id][0])
        monkeypatch.setattr(layer, "v_scale", by[layer.layer_id][1])
        scales = Scales(*(scale.expand(2) for scale in by[layer.layer_id]), torch.float32)
        own[layer.layer_id] = replace(planned.plan_layers[layer.layer_id], scales=scales)
    paged.plan_layers = own
    for (tokens, logprobs), (as_rounded, of_rounded) in zip(answers(paged), expected, strict=True):
        assert tokens == as_rounded
        assert logprobs == pytest.approx(of_rounded, abs=1e-3)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("float8", [False, True])
def test_the_launch_that_is_timed_attends_as_the_engine(paged: Any, page: int, float8: bool) -> None:
    from sparsekv.runtime.sglang.engine import _engine_of

    paged.plan_page = page
    engine, random = _engine_of(paged), torch.Generator().manual_seed(page)
    cache = engine.empty_cache(40, 2, 8, torch.uint8 if float8 else torch.float32, CPU)
    cache.random_(0, 120, generator=random) if float8 else cache.normal_(generator=random)
    table_BP = torch.randperm(40, generator=random).int().view(2, 20)
    scales = Scales(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]), torch.float32) if float8 else None
    q_THD, lengths = torch.randn(6, 4, 8, generator=random), [17, 9]
    out_THD = engine.platform.attention(q_THD, cache, table_BP, lengths, 0.3, None, scales, PLAIN)()
    pages = engine.platform.pages_of(cache)
    for number, length in enumerate(lengths):
        both = [x_NGSD[table_BP[number].long()].transpose(0, 1).flatten(1, 2)[:, :length] for x_NGSD in pages]
        if scales is not None:
            each = zip(both, (scales.k_G, scales.v_G), strict=True)
            both = [x.view(FLOAT8).float() * scale_G[:, None, None] for x, scale_G in each]
        k_HKD, v_HKD = (x.repeat_interleave(2, 0) for x in both)
        q_HTD = q_THD[3 * number : 3 * number + 3].transpose(0, 1)
        mask = torch.arange(length)[None] <= torch.arange(length - 3, length)[:, None]
        expected = scaled_dot_product_attention(q_HTD, k_HKD, v_HKD, attn_mask=mask, scale=0.3)
        assert torch.allclose(out_THD[3 * number : 3 * number + 3].transpose(0, 1), expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_left_are_timed_with_the_schedule_of_all(
    paged: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from sparsekv.runtime.sglang.engine import _engine_of

    random, scheduled = torch.Generator().manual_seed(seed), []
    monkeypatch.setattr(paged, "plan_page", 1)
    monkeypatch.setattr(paged, "_compute_scheduler_metadata", lambda *of: scheduled.append((of[1], of[2].tolist())))
    lengths_B = torch.randint(1, 40, (5,), generator=random, dtype=torch.int32)
    left_B = lengths_B * torch.randint(0, 2, (5,), generator=random, dtype=torch.int32)
    q_BHD, cache = (torch.randn(*shape, generator=random) for shape in ((5, 4, 8), (2, 40, 1, 2, 8)))
    table_BP = torch.randint(0, 40, (5, 40), generator=random, dtype=torch.int32)
    attention, lengths = _engine_of(paged).platform.attention, lengths_B.tolist()
    whole = attention(q_BHD, cache, table_BP, lengths, 0.3, None, None, PLAIN)()
    found = attention(q_BHD, cache, table_BP, lengths, 0.3, None, None, PLAIN, left_B)()
    assert torch.equal(found, whole * (left_B > 0)[:, None, None])
    assert scheduled == [(LONGEST, lengths)] * 2


def test_a_rule_is_measured_once_and_read_by_later_engines(
    paged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sparsekv.runtime.paged import timed_kernels
    from sparsekv.runtime.sglang.engine import _engine_of

    timed: list[int] = []

    def timer(launches: Any, device: torch.device) -> list[float]:
        for launch in launches:
            launch()
        timed.append(len(launches))
        return [2e4, *[1e4] * (len(launches) - 1)]  # longer than the program takes

    host = paged.plan_host
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timed_kernels, "Timers", lambda: Timers(timer, timer, timer))
    monkeypatch.setattr(host, "place", Place("sha256:", 1536, BUDGET, 2, {1536: counts(4, 0.4)}))
    monkeypatch.setattr(host, "engine", _engine_of(paged))
    rule = timed_kernels.measured_rule(host, CPU, 32, None, PLAIN)
    assert timed
    assert rule.decode.pays(2, 1536)
    timed.clear()
    assert timed_kernels.measured_rule(host, CPU, 32, None, PLAIN) == rule
    assert not timed


def test_a_captured_step_of_a_size_that_never_pays_holds_sglangs_kernel_alone(
    paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(paged.plan_host, "pays", Pays(decode=Thresholds((2,), (800,))))

    def step(lengths: list[int]) -> Any:
        lengths_B = torch.tensor(lengths)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True), seq_lens=lengths_B)
        batch.seq_lens_cpu, batch.req_pool_indices = lengths_B, torch.arange(1, len(lengths) + 1)
        paged.init_forward_metadata_out_graph(batch, True)
        return paged.plan_step

    assert step([900]) is None
    assert step([1, 1]).decode is not None  # later steps of this graph choose


@pytest.mark.parametrize("captured", [False, True])
def test_steps_that_are_dense_are_sglangs_own_but_for_a_call_a_layer(
    engine: Engine, paged: Any, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Chunks, a chunk beside a token, and tokens, as if these were captured."""
    from sglang_paged import PagedBackend

    host, plain, seen = paged.plan_host, PagedBackend(engine.runner), {}
    monkeypatch.setattr(host, "pays", NEVER)
    for backend in (paged, plain):
        own = type(backend)

        def begin(batch: Any, backend: Any = backend, own: Any = own) -> None:
            decodes = captured and batch.forward_mode.is_decode()
            (own.init_forward_metadata_out_graph if decodes else own.init_forward_metadata)(backend, batch)

        monkeypatch.setattr(backend, "init_forward_metadata", begin, raising=False)
        for _ in range(2):
            engine.use(backend)
            with Operators() as seen[backend]:
                sys.setprofile(seen[backend].called)
                try:
                    engine.answer([Asked(prompt_of(n), 12, at=n // 400, with_logprobs=False) for n in (300, 1100)])
                finally:
                    sys.setprofile(None)
    calls, more = seen[paged].calls, seen[paged].counts - seen[plain].counts
    layers, steps = len(host.program.layers), calls["Planned._begin"]
    assert set(more) <= {f"aten.{name}.default" for name in ("resolve_conj", "resolve_neg", "detach")}  # on the host
    assert more.total() <= 3 * steps
    assert not seen[plain].counts - seen[paged].counts
    assert engine.mixed
    assert calls["Planned.forward_extend"] + calls["Planned.forward_decode"] == layers * steps
    others = {name: count for name, count in calls.items() if not name.startswith("Planned.forward_")}
    assert max(others.values()) < 2 * steps
    assert not {"DecodeHost.begin", "DecodeHost.count", "Thresholds.least"} & others.keys()
    counted = host.counters.read()
    assert (counted.decode_sparse, counted.sparse_tokens, counted.dense_tokens) == (0, 0, 2 * 1400)
    assert counted.decode_dense == 2 * 22
