"""The plan of an engine that starts."""

import random
import warnings
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans_samples import quality_at
from safetensors.torch import save_file
from tiny_models import tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.kernels.keys import PLAIN
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import PlanMismatchError, PlanWarning, UnsupportedError
from sparsekv.plans.files import write_plan
from sparsekv.plans.model import Fingerprint
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, Offload
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import Pays, Thresholds
from sparsekv.runtime.engine_plan import EngineModel
from sparsekv.runtime.model_config import files_fingerprint
from sparsekv.runtime.paged.captured_prefill import memory_of
from sparsekv.runtime.paged.metrics import Counters
from sparsekv.runtime.vllm.engine_host import EngineHost, decoded_dense, start_host
from sparsekv.runtime.vllm.settings import EngineFacts, EngineOptions

CPU = torch.device("cpu")
FACTS = EngineFacts(release="0.32.0", device="cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plan(model: Any) -> Plan:
    prefill = every_head(model, AShape(sink=tokens(64), window=tokens(64)))
    return plan_for(model, prefill, decode_plan(segment(0, (1,), 64)))


def start(
    model: Any,
    plan: Plan,
    folder: Path,
    weights: dict[str, Any] | None = None,
    facts: EngineFacts = FACTS,
    **options: Any,
) -> EngineHost:
    write_plan(plan, folder / "sparsekv.yaml")
    sizes: dict[str, Any] = {"longest": 1024, "step": 2048, "rows": 4} | (weights or {})
    engine = EngineModel(str(folder), None, model.config, torch.float32, CPU, **sizes)
    return start_host(folder / "sparsekv.yaml", EngineOptions(**options), facts, engine)


def test_a_plan_starts_with_scratch_for_the_longest_request_and_both_phases(
    model: Any, plan: Plan, tmp_path: Path
) -> None:
    host = start(model, plan, tmp_path)
    assert host.phases == "prefill and decode"
    assert start(model, plan, tmp_path, decode=False).decode is None
    assert host.is_sparse(Chunk.uniform(1, 0, 1024))
    group = plan.model.attention[0]
    assert host.scratch.bytes == 2 * memory_of(1024) * group.kv_heads * group.head_dim * 4


def test_offload_is_ignored_with_one_line(model: Any, plan: Plan, tmp_path: Path) -> None:
    offload = Offload(layers=(1,), hot=tokens(128))
    with pytest.warns(PlanWarning, match="host memory") as caught:
        start(model, plan.model_copy(update={"decode": plan.decode.model_copy(update={"offload": offload})}), tmp_path)
    assert len(caught) == 1


def test_another_models_plan_is_refused_unless_it_is_allowed(model: Any, plan: Plan, tmp_path: Path) -> None:
    fingerprint = Fingerprint(architecture="sha256:" + "0" * 64)
    other = plan.model.model_copy(update={"rope": {"rope_type": "linear"}, "fingerprint": fingerprint})
    changed = plan.model_copy(update={"model": other, "decode": None})
    with pytest.raises(PlanMismatchError, match=r'"allow_mismatch": true'):
        start(model, changed, tmp_path)
    with pytest.warns(PlanWarning, match="another architecture"):
        start(model, changed, tmp_path, allow_mismatch=True)


def test_an_engine_that_cannot_run_the_plan_is_refused(model: Any, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="context parallelism"):
        start(model, plan, tmp_path, facts=EngineFacts(release="0.32.0", device="cpu", context_parallel=2))


def test_beside_a_drafter_each_row_decodes_and_layers_behind_the_models_own_are_the_drafters(
    model: Any, plan: Plan, tmp_path: Path
) -> None:
    facts = EngineFacts(release="0.32.0", device="cpu", speculative="eagle", drafted=3)
    host = start(model, plan, tmp_path, facts=facts)
    assert (host.phases, host.decoded, host.queries) == ("prefill and decode", 4, 4)
    own = len(host.program.layers)
    assert [host.takes_layer() for _ in range(own + 2)] == [True] * own + [False] * 2


def weights_of(plan: Plan, weights: str | None) -> Plan:
    fingerprint = plan.model.fingerprint.model_copy(update={"weights": weights})
    return plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": fingerprint})})


@pytest.mark.parametrize("packed", [False, True])
def test_quantised_weights_that_a_plan_was_not_made_on_are_said_in_one_line(
    model: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    read: list[Path] = []
    counted = lambda folder: read.append(folder) or files_fingerprint(folder)  # noqa: E731
    monkeypatch.setattr("sparsekv.runtime.engine_plan.files_fingerprint", counted)
    save_file({"weight": torch.randn(64)}, tmp_path / "model.safetensors")
    facts = {"quantization": "fp8", "packed": packed}
    base = weights_of(plan, "sha256-all:" + "0" * 64)
    with pytest.warns(PlanWarning) as caught:
        host = start(model, base, tmp_path, facts)
    assert host.model == plan.model.fingerprint.architecture
    assert len(read) == packed  # each reading opens all tensors
    assert ["other weights" in str(one.message) for one in caught] == [True]
    own = weights_of(plan, files_fingerprint(tmp_path))
    with torch.device("meta"):  # vLLM makes its layers, and so starts a plan, where new tensors are the device's
        assert files_fingerprint(tmp_path) == own.model.fingerprint.weights
        start(model, own, tmp_path, facts)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        start(model, own, tmp_path, facts)
    assert len(again) == (not packed)  # what vLLM quantises are other weights than any file's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(model, base, tmp_path)


@pytest.mark.parametrize(("name", "told"), [("some/model", 0), ("other/model", 1)])
def test_of_a_quantised_hub_model_that_is_not_downloaded_yet_the_name_decides(
    model: Any, plan: Plan, tmp_path: Path, name: str, told: int
) -> None:
    base = weights_of(plan, "sha256-all:" + "0" * 64)
    base = base.model_copy(update={"model": base.model.model_copy(update={"id": "some/model"})})
    write_plan(base, tmp_path / "sparsekv.yaml")
    given: dict[str, Any] = {"longest": 1024, "step": 2048, "rows": 4, "quantization": "fp8", "packed": True}
    engine = EngineModel(name, None, model.config, torch.float32, CPU, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start_host(tmp_path / "sparsekv.yaml", EngineOptions(), FACTS, engine)
    assert len(caught) == told


@pytest.mark.parametrize(("step", "told"), [(512, False), (256, True), (2048, True)])
def test_steps_of_another_size_than_the_chunks_that_were_verified_are_told(
    model: Any, plan: Plan, tmp_path: Path, step: int, told: bool
) -> None:
    quality = quality_at(1024, step=512)
    write_plan(plan.model_copy(update={"status": "verified", "quality": quality}), tmp_path / "sparsekv.yaml")
    engine = EngineModel(str(tmp_path), None, model.config, torch.float32, CPU, longest=4096, step=step, rows=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start_host(tmp_path / "sparsekv.yaml", EngineOptions(), FACTS, engine)
    assert any("chunks of 512" in str(warning.message) for warning in caught) == told


def test_a_plan_that_is_dense_everywhere_says_that_it_changes_nothing(model: Any, plan: Plan, tmp_path: Path) -> None:
    with pytest.warns(PlanWarning, match="changes nothing"):
        start(model, plan.model_copy(update={"prefill": None, "decode": None}), tmp_path)


def test_a_layer_runs_once_for_each_kind_of_patterns_before_prompts_come_and_nothing_is_counted(
    model: Any, plan: Plan, tmp_path: Path
) -> None:
    host = start(model, plan.model_copy(update={"decode": None}), tmp_path)
    group = plan.model.attention[0]
    scratch = host.scratch.zeros(group.kv_heads, group.head_dim, 1024).k  # what a run zeroes
    queries = torch.randn(300, group.heads, group.head_dim)
    for layer, left in zip(host.program.layers[:2], (0.0, 1.0), strict=True):
        scratch.fill_(1.0)
        host.warm_up(layer, queries, PLAIN, 1.0)
        assert scratch.unique().tolist() == [left]
    host.warm_up(host.program.layers[1], queries[..., : group.head_dim // 2], PLAIN, 1.0)  # heads of another size
    assert scratch.unique().tolist() == [0.0, 1.0]
    assert host.counters.read().prefill_density is None


@pytest.mark.parametrize("seed", range(40))
def test_a_step_in_which_nothing_chooses_is_told_and_counted_as_any_other(
    model: Any, plan: Plan, tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    buckets = (DecodeBucket(up_to=300, segments=(segment(0, (1,), 64),)), DecodeBucket(up_to=None, dense=True))
    plan = plan.model_copy(update={"decode": DecodePlan(lengths=buckets)})
    host, counted = start(model, plan, tmp_path, sparse="always"), Counters()
    assert host.decode is not None
    host.dense_graphs = source.random() < 0.7
    least, rows = source.choice([0, 60, 500]), source.randrange(1, 5)
    of_graphs, launched = (Thresholds((source.randrange(1, 4),), (tokens,)) for tokens in (least, 90))
    host.pays = Pays(decode=of_graphs, mixed=launched)
    lengths = [source.choice([0, 1, 20, 70, 80, 100, 600]) for _ in range(rows)]
    prompts = [length > 0 and source.random() < 0.2 for length in lengths]
    new = [source.choice([1, 1, 40]) for _ in range(rows)]
    common = SimpleNamespace(
        seq_lens_cpu_upper_bound=torch.tensor(lengths), num_reqs=rows, max_query_len=max(new),
        is_prefilling=torch.tensor(prompts), query_start_loc_cpu=torch.tensor([0, *accumulate(new)]),
    )  # fmt: skip
    graph_rows = source.choice([0, 8])
    tokens_of_step = decoded_dense(host, common, graph_rows)
    decoded = [
        length
        for length, count, prompt in zip(lengths, new, prompts, strict=True)
        if count == 1 and length > 1 and not prompt
    ]
    captured = graph_rows > 0 and max(new) == 1
    at = (of_graphs if captured else launched).at(rows)
    may_choose = at is not None and any(300 >= length > 64 and length >= at for length in decoded)
    assert (tokens_of_step is None) == (may_choose or (captured and not host.dense_graphs))
    if tokens_of_step is not None:
        host.decode.count([range(length, length + 1) for length in decoded], counted, at)
        assert (counted.decode_dense, counted.decode_sparse) == (tokens_of_step, 0)
