"""Profiling a model: what is measured, the same bytes each time, and going on after an interruption."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from planner_models import bare_job, quick_options
from progress import Counting, CtrlC
from tiny_models import tiny_model, tiny_tokenizer

from sparsekv.planner.options import PRESET_FAMILIES, settle
from sparsekv.planner.predict import ScoreTables
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import fitted_at_once, profile
from sparsekv.planner.profile.resume import LayerRecord, ProfileRun, records_at
from sparsekv.planner.records import RunFile
from sparsekv.plans.errors import PlanWarning, PromptError, UsageError
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = settle(
    quick_options(calibration_samples=2, tasks=("kv_retrieval", "perplexity"), families=PRESET_FAMILIES), 4096, "cpu"
)
QUICK = OPTIONS.but(families=("a_shape",))  # where every layer counts and no candidate
RANGES = 7  # of the families of OPTIONS, each at two densities


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel) -> Profile:
    return profile(bare_job(loaded, OPTIONS))


@dataclass(frozen=True)
class Finished:
    """A profile that was never interrupted, and its records."""

    profile: Profile
    records: str


@pytest.fixture(scope="module")
def finished(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    partial = tmp_path_factory.mktemp("profiles") / "profile.partial"
    return Finished(profile(bare_job(loaded, QUICK), resume=partial), partial.read_text())


def test_every_layer_head_and_candidate_is_measured(whole: Profile) -> None:
    (entry,) = whole.lengths
    assert [scores.layer for scores in entry.layers] == [0, 1, 2]
    assert len(entry.prompt_tokens) == 2
    assert len(entry.candidates) == 2 * RANGES
    tables = ScoreTables.of(entry)
    assert tables.damage_LCH.shape == (3, 4, 4)  # the two densities of the two best ranges of each head
    assert np.all((tables.density_LCH > 0) & (tables.density_LCH <= 1.0 + 1e-6))
    mean, worst = (np.array([getattr(scores, name) for scores in entry.layers]) for name in ("damage", "worst"))
    assert np.all((mean > 0) & (worst >= mean) & (worst <= 2 * mean * (1 + 1e-5)))  # of two prompts


def test_each_head_has_all_densities_of_its_ranges_and_the_patterns_of_their_families(whole: Profile) -> None:
    (entry,) = whole.lengths
    chosen = set()
    for scores in entry.layers:
        for head in range(4):
            found = [entry.candidates[row[head]] for row in scores.candidates]
            for ray in (rays := {candidate.range for candidate in found}):
                assert {one.density for one in found if one.range == ray} == set(entry.densities)
            assert len(rays) == 2
            chosen.add(frozenset(rays))
            patterns = [entry.patterns[row[head]].pattern for row in scores.patterns]
            assert patterns == [candidate.family for candidate in found]
    assert len(chosen) > 1


@pytest.mark.parametrize(("length", "rows"), [(1 << 15, 4), (1 << 17, 2), (1 << 18, 1), (1 << 20, 1)])
def test_long_prompts_have_fewer_candidates_fitted_at_once(length: int, rows: int) -> None:
    assert fitted_at_once(torch.empty(1, 32, length, 128, dtype=torch.bfloat16, device="meta")) == rows


@pytest.mark.parametrize("layers", [0, 3, 4])
def test_an_interrupted_profile_goes_on_to_the_same_result(
    loaded: LoadedModel, finished: Finished, tmp_path: Path, layers: int
) -> None:
    partial = tmp_path / "profile.partial"
    with pytest.raises(KeyboardInterrupt):
        profile(bare_job(loaded, QUICK), interrupted := CtrlC("profile", layers), resume=partial)
    assert interrupted.said == []
    assert partial.exists() == bool(layers)
    assert not layers or len(partial.read_text().splitlines()) == 1 + layers
    resumed = Counting()
    assert profile(bare_job(loaded, QUICK), resumed, resume=partial) == finished.profile
    assert [f"{100 * layers / 6:.3g}%" in line for line in resumed.said] == [True] * bool(layers)
    assert resumed.done == pytest.approx(resumed.total)
    assert resumed.total == pytest.approx(interrupted.total - interrupted.done)
    assert partial.read_text() == finished.records
    assert list(tmp_path.iterdir()) == [partial]


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    loaded: LoadedModel, finished: Finished, tmp_path: Path
) -> None:
    partial = tmp_path / "profile.partial"
    (tmp_path / "whole").write_text(finished.records)
    whole = RunFile.read(ProfileRun, tmp_path / "whole")
    first, *others = whole.all(LayerRecord).values()
    RunFile(whole.settings, partial).add(first.model_copy(update={"importance": 0.125}), *others)
    before = partial.read_text().splitlines(keepends=True)
    partial.write_text("".join(before)[:-100])
    found = profile(bare_job(loaded, QUICK), resume=partial).lengths[0].reuse.importance
    expected = finished.profile.lengths[0].reuse.importance
    assert found[2] != expected[2]  # the last layer is measured first
    assert found[:2] == expected[:2]
    assert partial.read_text().splitlines(keepends=True) == before


@pytest.mark.parametrize("change", [{"seed": 7}, {"target_density": (0.6,)}, {"phases": ("prefill",)}], ids=str)
def test_what_another_run_left_is_not_taken_up(
    loaded: LoadedModel, finished: Finished, tmp_path: Path, change: dict
) -> None:
    partial = tmp_path / "profile.partial"
    partial.write_text(finished.records)
    with pytest.raises(UsageError, match="found those of another"):
        profile(bare_job(loaded, QUICK.but(**change)), resume=partial)
    assert partial.read_text() == finished.records


def test_own_prompts_are_calibrated_on_and_short_ones_refused(loaded: LoadedModel) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    own = settle(quick_options(prompts=(text, "short"), calibration_samples=3), 4096, "cpu")
    with pytest.warns(PlanWarning, match="1 of 2"):
        found = profile(bare_job(loaded, own))
    assert found.lengths[0].prompt_tokens == (1024,)
    assert found.tasks == ()
    with pytest.raises(PromptError, match="found 5"):
        profile(bare_job(loaded, settle(quick_options(prompts=("short",)), 4096, "cpu")))


def test_a_sliding_layer_is_left_dense() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    mixed = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/mixed"))
    found = profile(bare_job(mixed, QUICK))
    assert [scores.layer for scores in found.lengths[0].layers] == [1, 2]


# --- files of interrupted runs ----------------------------------------------------------------------------------------


def record(layer: int) -> LayerRecord:
    return LayerRecord(length=64, sample=0, layer=layer)


def test_a_run_with_other_options_loses_no_partial_profile(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml.profile.partial"
    records_at(path, {"seed": 0}).add(record(3))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="remove the file"):
        records_at(path, {"seed": 1})
    assert path.read_bytes() == before


def test_a_partial_profile_without_records_is_not_left_behind(tmp_path: Path) -> None:
    records_at(tmp_path / "partial", {"seed": 0})
    assert list(tmp_path.iterdir()) == []
