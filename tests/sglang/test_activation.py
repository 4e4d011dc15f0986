"""Where an engine of SGLang runs a plan, where it is dense, and where it ends instead."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_engine import SETTINGS, SLOTS, STUBS, Engine, prompt_of
from tiny_models import tiny_model
from tiny_plans import drops, every_head, plan_for
from vllm_engine import Oracle

from sparsekv.plans.errors import PlanMismatchError, UnsupportedError, UsageError
from sparsekv.plans.patterns import Dense
from sparsekv.plans.schema import Plan

SUPPORT = Path(__file__).parents[1] / "support"
ASK = """
import json, sys
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    answers = engine.generate(input_ids=json.loads(sys.argv[2]), sampling_params=sampling)
    print(json.dumps([answer["output_ids"] for answer in answers]))
    engine.shutdown()
"""


@pytest.mark.slow  # it imports SGLang in three processes
def test_an_engine_in_processes_of_its_own_runs_the_plan_beside_its_model_unasked_from_larger_pages(
    folder: Path, sparse: Oracle, tmp_path: Path
) -> None:
    (script := tmp_path / "ask.py").write_text(ASK)
    settings = SETTINGS | {"model_path": str(folder), "page_size": 16, "log_level": "info"}
    settings["attention_backend"] = "torch_native"
    prompts = [prompt_of(1100), prompt_of(300)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(STUBS), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, str(script), json.dumps(settings), json.dumps(prompts)]
    ran = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=280)
    assert "sparsekv: prefill and decode by" in ran.stdout + ran.stderr
    answers = json.loads(ran.stdout.splitlines()[-1])
    assert answers[0] == sparse(prompts[0], [512, 1024]).tokens
    assert answers[1] == sparse(prompts[1], []).tokens


def test_a_model_without_a_plan_keeps_sglangs_own_backend_unless_ours_was_named(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsekv.runtime.sglang.engine import with_plan

    monkeypatch.setattr(engine.runner.model_config, "model_path", str(tmp_path))
    backend = engine.backend(None, tmp_path)
    assert with_plan(backend, engine.runner, required=False) is backend
    with pytest.raises(UsageError, match="leave the option out to run dense"):
        with_plan(backend, engine.runner, required=True)


def test_drafters_and_other_backends_are_made_as_before(engine: Engine) -> None:
    from sparsekv.runtime.sglang.sglang_plugin import planned

    drafter = SimpleNamespace(is_draft_worker=True, device="cpu")
    assert planned("torch_native", lambda runner: runner)(drafter) is drafter
    on_gpu = SimpleNamespace(is_draft_worker=False, device="cuda")
    assert planned("torch_native", lambda runner: runner)(on_gpu) is on_gpu


def test_our_name_stands_for_the_devices_backend_in_all_of_sglangs_lists(folder: Path) -> None:
    """Deterministic inference, page-major pools and trees of drafts allow backends by name."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    from sparsekv.runtime.sglang.sglang_plugin import name_device_backend

    arguments = SimpleNamespace(attention_backend="sparsekv", prefill_attention_backend=None)
    arguments.decode_attention_backend = None
    name_device_backend(arguments)
    assert arguments.attention_backend == "torch_native"
    assert "sparsekv" in ATTENTION_BACKEND_CHOICES


