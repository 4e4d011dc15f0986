"""Tensors that do not fit together are refused with a message that says what to do."""

import pytest
import torch
from attention_cases import Case, draw

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import BackendError, ShapeError

PROBLEM = draw(Case("x", lengths=(100,), heads=4, kv_heads=2, columns=5))


def call(**changes: object) -> None:
    given = {
        "q": PROBLEM.q_BHSD,
        "k": PROBLEM.k_BGKD,
        "v": PROBLEM.v_BGKD,
        "index": PROBLEM.index,
        "chunk": PROBLEM.chunk,
        "scale": 0.1,
        "window": None,
        "backend": "cpu",
    } | changes
    q, k, v, index, chunk = (given.pop(name) for name in ("q", "k", "v", "index", "chunk"))
    prefill_attention(q, k, v, index, chunk, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": PROBLEM.q_BHSD[0]}, r"\(4, 100, 64\)"),
        ({"k": PROBLEM.k_BGKD.transpose(2, 3).contiguous().transpose(2, 3)}, "contiguous"),
        ({"v": PROBLEM.v_BGKD[:, :, :-1]}, r"\(1, 2, 99, 64\)"),
        ({"q": PROBLEM.q_BHSD[..., :32]}, r"\(1, 4, 100, 32\)"),
        ({"q": PROBLEM.q_BHSD[:, :3]}, r"\(1, 3, 100, 64\)"),
        ({"q": PROBLEM.q_BHSD.half()}, "float16"),
        ({"scale": 0.0}, "scale"),
        ({"chunk": Chunk((0, 0), (100, 100))}, "2 batch rows"),
        ({"chunk": Chunk((0,), (101,))}, "101 query rows"),
        ({"chunk": Chunk((50,), (150,))}, "150 keys, k holds 100"),
        ({"window": 0}, "at least 1 token"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_misfit_is_refused_with_what_was_found(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call(**changes)


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match="'cuda'"):
        call(backend="cuda")


def test_tensors_that_the_triton_kernel_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from sparsekv.kernels import triton_support

    q, far = torch.empty(1, 1, 1, 64), torch.empty(0).as_strided((1, 1, 0, 64), (1, 1, 1 << 24, 1))
    with monkeypatch.context() as patch:
        patch.setattr(triton_support, "interpreting", lambda: False)
        with pytest.raises(BackendError, match="cpu"):
            triton_support.check_tensors(q, q, q)
    monkeypatch.setattr(triton_support, "interpreting", lambda: True)
    for size in (8, 60, 520):
        with pytest.raises(BackendError, match=f"16 to 512, found {size}"):
            triton_support.check_tensors(torch.empty(1, 1, 1, size), q, q)
    with pytest.raises(ShapeError, match=str(1 << 24)):
        triton_support.check_tensors(q, q, far)
