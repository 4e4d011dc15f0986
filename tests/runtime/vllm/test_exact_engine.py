"""What an engine's arguments become where they ask for exact output, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captured_steps import launched
from plans_samples import small_plan

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.plan_checks import refuse
from sparsekv.runtime.vllm.exact_engine import (
    DRAFTED,
    SCHEDULER,
    WORKER,
    ask_for_drafts,
    dense_up_to,
)
from sparsekv.runtime.vllm.settings import EngineFacts, EngineOptions, host_of, read_options


def drafting_plan() -> Plan:
    segments = (Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=8), sink=1, recent=4),)
    lengths = (DecodeBucket(up_to=4096, dense=True), DecodeBucket(up_to=None, segments=segments))
    return small_plan().model_copy(update={"decode": DecodePlan(lengths=lengths), "kv_cache": None})


def arguments(folder: Path, **given: Any) -> Any:
    own = {"additional_config": {"sparsekv": {"exact": True}}, "model": str(folder), "revision": "main"}
    defaults = {"speculative_config": None, "worker_cls": "auto", "scheduler_cls": None, "max_num_seqs": None}
    defaults["max_num_batched_tokens"] = None
    sizes = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None)
    graphs = {"compilation_config": sizes, "cudagraph_capture_sizes": None}
    return SimpleNamespace(**(own | defaults | graphs | given))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_plan(drafting_plan(), tmp_path / "sparsekv.yaml")
    return tmp_path


def test_the_target_is_its_own_draft_model(folder: Path) -> None:
    args = arguments(folder)
    ask_for_drafts(args)
    asked = args.speculative_config
    assert (asked["method"], asked["model"], asked["revision"]) == ("draft_model", str(folder), "main")
    assert asked["num_speculative_tokens"] == DRAFTED
    assert (args.worker_cls, args.scheduler_cls) == (WORKER, SCHEDULER)
    before = vars(args).copy()
    ask_for_drafts(args)  # a configuration may be made twice
    assert vars(args) == before


def test_steps_with_and_without_drafts_are_captured_however_few_rows_there_are(folder: Path) -> None:
    args = arguments(folder, max_num_seqs=1, additional_config={"sparsekv": {"exact": "decode", "draft": 6}})
    ask_for_drafts(args)
    schedule = args.speculative_config["num_speculative_tokens_per_batch_size"]
    assert {drafted for first, _, drafted in schedule if first <= args.max_num_seqs} == {0, 6}


def sizes_of(folder: Path, drafted: int, **given: Any) -> list[int]:
    args = arguments(folder, additional_config={"sparsekv": {"exact": True, "draft": drafted}}, **given)
    ask_for_drafts(args)
    return list(args.cudagraph_capture_sizes)


@pytest.mark.parametrize("drafted", range(1, 9))
def test_no_step_lacks_a_graph_however_many_rows_a_server_has(folder: Path, drafted: int) -> None:
    for rows in (*range(1, 65), 96, 100, 127, 128, 200, 255, 256, 257, 300, 450, 500, *range(505, 513), 513, 1024):
        sizes = sizes_of(folder, drafted, max_num_seqs=rows)
        assert (launched(sizes, max(2, rows), drafted), len(sizes) < 52) == ([], True), rows


@pytest.mark.parametrize("drafted", range(1, 9))
def test_no_step_lacks_a_graph_where_the_server_chooses_how_many_rows_it_has(folder: Path, drafted: int) -> None:
    """vLLM: 128 or 256 a device on CPUs, 256 on GPUs, 1,024 on large ones, twice that for throughput, and no more than
    a step has tokens."""
    for usual in (128, 256, 384, 512, 1024, 2048):
        for tokens in (None, 100, 250, 500, 600, 8192):
            sizes = sizes_of(folder, drafted, max_num_batched_tokens=tokens)
            fit = [size for size in sizes if size <= (tokens or 8192)]
            rows = min(usual, tokens or usual)
            assert launched(fit, rows, drafted, max(fit)) == [], (usual, tokens)
            assert max(fit) >= min(rows, 512), (usual, tokens)


def test_sizes_of_graphs_that_were_asked_for_stay(folder: Path) -> None:
    args = arguments(folder, cudagraph_capture_sizes=[1, 5])
    ask_for_drafts(args)
    assert args.cudagraph_capture_sizes == [1, 5]


@pytest.mark.parametrize("own", [{}, {"exact": False}, {"exact": True, "dense": True}], ids=str)
def test_engines_that_do_not_ask_for_it_are_left_as_they_are(folder: Path, own: dict[str, Any]) -> None:
    args = arguments(folder, additional_config={"sparsekv": own}, max_num_seqs=1)
    before = vars(args).copy()
    ask_for_drafts(args)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ({"spec_method": "ngram", "spec_tokens": 3}, "--spec-method, --spec-tokens"),
        ({"worker_cls": "mine.Worker", "scheduler_cls": "mine.Scheduler"}, "--worker-cls, --scheduler-cls"),
    ],
    ids=str,
)
def test_another_drafter_worker_or_scheduler_is_refused_by_name(
    folder: Path, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        ask_for_drafts(arguments(folder, **given))


def test_without_a_plan_there_is_nothing_to_draft_by(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a plan that drafts exact output, found none"):
        ask_for_drafts(arguments(tmp_path))


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"exact": True, "decode": False}, "which drafts"),
        ({"draft": 3}, "found it alone"),
        ({"exact": True, "draft": 0}, "greater than or equal to 1"),
        ({"exact": "prefill"}, "exact"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(own: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_options({"sparsekv": own})


def test_drafts_begin_where_the_plan_is_sparse() -> None:
    assert dense_up_to(drafting_plan()) == 4096
    assert dense_up_to(small_plan().model_copy(update={"decode": None})) == 0


def check(plan: Plan, **facts: Any) -> None:
    given: dict[str, Any] = {"release": "0.33.0", "device": "cuda", "self_drafting": True}
    refuse(plan, plan.model, host_of(EngineFacts(**(given | facts)), plan, EngineOptions(exact=True)))


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"self_drafting": False}, "nothing drafts there"),
        ({"beside": ("--enable-lora", "--enable-eplb")}, "beside --enable-lora, --enable-eplb"),
        ({"stages": (range(1), range(1, 2))}, "over pipeline stages"),
    ],
    ids=str,
)
def test_engines_that_cannot_give_exact_output_are_refused_by_name(facts: dict[str, Any], named: str) -> None:
    check(drafting_plan())
    with pytest.raises(UnsupportedError, match=named):
        check(drafting_plan(), **facts)
