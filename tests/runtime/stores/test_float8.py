"""The scales of keys and values in 8 bits; tests/core has what is computed."""

import pytest
import torch

from sparsekv.runtime.stores.store import Float8


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
