"""Short timings of prices: tests ask what is timed and what is made of it, never how long it takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparsekv.planner import measure_prices


@pytest.fixture(autouse=True, scope="session")
def quick_timings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_prices, "SECONDS_A_TIMING", 1e-3)
        patch.setattr(measure_prices, "_FEWEST", 1)
        yield
