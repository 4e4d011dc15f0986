"""`bench own`: figures of a plan beside dense in a file that halves share, and what people are shown of them."""

import json
import random
import re
import stat
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from tiny_plans import drops

from sparsekv.bench import own
from sparsekv.bench.harness import program
from sparsekv.bench.own_file import OwnFigure, OwnFile, OwnLength, OwnPlan, OwnRun, figures, result
from sparsekv.bench.own_page import page
from sparsekv.bench.own_picture import write_picture
from sparsekv.bench.own_vllm import OwnTurns
from sparsekv.bench.real_shares import share_at
from sparsekv.cli import bench_own
from sparsekv.cli.bench_own import OwnFlags
from sparsekv.cli.bench_own import own as command
from sparsekv.planner.options import density_for
from sparsekv.plans.errors import GateError
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.quality import Quality

QUICK = own.OwnBench(
    repeats=2, session_repeats=1, answer=4, at_once=(1, 2), turns=3, turn_tokens=(64, 128), turn_answer=8
)
ONCE = {"half": "vllm", "length": 2048, "at_once": 1, "device": "H200", "host": "vLLM 0.33.0", "way": "vLLM 0.33.0"}


@pytest.fixture
def plan(folder, tmp_path):
    """A plan that was tested, in a file."""
    tested = load_plan(folder / "sparsekv.yaml").model_copy(
        update={"quality": Quality(test="small", reason="so small")}
    )
    write_plan(tested, tmp_path / "plan.yaml")
    return tested


@pytest.fixture
def empty(plan):
    file = OwnFile(OwnRun.of(plan))
    file.add(OwnPlan.of(plan))
    return file


# --- what people are shown --------------------------------------------------------------------------------------------


def test_a_figure_counts_where_five_pairs_of_repeats_agree_more_than_they_differ(empty):
    empty.add(OwnFigure(name="first token", dense=(100.0, 104.0, 98.0) * 2, plan=(80.0, 82.0, 79.0) * 2, **ONCE))
    empty.add(OwnFigure(name="token", dense=(5.0, 4.0, 5.0) * 2, plan=(4.5, 4.8, 4.4) * 2, **ONCE))
    empty.add(OwnFigure(name="tokens/s", dense=(90.0, 91.0) * 3, plan=(80.0, 82.0) * 3, **ONCE))
    empty.add(OwnFigure(name="session", dense=(90.0,) * 4, plan=(60.0,) * 4, **ONCE))
    assert result(empty) == (
        "faster: first token at 2k in vLLM, 1 at once 1.25x; slower: tokens/s at 2k in vLLM, 1 at once 0.90x"
    )


def test_lengths_are_told_together_where_none_says_otherwise(empty):
    longer = ONCE | {"length": 8192}
    for name, plan in (("first token", 50.0), ("token", 125.0)):
        empty.add(OwnFigure(name=name, dense=(100.0,) * 5, plan=(80.0,) * 5, **ONCE))
        empty.add(OwnFigure(name=name, dense=(100.0,) * 5, plan=(plan,) * 5, **longer))
    assert result(empty) == (
        "faster: first token at 2k to 8k in vLLM, 1 at once 1.58x; slower: token at 8k in vLLM, 1 at once 0.80x"
    )


def test_noise_is_seldom_a_gain(plan):
    source, called = random.Random(0), 0
    for _ in range(200):
        file = OwnFile(OwnRun.of(plan))
        for name, many in product(("first token", "token", "tokens/s", "session"), (1, 8)):
            times = {way: [source.lognormvariate(0.0, 0.05) for _ in range(5)] for way in ("dense", "plan")}
            file.add(OwnFigure(name=name, **ONCE | {"at_once": many} | times))
        called += "faster" in result(file).replace("no figure is faster", "")
    assert called <= 20


def test_a_plan_that_gains_nothing_says_so_first_and_one_of_few_repeats_that_it_tells_none(empty):
    empty.add(OwnFigure(name="turn", turn=1, dense=(4.0,) * 5, plan=(2.0,) * 5, **ONCE))
    assert result(empty) == "nothing was measured"
    empty.add(OwnFigure(name="token", dense=(4.0,) * 4, plan=(3.0,) * 4, **ONCE))
    assert result(empty) == "tells no gain: fewer than 5 pairs of repeats"
    empty.add(OwnFigure(name="token", dense=(4.0, 4.1, 4.0) * 2, plan=(4.0,) * 6, **ONCE))
    assert result(empty).startswith("gains nothing")