def test_an_engine_ends_if_sglang_takes_another_backend_than_the_one_that_ours_stands_for(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ServerArgs

    from sparsekv.runtime.sglang import sglang_plugin

    monkeypatch.setitem(sglang_plugin.REPLACED, "cpu", "fa3")  # as on a GPU
    settings = SETTINGS | {"attention_backend": "sparsekv", "kv_cache_dtype": "fp8_e5m2"}
    arguments = ServerArgs(model_path=str(folder), **settings)
    arguments.resolve_once()
    arguments = pickle.loads(pickle.dumps(arguments))
    assert attention_backends_of(resolved_view(arguments)) == ("triton", "triton")
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch_native", lambda runner: engine.backend(None, folder))
    with pytest.raises(UnsupportedError, match=r"expected fa3 .* took torch_native"):
        engine.runner.init_attention_backends()  # and the runner has that backend
    monkeypatch.setattr(engine.runner, "server_args", arguments)
    monkeypatch.setattr(engine.runner, "prefill_attention_backend_str", "triton")
    with pytest.raises(UnsupportedError, match=r"expected fa3 .* took triton"):
        sglang_plugin.check_planned(None, engine.runner)
    monkeypatch.setattr(engine.runner, "server_args", SimpleNamespace())  # nobody asked
    sglang_plugin.check_planned(None, engine.runner)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["engine_plan.Scratch", "sglang.engine._warm_up"])
def test_an_engine_without_memory_for_its_plan_is_dense_unless_others_wait_for_it(
    engine: Engine, planned: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, ranks: int
) -> None:
    def fail(*given: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(f"sparsekv.runtime.{place}", fail)
    if place == "sglang.engine._warm_up":
        monkeypatch.setattr("sparsekv.runtime.sglang.engine._started", lambda *given: planned.plan_host)
        monkeypatch.setattr(engine.runner, "device", "cuda")
    group = SimpleNamespace(all_gather_object=lambda given: [given] * ranks)
    parallel = SimpleNamespace(attn_tp_rank=0, attn_tp_size=ranks, attn_tp_group=group)
    monkeypatch.setattr("sparsekv.runtime.sglang.engine.get_parallel", lambda: parallel)
    if ranks > 1:
        with pytest.raises(torch.OutOfMemoryError):
            engine.backend(plan, tmp_path, required=False)
        return
    assert type(engine.backend(plan, tmp_path, required=False)).__name__ == "TorchNativeAttnBackend"
    with pytest.raises(UnsupportedError, match="OutOfMemoryError: out of memory"):
        engine.backend(plan, tmp_path)


def test_layers_are_warmed_up_by_pages_of_their_own_shape() -> None:
    from sparsekv.runtime.sglang.engine import _warm_up

    shapes = ((2, 32), (1, 64), (2, 32))
    layers = [
        SimpleNamespace(layer_id=number, tp_q_head_num=4, tp_k_head_num=heads, head_dim=size)
        for number, (heads, size) in enumerate(shapes)
    ]
    planned = {number: SimpleNamespace(program=number, softmax=number, scale=1.0, scales=number) for number in range(3)}
    called: list[tuple[Any, ...]] = []
    scratch = SimpleNamespace(
        kind=(torch.float32, torch.device("cpu")),
        copy=lambda pages, table_P, length, scales: called.append(("copy", pages, scales)),
    )
    captured = SimpleNamespace(warm_up=lambda program, pages, *by: called.append(("prefill", pages, program)))
    decode = SimpleNamespace(warm_up=lambda programs, pages, *by: called.append(("decode", pages, programs)))
    host = SimpleNamespace(scratch=scratch, captured=captured, decode=decode, longest=64, warm_up=lambda *given: None)
    host.program = SimpleNamespace(prefilling=(2,))
    _warm_up(
        SimpleNamespace(plan_host=host, plan_layers=planned, pages=lambda layer: (layer.tp_k_head_num, layer.head_dim)),
        layers,
        8,
    )
    assert called == [
        ("copy", (2, 32), 0),
        ("prefill", (2, 32), 2),
        ("decode", (2, 32), [0, 2]),
        ("copy", (1, 64), 1),
        ("decode", (1, 64), [1]),
    ]


def change_settings(engine: Engine, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    settings = resolved_view(engine.runner.server_args)

    class Changed:
        def __getattr__(self, name: str) -> Any:
            return values.get(name, getattr(settings, name))

    monkeypatch.setattr("sparsekv.runtime.sglang.engine.resolved_view", lambda arguments: Changed())


@pytest.mark.parametrize("drafter", [None, "NGRAM"])
def test_beside_drafts_no_row_of_a_mixed_step_chooses(
    engine: Engine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str | None
) -> None:
    change_settings(engine, monkeypatch, {"speculative_algorithm": drafter})
    assert engine.backend(plan, tmp_path).plan_mixes is (drafter is None)


def graphs_of(backend: str) -> dict[str, Any]:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=backend), decode=SimpleNamespace(bs=None))
    return {"cuda_graph_config": graphs}


