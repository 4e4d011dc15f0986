"""The kernel that is timed in an engine is the one that it attends by."""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparsekv.runtime.vllm import internals
from sparsekv.runtime.vllm.devices import OnCuda

DEVICE = torch.device(internals.current_platform.device_type)
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


@pytest.mark.parametrize(("rows", "length"), [(300, 300), (129, 700), (1, 513)])
def test_the_dense_kernel_attends_to_the_pages_of_a_request(rows: int, length: int) -> None:
    generator, like = torch.Generator(DEVICE).manual_seed(0), {"device": DEVICE, "dtype": DTYPE}
    q_THD = torch.randn(rows, 4, 64, generator=generator, **like)
    k_GSD, v_GSD = torch.randn(2, 2, length, 64, generator=generator, **like)
    page = internals.platform.page
    table_P = torch.randperm(-(-length // page), generator=generator, device=DEVICE).int()
    cache = internals.empty_cache(len(table_P), 2, 64, DTYPE, DEVICE)
    for x_NGSD, x_GSD in zip(internals.platform.pages_of(cache), (k_GSD, v_GSD), strict=True):
        for number, one in enumerate(table_P.tolist()):
            part_GSD = x_GSD[:, number * page : (number + 1) * page]
            x_NGSD[one, :, : part_GSD.shape[1]] = part_GSD
    out_THD = torch.zeros_like(q_THD)
    internals.platform.attention(q_THD, cache, table_P[None], [length], 64**-0.5, out_THD)()
    k_HSD, v_HSD = (x_GSD.float().repeat_interleave(2, 0) for x_GSD in (k_GSD, v_GSD))
    causal_TS = torch.ones(rows, length, dtype=torch.bool, device=DEVICE).tril(length - rows)
    q_HTD = q_THD.float().transpose(0, 1)
    expected_HTD = torch.nn.functional.scaled_dot_product_attention(q_HTD, k_HSD, v_HSD, causal_TS)
    near = 1e-4 if DEVICE.type == "cpu" else 2e-2
    torch.testing.assert_close(out_THD.float(), expected_HTD.transpose(0, 1), rtol=near, atol=near)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_requests_without_keys_beside_others_are_zeros_and_leave_those_alone(rows: int) -> None:
    """Requests that choose have no keys for vLLM's kernel, however many rows of drafts they have."""
    lengths, like = [700, 0, 513, 0], {"device": DEVICE, "dtype": DTYPE}
    generator = torch.Generator(DEVICE).manual_seed(0)
    q_THD = torch.randn(rows * len(lengths), 8, 128, generator=generator, **like)
    cache = internals.empty_cache(200, 2, 128, DTYPE, DEVICE).normal_(generator=generator)
    table_BP = torch.randperm(200, generator=generator, device=DEVICE).int().view(4, 50)
    out_THD = torch.full_like(q_THD, 7.0)
    internals.platform.attention(q_THD, cache, table_BP, lengths, 0.1, out_THD)()
    for request, length in enumerate(lengths):
        part, alone_THD = slice(request * rows, (request + 1) * rows), torch.empty_like(q_THD[:rows])
        if not length:
            assert (out_THD[part] == 0).all()
            continue
        internals.platform.attention(q_THD[part], cache, table_BP[request, None], [length], 0.1, alone_THD)()
        torch.testing.assert_close(out_THD[part], alone_THD, rtol=2e-2, atol=2e-2)


# --- FlashAttention 3, over a stand-in --------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The last arguments of the schedule and the launch."""
    given: dict[str, Any] = {}

    def schedule(*sizes: Any, num_splits: int, **_: Any) -> Any:
        given["schedule"] = sizes[6].tolist(), num_splits
        return given["schedule"]

    stand_in: Any = ModuleType("flash_attn")
    stand_in.get_flash_attn_version, stand_in.get_scheduler_metadata = (lambda **_: 3), schedule
    stand_in.flash_attn_varlen_func = lambda **how: given.update(how)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.flash_attn", stand_in)
    return given


def config(splits: int) -> Any:
    return SimpleNamespace(attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=splits))


@pytest.mark.parametrize("seed", range(8))
def test_a_timed_launch_has_the_schedule_of_all_requests_and_the_splits_of_the_engine(
    calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    source = random.Random(seed)
    windows, invariant = source.choice([(None,), (None, 512), (512, 512)]), source.random() < 0.3
    splits, graph_rows, rows = source.randrange(1, 64), source.choice([0, 8, 512]), source.choice([1, 2, 5])
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", invariant, raising=False)  # engines keep what they read
    layers = [SimpleNamespace(sliding_window=window) for window in windows]
    how = OnCuda.kernel(config(splits), layers, graph_rows)
    lengths = [source.randrange(rows, 300) for _ in range(source.randrange(1, 9))]
    left_B = torch.tensor([length * source.randrange(2) for length in lengths], dtype=torch.int32)
    q_THD, cache, table_BP = torch.ones(rows * len(lengths), 4, 8), torch.ones(40, 2, 16, 16), torch.ones(9, 20)
    for left in (None, left_B):
        calls.clear()
        OnCuda.attention(q_THD, cache, table_BP, lengths, 0.1, torch.empty_like(q_THD), left_B=left, **how)()
        expected = 1 if invariant else splits if len(q_THD) <= graph_rows else 0
        assert calls["num_splits"] == expected
        assert calls["seqused_k"].tolist() == (lengths if left is None else left.tolist())
        scheduled = None if invariant or len(set(windows)) > 1 else (lengths, expected)
        assert calls.get("scheduler_metadata") == scheduled == calls.get("schedule")