def test_a_share_that_was_not_counted_is_sparse_not_whole(plan):
    (length,) = OwnPlan.of(plan.model_copy(update={"cost": None, "quality": None})).lengths
    file = OwnFile(OwnRun.of(plan))
    file.add(OwnPlan(status="unverified", verdict="none", lengths=(length,)))
    assert length.prefill is None
    assert "2k: prefill sparse, decode" in page(file)


def test_dense_is_one_way_or_the_fastest_of_those_that_ran(empty):
    empty.add(OwnFigure(name="token", dense=(4.0,), plan=(3.0,), **ONCE))
    assert "Dense is vLLM 0.33.0." in page(empty)
    facts = ONCE | {"half": "transformers", "way": "sdpa", "ways": ("sdpa", "flash")}
    empty.add(OwnFigure(name="token", dense=(4.0,), plan=(3.0,), **facts))
    assert "Dense is the fastest of sdpa, flash." in page(empty)


def test_page_and_picture_have_the_verdict_the_shares_and_failures_in_words(empty, plan, tmp_path):
    empty.add(OwnFigure(name="first token", share=0.25, dense=(100.0,) * 5, plan=(80.0,) * 5, **ONCE))
    empty.add(OwnFigure(name="token", failed="out of memory", **ONCE))
    turns = ((1, 1024, 1024), (2, 1400, 256), (3, 1700, 256))
    empty.add(OwnFigure(name="session", turn=3, dense=(90.0,) * 5, plan=(60.0,) * 5, **ONCE))
    for turn, length, new in turns:
        facts = ONCE | {"length": length, "turn": turn, "new": new}
        empty.add(OwnFigure(name="turn", dense=(30.0,), plan=(20.0 if turn < 3 else 15.0,), **facts))
    text = page(empty, "own.svg")
    for said in (
        "so small",
        "failed: out of memory",
        "| first token at 2k | 1 | 25% | 100 ms | 80 ms | 1.25x (1.25 to 1.25) |",
        "| first token, turns of 256 (2) | 1 |  | 30 ms | 17.5 ms | 1.75x (1.50 to 2.00) |",
        "![Times by length and turn, dense and by the plan](own.svg)",
        "H200; vLLM 0.33.0",
        "session of 3 turns at 2k in vLLM, 1 at once 1.50x",
        "| session of 3 turns, to 2k | 1 |",
    ):
        assert said in text, text
    write_picture(empty, tmp_path / "own.svg")
    drawn = (tmp_path / "own.svg").read_text()
    for said in ("out of memory", "so small", "first token of a turn, vLLM, 1 at once", "1.25x"):
        assert said in drawn


def test_a_report_shows_the_figures_of_its_own_plan_alone(empty, plan, sparsekv, tmp_path):
    empty.add(OwnFigure(name="first token", share=0.25, dense=(100.0,) * 5, plan=(80.0,) * 5, **ONCE))
    OwnFile(empty.settings, tmp_path / "own.json").add(*empty.all(OwnPlan).values(), *empty.all(OwnFigure).values())
    done = sparsekv("report", tmp_path / "plan.yaml", tmp_path / "own.json", "-o", tmp_path / "page.html")
    assert done.code == 0, done.err
    text = (tmp_path / "page.html").read_text()
    assert "faster: first token at 2k in vLLM, 1 at once 1.25x." in text
    assert "1.25x (1.25 to 1.25)" in text
    write_plan(plan.model_copy(update={"decode": None}), tmp_path / "other.yaml")
    done = sparsekv("report", tmp_path / "other.yaml", tmp_path / "own.json", "-o", tmp_path / "page.html")
    assert done.code == 3
    assert "expected figures of this plan" in done.err


