"""eval --suite: tables of RULER's tasks, dense beside plans, in a file that goes on over several runs."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from sparsekv.bench import ruler_suite
from sparsekv.bench import suite as suites
from sparsekv.bench.suite import SuiteCell, SuiteRun
from sparsekv.planner.records import RunFile
from sparsekv.planner.tasks.retrieval import NiahMultivalue
from sparsekv.plans.files import load_plan, write_plan

TASKS = ("niah_single_1", "niah_multivalue", "fwe")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks, with room for their answers and no more."""
    some = MappingProxyType({name: replace(ruler_suite.RULER_SUITE[name], tokens=1) for name in TASKS})
    monkeypatch.setattr(ruler_suite, "SUITES", {"ruler": some})
    monkeypatch.setattr(suites, "SUITES", {"ruler": some})


def cells(file: Path) -> list[SuiteCell]:
    return [*RunFile.read(SuiteRun, file).all(SuiteCell).values()]


CALL = ("--suite", "ruler", "--lengths", "1k,768", "--samples", 2)


def test_the_table_has_methods_by_length_and_then_tasks_the_worst_first(sparsekv, folder, tmp_path, few, monkeypatch):
    lost = {"niah_single_1": 0.25, "niah_multivalue": 1.0, "fwe": 0.0}  # of a sample, by the plan

    def cell(run, method, plan):
        own = 1.0 if plan is None else 1.0 - lost[run.task]
        scores = {"recall": (own, 1.0), "exact": (1.0, 0.0), "prefill_density": 0.5, "decode_share": 1.0}
        return suites.SuiteCell(method=method, task=run.task, length=run.length, device="cpu", **scores)

    monkeypatch.setattr(suites._Run, "cell", cell)
    done = sparsekv("eval", folder, *CALL)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["task", "length", "score", "dense", "plan", "difference", "95%", "tiles", "tokens"]
    assert [line[:6] for line in lines[1:4]] == [
        ["all", at, "recall", "100.0", "79.2", "-20.8"] for at in ("768", "1k", "all")
    ]
    assert lines[1][-2:] == ["0.500", "1.000"]
    assert lines[4][:6] == ["all", "768", "exact", "50.0", "50.0", "+0.0"]
    order = [line[0] for line in lines if line and line[0] in TASKS]
    assert order == [task for task in ("niah_multivalue", "niah_single_1", "fwe") for _ in range(2)]
    worst = next(line for line in lines if line and line[0] == "niah_multivalue")
    assert worst[1:6] == ["768", "recall", "100.0", "50.0", "-50.0"]
    assert max(map(len, done.out.splitlines()[:13])) <= 100
    for word in ("Python's standard library", "absent: qa_1, qa_2", "2 samples of each"):
        assert word in done.out


def test_results_are_printed_as_json_and_kept_in_a_file_that_is_not_measured_again(
    sparsekv, folder, tmp_path, few, monkeypatch
):
    file = tmp_path / "ruler.json"
    done = sparsekv("eval", folder, *CALL, "-o", file, "--json")
    assert done.code == 0, done.err
    data = done.data
    assert [method["method"] for method in data["methods"]] == ["dense", "plan"]
    assert data["methods"][0]["recall"].keys() == {"768", "1024", "mean"}
    assert {row["task"] for row in data["tasks"]} == set(TASKS)
    low, high = data["differences"]["plan"]["recall"]["interval"]
    assert low < data["differences"]["plan"]["recall"]["difference"] < high
    assert data["methods"][1]["prefill_density"]["1024"] < 1.0 == data["methods"][0]["prefill_density"]["1024"]
    assert data["haystacks"]["niah_multivalue"].startswith("source files of Python")
    assert (data["path"], data["absent"]) == (str(file), ["qa_1", "qa_2"])
    assert len(cells(file)) == 2 * len(TASKS) * 2
    before = file.read_bytes()
    monkeypatch.setattr(suites, "generated", lambda *_: pytest.fail("it ran again"))
    again = sparsekv("eval", folder, *CALL, "-o", file, "--json")
    assert again.data == data
    assert file.read_bytes() == before


def test_a_run_that_was_interrupted_goes_on(sparsekv, folder, tmp_path, few, ctrl_c_in):
    file = tmp_path / "ruler.json"
    call = ("eval", folder, "--suite", "ruler", "--length", "768", "--samples", 1, "-o", file)
    with ctrl_c_in("evaluate", steps=3):
        stopped = sparsekv(*call)
    assert stopped.code == 130
    assert f"{file}; the same command goes on" in stopped.err
    kept = cells(file)
    assert [(cell.task, cell.method) for cell in kept] == [(TASKS[0], "dense"), (TASKS[0], "plan")]
    assert sparsekv(*call).code == 0
    whole = cells(file)
    assert whole[:2] == kept
    assert len(whole) == 6


def test_without_lengths_a_suite_runs_at_two_inside_each_bucket_of_the_plan(sparsekv, copy, few, monkeypatch) -> None:
    plan = load_plan(copy / "sparsekv.yaml")
    buckets = tuple(plan.prefill.lengths[0].model_copy(update={"up_to": end}) for end in (700, 1024, 2048, None))
    prefill = plan.prefill.model_copy(update={"lengths": buckets})
    write_plan(plan.model_copy(update={"prefill": prefill, "decode": None, "cost": None}), copy / "sparsekv.yaml")
    scores = {"recall": (1.0,), "exact": (1.0,), "prefill_density": 0.5}
    monkeypatch.setattr(
        suites._Run,
        "cell",
        lambda run, method, plan: SuiteCell(method=method, device="cpu", task=run.task, length=run.length, **scores),
    )
    done = sparsekv("eval", copy, "--suite", "ruler", "--samples", 1, "--json")
    assert done.code == 0, done.err
    assert done.data["lengths"] == [490, 700, 862, 1024, 1536, 2048]


def test_the_long_suite_scores_the_share_of_numbers_and_the_last_one(sparsekv, folder, tmp_path, monkeypatch) -> None:
    table = replace(ruler_suite.SUITES["long"]["table"], task=NiahMultivalue("table", values=3), tokens=1)
    for module in (suites, ruler_suite):
        monkeypatch.setattr(module, "SUITES", {"ruler": {}, "long": {"table": table}})
    answers = []
    drawn = suites.SuiteSamples.drawn
    monkeypatch.setattr(
        suites.SuiteSamples,
        "drawn",
        lambda *given: (answers.append(sample.answer) or sample for sample in drawn(*given)),
    )
    monkeypatch.setattr(suites, "generated", lambda *_: ["0, 0," + answers[-1].split(",")[-1] + ", and on"])
    file = tmp_path / "long.jsonl"
    done = sparsekv("eval", folder, "--suite", "long", "--length", "768", "--samples", 1, "-o", file)
    assert done.code == 0, done.err
    assert "the last of the numbers is right" in done.out
    assert "qa_1" not in done.out
    for cell in cells(file):
        assert (cell.task, cell.exact) == ("table", (1.0,))
        assert cell.recall[0] == pytest.approx(1 / 3)
