"""The kernel that is timed in an engine is the one that it attends by."""

import pytest
import torch

from sparsekv.runtime.vllm import internals

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
