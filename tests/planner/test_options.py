"""What may be asked of `plan`, and the defaults that depend on model and device."""

from dataclasses import replace

import pytest

from sparsekv.planner.options import TASKS, Gate, PlanOptions, check_targets, density_for, lengths_up_to
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape, tokens


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"target_density": (0.0,)}, "densities"),
        ({"target_density": (1.5,)}, "densities"),
        ({"target_density": (float("nan"),)}, "densities"),
        ({"target_speedup": 1.0}, "speedup"),
        ({"lengths": (4096, 4096)}, "each length once"),
        ({"lengths": 4096}, "found 4096"),
        ({"lengths": "4k"}, "found '4k'"),
        ({"lengths": ("4k",)}, "found 4k"),
        ({"target_density": 0.3}, "target_density as a tuple .*, found 0.3"),
        ({"tasks": "niah_single"}, "'niah_single'"),
        ({"gate": Gate(max_kl=float("nan"))}, "divergence"),
        ({"gate": Gate(max_decode_kl=-0.1)}, "divergence"),
        ({"gate": Gate(min_agreement=1.1)}, "agreement"),
        ({"gate": Gate(min_exact=float("nan"))}, "agreement"),
        ({"phases": ()}, "phases"),
        ({"families": ("spiral",)}, "families"),
        ({"tasks": ("chess",)}, "tasks"),
        ({"decode_budget": tokens(0)}, "decode budget"),
        ({"preset": "x"}, "minference"),
        ({"batch": 0}, "batch"),
        ({"prefill_chunk": 15}, "least 16"),
        ({"seed": -1}, "seed"),
        ({"tasks": ("kv_retrieval", "kv_retrieval")}, "tasks"),
        ({"lengths": (4096,), "verify_lengths": (4096, 4096)}, "verify lengths"),
        ({"samples": 0}, "calibration"),
        ({"verify_samples": -1}, "verification"),
        ({"lengths": (1024,), "verify_lengths": (2048,)}, "verification lengths"),
        ({"levels": (0.0,)}, "levels"),
        ({"decode_loss": -0.1}, "loss"),
        ({"decode_loss": 1.1}, "loss"),
        ({"decode_kl": float("nan")}, "decode divergence"),
        ({"gate": Gate(max_accuracy_drop=101.0)}, "accuracy drop"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanOptions(**asked)


def test_densities_fall_with_length_through_the_given_points() -> None:
    lengths = [512 << n for n in range(14)]
    densities = [density_for(length) for length in lengths]
    assert densities == sorted(densities, reverse=True)
    assert density_for(4096) <= 0.45
    assert density_for(16384) <= 0.30
    assert density_for(32768) <= 0.22


def test_lengths_beyond_the_context_are_refused() -> None:
    with pytest.raises(UsageError, match=r"context of 4k tokens, found 8k"):
        PlanOptions(lengths=(1024, 8192)).settled(4096, "cpu")


def test_default_lengths_fit_the_context() -> None:
    assert PlanOptions().settled(1000, "cpu").lengths == (1000,)
    assert max(PlanOptions().settled(40_000, "cuda").lengths) <= 40_000


@pytest.mark.parametrize(
    ("context", "device", "lengths"),
    [
        (2048, "cuda", (2048,)),
        (8192, "cuda", (4096, 8192)),
        (32768, "cuda", (4096, 16384, 32768)),
        (40960, "cuda", (4096, 16384, 40960)),
        (65536, "cuda", (4096, 16384, 32768, 65536)),
        (131072, "cuda", (4096, 16384, 32768, 131072)),
        (1 << 20, "cuda", (4096, 16384, 32768, 131072)),
        (2048, "cpu", (2048,)),
        (6144, "cpu", (4096, 6144)),
        (131072, "cpu", (4096, 8192)),
    ],
)
def test_default_lengths_reach_the_end_of_the_context_or_what_the_device_does_in_minutes(
    context: int, device: str, lengths: tuple[int, ...]
) -> None:
    assert PlanOptions().settled(context, device).lengths == lengths


@pytest.mark.parametrize(
    ("context", "planned", "lengths"),
    [
        (32768, (4096, 8192), (4096, 8192, 16384, 32768)),
        (131072, (8192,), (8192, 16384, 32768, 131072)),
        (1 << 20, (4096, 131072), (4096, 131072, 1 << 20)),
        (40960, (4096, 16384), (4096, 16384, 40960)),
    ],
)
def test_a_longer_context_is_planned_with_lengths_that_lead_up_to_it(context, planned, lengths) -> None:
    assert lengths_up_to(context, planned) == lengths
    assert PlanOptions(lengths=lengths).settled(context, "cpu").lengths == lengths


def test_densities_pair_with_lengths_in_the_order_given() -> None:
    settled = PlanOptions(lengths=(8192, 4096), target_density=(0.2, 0.4)).settled(8192, "cpu")
    assert settled.lengths == (4096, 8192)
    assert settled.target_density == (0.4, 0.2)
    with pytest.raises(UsageError, match="the 2"):
        PlanOptions(lengths=(8192, 4096), target_density=(0.2, 0.4, 0.1)).settled(8192, "cpu")


def test_the_published_preset_takes_one_key_value_sample_and_64_tiles() -> None:
    settled = PlanOptions(preset="minference", lengths=(32768,)).settled(32768, "cuda")
    assert settled.tasks == ("kv_retrieval",)
    assert settled.samples == 1
    assert settled.tile == TileShape(query=64, key=64)


def test_where_tasks_are_found_out_a_gpu_has_time_for_more_samples_than_a_cpu() -> None:
    assert [PlanOptions().settled(4096, device).samples for device in ("cpu", "cuda")] == [3, 8]
    assert PlanOptions().settled(4096, "cpu").tasks == ()


def test_long_prompts_are_scored_on_as_many_rows_as_shorter_ones_have() -> None:
    asked = PlanOptions(lengths=(4096, 32768, 131072))
    strides = {
        device: [asked.settled(131072, device).row_stride_at(length) for length in asked.lengths]
        for device in ("cuda", "cpu")
    }
    assert strides == {"cuda": [1, 1, 4], "cpu": [4, 4, 4]}
    assert replace(asked, row_stride=2).settled(131072, "cuda").row_stride_at(131072) == 2
    assert PlanOptions(preset="minference", lengths=(131072,)).settled(131072, "cuda").row_stride_at(131072) == 1


def test_long_prompts_are_fewer_unless_a_number_is_asked_for() -> None:
    asked = PlanOptions(lengths=(32768, 131072))
    for options, device, counts in (
        (asked, "cuda", [8, 5]),
        (asked, "cpu", [3, 3]),
        (replace(asked, samples=7), "cuda", [7, 7]),
        (replace(asked, prompts=("a",) * 9), "cuda", [9, 9]),
        (PlanOptions(preset="minference", lengths=(32768, 131072)), "cuda", [1, 1]),
    ):
        settled = options.settled(131072, device)
        assert [settled.samples_at(length) for length in settled.lengths] == counts
        assert [settled.settled(131072, device).samples_at(length) for length in settled.lengths] == counts


def test_given_tasks_are_all_seen_on_a_gpu() -> None:
    assert PlanOptions(tasks=("kv_retrieval", "perplexity")).settled(4096, "cuda").samples == 2
    assert PlanOptions(tasks=TASKS).settled(4096, "cuda").samples == len(TASKS)
    assert PlanOptions(tasks=("kv_retrieval",)).settled(4096, "cpu").samples == 1


def test_verification_takes_as_many_samples_of_each_task_as_prove_a_plan_over_all_of_them():
    found = [PlanOptions().held_out(TASKS[:count], "cuda") for count in (0, 3, 4, 8)]
    assert found == [17, 17, 13, 7]
    assert PlanOptions().settled(4096, "cuda").verify_samples == 17
    assert PlanOptions().held_out(TASKS, "cpu") == 1
    assert PlanOptions(verify_samples=0).held_out(TASKS, "cuda") == 0


def test_settling_twice_changes_nothing() -> None:
    once = PlanOptions(lengths=(2048,)).settled(4096, "cuda")
    assert once.settled(4096, "cuda") == once


def test_a_density_and_a_speedup_exclude_each_other_but_a_speedup_alone_settles() -> None:
    with pytest.raises(UsageError, match="--target-speedup"):
        PlanOptions(target_speedup=2.0, target_density=(0.3,)).settled(32768, "cpu")
    settled = PlanOptions(target_speedup=2.0).settled(32768, "cpu")
    assert settled.target_speedup == 2.0
    assert len(settled.target_density) == len(settled.lengths)  # what is profiled


def test_densities_pair_with_the_default_lengths_in_their_order() -> None:
    settled = PlanOptions(target_density=(0.4, 0.3)).settled(32768, "cpu")
    assert settled.target_density == (0.4, 0.3)
    assert len(settled.lengths) == 2


def test_own_prompts_are_all_used_unless_samples_says_otherwise() -> None:
    assert PlanOptions(prompts=("a",) * 9).settled(32768, "cpu").samples == 9
    assert PlanOptions(prompts=("a",) * 9, samples=4).settled(32768, "cpu").samples == 4


def test_tiles_are_128_unless_a_preset_or_the_caller_says_otherwise() -> None:
    def rows(device: str, **asked: object) -> int:
        return PlanOptions(**asked).settled(131072, device).tile.query

    for device in ("cpu", "cuda"):
        assert rows(device, lengths=(4096, 131072)) == 128
        assert rows(device, lengths=(4096,), preset="minference") == 64
        assert rows(device, lengths=(4096,), tile=TileShape(query=64, key=64)) == 64


@pytest.mark.parametrize("tile", [64, 128])
def test_a_default_density_leaves_room_for_the_tiles_that_every_pattern_computes(tile: int) -> None:
    shape = TileShape(query=tile, key=tile)
    lengths = (256, 384, 512, 640, 1024, 4096)
    options = PlanOptions(lengths=lengths, tile=shape).settled(8192, "cpu")
    check_targets({length: (length,) for length in lengths}, options.target_density, shape, options.families)
    assert options.target_density[-1] == density_for(4096)
    assert max(options.target_density) <= 1.0


def test_decode_trials_are_held_to_a_stricter_gate_and_not_to_a_looser_one() -> None:
    usual = PlanOptions().decode_bound
    assert PlanOptions(gate=Gate(max_decode_kl=usual / 4)).decode_bound == usual / 4
    assert PlanOptions(gate=Gate(max_decode_kl=50.0)).decode_bound == usual
    assert PlanOptions(decode_kl=0.1).decode_bound == 0.1
