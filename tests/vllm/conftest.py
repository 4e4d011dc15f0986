"""vLLM's engine on the CPU, in this process. Without vLLM nothing here is collected: `make test-vllm` has it."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm"):  # before anything imports it; elsewhere these would only reach other tests
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a line that counts log-probabilities: a minute
    if os.environ.get("TRITON_INTERPRET") == os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # which needs Triton
        from triton.backends import backends

        backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # what the contract names

from vllm_drafters import beside, drafters, eagle3, mimo, repeated, retriever, suffixes, without  # noqa: F401 (fixtures)
from vllm_engine import CROSSOVER, DECODE_BOUND, TILE, Oracle, make_engine

from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel, load_model

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drafters come last: they import numba, a module of which vLLM 0.32 fails at in every engine made behind that."""
    items.sort(key=lambda item: item.path.stem.startswith("test_drafters"))


@pytest.fixture(scope="session")
def reference() -> LoadedModel:
    return load_model("tiny-retriever", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def plan(reference: LoadedModel) -> Plan:
    """Sparse from CROSSOVER on, in all layers but one, which is sparse from 1536 on. Decode is sparse from DECODE_BOUND
    on, in two segments, of which the second chooses by KV head and its filter layer for itself as well."""
    lines = VerticalSlash(vertical=tokens(64), slash=tokens(256), last_q=64, max_tiles=fraction(0.4))
    patterns = (lines, BlockSparse(keep=fraction(0.3)), AShape(sink=tokens(64), window=tokens(256)), Dense())

    def heads(layers: Sequence[int]) -> tuple[HeadGroup, ...]:
        return tuple(
            HeadGroup(layer=layer, heads=(head,), pattern=patterns[head]) for layer in layers for head in range(4)
        )

    everywhere = range(reference.info.layers)
    prefill = PrefillPlan(
        tile=TileShape(query=TILE, key=TILE),
        lengths=(
            PrefillBucket(up_to=CROSSOVER, dense=True),
            PrefillBucket(up_to=1536, heads=heads([layer for layer in everywhere if layer != 3])),
            PrefillBucket(up_to=None, heads=heads(everywhere)),
        ),
    )

    def segments(*budgets: int) -> tuple[Segment, ...]:
        first, second = (DecodeBudget(tokens=budget) for budget in budgets)
        return (
            Segment(filter=1, layers=(2, 3, 4), budget=first, sink=4, recent=32),
            Segment(filter=6, layers=(6, 7, 8, 9), budget=second, sink=4, recent=16, heads="per_kv_head"),
        )

    decode = DecodePlan(
        lengths=(
            DecodeBucket(up_to=DECODE_BOUND, dense=True),
            DecodeBucket(up_to=1536, segments=segments(48, 64)),
            DecodeBucket(up_to=None, segments=segments(96, 1600)),  # which covers some contexts whole
        )
    )
    return Plan(status="unverified", model=reference.info, prefill=prefill, decode=decode)


@pytest.fixture(scope="session")
def plan_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    write_plan(plan, path)
    return path


@pytest.fixture(scope="session")
def llm(reference: LoadedModel, plan_file: Path) -> Any:
    """One engine with the plan for all tests: it takes the better part of a minute to start."""
    return make_engine(str(reference.model.name_or_path), additional_config={"sparsekv": {"plan": str(plan_file)}})


@pytest.fixture(scope="session")
def plain(reference: LoadedModel) -> Any:
    """One engine without a plan. It logs no statistics: vLLM would end those of the other engine."""
    return make_engine(str(reference.model.name_or_path), disable_log_stats=True)


@pytest.fixture(scope="session")
def kept_engines() -> Iterator[list[Any]]:
    """Engines that tests make: when one goes, vLLM ends what the others of the process need."""
    yield []
    gc.collect = lambda generation=2: 0  # at the end of the process each engine would look through the whole heap


@pytest.fixture(scope="session", autouse=not torch.cuda.is_available())  # on a GPU engines give their memory back
def unfreeze() -> Iterator[Callable[[], None]]:
    """`gc.unfreeze`, which vLLM calls where an engine ends, to look through the whole heap then: two seconds each."""
    given = gc.unfreeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield given


@pytest.fixture(scope="session", autouse=not torch.cuda.is_available())
def timed_kernel() -> Iterator[None]:
    """What engines time on a GPU alone."""
    from vllm_cpu_kernel import attention

    from sparsekv.runtime.vllm.devices import OnCpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnCpu, "attention", staticmethod(attention), raising=False)
        yield


@pytest.fixture
def engine(llm: Any) -> Any:
    """The engine with nothing cached and nothing counted."""
    from sparsekv.runtime.vllm.engine_host import reset_stats

    assert llm.reset_prefix_cache()
    reset_stats(llm)
    return llm


@pytest.fixture(scope="session")
def prompts(reference: LoadedModel) -> dict[int, list[int]]:
    """Questions about a number hidden in a document, by length."""
    kit = prepare(reference.tokenizer, Split.EVALUATION)
    lengths = (200, 700, 1100, 1500, 2000, 2700)
    samples = {n: make_sample(TASKS["niah_single"], kit, n + 8, 0, n).prompt_ids for n in lengths}  # 8 for the answer
    assert {n: len(ids) for n, ids in samples.items()} == {n: n for n in lengths}
    return {n: [int(token) for token in ids] for n, ids in samples.items()}


@pytest.fixture(scope="session")
def sparse(reference: LoadedModel, plan: Plan) -> Iterator[Oracle]:
    """The plan in the transformers host."""
    return Oracle(reference.model, plan)


@pytest.fixture(scope="session")
def dense(reference: LoadedModel) -> Oracle:
    """The unmodified model."""
    return Oracle(reference.model, None)
