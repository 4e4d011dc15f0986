"""What a plan's figures miss of what was asked for is told, and nothing else: one line each."""

import numpy as np
import pytest
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.options import Settled
from sparsekv.planner.plan import compile_once, plan_remarks
from sparsekv.planner.prices import Prices
from sparsekv.planner.profile.profile_data import LengthProfile, Profile

PREFILL = options_for(target_density=(0.3,), phases=("prefill",))
DECODE = options_for(phases=("decode",), filter_layers=(0,))
FREE = made_up_prices()


def profile_with(**options) -> Profile:
    return made_up_profile(made_up_length(8192, np.random.default_rng(0), **options), model=made_up_model(context=8192))


def decode_profile(*kept: np.ndarray) -> Profile:
    lengths = [
        LengthProfile(length=8192 << place, prompt_tokens=(8192 << place,), reuse=made_up_reuse(table))
        for place, table in enumerate(kept)
    ]
    return made_up_profile(*lengths, model=made_up_model(layers=len(kept[0]), context=8192 << len(kept) - 1))


def remarks(profile: Profile, cost: Prices, options: Settled) -> tuple[str, ...]:
    found = tuple(plan_remarks(compile_once(profile.model, options, profile, cost), options, profile))
    assert not any("\n" in line for line in found)
    return found


@pytest.mark.parametrize(
    ("profile", "options"),
    [(profile_with(), PREFILL), (decode_profile(np.ones((3, 3))), DECODE)],
    ids=["tiles", "steps"],
)
def test_a_plan_that_keeps_to_what_was_asked_for_needs_no_remark(profile: Profile, options: Settled) -> None:
    assert remarks(profile, FREE, options) == ()


@pytest.mark.parametrize(("context", "lengths"), [(131072, "8k,16k,32k,128k"), (16384, "8k,16k")])
def test_a_longer_context_is_told_with_the_lengths_that_plan_it(context: int, lengths: str) -> None:
    profile = profile_with().model_copy(update={"model": made_up_model(context=context)})
    (line,) = remarks(profile, FREE, PREFILL)
    assert f"--lengths {lengths} " in line