def test_the_page_and_readme_come_of_the_files_alone(empty, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import build_own_page as tool

    measured = tool.files()
    readme = tool.headline(measured[tool.HEADLINE], measured[tool.LONGER])
    blocks = {tool.README: readme, tool.BENCHMARKS: tool.by_model(measured)}
    for shown, block in blocks.items():
        assert tool.put(shown.read_text(), block) == shown.read_text(), "python tools/build_own_page.py"
    assert tool.provenance() == tool.PAGE.read_text(), "python tools/build_own_page.py"
    assert tool.own_pages(measured) == tool.OWN_PAGE.read_text(), "python tools/build_own_page.py"
    for name, file in measured.items():
        planned = load_plan(tool.RESULTS / f"{name}.yaml")
        assert OwnRun.of(planned).model_copy(update={"model": name}) == file.settings
        assert OwnPlan.of(planned) == file.all(OwnPlan)["plan"]
    assert tool.headline(empty) == "", "nothing was measured"
    empty.add(OwnFigure(name="first token", dense=(100.0,) * 5, plan=(80.0,) * 5, **ONCE))
    assert "| first token of a 2K prompt | 100 ms | 80 ms | 1.25x |" in tool.headline(empty)


def test_each_row_of_the_benchmarks_names_a_source(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import build_own_page as tool

    sources = yaml.safe_load(tool.SOURCES.read_text())
    text = tool.BENCHMARKS.read_text()
    text = text.partition(tool.BEGIN)[0] + text.partition(tool.END)[2]
    cited = [int(number) for number in re.findall(r"\[(\d+)\]\(provenance\.md\)", text)]
    assert {*cited} <= sources.keys()
    figures = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)]
    assert not [line for line in figures if "(provenance.md)" not in line]


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_a_shape_takes_the_share_of_plans_that_reach_its_length_and_names_them(plan, tmp_path):
    points = {"a": ((1024, 0.4), (4096, 0.1)), "b": ((1024, 1.0), (2048, 0.8), (4096, 0.4))}
    for (name, lengths), decode in zip(points.items(), (1.0, 0.5), strict=True):
        settings = OwnRun.of(plan).model_copy(update={"model": name})
        told = tuple(OwnLength(length=length, prefill=share, decode=decode) for length, share in lengths)
        file = OwnFile(settings, tmp_path / f"{name}.json")
        file.add(OwnPlan(status="unverified", verdict="none", lengths=told, families=("vertical_slash",)))
    middle = share_at(2048, tmp_path)
    assert middle.prefill == pytest.approx((0.2 * 0.8) ** 0.5, abs=1e-4)
    assert (middle.words, middle.families) == ("of the plans, their mean, of a and b at 2k", ("vertical_slash",))
    assert (middle.decode, middle.verdicts) == (pytest.approx(0.5**0.5, abs=1e-4), "a: none; b: none")
    assert share_at(1024, tmp_path).prefill == pytest.approx(0.4**0.5, abs=1e-4), "b is dense there"
    assert share_at(1448, tmp_path).words == "of the plan of a at 1448"
    beyond = share_at(131072, tmp_path)
    assert beyond.prefill == density_for(131072)
    assert "no plan of a real model" in beyond.words


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_turns_stop_at_the_longest_planned_length_behind_half_of_it(plan):
    bench = replace(QUICK, turns=20, turn_tokens=(256, 512))
    context, *sizes = own._sizes(1024, 2048, bench)
    assert (context, sizes) == (1024, [256, 512])
    load = OwnTurns(answer=8, repeats=1, agents=(tuple((0,) * size for size in (context, *sizes)),))
    assert load.contexts == (1024, 1288, 1808)
    assert load.contexts[-1] + 8 <= 2048


# --- the command ------------------------------------------------------------------------------------------------------

