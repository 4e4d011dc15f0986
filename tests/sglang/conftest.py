"""SGLang's engine on the CPU, in this process. Without SGLang nothing here is collected: `make test-sglang` has it."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang"):  # before anything imports it
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang_engine import STUBS

    sys.path[:0] = STUBS

from model_folders import save_model
from sglang_engine import Engine
from tiny_models import tiny_model
from tiny_plans import plan_for, segment
from transformers import PreTrainedModel
from vllm_engine import Oracle

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
LAYERS = 5


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return tiny_model("llama", layers=LAYERS)


@pytest.fixture(scope="session")
def plan(model: PreTrainedModel) -> Plan:
    """Prefill is sparse from 384 tokens on, in all layers but one; decode from 740 on, in two segments, of which the
    second chooses by KV head."""
    lines = VerticalSlash(vertical=tokens(64), slash=tokens(256), last_q=64, max_tiles=fraction(0.4))
    patterns = (lines, BlockSparse(keep=fraction(0.3)), AShape(sink=tokens(64), window=tokens(256)), Dense())
    heads = tuple(
        HeadGroup(layer=layer, heads=(head,), pattern=patterns[head]) for layer in (0, 1, 2, 4) for head in range(4)
    )
    buckets = (PrefillBucket(up_to=384, dense=True), PrefillBucket(up_to=None, heads=heads))
    segments = (
        segment(0, (1, 2), 48, sink=4, recent=32),
        segment(3, (4,), 64, sink=4, recent=16, heads="per_kv_head"),
    )
    decode = DecodePlan(lengths=(DecodeBucket(up_to=740, dense=True), DecodeBucket(up_to=None, segments=segments)))
    return plan_for(model, PrefillPlan(tile=TileShape(query=64, key=64), lengths=buckets), decode)


@pytest.fixture(scope="session")
def folder(model: PreTrainedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its plan beside it."""
    place = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(plan, place / "sparsekv.yaml")
    return place


@pytest.fixture(scope="session")
def started(folder: Path) -> Engine:
    """The one engine of the process, which was asked for our backend by its name."""
    return Engine(folder, attention_backend="sparsekv")


@pytest.fixture(scope="session")
def planned(started: Engine) -> Any:
    return started.runner.attn_backend


@pytest.fixture
def engine(started: Engine, planned: Any) -> Iterator[Engine]:
    """The engine with the plan, nothing cached and nothing counted."""
    started.use(planned)
    planned.plan_host.counters.reset()
    yield started
    started.use(planned)


@pytest.fixture(scope="session")
def sparse(model: PreTrainedModel, plan: Plan) -> Oracle:
    """The plan in the transformers host."""
    return Oracle(model, plan)
