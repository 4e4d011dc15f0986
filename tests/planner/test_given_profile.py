"""Options that a given profile contradicts, and those that a phase made dense leaves to be tried."""

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_profile, made_up_reuse

from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape

LENGTH = made_up_length(4096, np.random.default_rng(0))
REUSE = made_up_reuse(np.eye(3))
PROFILE = made_up_profile(LENGTH.model_copy(update={"reuse": REUSE}))
PRESET = PROFILE.model_copy(update={"preset": "minference"})
PREFILL_ONLY = made_up_profile(LENGTH)
DECODE_ONLY = made_up_profile(
    LENGTH.model_copy(update={"reuse": REUSE, "candidates": (), "patterns": (), "layers": ()})
)


@pytest.mark.parametrize(
    ("asked", "profile", "words"),
    [
        ({"tile": TileShape(query=128, key=128)}, PROFILE, "tile"),
        ({"preset": "minference"}, PROFILE, "--preset"),
        ({"calibration_samples": 99}, PROFILE, "calibration_samples"),
        ({"prompts": ("a",)}, PROFILE, "prompts"),
        ({"target_density": (0.3,)}, PRESET, "target_density beside --profile"),
        ({}, PREFILL_ONLY, "--only prefill"),
        ({}, DECODE_ONLY, "--only decode"),
        ({"phases": ("decode",)}, PREFILL_ONLY, "profile again"),
        ({"families": ("spiral",)}, PROFILE, "families"),
    ],
)
def test_a_profile_is_not_contradicted_and_holds_what_is_asked_for(asked, profile, words) -> None:
    with pytest.raises(UsageError, match=words):
        for_profile(PlanOptions(**asked), profile)


def test_families_that_were_not_searched_are_refused() -> None:
    candidates = tuple(candidate for candidate in LENGTH.candidates if candidate.family == "a_shape")
    narrow = LENGTH.model_copy(update={"candidates": candidates, "reuse": REUSE})
    with pytest.raises(UsageError, match=r"families.*found block_sparse.*--profile"):
        for_profile(
            PlanOptions(families=("a_shape", "block_sparse")), PROFILE.model_copy(update={"lengths": (narrow,)})
        )


def test_saying_again_what_the_profile_says_is_fine() -> None:
    options = PlanOptions(tile=PROFILE.tile, calibration_samples=PROFILE.samples, lengths=(4096,))
    assert for_profile(options, PROFILE)[0].tile == PROFILE.tile
    assert for_profile(PlanOptions(preset="minference"), PRESET)[0].preset == "minference"
    assert for_profile(PlanOptions(phases=("prefill",)), PREFILL_ONLY)[0].phases == ("prefill",)
