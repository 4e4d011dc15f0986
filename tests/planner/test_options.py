"""What may be asked of `plan`, and the defaults that depend on model and device."""

import pytest

from sparsekv.planner.options import TASKS, PlanArguments, PlanOptions, density_for, lengths_up_to, settle
from sparsekv.planner.profile.search_space import aims
from sparsekv.planner.tasks import TASKS as KNOWN_TASKS
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape, fraction, mandatory_density


def test_texts_mean_what_they_mean_on_the_command_line() -> None:
    asked = PlanOptions(
        lengths="16k,4k", target_density="20%,0.4", decode_budget="5%", tile="64", filter_layers="2,8-9"
    )
    assert (asked.lengths, asked.target_density, asked.filter_layers) == ((16384, 4096), (0.2, 0.4), (2, 8, 9))
    assert (asked.decode_budget, asked.tile) == (fraction(0.05), TileShape(query=64, key=64))


def test_programs_give_every_option_that_is_explained_by_a_name_that_types_know() -> None:
    parts = {name: (field.description, *field.metadata) for name, field, _ in PlanOptions.declared()}
    explained = {name for name, own in parts.items() if own[0] or any(hasattr(part, "help") for part in own)}
    assert explained <= {*PlanArguments.__annotations__} <= {*PlanOptions.model_fields}


def test_the_tasks_are_those_there_are() -> None:
    assert tuple(KNOWN_TASKS) == TASKS


def test_densities_fall_with_length_through_the_given_points() -> None:
    lengths = [512 << n for n in range(14)]
    densities = [density_for(length) for length in lengths]
    assert densities == sorted(densities, reverse=True)
    assert density_for(4096) <= 0.45
    assert density_for(16384) <= 0.30
    assert density_for(32768) <= 0.22


@pytest.mark.parametrize(
    ("context", "device", "lengths"),
    [
        (1000, "cpu", (1000,)),
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
    assert settle(PlanOptions(), context, device).lengths == lengths


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
    assert settle(PlanOptions(lengths=lengths), context, "cpu").lengths == lengths


def test_densities_pair_with_lengths_in_the_order_given() -> None:
    settled = settle(PlanOptions(lengths=(8192, 4096), target_density=(0.2, 0.4)), 8192, "cpu")
    assert settled.lengths == (4096, 8192)
    assert settled.target_density == (0.4, 0.2)
    with pytest.raises(UsageError, match="found 3"):
        settle(PlanOptions(lengths=(8192, 4096), target_density=(0.2, 0.4, 0.1)), 8192, "cpu")
    assert settle(PlanOptions(target_density=(0.4, 0.3)), 32768, "cpu").target_density == (0.4, 0.3)


def test_the_published_preset_takes_one_key_value_sample_and_64_tiles() -> None:
    settled = settle(PlanOptions(preset="minference", lengths=(32768,)), 32768, "cuda")
    assert settled.tasks == ("kv_retrieval",)
    assert settled.calibration_samples == 1
    assert settled.tile == TileShape(query=64, key=64)


def test_long_prompts_are_scored_on_as_many_rows_as_shorter_ones_have() -> None:
    asked = PlanOptions(lengths=(4096, 32768, 131072))
    strides = {
        device: [settle(asked, 131072, device).row_stride_at(length) for length in asked.lengths]
        for device in ("cuda", "cpu")
    }
    assert strides == {"cuda": [1, 1, 4], "cpu": [4, 4, 4]}
    assert settle(asked.but(row_stride=2), 131072, "cuda").row_stride_at(131072) == 2
    preset = PlanOptions(preset="minference", lengths=(131072,))
    assert settle(preset, 131072, "cuda").row_stride_at(131072) == 1


@pytest.mark.parametrize(
    ("changes", "device", "counts"),
    [
        ({}, "cuda", [8, 5]),
        ({}, "cpu", [3, 3]),
        ({"calibration_samples": 7}, "cuda", [7, 7]),
        ({"prompts": ("a",) * 9}, "cuda", [9, 9]),
        ({"prompts": ("a",) * 9, "calibration_samples": 4}, "cpu", [4, 4]),
        ({"preset": "minference"}, "cuda", [1, 1]),
        ({"tasks": ("kv_retrieval", "perplexity")}, "cuda", [2, 2]),
        ({"tasks": ("kv_retrieval",)}, "cpu", [1, 1]),
    ],
)
def test_long_prompts_are_fewer_unless_a_number_is_asked_for(changes, device, counts) -> None:
    settled = settle(PlanOptions(lengths=(32768, 131072), **changes), 131072, device)
    assert [settled.samples_at(length) for length in settled.lengths] == counts


@pytest.mark.parametrize("tile", [64, 128])
def test_the_ladder_of_a_length_leaves_room_for_the_tiles_that_every_pattern_computes(tile: int) -> None:
    shape = TileShape(query=tile, key=tile)
    lengths = (256, 384, 512, 640, 1024, 4096)
    options = settle(PlanOptions(lengths=lengths, tile=shape), 8192, "cpu")
    for length in lengths:
        densities = [aim.density for aim in aims(options, length)]
        least = min(mandatory_density(length, shape, family) for family in options.families)
        assert least <= max(densities) + 1e-4 <= 1.0001
    assert 0.4 * density_for(4096) == pytest.approx(min(densities), abs=1e-4)
