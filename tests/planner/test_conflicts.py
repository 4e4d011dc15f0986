"""Options that cancel each other are refused by name, in the library and before any work."""

from dataclasses import fields

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_profile, made_up_reuse
from progress import Counting

from sparsekv.planner.conflicts import READERS, SWITCHES, check_used
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.plan import compile_plan, plan_model
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.planner.verify import after_a_missed_gate
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
    ("given", "named"),
    [
        ({"target_density": (0.3,), "preset": "minference"}, ("--target-density", "--preset minference")),
        ({"target_speedup": 2.0, "preset": "minference"}, ("--target-speedup", "--preset minference")),
        ({"target_density": (0.3,), "target_speedup": 2.0}, ("--target-density", "--target-speedup")),
        ({"tile": "64", "profile": "a"}, ("--tile", "--profile")),
        ({"preset": "minference", "profile": "a"}, ("--preset", "--profile")),
        ({"prompts": "p", "profile": "a"}, ("--prompts", "--profile")),
        ({"samples": 2, "profile": "a"}, ("--samples", "--profile")),
        ({"tasks": "x", "profile": "a", "no_verify": True}, ("--tasks", "--profile", "--no-verify", "beside")),
        ({"tasks": "x", "prompts": "p", "no_verify": True}, ("--tasks", "--prompts", "--no-verify")),
        ({"seed": 1, "profile": "a", "no_verify": True}, ("--seed", "--profile", "--no-verify")),
        (
            {"backend": "cpu", "profile": "a", "cost": "c", "no_verify": True},
            ("--backend", "--profile", "--cost", "--no-verify"),
        ),
        (
            {"device": "cuda", "profile": "a", "cost": "c", "no_verify": True},
            ("--device", "--profile", "--cost", "--no-verify"),
        ),
        ({"target_density": (0.3,), "only": "decode"}, ("--target-density", "--only decode")),
        ({"families": ("a_shape",), "only": "decode"}, ("--families", "--only decode")),
        ({"decode_budget": "10%", "only": "prefill"}, ("--decode-budget", "--only prefill")),
        ({"offload": True, "only": "prefill"}, ("--offload", "--only prefill")),
        ({"decode_kl": 0.1, "decode_loss": 0.1}, ("--decode-kl", "--decode-loss")),
        ({"decode_loss": 0.1, "filter_layers": (2,)}, ("--decode-loss", "--filter-layers")),
        ({"filter_layers": (2,), "only": "prefill"}, ("--filter-layers", "--only prefill")),
        ({"max_kl": 0.1, "no_verify": True}, ("--max-kl", "--no-verify")),
        ({"prefill_chunk": 512, "no_verify": True}, ("--prefill-chunk", "--no-verify")),
        ({"host": "vllm", "cost": "c"}, ("--host", "--cost")),
        ({"host": "vllm", "decode_budget": "10%"}, ("--decode-budget", "--host vllm")),
        ({"host": "vllm", "offload": True}, ("--offload", "--host vllm")),
        (
            {"host": "vllm", "prefill_chunk": 512, "cost": "c", "no_verify": True},
            ("--host", "--cost"),
        ),
    ],
)
def test_an_option_that_nothing_would_read_is_refused_with_those_that_cancel_it(given, named) -> None:
    with pytest.raises(UsageError) as refused:
        check_used(given)
    assert [word for word in named if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    "given",
    [
        {"tasks": "x", "profile": "a"},  # verification reads them
        {"seed": 3, "profile": "a"},
        {"lengths": (4096,), "profile": "a"},  # some of the profiled ones
        {"only": "prefill", "profile": "a"},
        {"families": ("a_shape",), "preset": "minference"},
        {"tile": "128", "preset": "minference"},
        {"samples": 3, "prompts": "p"},
        {"backend": "cpu", "profile": "a", "no_verify": True},  # the device cost is measured with it
        {"decode_budget": "10%", "only": "decode"},
        {"host": "vllm", "prefill_chunk": 512, "no_verify": True},  # chunks are timed
        {"host": "vllm", "only": "prefill"},
        {"host": "transformers", "decode_budget": "10%"},
    ],
)
def test_options_that_something_reads_go_together(given) -> None:
    check_used(given)


