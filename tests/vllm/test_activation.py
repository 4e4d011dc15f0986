"""A plan beside a model is run without being asked for, and without one vLLM is its own."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm_engine import Oracle, generate, make_engine, same

from sparsekv.plans.errors import PlanMismatchError, SparseKVError, UnsupportedError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm import attention_backend
from sparsekv.runtime.vllm.attention_backend import SparseBuilder, SparseImpl
from sparsekv.runtime.vllm.engine_host import EngineHost, serving_stats
from sparsekv.runtime.vllm.settings import check_engine_layer

Prompts = dict[int, list[int]]


@pytest.fixture
def planned(reference: LoadedModel, plan: Plan, tmp_path: Path) -> Path:
    """The folder of the model with a plan beside it."""
    for file in Path(reference.model.name_or_path).iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_plan(plan, tmp_path / "sparsekv.yaml")
    return tmp_path


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    logger = attention_backend.vllm.logger
    monkeypatch.setattr(logger, "warning", lambda text, *args: found.append(text % args))
    return found


def kinds_of(engine: Any) -> tuple[set[type], set[type]]:
    """What attends and what prepares steps."""
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    builders = {type(group.get_metadata_builder()) for groups in runner.attn_groups for group in groups}
    return {type(layer.impl) for layer in layers}, builders


VLLMS_OWN = {CPUAttentionBackendImpl}, {CPUAttentionMetadataBuilder}


def test_engines_of_one_process_are_vllms_own_without_a_plan_and_ours_with_one(
    reference: LoadedModel, planned: Path, dense: Oracle, prompts: Prompts
) -> None:
    """vLLM keeps the class that it found for the first of them."""
    asked = [prompts[700]]
    for folder, options, has_plan in (
        (reference.model.name_or_path, {}, False),
        (planned, {}, True),
        (planned, {"dense": True}, False),
    ):
        engine = make_engine(str(folder), additional_config={"sparsekv": options})
        outputs = generate(engine, asked)
        if has_plan:
            assert kinds_of(engine) == ({SparseImpl}, {SparseBuilder})
            assert serving_stats(engine).sparse_tokens > 0
        else:
            assert kinds_of(engine) == VLLMS_OWN
            assert same(outputs[0], dense(asked[0], ()))
        del engine


def test_a_plan_that_cannot_run_leaves_the_engine_dense_with_one_warning_that_names_the_reason(
    planned: Path, plan: Plan, warned: list[str], dense: Oracle, prompts: Prompts
) -> None:
    group = plan.model.attention[0].model_copy(update={"head_dim": 32})
    other = plan.model.model_copy(update={"id": "example/other", "attention": (group,)})
    write_plan(plan.model_copy(update={"model": other}), planned / "sparsekv.yaml")
    engine = make_engine(str(planned))
    (line,) = warned
    assert "head dim: plan 32, model 64" in line
    assert kinds_of(engine) == VLLMS_OWN
    assert same(generate(engine, [prompts[700]])[0], dense(prompts[700], ()))
    named = {"sparsekv": {"plan": str(planned / "sparsekv.yaml")}}
    with pytest.raises(PlanMismatchError, match="head dim"):
        make_engine(str(planned), additional_config=named)
    named["sparsekv"]["require"] = False
    assert kinds_of(make_engine(str(planned), additional_config=named)) == VLLMS_OWN


def test_a_plan_that_is_required_and_is_nowhere_ends_the_engine(reference: LoadedModel, warned: list[str]) -> None:
    folder = str(reference.model.name_or_path)
    with pytest.raises(UsageError, match='"require" in --additional-config asks, found none'):
        make_engine(folder, additional_config={"sparsekv": {"require": True}})
    missing = {"plan": "nowhere.yaml"}
    with pytest.raises(UsageError, match=r"expected a plan at nowhere\.yaml"):
        make_engine(folder, additional_config={"sparsekv": missing})
    assert warned == []
    engine = make_engine(folder, additional_config={"sparsekv": missing | {"require": False}})
    assert kinds_of(engine) == VLLMS_OWN
    assert "expected a plan at nowhere.yaml" in warned[0]


def test_an_engine_that_cannot_be_read_runs_dense(
    planned: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a release or a model that is unlike what was seen."""

    def fail(*args: Any) -> Any:
        raise AttributeError("of this test")

    monkeypatch.setattr(attention_backend.vllm, "engine_facts", fail)
    assert kinds_of(make_engine(str(planned))) == VLLMS_OWN
    assert "the engine could not be read (AttributeError: of this test)" in warned[0]


@pytest.mark.parametrize("require", [None, True])
def test_ranks_with_other_plan_files_run_dense_together_or_end_together(
    planned: Path, warned: list[str], require: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank knows is what all of them gave; one that has no plan raises nothing before."""
    monkeypatch.setattr(attention_backend.vllm, "gather_bytes", lambda given: [given, b"1" * 32])
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(planned), revision=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        additional_config={"sparsekv": {"require": require}},
    )
    for has_plan in (True, False):
        if not has_plan:
            (planned / "sparsekv.yaml").unlink()
        if require:
            with pytest.raises(SparseKVError, match="one plan on all" if has_plan else "found none"):
                attention_backend._started(config)
        else:
            assert attention_backend._started(config) is None
            assert ("1: 31313131" if has_plan else "0: none, 1: 31313131") in warned.pop()


def test_what_the_step_finds_that_measures_memory_leaves_all_layers_dense(
    planned: Path, warned: list[str], dense: Oracle, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that step is the first that sees a layer whole, before there are builders, and has no metadata."""
    engine = make_engine(str(planned))
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    layers = list(runner.vllm_config.compilation_config.static_forward_context.values())
    monkeypatch.setattr(attention_backend.vllm.platform, "profiles", True)
    monkeypatch.setattr(EngineHost, "warm_up", lambda *args: check_engine_layer(args[1], 7, 7, None))
    q_THD, k_TGD = torch.zeros(8, 4, 64), torch.zeros(8, 2, 64)
    layers[2].impl.forward(layers[2], q_THD, k_TGD, k_TGD, layers[2].kv_cache, None, torch.zeros_like(q_THD))
    assert "found that vLLM runs it with (7, 7, None, None)" in warned[0]
    assert all(layer.impl.plan_host is None for layer in layers)
    assert same(generate(engine, [prompts[1100]])[0], dense(prompts[1100], ()))


def test_what_an_engine_ran_by_is_freed_with_it(planned: Path, unfreeze: Callable[[], None]) -> None:
    engine = make_engine(str(planned))
    assert any(host is not None for host in attention_backend._hosts.values())
    del engine
    unfreeze()
    gc.collect()
    assert all(host is None for host in attention_backend._hosts.values())


def test_what_only_layers_show_leaves_all_of_them_dense_or_ends_an_engine_that_requires_its_plan(
    planned: Path, warned: list[str], dense: Oracle, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = [None, None]

    def refuse(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > 2:
            raise UnsupportedError("of this test")
        return given(*args)

    given = attention_backend.check_pages
    monkeypatch.setattr(attention_backend, "check_pages", refuse)
    engine = make_engine(str(planned))
    (line,) = warned
    assert "of this test" in line
    layers, _ = kinds_of(engine)
    assert layers <= {SparseImpl, CPUAttentionBackendImpl}
    assert same(generate(engine, [prompts[1100]])[0], dense(prompts[1100], ()))
    calls[:] = [None] * 3
    with pytest.raises(SparseKVError, match="of this test"):
        make_engine(str(planned), additional_config={"sparsekv": {"require": True}})
