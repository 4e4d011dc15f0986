"""Runs of RULER's tasks: what is generated, what it scores, and what a file of an earlier run saves."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from task_tokenizers import REFERENCE_MODEL, kit_of
from tiny_models import random_tokens, tiny_model, tiny_tokenizer
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.bench import suite as suites
from sparsekv.bench.intervals import score_interval
from sparsekv.bench.ruler_suite import RULER_SUITE
from sparsekv.bench.suite import (
    SuiteCell,
    SuiteRun,
    SuiteSamples,
    SuiteTable,
    check_continued,
    generated,
    run_suite,
)
from sparsekv.bench.text_runs import until_end
from sparsekv.planner.evaluation import PlanMode, predictions
from sparsekv.planner.records import RunFile
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.errors import GateError, PlanError, UsageError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import describe_config

DIGEST = "sha256:" + "0" * 64
SETTINGS = SuiteRun(
    model="some/model",
    architecture=DIGEST,
    dtype="float32",
    seed=0,
    samples=2,
    phase="both",
    backend="auto",
    versions={},
)


def file_of(*cells: SuiteCell, path: Path | None = None) -> RunFile[SuiteRun]:
    file = RunFile(SETTINGS, path)
    file.add(*cells)
    return file


def cell(method: str, task: str = "vt", length: int = 1024, recall: tuple[float, ...] = (1.0, 0.5)) -> SuiteCell:
    named = {"method": method, "task": task, "length": length, "device": "cpu"}
    return SuiteCell(**named, recall=recall, exact=(1.0, 0.0), prefill_density=1.0, decode_share=1.0)


@pytest.fixture(scope="module")
def retriever() -> LoadedModel:
    return load_model(ModelSource(str(REFERENCE_MODEL)), device="cpu", dtype="float32")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, with room for their answers and little more."""
    names = ("niah_single_1", "fwe")
    few = {name: replace(RULER_SUITE[name], tokens=16) for name in names}
    monkeypatch.setattr(suites, "SUITES", {"ruler": few})


ASKED = SuiteSamples((768,), samples=2)


def test_a_plan_that_sees_too_little_loses_and_says_what_it_computed(retriever, few) -> None:
    model = retriever.model
    narrow = every_head(model, AShape(sink=tokens(64), window=tokens(64)))
    plan = plan_for(model, narrow, decode_plan(segment(0, range(1, model.config.num_hidden_layers), 16)))
    run_suite(retriever, {"plan": PlanMode(plan)}, ASKED, file := file_of(), kit=kit_of(retriever.tokenizer))
    pair = SuiteTable(file, ("plan",), (768,)).paired("plan", "recall", ("niah_single_1",), (768,))
    assert (pair.dense, pair.own, pair.difference) == (1.0, 0.0, -1.0)
    assert pair.interval[0] == -1.0 < pair.interval[1] < 0.0
    assert file.all(SuiteCell)["plan", "niah_single_1", 768].prefill_density < 0.5
    assert file.all(SuiteCell)["dense", "niah_single_1", 768].prefill_density == 1.0


def test_samples_that_were_not_run_sparse_are_refused(retriever, few, monkeypatch) -> None:
    plan = plan_for(retriever.model, every_head(retriever.model, AShape(sink=tokens(64), window=tokens(64))))
    monkeypatch.setattr(predictions, "apply", lambda *args, **named: apply(*args, **named | {"sparse": "never"}))
    with pytest.raises(GateError, match=r"expected prefill of .* to be sparse"):
        run_suite(retriever, {"plan": PlanMode(plan)}, ASKED, file_of(), kit=kit_of(retriever.tokenizer))


def test_samples_that_run_together_score_what_each_does_by_itself(retriever, few, monkeypatch) -> None:
    monkeypatch.setattr(suites, "SUITES", {"ruler": {"niah_single_1": suites.SUITES["ruler"]["niah_single_1"]}})
    model = retriever.model
    narrow = every_head(model, AShape(sink=tokens(64), window=tokens(256)))
    modes = {"plan": PlanMode(plan_for(model, narrow, decode_plan(segment(0, range(1, 4), 64))))}
    found = []
    for size in (1, 2):
        asked = replace(ASKED, samples=3, batch=size)
        run_suite(retriever, modes, asked, file := file_of(), kit=kit_of(retriever.tokenizer))
        found.append([(one.recall, one.exact) for one in file.all(SuiteCell).values()])
    assert found[0] == found[1]
    assert len({recall for recall, _ in found[0]}) > 1


