"""What `plan --host vllm` times is what an engine runs."""

import pytest
import torch

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.measure_prices import measure_prices
from sparsekv.planner.prices import HeadShape, Prices
from sparsekv.planner.timed_host import VllmHost
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.vllm import internals

DEVICE = torch.device(internals.device_type())
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
RELEASE = internals.release.partition("+")[0]
TILE = TileShape(query=64, key=64)


@pytest.fixture(scope="module")
def measured() -> Prices:
    shape = HeadShape(heads=4, kv_heads=2, head_dim=64)
    return measure_prices(shape, (2048,), device=DEVICE, dtype=DTYPE, tile=TILE, host=VllmHost(512, DEVICE))


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
    internals.engine_dense_attention(q_THD, cache, table_P[None], [length], 64**-0.5, out_THD)()
    k_HSD, v_HSD = (x_GSD.float().repeat_interleave(2, 0) for x_GSD in (k_GSD, v_GSD))
    causal_TS = torch.ones(rows, length, dtype=torch.bool, device=DEVICE).tril(length - rows)
    q_HTD = q_THD.float().transpose(0, 1)
    expected_HTD = torch.nn.functional.scaled_dot_product_attention(q_HTD, k_HSD, v_HSD, causal_TS)
    near = 1e-4 if DEVICE.type == "cpu" else 2e-2
    torch.testing.assert_close(out_THD.float(), expected_HTD.transpose(0, 1), rtol=near, atol=near)


def test_what_is_timed_over_pages_in_8_bits_runs_over_such_pages() -> None:
    host, (k, v) = VllmHost(512, DEVICE, float8=True), torch.randn(2, 1, 2, 700, 64, dtype=DTYPE, device=DEVICE)
    (keys,) = host.views(k, v, 2, 1)
    assert (keys.k.dtype, keys.batch, keys.capacity >= 700) == (torch.float8_e4m3fn, 2, True)
    q_BH1D = torch.randn(2, 4, 1, 64, dtype=DTYPE, device=DEVICE)
    host.dense_step(q_BH1D, keys, 0.1, "cpu")()
    host.idle_step(q_BH1D, keys, 0.1)()
    host.copy(k, v)()
    host.dense(torch.randn(1, 4, 188, 64, dtype=DTYPE, device=DEVICE), k, v, Chunk.uniform(1, 512, 700), 0.1, "cpu")()
    backend = "cpu" if DEVICE.type == "cpu" else "triton"
    assert decode_attention(q_BH1D, keys, scale=0.1, backend=backend).out_BHSD.isfinite().all()


def test_a_cost_says_where_it_was_measured(measured: Prices) -> None:
    assert (measured.host, measured.chunk, measured.versions["vllm"]) == ("vllm", 512, RELEASE)
    assert Prices.model_validate_json(measured.model_dump_json()) == measured


def test_decode_steps_of_one_row_and_of_several_are_timed(measured: Prices) -> None:
    assert [step.rows for step in measured.steps] == [1, 8]
    assert {step.dense.along for step in measured.steps} == {measured.dense.along}


def test_rows_in_pages_are_what_the_plan_attends_to() -> None:
    host, shape = VllmHost(512, DEVICE), (1, 2, 300, 64)
    like = torch.zeros(shape, device=DEVICE, dtype=DTYPE)
    (keys,) = host.views(like, like, 3, 1)
    q_BH1D = torch.randn(3, 4, 1, 64, device=DEVICE, dtype=DTYPE)
    launch = host.dense_step(q_BH1D, keys, 64**-0.5, "cpu")
    launch()
    out_BHD = launch.keywords["output" if DEVICE.type == "cpu" else "out"]
    k_BGSD, v_BGSD = keys.contiguous(300)
    expected_BH1D = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q_BH1D, k_BGSD.repeat_interleave(2, 1), v_BGSD.repeat_interleave(2, 1)))
    )
    near = 1e-4 if DEVICE.type == "cpu" else 2e-2
    torch.testing.assert_close(out_BHD.float(), expected_BH1D[:, :, 0], rtol=near, atol=near)


def test_copies_of_a_chunk_with_a_past_are_timed(measured: Prices) -> None:
    assert measured.copy_keys.along == measured.dense.along == (512, 1024, 2048)
    assert measured.copies_us(2048) > measured.copies_us(512) == 0.0


def test_chunks_are_those_of_a_server_unless_asked_otherwise() -> None:
    assert VllmHost(None, DEVICE).chunk == internals.server_step() >= 2048


def test_a_model_on_another_kind_of_device_is_refused() -> None:
    other = "cuda" if DEVICE.type == "cpu" else "cpu"
    with pytest.raises(UsageError, match=f"{DEVICE.type}.* found {other}"):
        VllmHost(512, torch.device(other))