def test_decode_is_timed_at_sizes_that_are_captured_and_fit_the_cache(
    engine: Engine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at all requests that there may be, each as long as any."""
    from sglang.srt.arg_groups.overrides import resolved_view

    prefill = resolved_view(engine.runner.server_args).cuda_graph_config.prefill
    monkeypatch.setattr(engine.runner, "max_total_num_tokens", SLOTS + 100)
    for sizes, rows in (([1, 2, 4], 4), (None, 8), ([1, 2, 500], 8)):
        graphs = SimpleNamespace(prefill=prefill, decode=SimpleNamespace(bs=sizes))
        change_settings(engine, monkeypatch, {"cuda_graph_config": graphs})
        place = engine.backend(plan, tmp_path).plan_host.place
        assert (place.rows, place.tokens) == (rows, SLOTS)
        monkeypatch.undo()
        monkeypatch.setattr(engine.runner, "max_total_num_tokens", SLOTS + 100)


OTHERS: dict[str, dict[str, Any]] = {
    "--enable-deterministic-inference": {"enable_deterministic_inference": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--enable-dp-attention": {"enable_dp_attention": True},
    "a store of keys and values \\(file\\)": {"hicache_storage_backend": "file"},
    "a store of keys and values \\(lmcache\\)": {"enable_lmcache": True},
    "--dcp-size 1": {"dcp_size": 2},
    "--pp-size 1": {"pp_size": 2},
    "--dllm-algorithm": {"dllm_algorithm": "some"},
    "--prefill-only-disable-kv-cache": {"prefill_only_disable_kv_cache": True},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--cuda-graph-backend-prefill": graphs_of("full"),
    "--cuda-graph-backend-prefill breakable": graphs_of("tc_piecewise"),
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_a_setting_that_would_run_a_plan_wrongly_is_told_and_ends_an_engine_that_was_asked_for_it(
    engine: Engine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, sentence: str
) -> None:
    change_settings(engine, monkeypatch, OTHERS[sentence])
    with pytest.raises(UnsupportedError, match=sentence):
        engine.backend(plan, tmp_path)
    with caplog.at_level(logging.WARNING, logger="sglang.sparsekv"):
        dense = engine.backend(plan, tmp_path, required=False)
    assert type(dense).__name__ == "TorchNativeAttnBackend"
    assert "all attention is dense" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("use_mla_backend", True, "latent keys"),
        ("decode_attention_backend_str", "fa3", "use --attention-backend alone"),
        ("kv_cache_dtype", "torch.float8_e5m2", "fp8_e4m3"),
        ("kv_cache_dtype", "torch.float8_e4m3fn", "on a CPU"),
    ],
)
def test_a_runner_that_a_plan_cannot_follow_is_refused(
    engine: Engine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, sentence: str
) -> None:
    monkeypatch.setattr(engine.runner, name, value)
    with pytest.raises(UnsupportedError, match=sentence):
        engine.backend(plan, tmp_path)


def test_plans_that_evict_and_plans_of_other_models_are_refused(engine: Engine, plan: Plan, tmp_path: Path) -> None:
    evicting = plan.model_copy(update={"decode": None, "prefill": None, "kv_cache": (drops((2,), 64),)})
    with pytest.raises(UnsupportedError, match="evict tokens, which SGLang cannot"):
        engine.backend(evicting, tmp_path)
    with pytest.raises(PlanMismatchError, match="the model of this plan"):
        engine.backend(plan_for(other := tiny_model("llama", layers=2), every_head(other, Dense())), tmp_path)