# --- generation -------------------------------------------------------------------------------------------------------


def loaded_of(**options: object) -> LoadedModel:
    model = tiny_model(**options)
    return LoadedModel(model, tiny_tokenizer(), describe_config(model.config, "tests/tiny"))


@pytest.mark.parametrize("chunk", [None, 32])
def test_text_is_what_transformers_generates_greedily(chunk) -> None:
    loaded, ids_BS = loaded_of(), random_tokens(3, 90)
    plain = loaded.model.generate(
        ids_BS, attention_mask=torch.ones_like(ids_BS), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    expected = [loaded.tokenizer.decode(row[90:], skip_special_tokens=True) for row in plain]
    assert generated(loaded, ids_BS, 12, chunk) == expected
    assert len(set(expected)) == 3


def test_each_row_ends_at_its_end_token() -> None:
    loaded, ids_BS = loaded_of(), random_tokens(3, 90)
    texts = generated(loaded, ids_BS, 12)
    end = texts[1][5]
    loaded.model.generation_config.eos_token_id = loaded.tokenizer.convert_tokens_to_ids(end)
    cut = [text.partition(end) for text in texts]
    assert generated(loaded, ids_BS, 12) == [head + found for head, found, _ in cut]
    assert any(rest for *_, rest in cut)


# --- files and intervals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "plan", "told"),
    [
        ({"samples": 3}, DIGEST, "samples: 2 there, 3 here"),
        ({"seed": 0, "prefill_chunk": 64}, DIGEST, "prefill chunk: none there, 64 here"),
        ({}, "sha256:" + "1" * 64, "plan of plan: sha256:0"),
    ],
)
def test_a_run_that_differs_is_refused_by_what_differs(tmp_path, known, plan, told) -> None:
    file = file_of(cell("plan").model_copy(update={"plan": DIGEST}), path=tmp_path / "a.json")
    check_continued(file, {"samples": 2}, {"plan": DIGEST, "half": plan})
    with pytest.raises(UsageError) as error:
        check_continued(file, known, {"plan": plan})
    assert told in str(error.value)
    assert str(error.value).count(" there") == 1


@pytest.mark.parametrize(
    "changes", [{"recall": ()}, {"exact": ()}, {"recall": (1.0,), "exact": (1.0,)}, {"task": "no such task"}]
)
def test_a_cell_that_no_such_run_writes_is_refused_by_its_line(tmp_path: Path, changes: dict[str, object]) -> None:
    file_of(cell("dense"), cell("plan").model_copy(update=changes), path=tmp_path / "a")
    with pytest.raises(PlanError, match="line 3"):
        RunFile.read(SuiteRun, tmp_path / "a")


def test_means_and_differences_are_of_the_same_samples() -> None:
    cells = [cell("dense"), cell("plan", recall=(0.5, 0.5)), cell("dense", "cwe"), cell("plan", "cwe")]
    table = SuiteTable(file_of(*cells), ("plan",), (1024,))
    pair = table.paired("plan", "recall", ("vt", "cwe"), (1024,))
    assert (pair.dense, pair.own, pair.difference) == (0.75, 0.625, -0.125)
    assert table.scores("plan", "recall", ("vt", "cwe"), (1024,)) == [0.5, 0.5, 1.0, 0.5]


def test_the_interval_of_scores_covers_what_is_true() -> None:
    """In 95 of 100 draws or more, of right and wrong as of shares, near the ends and in the middle."""
    rng = np.random.default_rng(0)
    for parts, share, lost, won in product((1, 4), (0.5, 0.95), (0.0, 0.05, 0.3), (0.0, 0.05)):
        covered, draws = 0, 300
        truth = (1 - share) * won - share * lost
        for _ in range(draws):
            dense = rng.random((20, parts)) < share
            sparse = np.where(dense, rng.random(dense.shape) >= lost, rng.random(dense.shape) < won)
            low, high = score_interval(dense.mean(1), sparse.mean(1))
            covered += low <= truth <= high
        assert covered / draws >= 0.93


def test_what_follows_an_end_token_does_not_count() -> None:
    ids = torch.tensor([[5, 9, 5, 9], [5, 6, 7, 8]])
    for ends, counts in ((9, [2, 4]), ([6, 9], [2, 2]), (None, [4, 4])):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
        assert until_end(model, ids).tolist() == [[place < count for place in range(4)] for count in counts]
