"""The flash backend without its GPU: its lists in an emulator, its calls on a stand-in, columns in the interpreter."""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import flash_emulator
import pytest
import torch
from attention_cases import Case, assert_close, draw, pack
from flash_cases import COLUMN_CASES, SQUARE, TALL, TILE_CASES, half, stand_in
from torch_state import poisoned_memory

from sparsekv.kernels import backends
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.flash import backend, call, limits
from sparsekv.kernels.prefill.flash.call import mask_mod
from sparsekv.kernels.prefill.flash.limits import FlashPackage, check_layout, package, shape_obstacle
from sparsekv.kernels.tiles import AttentionOutput, Chunk, PrefillCall
from sparsekv.plans.errors import BackendError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, tokens

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """An element that is never written shows."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lower", "attend_lists", "attend_dense"):
        monkeypatch.setattr(backend, name, getattr(flash_emulator, name))


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch, _emulated: None):
    """flash-attn-4's stand-in where imports look for it, called in place of the emulator."""
    mask_mod.cache_clear()
    for name in ("attend_lists", "attend_dense"):
        monkeypatch.setattr(backend, name, getattr(call, name))
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    mask_mod.cache_clear()


def run(case: Case, want_lse: bool = True) -> AttentionOutput:
    problem = draw(case)
    found = backend.run(problem.call, problem.index, want_lse)
    assert_close(found, problem)
    return found


EVERY_WAY = [(case, listed) for case in TILE_CASES for listed in ((0, 256) if case.dense_heads else (0,))]


def _named(case: Case, listed: int) -> str:
    return f"{case}, dense heads listed" if listed else str(case)


