"""Options of `plan` that are refused: each block of tests/data/refused_options.txt is a call and its message.

To add one, or to change a message, edit its line `$ ...` there and run
`WRITE_MESSAGES=1 python -m pytest tests/planner/test_refusals.py`, which writes the rest.
"""

from pathlib import Path

import numpy as np
import pytest
from golden import Golden
from planner_profiles import made_up_length, made_up_profile, made_up_reuse

from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape, tokens

REFUSED = Golden(Path(__file__).parents[1] / "data" / "refused_options.txt")
LENGTH = made_up_length(4096, np.random.default_rng(0))
REUSE = {"reuse": made_up_reuse(np.eye(3))}
PROFILE = made_up_profile(LENGTH.model_copy(update=REUSE))
PRESET = PROFILE.model_copy(update={"preset": "minference"})
PREFILL_ONLY = made_up_profile(LENGTH)
DECODE_ONLY = made_up_profile(LENGTH.model_copy(update=REUSE | {"candidates": (), "patterns": (), "layers": ()}))
A_SHAPES = tuple(candidate for candidate in LENGTH.candidates if candidate.family == "a_shape")
NARROW = made_up_profile(LENGTH.model_copy(update=REUSE | {"candidates": A_SHAPES}))
CALLS = {one.__name__: one for one in (PlanOptions, settle, for_profile, TileShape, tokens)}
CALLS |= {"nan": float("nan"), "PROFILE": PROFILE, "PRESET": PRESET, "NARROW": NARROW}
CALLS |= {"PREFILL_ONLY": PREFILL_ONLY, "DECODE_ONLY": DECODE_ONLY}


@pytest.mark.parametrize("line", REFUSED.blocks)
def test_a_call_is_refused_as_it_was(line: str) -> None:
    with pytest.raises(UsageError) as refused:
        eval(line, dict(CALLS))
    REFUSED.check(line, str(refused.value))


def test_saying_again_what_the_profile_says_is_fine() -> None:
    options = PlanOptions(tile=PROFILE.tile, calibration_samples=PROFILE.samples, lengths=(4096,))
    assert for_profile(options, PROFILE)[0].tile == PROFILE.tile
    assert for_profile(PlanOptions(preset="minference"), PRESET)[0].preset == "minference"
    assert for_profile(PlanOptions(phases=("prefill",)), PREFILL_ONLY)[0].phases == ("prefill",)
