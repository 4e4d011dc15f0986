"""Profiling a model: what is measured, the same bytes each time, and going on after an interruption."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planner_models import loaded_tiny, quick_options
from tiny_models import tiny_model, tiny_tokenizer

from sparsekv.planner.cost.predict import ScoreTables
from sparsekv.planner.data_files import write_measured
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile import profiler
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.plans.errors import PlanWarning, PromptError, UsageError
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = quick_options(samples=2, tasks=("kv_retrieval", "perplexity")).settled(4096, "cpu")


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel) -> Profile:
    return profile(loaded, OPTIONS)


def interrupted_after(layers: int) -> Callable[..., object]:
    """A scorer that is interrupted with Ctrl-C after so many layers."""
    done = iter(range(layers))

    def score(*arguments: object) -> object:
        if next(done, None) is None:
            raise KeyboardInterrupt
        return observe_score(*arguments)

    return score


observe_score = profiler.score_candidates


def test_every_layer_head_and_candidate_is_measured(whole: Profile) -> None:
    (entry,) = whole.lengths
    assert [scores.layer for scores in entry.layers] == [0, 1, 2]
    assert len(entry.prompt_tokens) == 2
    tables = ScoreTables.of(entry)
    assert tables.error_LCH.shape == (3, len(entry.candidates), 4)
    assert np.all(tables.density_LCH > 0)
    assert np.all(tables.density_LCH <= 1.0 + 1e-6)
    mass = np.array([scores.mass for scores in entry.layers])
    assert np.all((mass > 0) & (mass <= 1.0 + 1e-6))


def test_more_of_a_ray_loses_less_on_the_whole(whole: Profile) -> None:
    (entry,) = whole.lengths
    error = ScoreTables.of(entry).error_LCH
    densities = sorted({candidate.density for candidate in entry.candidates})
    low, high = (
        error[:, [n for n, candidate in enumerate(entry.candidates) if candidate.density == density]].mean()
        for density in (densities[0], densities[-1])
    )
    assert high < low


def test_a_layer_keeps_its_own_best_tokens_better_than_nothing(whole: Profile) -> None:
    reuse = whole.lengths[0].reuse
    assert reuse is not None
    own = [reuse.kept[0][-1][j][j] for j in range(3)]
    assert all(0.0 < value <= 1.0 for value in own)
    assert all(value > 0 for value in reuse.importance)


def test_two_profiles_with_one_seed_are_the_same_bytes(loaded: LoadedModel, whole: Profile, tmp_path: Path) -> None:
    for name, found in (("a", whole), ("b", profile(loaded, OPTIONS))):
        write_measured(found, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_seed_draws_other_prompts(loaded: LoadedModel, whole: Profile) -> None:
    other = profile(loaded, quick_options(seed=5, samples=1).settled(4096, "cpu"))
    assert other.calibration != whole.calibration


@pytest.mark.parametrize("layers", [0, 1, 3, 4])
def test_an_interrupted_profile_goes_on_to_the_same_result(
    loaded: LoadedModel, whole: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    partial = tmp_path / "profile.partial"
    monkeypatch.setattr(profiler, "score_candidates", interrupted_after(layers))
    with pytest.raises(KeyboardInterrupt):
        profile(loaded, OPTIONS, resume=partial)
    assert len(partial.read_text().splitlines()) == 1 + layers
    left = iter(range(6 - layers))
    monkeypatch.setattr(profiler, "score_candidates", lambda *a: (next(left), observe_score(*a))[1])
    assert profile(loaded, OPTIONS, resume=partial) == whole
    assert next(left, None) is None  # no layer was measured twice
    assert list(tmp_path.iterdir()) == [partial]


def test_a_line_cut_short_is_measured_again(
    loaded: LoadedModel, whole: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "profile.partial"
    profile(loaded, OPTIONS, resume=partial)
    partial.write_bytes(partial.read_bytes()[:-100])
    count: list[int] = []
    monkeypatch.setattr(profiler, "score_candidates", lambda *a: (count.append(1), observe_score(*a))[1])
    assert profile(loaded, OPTIONS, resume=partial) == whole
    assert len(count) == 1


@pytest.mark.parametrize("change", [{"seed": 7}, {"target_density": (0.6,)}, {"phases": ("prefill",)}], ids=str)
def test_what_another_run_left_is_not_taken_up(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict
) -> None:
    partial = tmp_path / "profile.partial"
    profile(loaded, quick_options().settled(4096, "cpu"), resume=partial)
    count: list[int] = []
    monkeypatch.setattr(profiler, "score_candidates", lambda *a: (count.append(1), observe_score(*a))[1])
    profile(loaded, quick_options(**change).settled(4096, "cpu"), resume=partial)
    assert len(count) == 3


def test_the_model_is_left_as_it_was_after_an_interruption(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_tiny(seed=3)
    monkeypatch.setattr(profiler, "score_candidates", interrupted_after(1))
    with pytest.raises(KeyboardInterrupt):
        profile(model, OPTIONS)
    assert model.model.config._attn_implementation == "sdpa"
    hooks = [hook for module in model.model.modules() for hook in module._forward_pre_hooks]
    assert hooks == []


def test_one_phase_is_profiled_alone(loaded: LoadedModel) -> None:
    only = {
        phase: profile(loaded, quick_options(phases=(phase,)).settled(4096, "cpu")) for phase in ("prefill", "decode")
    }
    assert only["prefill"].lengths[0].reuse is None
    assert only["prefill"].lengths[0].layers
    assert only["decode"].lengths[0].layers == ()
    assert only["decode"].lengths[0].reuse is not None


def test_own_prompts_are_calibrated_on_and_short_ones_refused(loaded: LoadedModel) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    own = quick_options(prompts=(text, "short"), samples=3).settled(4096, "cpu")
    with pytest.warns(PlanWarning, match="1 of 2 calibration prompts are shorter than 512 tokens.*plan for 1k"):
        found = profile(loaded, own)
    assert found.lengths[0].prompt_tokens == (1024,)
    assert found.tasks == ()
    with pytest.raises(PromptError, match="at least 512 tokens to plan for 1024, found 5"):
        profile(loaded, quick_options(prompts=("short",)).settled(4096, "cpu"))


def test_a_sliding_layer_is_left_dense() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    mixed = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/mixed"))
    found = profile(mixed, quick_options().settled(4096, "cpu"))
    assert [scores.layer for scores in found.lengths[0].layers] == [1, 2]


class Counting:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total, self.done = 0.0, 0.0

    def stage(self, name: str, total: float | None = None) -> contextlib.AbstractContextManager["Counting"]:
        self.total += total or 0.0
        return contextlib.nullcontext(self)

    def advance(self, units: float = 1, note: str = "") -> None:
        self.done += units


def test_progress_reaches_its_total(loaded: LoadedModel) -> None:
    progress = Counting()
    profile(loaded, quick_options().settled(4096, "cpu"), progress)
    assert progress.done == pytest.approx(progress.total)


def test_an_unknown_task_and_one_that_does_not_fit_are_named(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="kv_retrieval"):
        profile(loaded, PlanOptions(lengths=(1024,), tasks=("chess",)).settled(4096, "cpu"))
    with pytest.raises(PromptError, match="niah_single at 64 tokens"):
        profile(loaded, PlanOptions(lengths=(64,), tasks=("niah_single",)).settled(4096, "cpu"))
