"""Families of models that vLLM's CPU build has: answers by a plan are those of the transformers host."""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import save_model
from tiny_models import SHARED, random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, info_of, plan_for, segment
from vllm_engine import LONGEST, Oracle, assert_answered, gaps, make_engine

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import PrefillPlan

PATTERNS = (
    AShape(sink=tokens(64), window=tokens(128)),
    BlockSparse(keep=fraction(0.3)),
    VerticalSlash(vertical=tokens(32), slash=tokens(128), last_q=64, max_tiles=fraction(0.4)),
    Dense(),
)
PROMPTS = [random_tokens(1, length, length)[0].tolist() for length in (700, 600)]
LOCAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {  # vLLM knows no other rope of this family
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": LONGEST // 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GEMMA4 = {"sliding_window": 100, "global_head_dim": 128}
FAMILIES = {
    "qwen3_moe": {},  # first: it has experts
    "phi3": {},
    "gemma2": {"layers": 4, "layer_types": LOCAL, "sliding_window": 100},
    "gpt_oss": {"layers": 4, "layer_types": LOCAL, "sliding_window": 100, "rope_parameters": YARN},
    "gemma4_text": _GEMMA4 | {"layers": 4, "layer_types": LOCAL},
    SHARED: _GEMMA4 | {"layers": 6, "layer_types": LOCAL + LOCAL[:2], "num_kv_shared_layers": 2},
    "gemma3_text": {"layers": 4, "layer_types": LOCAL, "sliding_window": 100},
    "glm4_moe": {},
}
ONE_GROUP = "gemma2 in one group"  # layers with a window share the page tables of the others


def check(name: str, folder: Path) -> Any:
    """The engine, with a plan. Raises where an answer of it is not that of the transformers host."""
    family, *in_one_group = name.split(" in ")
    model = tiny_model(family, head_dim=64, context=LONGEST, **FAMILIES[family])
    whole = info_of(model).full_layers
    bucket = every_head(model, *PATTERNS).lengths[0]
    heads = tuple(group for group in bucket.heads if group.layer in whole)
    prefill = PrefillPlan(tile={"query": 64, "key": 64}, lengths=(bucket.model_copy(update={"heads": heads}),))
    plan = plan_for(model, prefill, decode_plan(segment(whole[0], whole[1:], 48, sink=4, recent=32)))
    write_plan(plan, folder / "plan.yaml")
    given = {"sparsekv": {"plan": str(folder / "plan.yaml")}}
    settings = {"disable_hybrid_kv_cache_manager": True} if in_one_group else {}
    engine = make_engine(str(save_model(model, folder / "model")), additional_config=given, **settings)
    groups = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    assert (len(groups) > 1) == ("sliding_window" in FAMILIES[family] and not in_one_group)
    assert_answered(engine, Oracle(model, plan), PROMPTS)
    return engine


HYBRID_NAME = "qwen3_next"
HYBRID = {
    "layers": 4,
    "layer_types": ["full_attention", "linear_attention"] * 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 2,
    "num_experts_per_tok": 2,  # no choice among experts that rounding could turn
    "dtype": torch.bfloat16,
}


def check_hybrid(folder: Path) -> Any:
    """As `check`, in bfloat16, which vLLM's recurrent layers ask for on a CPU: the log-probabilities of the engine's
    own tokens are nearer to those by the plan than to dense ones by far."""
    model = tiny_model(HYBRID_NAME, head_dim=64, context=LONGEST, **HYBRID)
    bucket = every_head(model, AShape(sink=tokens(64), window=tokens(128))).lengths[0]
    heads = tuple(group for group in bucket.heads if group.layer in (0, 2))
    prefill = PrefillPlan(tile={"query": 64, "key": 64}, lengths=(bucket.model_copy(update={"heads": heads}),))
    plan = plan_for(model, prefill, decode_plan(segment(0, (2,), 48, sink=4, recent=32)))
    write_plan(plan, folder / "plan.yaml")
    given = {"sparsekv": {"plan": str(folder / "plan.yaml")}}
    engine = make_engine(str(save_model(model, folder / "model")), additional_config=given, dtype="bfloat16")
    assert engine.llm_engine.vllm_config.cache_config.block_size > 128  # by the states, which CPUs keep in other types
    model = model.float()
    apart, dense = gaps(engine, (Oracle(model, plan), Oracle(model, None)), PROMPTS)
    assert max(apart) < 0.2 < 0.4 < min(dense), (apart, dense)
    return engine


def check_all(folder: Path) -> None:
    """Writes to `folder/found.json` what each check raised, or nothing. All engines are kept: where one goes, vLLM ends
    what others need."""
    found: dict[str, str] = {}
    kept: list[Any] = []
    for name in (*FAMILIES, ONE_GROUP, HYBRID_NAME):
        (folder / name).mkdir()
        try:
            kept.append(check_hybrid(folder / name) if name == HYBRID_NAME else check(name, folder / name))
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong with each family. In a process of their own: vLLM forms groups for experts with the first engine
    of a process or never."""
    folder = tmp_path_factory.mktemp("families")
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    call = f"from pathlib import PosixPath; from test_families import check_all; check_all({folder!r})"
    call += "; import os; os._exit(0)"  # ending the engines takes seconds
    subprocess.run([sys.executable, "-c", call], env=os.environ | {"PYTHONPATH": paths}, check=False)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM packs bfloat16 keys here, which is refused")
def test_a_model_with_recurrent_states_follows_a_plan(found: dict[str, str]) -> None:
    assert found[HYBRID_NAME] == ""


@pytest.mark.parametrize("family", [*FAMILIES, ONE_GROUP])
def test_answers_are_those_of_the_transformers_host_by_the_same_plan(family: str, found: dict[str, str]) -> None:
    assert found[family] == ""