@pytest.mark.parametrize(("case", "listed"), EVERY_WAY, ids=[_named(*way) for way in EVERY_WAY])
def test_lists_and_dense_launches_compute_exactly_the_indexed_mask(
    case: Case, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LISTED_TILES", listed)
    run(case)


@needs_interpreter
@pytest.mark.parametrize("case", COLUMN_CASES, ids=str)
def test_columns_join_the_softmax_of_the_tiles(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", half(TILE_CASES), ids=str)
@pytest.mark.usefixtures("flash_attn")
def test_calls_into_flash_attn_4_mean_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LISTED_TILES", 0)
    run(case)


def test_what_the_compiler_says_of_its_own_argument_is_silenced_and_nothing_else() -> None:
    noise = (
        "Argument aux_data (position 19) cannot be converted to a JitArgument for function 'cutlass___call___flash'. "
        "Its type `<class 'flash_attn.cute.utils.AuxData'>` is not supported."
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call.ignore_argument_warnings()
        warnings.warn(noise, UserWarning, stacklevel=1)
        warnings.warn(noise.replace("aux_data", "mScale"), UserWarning, stacklevel=1)
        warnings.warn("Argument aux_data is deprecated", UserWarning, stacklevel=1)
    assert [str(warning.message)[:20] for warning in told] == ["Argument mScale (pos", "Argument aux_data is"]


@pytest.mark.usefixtures("flash_attn")
def test_one_mask_function_serves_every_length_and_names_its_window() -> None:
    assert mask_mod(None) is mask_mod(None)
    assert mask_mod(30) is mask_mod(30)
    assert len({mask_mod(window).__cute_hash__ for window in (None, 30, 31)}) == 3


@needs_interpreter
@pytest.mark.parametrize("tile", [SQUARE, TALL], ids=["128 x 128", "128 x 64"])
def test_indices_as_the_builders_make_them_are_understood(tile: TileShape) -> None:
    patterns = [
        VerticalSlash(vertical=tokens(10), slash=tokens(60), last_q=16, max_tiles=tokens(384)),
        AShape(sink=tokens(4), window=tokens(100)),
        BlockSparse(keep=tokens(384)),
        Dense(),
    ]
    q_BHSD, k_BGKD, v_BGKD = (torch.randn(1, heads, 600, 64) for heads in (4, 2, 2))
    chunk = Chunk((0,), (600,))
    index = build_index(patterns, q_BHSD, k_BGKD, chunk, tile, scale=0.125)
    assert index.dense_heads == (3,)
    found = backend.run(PrefillCall(q_BHSD, k_BGKD, v_BGKD, chunk, 0.125), index, True)
    answer = prefill_attention(q_BHSD, k_BGKD, v_BGKD, index, chunk, scale=0.125, want_lse=True, backend="reference")
    torch.testing.assert_close(found.out_BHSD, answer.out_BHSD, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.lse_BHS, answer.lse_BHS, atol=1e-4, rtol=1e-4)


def test_log_sum_exp_is_only_returned_on_request() -> None:
    assert run(Case("x", lengths=(70,), tile=SQUARE), want_lse=False).lse_BHS is None


@pytest.mark.parametrize(("head_dim", "tile", "taken"), [(64, SQUARE, True), (128, SQUARE, True), (128, TALL, False)])
def test_a_copy_of_a_host_takes_the_key_tiles_of_its_kernels(monkeypatch, head_dim, tile, taken) -> None:
    copy = FlashPackage("host.cute", "host", (), asks_lists=False)
    monkeypatch.setattr(limits, "_OF_HOSTS", [copy])
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # not installed beside it
    assert package() is copy
    found = shape_obstacle(torch.bfloat16, head_dim, tile)
    assert found is None if taken else "of 128" in found
    for any_tile in (None, SQUARE, TALL):
        assert "from 16 to 128, found 256" in shape_obstacle(torch.bfloat16, 256, any_tile)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_it_takes_has_no_obstacle(head_dim: int) -> None:
    assert shape_obstacle(torch.bfloat16, head_dim, TALL) is None
    assert shape_obstacle(torch.bfloat16, head_dim, None) is None
    assert (shape_obstacle(torch.bfloat16, head_dim, SQUARE) is None) == (head_dim <= 128)


def test_strides_that_would_be_copied_in_silence_are_refused() -> None:
    q_BHSD = torch.empty(1, 2, 10, 68, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(BackendError, match=r"multiples of 16 bytes.*contiguous"):
        check_layout("q", q_BHSD)
    check_layout("q", q_BHSD.contiguous())


def test_tensors_in_main_memory_are_refused_with_the_way_out() -> None:
    problem = draw(Case("x", lengths=(70,), tile=SQUARE, dtype=torch.bfloat16))
    with pytest.raises(BackendError, match=r"needs an NVIDIA GPU.*backend='triton'"):
        backend.prefill(problem.call, problem.index)


WHOLE = [
    Case("whole prompt", lengths=(300,), heads=4),
    Case("past, ragged", past=(77, 0), lengths=(300, 190), heads=4, spare_rows=5, spare_keys=40),
    Case("window", past=(30,), lengths=(333,), heads=4, window=90),
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_dense_layers_see_every_key_and_nothing_of_the_padding(case: Case) -> None:
    problem = draw(replace(case, dense_heads=tuple(range(case.heads))))
    assert_close(backend.dense(problem.call), problem)


@pytest.mark.usefixtures("flash_attn")
def test_dense_layers_go_to_flash_attn_from_the_rows_on_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "device_obstacle", lambda device: None)
    whole, chunk = backend.DENSE_ROWS, backend.DENSE_CHUNK_ROWS

    def goes(past: int, rows: int, name: str = "flash", spare: int = 0) -> bool:
        q_BHSD, k_BGKD = torch.zeros(1, 2, rows, 64).half(), torch.zeros(1, 1, past + rows, 64 + spare).half()[..., :64]
        return backends.dense_by_flash(q_BHSD, k_BGKD, k_BGKD, Chunk((past,), (past + rows,)), backend=name)

    assert goes(0, whole)
    assert goes(0, 16384 - 128)  # a prompt of 16K that leaves room for its answer
    assert not goes(0, whole - 1)
    assert goes(7, chunk)
    assert not goes(7, chunk - 1)
    assert not goes(0, whole, "triton")
    assert not goes(0, whole, spare=4)  # rows 136 bytes apart
    problem = draw(Case("x", past=(7,), lengths=(7 + chunk,), dim=16, dense_heads=(0, 1), dtype=torch.float16))
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.chunk)
    assert_close(backends.dense_prefill(*tensors, scale=problem.scale, backend="flash"), problem)
    with pytest.raises(BackendError, match="found 'nonsense'"):
        backends.dense_prefill(*tensors, scale=1.0, backend="nonsense")


@needs_interpreter
def test_columns_on_the_diagonal_stay_masked_before_a_step_without_live_ones() -> None:
    problem = draw(Case("x", lengths=(256,), heads=1, dim=16, tile=SQUARE, share=0.0, columns=256))
    live_BHTC = torch.zeros_like(problem.seen.live_BHTC)
    live_BHTC[..., 10:30] = live_BHTC[..., 200:210] = True  # not a column of the steps between
    seen = replace(problem.seen, live_BHTC=live_BHTC)
    problem = replace(problem, seen=seen, index=pack(SQUARE, seen, problem.index.dense_H))
    assert_close(backend.run(problem.call, problem.index, True), problem)