ELSEWHERE = """
    import json, sys
    request = json.load(open(sys.argv[3]))
    assert request["device"] == "cpu" and request["plan"].endswith(".yaml")
    asked = [[len(p["prompts"]), *map(len, p["prompts"])] for p in request["prompts"]]
    json.dump(asked + [request["sparse"], request["quantization"]], open(sys.argv[0] + ".asked", "w"))
    with open(sys.argv[4], "a") as out:
        for load in request["prompts"][:1]:
            for name in ("first token", "token", "tokens/s"):
                own = {"half": "vllm", "name": name, "length": load["length"], "at_once": len(load["prompts"])}
                print(json.dumps(own | {"dense": [2.0] * 5, "plan": [1.0] * 5}), file=out)
    print("a library is missing", file=sys.stderr)
    raise SystemExit(3)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """An environment whose worker answers the first load that is left, and ends."""
    script, python = tmp_path / "worker.py", tmp_path / "python"
    script.write_text(dedent(ELSEWHERE))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def test_halves_join_in_the_file_and_nothing_is_measured_twice(
    asked, folder, plan, tmp_path, elsewhere, monkeypatch, short_filler
):
    monkeypatch.setattr(own, "OwnBench", lambda **options: replace(QUICK, **options))
    out = tmp_path / "own.json"
    call = {"model": str(folder), "plan": tmp_path / "plan.yaml", "out": out}
    done = asked(command, OwnFlags, **call, half="transformers")
    assert done.code == 0, done.err
    read = {figure.key[:3]: figure for figure in figures(OwnFile.read(OwnRun, out))}
    assert [*read] == [("transformers", "prompt", 2048), ("transformers", "token", 2048)]
    for figure in read.values():
        assert not figure.failed
        assert len(figure.dense) == len(figure.plan) == 2
        assert 0 < figure.share < 1
        assert figure.way in figure.ways
        assert program() in figure.host
    before = read
    done = asked(command, OwnFlags, **call, vllm_python=elsewhere)
    assert done.code == 0, done.err
    assert "first token at 2k in vLLM, 1 at once 2.00x" in done.out
    read = {figure.key[:4]: figure for figure in figures(OwnFile.read(OwnRun, out))}
    assert all(read[*key, 1] == figure for key, figure in before.items())
    failed = read["vllm", "first token", 2048, 2]
    assert failed.failed.startswith("its process ended with code 3: ")
    assert failed.failed.endswith("a library is missing")
    assert json.loads((tmp_path / "worker.py.asked").read_text())[0][0] == 1
    asked(command, OwnFlags, **call, vllm_python=elsewhere, half="vllm")
    (count, *_), _, none = json.loads((tmp_path / "worker.py.asked").read_text())
    assert (count, none) == (2, None)
    assert out.with_suffix(".md").read_text() == page(OwnFile.read(OwnRun, out), "own.svg")


def test_quantised_weights_are_measured_in_vllm_alone_into_a_file_of_their_own(
    asked, folder, plan, tmp_path, elsewhere, monkeypatch, short_filler
):
    monkeypatch.setattr(own, "OwnBench", lambda **options: replace(QUICK, **options))
    monkeypatch.setattr(own, "in_transformers", lambda *_: pytest.fail("no weights are quantised there"))
    out = tmp_path / "own.json"
    call = {"model": str(folder), "plan": tmp_path / "plan.yaml", "out": out, "vllm_python": elsewhere}
    assert asked(command, OwnFlags, **call, quantization="fp8_per_channel").code == 0
    assert json.loads((tmp_path / "worker.py.asked").read_text())[-1] == "fp8_per_channel"
    assert OwnFile.read(OwnRun, out).settings.model.endswith(", fp8_per_channel")
    assert "those of another" in asked(command, OwnFlags, **call).err
    refused = asked(command, OwnFlags, model="m", quantization="fp8_per_channel", out=tmp_path / "other.json")
    assert (refused.code, "--vllm-python beside fp8_per_channel" in refused.err) == (2, True), refused.err
    refused = asked(command, OwnFlags, **call, quantization="fp8_per_channel", half="transformers")
    assert (refused.code, "found half=transformers" in refused.err) == (2, True), refused.err


def test_engines_of_a_request_quantise_their_weights_and_are_sparse_where_it_says():
    asked = {"model": "m", "plan": "p", "device": "cpu", "dtype": "float32", "backend": "auto", "longest": 8}
    request = own.OwnRequest(**asked, step_tokens=8, repeats=1, quantization="fp8_per_channel", sparse="never")
    assert (request.bench.quantization, request.bench.sparse) == ("fp8_per_channel", "never")


def test_figures_with_nothing_sparse_are_measured_apart_from_those_of_the_plan(
    asked, folder, plan, tmp_path, elsewhere, monkeypatch, short_filler
):
    monkeypatch.setattr(own, "OwnBench", lambda **options: replace(QUICK, **options))
    out, file = tmp_path / "noise.json", tmp_path / "on_device.yaml"  # layers in host memory stay sparse
    write_plan(plan.model_copy(update={"decode": plan.decode.model_copy(update={"offload": None})}), file)
    call = {"model": str(folder), "plan": file, "out": out, "vllm_python": elsewhere}
    assert asked(command, OwnFlags, **call, sparse="never").code == 0
    assert json.loads((tmp_path / "worker.py.asked").read_text())[-2] == "never"
    read = [figure for figure in figures(OwnFile.read(OwnRun, out)) if figure.half == "transformers"]
    assert {figure.name: figure.share for figure in read} == {"prompt": 1.0, "token": 1.0}
    assert all(len(figure.dense) == len(figure.plan) == 2 for figure in read)
    assert OwnFile.read(OwnRun, out).settings.model.endswith(", sparse=never")
    assert "those of another" in asked(command, OwnFlags, **call).err


def test_a_token_of_a_plan_that_evicts_alone_has_no_share_here(plan):
    evicting = plan.model_copy(update={"decode": None, "kv_cache": (drops((0,), 64),)})
    figure = OwnFigure(half="transformers", name="token", length=2048)
    told = own._token_figure(figure, None, evicting, QUICK, None, None)
    assert (told.share, told.note) == (None, "eviction is timed in vLLM alone")


def test_a_model_without_a_plan_is_planned_and_a_plan_without_a_test_is_tested(folder, tmp_path, monkeypatch, capsys):
    calls, path = [], tmp_path / "made.yaml"

    def make(flags):
        calls.append(("plan", flags.model, flags.out))
        write_plan(load_plan(folder / "sparsekv.yaml"), path)

    def test(flags):
        calls.append(("verify", flags.target, flags.plan, flags.write))
        raise GateError("test missed")

    monkeypatch.setattr("sparsekv.cli.plan.plan", make)
    monkeypatch.setattr("sparsekv.cli.verify.verify", test)
    subject = bench_own._planned(OwnFlags(model=str(folder)), path)
    assert bench_own._tested(subject, path) == load_plan(path)
    assert calls == [("plan", str(folder), path), ("verify", str(folder), path, True)]
    assert "test missed" in capsys.readouterr().err
    assert bench_own._planned(OwnFlags(model=str(folder)), path).path == path
    assert len(calls) == 2


def test_figures_of_another_plan_are_not_joined(asked, folder, plan, tmp_path, monkeypatch):
    out, other = tmp_path / "own.json", plan.model_copy(update={"decode": None})
    file = OwnFile.of(OwnRun.of(other), out)
    file.add(OwnPlan.of(other))
    done = asked(command, OwnFlags, model=str(folder), plan=tmp_path / "plan.yaml", out=out)
    assert done.code == 2
    assert "those of another" in done.err
    assert "expected --vllm-python" in asked(command, OwnFlags, model=str(folder), out=out, half="vllm").err


def test_files_of_others_and_what_cannot_run_are_refused_before_any_work(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_own, "_planned", lambda *_: pytest.fail("work began"))
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "other.json").write_text("{}")
    for name, said in (("own.svg", "the picture"), ("notes.json", "no file yet in"), ("other.json", "another file")):
        done = asked(command, OwnFlags, model="m", out=tmp_path / name)
        assert (done.code, said in done.err) == (2, True), done.err
    done = asked(command, OwnFlags, model="m", out=tmp_path / "own.json", vllm_python=tmp_path / "notes.md")
    assert (done.code, "no executable file" in done.err) == (2, True), done.err
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_a_dense_plan_is_not_measured(asked, folder, plan, tmp_path):
    write_plan(plan.model_copy(update={"prefill": None, "decode": None, "quality": None}), tmp_path / "dense.yaml")
    done = asked(command, OwnFlags, model=str(folder), plan=tmp_path / "dense.yaml", out=tmp_path / "own.json")
    assert (done.code, done.out) == (0, "the plan is dense: nothing to measure\n"), done.err
    assert "the half in vLLM is left out" in done.err
    assert not (tmp_path / "own.json").exists()


def test_a_run_that_is_stopped_says_how_to_go_on(asked, folder, plan, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(own, "in_transformers", stopped)
    out = tmp_path / "own.json"
    done = asked(command, OwnFlags, model=str(folder), plan=tmp_path / "plan.yaml", out=out)
    assert f"{out}; the same command goes on" in done.err
    assert out.with_suffix(".md").exists()
