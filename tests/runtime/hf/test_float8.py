"""`apply(kv_dtype="fp8")`: cuts of a prompt, scales and refusals; tests/core has what is computed."""

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import plan_for

from sparsekv.kernels import backends
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.stores.store import Float8


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=16, heads=4, kv_heads=2)


@pytest.mark.parametrize("largest", [0.0, 1e-30, 0.02, 1.0, 300.0, 1e30, float("inf"), float("nan")])
def test_scales_leave_room_for_what_is_larger_than_the_first_tokens(largest):
    x = torch.full((1, 2, 3, 8), 0.0)
    x[0, 0, 1, 2] = largest
    found = Float8()
    found.rounded(x, x)
    scale = found.scales.k_G
    assert scale[1] == 1
    if 0 < largest < 1e38:
        assert 4 <= largest / float(scale[0]) < 8
        later = x * 50
        torch.testing.assert_close(found.read(*found.rounded(later, later))[0], later, rtol=0.07, atol=0)
        over = found.read(*found.rounded(x * 1e6, x))[0]
        assert float(over.max()) == pytest.approx(448 * float(scale[0]))
    else:
        assert scale[0] == 1


def test_other_precisions_and_devices_are_refused(model, monkeypatch):
    with pytest.raises(UsageError, match="auto or fp8"):
        apply(model, plan_for(model), kv_dtype="fp4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9" in (backends.float8_obstacle("triton", torch.device("cuda")) or "")
    monkeypatch.setattr("sparsekv.runtime.hf.apply.float8_obstacle", lambda *given: "it is old")
    with pytest.raises(BackendError, match="it is old"):
        apply(model, plan_for(model), kv_dtype="fp8")
