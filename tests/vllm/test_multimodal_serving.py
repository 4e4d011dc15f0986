"""Multimodal checkpoints served for text alone: answers by a plan of the decoder are those of the transformers host."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import save_model
from tiny_models import random_tokens
from tiny_multimodal import multimodal_config, multimodal_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from vllm_engine import LONGEST, Oracle, assert_answered, gaps, make_engine

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, fraction, tokens
from sparsekv.runtime.hf.load import load_model

pytestmark = pytest.mark.slow  # half a minute each: vLLM looks at a class of a model in one more process
WITHOUT_TORCHVISION = Path(__file__).parents[1] / "support" / "no_torchvision"
PATTERNS = (AShape(sink=tokens(64), window=tokens(128)), BlockSparse(keep=fraction(0.3)), Dense())
PROMPTS = [random_tokens(1, length, length)[0].tolist() for length in (1100, 700)]


def plan_beside(kind: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Saves a model with a plan beside it; returns its decoder and the plan."""
    save_model(multimodal_model(config=multimodal_config(kind, **options)), folder)
    decoder = load_model(folder, device="cpu", dtype="float32").model
    plan = plan_for(decoder, every_head(decoder, *PATTERNS), decode_plan(segment(1, (2,), 48, sink=4, recent=32)))
    write_plan(plan, folder / "sparsekv.yaml")
    return decoder, plan


_EVEN = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": LONGEST}
OWN = {  # vLLM 0.32 does not read from a config of transformers how the queries of Ministral 3 grow with their position
    "mistral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | _EVEN},
}


def check(kind: str, folder: Path, limits: dict[str, Any]) -> None:
    """Raises where an answer of an engine with a plan is not that of the transformers host."""
    decoder, plan = plan_beside(kind, folder, **OWN.get(kind, {}))
    check_limits(folder, limits)
    engine = make_engine(str(folder), additional_config={"sparsekv": {"require": True}}, **limits)
    assert_answered(engine, Oracle(decoder, plan), PROMPTS)


def check_limits(folder: Path, limits: dict[str, Any]) -> None:
    """Raises where the configuration of an engine does not say that it takes text alone."""
    from vllm.engine.arg_utils import EngineArgs

    from sparsekv.runtime.vllm.internals import engine_facts

    args = {"model": str(folder), "dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST}
    assert engine_facts(EngineArgs(**args).create_engine_config()).modalities
    assert not engine_facts(EngineArgs(**args, **limits).create_engine_config()).modalities


STATES = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}


def check_hybrid(kind: str, folder: Path) -> None:
    """In bfloat16, as `test_families.check_hybrid`: log-probabilities are nearer to those by the plan than to dense."""
    decoder, plan = plan_beside(kind, folder, **STATES)
    engine = make_engine(str(folder), language_model_only=True, dtype="bfloat16")
    apart, dense = gaps(engine, (Oracle(decoder, plan), Oracle(decoder, None)), PROMPTS)
    assert max(apart) < min(dense) / 2, (apart, dense)


NO_PICTURES = {
    "qwen3_vl": {"language_model_only": True},
    "gemma3": {"limit_mm_per_prompt": {"image": 0}},
    "gemma4": {"language_model_only": True},
    "mistral3": {"language_model_only": True},
}


@pytest.mark.parametrize("kind", NO_PICTURES)
def test_the_plan_beside_a_multimodal_model_runs_where_requests_are_text_alone(kind: str, tmp_path: Path) -> None:
    run("check", kind, tmp_path / "model", NO_PICTURES[kind])


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM packs bfloat16 keys here, which is refused")
def test_a_multimodal_model_with_recurrent_states_follows_a_plan(tmp_path: Path) -> None:
    run("check_hybrid", "qwen3_5", tmp_path / "model")


def run(check: str, *given: object) -> None:
    """In a process of its own, where torchvision is another one."""
    paths = os.pathsep.join((str(WITHOUT_TORCHVISION), str(Path(__file__).parent), *sys.path))
    call = f"from pathlib import PosixPath; from test_multimodal_serving import {check}; {check}{given!r}"
    ran = subprocess.run([sys.executable, "-c", call], env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert ran.returncode == 0