def test_the_table_knows_only_options_that_there_are_and_parts_that_something_reads() -> None:
    known = {field.name for field in fields(PlanOptions)} | {field.name for field in fields(Gate)}
    assert {option for options in READERS.values() for option in options} - known == set()
    assert {part for switch in SWITCHES for part in switch.leaves_out} - set(READERS) == set()


@pytest.mark.parametrize("target", [{"target_density": (0.3,)}, {"target_speedup": 2.0}])
def test_the_library_refuses_a_preset_beside_a_target_before_it_loads_anything(target) -> None:
    with pytest.raises(UsageError, match="--preset minference"):
        PlanOptions(preset="minference", **target)
    with pytest.raises(UsageError, match="--preset minference"):
        plan_model("nowhere/nothing", preset="minference", **target)


def test_what_is_filled_in_by_default_contradicts_nothing() -> None:
    for asked in ({"preset": "minference"}, {"target_speedup": 2.0}, {"verify_samples": 0}):
        settled = PlanOptions(**asked).settled(8192, "cpu")
        assert settled.settled(8192, "cpu") == settled


@pytest.mark.parametrize(
    ("asked", "profile", "words"),
    [
        ({"tile": TileShape(query=128, key=128)}, PROFILE, "--tile"),
        ({"preset": "minference"}, PROFILE, "--preset"),
        ({"samples": 99}, PROFILE, "--samples"),
        ({"prompts": ("a",)}, PROFILE, "--prompts"),
        ({"target_density": (0.3,)}, PRESET, "--target-density beside --profile"),
        ({"target_speedup": 2.0}, PRESET, "--target-speedup beside --profile"),
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
    with pytest.raises(UsageError, match=r"--families.*found block_sparse.*--profile"):
        for_profile(
            PlanOptions(families=("a_shape", "block_sparse")), PROFILE.model_copy(update={"lengths": (narrow,)})
        )


def test_saying_again_what_the_profile_says_is_fine() -> None:
    options = PlanOptions(tile=PROFILE.tile, samples=PROFILE.samples, lengths=(4096,))
    assert for_profile(options, PROFILE)[0].tile == PROFILE.tile
    assert for_profile(PlanOptions(preset="minference"), PRESET)[0].preset == "minference"
    assert for_profile(PlanOptions(phases=("prefill",)), PREFILL_ONLY)[0].phases == ("prefill",)


@pytest.mark.parametrize(
    ("asked", "missed", "named", "unnamed"),
    [
        ({}, {"prefill"}, ("--target-density", "--max-accuracy-drop"), ("--decode-budget",)),
        ({}, {"decode"}, ("--decode-budget",), ("--target-density",)),
        ({}, {"both"}, ("--target-density", "--decode-budget"), ()),
        ({"preset": "minference"}, {"prefill"}, ("minference",), ("--target-density", "--target-speedup")),
        ({"target_speedup": 2.0}, {"prefill"}, ("--target-speedup",), ("--target-density",)),
        ({"phases": ("decode",)}, {"decode", "both"}, ("--decode-budget",), ("--target",)),
        ({"phases": ("prefill",)}, {"prefill"}, ("--target-density",), ("--decode",)),
        ({"filter_layers": (1,)}, {"decode"}, ("--filter-layers",), ("--decode-budget",)),
        ({"gate": Gate(max_kl=0.1)}, {"prefill"}, ("--max-kl",), ()),
    ],
)
def test_what_to_try_after_a_missed_gate_fits_the_options_used(asked, missed, named, unnamed) -> None:
    advice = after_a_missed_gate(PlanOptions(**asked), missed)
    assert [flag for flag in named if flag not in advice] == []
    assert [flag for flag in unnamed if flag in advice] == []


def test_a_profile_is_checked_before_the_device_is_measured(loaded) -> None:
    progress, own = Counting(), PREFILL_ONLY.model_copy(update={"model": loaded.info})
    with pytest.raises(UsageError, match="--only prefill"):
        compile_plan(loaded, PlanOptions(), profile_in=own, progress=progress)
    assert progress.stages == []
