"""The table of quality: what methods are held to, what is recorded once, and what eviction keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planner_profiles import made_up_profile, made_up_reuse
from task_tokenizers import REFERENCE_MODEL
from tiny_plans import decode_plan, drops, every_head, plan_for, segment

from sparsekv.bench import quality_methods, quality_table, ruler_suite
from sparsekv.bench.eviction_rules import Evicted, cached_share, observed_prompt
from sparsekv.bench.quality_file import (
    QualityFile,
    QualityRun,
    RunNote,
    markdown,
)
from sparsekv.bench.quality_methods import Inputs
from sparsekv.bench.quality_table import Table, main
from sparsekv.bench.suite import SuiteSamples
from sparsekv.planner.profile.profile_data import LengthProfile
from sparsekv.planner.records import only_run
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.errors import ConflictError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import VerticalSlash, tokens
from sparsekv.runtime.hf.load import LoadedModel, load_model

LENGTH = 1024
PREFILL_PEERS = ("MInference", "XAttention", "FlexPrefill", "FlashPrefill")
DECODE_PEERS = ("Quest", "OmniKV", "Kascade")


@pytest.fixture(scope="module")
def retriever() -> LoadedModel:
    return load_model(ModelSource(str(REFERENCE_MODEL)), device="cpu", dtype="float32")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, short_filler: None) -> None:
    names = ("niah_single_1", "fwe")
    tasks = {name: replace(ruler_suite.RULER_SUITE[name], tokens=16) for name in names}
    monkeypatch.setattr(ruler_suite, "RULER_SUITE", tasks)
    monkeypatch.setattr(ruler_suite, "SUITES", {"ruler": tasks})
    monkeypatch.setattr("sparsekv.bench.suite.SUITES", {"ruler": tasks})
    monkeypatch.setattr(quality_methods, "_HALVINGS", 2)
    monkeypatch.setattr(quality_table, "AGAIN", 2)


@pytest.fixture(scope="module")
def inputs(retriever: LoadedModel) -> Inputs:
    return inputs_of(retriever)


def inputs_of(retriever: LoadedModel, columns: int = 64, chosen: int = 200) -> Inputs:
    model = retriever.model
    lines = VerticalSlash(vertical=tokens(columns), slash=tokens(96), last_q=64, max_tiles=tokens(8 * columns))
    decode = decode_plan(segment(0, tuple(range(1, 7)), chosen), segment(7, tuple(range(8, 12)), chosen))
    own = plan_for(model, every_head(model, lines), decode)
    evicting = plan_for(model, None, None, drops(tuple(range(12)), 400, observe=64))
    reuse = made_up_reuse(np.random.default_rng(0).uniform(0.5, 1.0, (12, 12)))
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=reuse)
    return Inputs(retriever, own, {"0.4": evicting}, made_up_profile(entry, model=retriever.info))


RUN = RunNote(command="python", commit="0", device="cpu", began="2026-01-01", seconds=1.0)


def empty(inputs: Inputs, path: Path | None = None, **changes: int) -> QualityFile:
    architecture = inputs.loaded.info.fingerprint.architecture
    run = QualityRun(
        model="tiny", architecture=architecture, dtype="float32", seed=0, samples=1, backend="auto", versions={}
    )
    return QualityFile(run.model_copy(update=changes), path)


def run_on(inputs: Inputs, found: QualityFile, **options: float) -> tuple[bool, int]:
    """Whether all is there, and how many batches were added."""
    notes: list[None] = []
    table = Table(
        inputs,
        SuiteSamples((LENGTH,), samples=1),
        found,
        lambda: notes.append(None) or RUN,
        lambda line: None,
        **options,
    )
    return table.run([LENGTH]), len(notes)


def test_every_method_runs_once_at_what_it_is_held_to_and_a_stopped_run_goes_on(inputs: Inputs, few: None) -> None:
    found = empty(inputs)
    assert run_on(inputs, found, until=0.0) == (False, 0)
    assert run_on(inputs, found)[0]
    evicting = {"plan, evicting to 0.4", "SnapKV, 0.4", "expected attention, 0.4"}
    methods = {"dense", *inputs.own, *PREFILL_PEERS, *DECODE_PEERS, *evicting}
    assert {method for method, _, _ in found.by_key} == methods
    for task in ruler_suite.RULER_SUITE:
        own = {name: found.by_key[name, task, LENGTH] for name in methods}
        for name in PREFILL_PEERS:
            assert own[name].prefill_density == pytest.approx(own["plan, prefill"].prefill_density, abs=0.2), name
            assert own[name].decode_share == 1.0
        for name in evicting:
            assert own[name].cached == pytest.approx(own["plan, evicting to 0.4"].cached, abs=0.02)
            assert own[name].prefill_seconds is None, "masks have no time"
        if own["dense"].steps:
            assert own["Quest"].decode_share == pytest.approx(own["plan, decode"].decode_share, abs=0.05)
    dense = found.by_key["dense", "niah_single_1", LENGTH]
    assert dense.recall[0] == 1.0
    assert set(dense.kl) == {0.0}
    text = "\n".join(markdown(found))
    assert "| 1k | FlexPrefill (gamma" in text
    assert "our divergence is" in text
    assert run_on(inputs, found) == (True, 0), "what is there is not run again"
    lost = [key for key in found.by_key if key[0] != "dense" and found.loss(*key) >= 0.1]
    assert lost, "some method at a share of 0.4 loses"
    assert all(found.samples(key) == 2 for key in lost), "a task that lost has more samples"


@pytest.mark.gpu
def test_all_methods_run_on_a_gpu_and_what_is_shared_and_captured_loses_nothing(few: None) -> None:
    loaded = load_model(ModelSource(str(REFERENCE_MODEL)), device="cuda", dtype="bfloat16")
    inputs = inputs_of(loaded, columns=450, chosen=860)
    found = empty(inputs)
    assert run_on(inputs, found)[0]
    for name in ("dense", "plan", "plan, prefill", "plan, decode"):
        cell = found.by_key[name, "niah_single_1", LENGTH]
        assert cell.recall[0] == 1.0, name
        assert cell.steps > 0, name
        assert cell.step_seconds, name
        assert max(cell.kl) < 0.1, name
    cell = found.by_key["plan", "niah_single_1", LENGTH]
    assert cell.prefill_density < 0.95
    assert cell.decode_share < 0.9


def test_the_command_writes_a_file_that_it_goes_on_with_and_prints(
    inputs: Inputs, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(inputs.plan.model_copy(update={"prefill": None}), tmp_path / "plan.yaml")
    command = ["tiny-retriever", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "q.json")]
    command += ["--lengths", "1k", "--samples", "1", "--device", "cpu", "--commit", "abc"]
    assert main([*command, "--max-seconds", "0"]) == 1
    assert main(command) == 0
    printed, told = capsys.readouterr()
    assert told.count("the same command goes on from") == 1
    assert "| 1k | plan |" in printed
    assert "commit abc" in printed
    assert len(QualityFile.read(QualityRun, tmp_path / "q.json").all(RunNote)) == 1
    assert main(["--show", str(tmp_path / "q.json")]) == 0
    assert capsys.readouterr().out in printed
    with pytest.raises(UsageError, match="samples: 1 there, 2 here"):
        main([*command, "--samples", "2"])
    with only_run(tmp_path / "q.json"), pytest.raises(ConflictError, match="under way"):
        main(command)


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_expected_attention_unrotates_queries_and_keeps_what_future_ones_attend_to(retriever: LoadedModel) -> None:
    """Beside the definition: means of queries as they were projected, turned by every future position, one by one."""
    model = retriever.model
    ids_BS = torch.randint(0, 500, (2, 192), generator=torch.Generator().manual_seed(0))
    projected: list[torch.Tensor] = []
    layer = model.model.layers[1].self_attn
    hook = layer.q_proj.register_forward_hook(lambda module, given, out: projected.append(out))
    with torch.no_grad(), observed_prompt(model, ids_BS, ("expected_attention",)) as (seen, _):
        hook.remove()
        q_BHSD = projected[0].unflatten(-1, (4, 64)).transpose(1, 2)
        statistics = seen.seen.statistics[1]
        torch.testing.assert_close(statistics.mean_BHD, q_BHSD[:, :, 4:].mean(2), atol=1e-4, rtol=1e-4)
        k_BGSD, v_BGSD = seen.keys_values(1)
        cos_FD, sin_FD = (part[0] for part in model.model.rotary_emb(q_BHSD, torch.arange(192, 704)[None]))

        def turned(x_D: torch.Tensor) -> torch.Tensor:
            first, second = x_D.chunk(2)
            return (x_D * cos_FD + torch.cat((-second, first)) * sin_FD).mean(0)

        centred_SD = q_BHSD[1, 2, 4:] - q_BHSD[1, 2, 4:].mean(0)
        mean_D = turned(q_BHSD[1, 2, 4:].mean(0))
        spread_SD = torch.stack([turned(x_D) for x_D in centred_SD])
        k_SD = k_BGSD[1, 1, 4:]
        logits_S = k_SD @ mean_D / 8 + ((k_SD @ spread_SD.T) ** 2).mean(1) / 128
        other_SD = torch.stack([turned(x_D) for x_D in q_BHSD[1, 3, 4:] - q_BHSD[1, 3, 4:].mean(0)])
        others_S = k_SD @ turned(q_BHSD[1, 3, 4:].mean(0)) / 8 + ((k_SD @ other_SD.T) ** 2).mean(1) / 128
        weights_S = (logits_S.softmax(0) + others_S.softmax(0)) / 2
        expected_S = (weights_S + 0.02) * v_BGSD[1, 1, 4:].norm(dim=-1)
        torch.testing.assert_close(seen._expected(1)[1, 1, 4:], expected_S, atol=1e-4, rtol=1e-3)


def test_masks_are_attended_to_as_an_evicted_cache_is(retriever: LoadedModel) -> None:
    """What is masked has no influence: its values may be anything."""
    model = retriever.model
    ids_BS = torch.randint(0, 500, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), observed_prompt(model, ids_BS, ("snapkv",)) as (seen, steps):
        masks = seen.by_rule("snapkv", 0.5)
        assert cached_share(masks, 12) == pytest.approx(0.5, abs=0.01)
        assert all(mask_BGS[..., -64:].all() for mask_BGS in masks.values())
        steps.rule, cache = Evicted(masks), seen.prompts.cache
        one = model(input_ids=ids_BS[:, :1], past_key_values=cache).logits
        for number, layer in enumerate(cache.layers):
            layer.store.truncate((300,))
            _, v_BGSD = layer.store.tensors
            v_BGSD[:, :, :300].masked_fill_(~masks[number][..., None], 1e4)
        torch.testing.assert_close(model(input_ids=ids_BS[:, :1], past_key_values=cache).logits, one)
