"""Families of models that vLLM's CPU build has: answers by a plan are those of the transformers host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_folders import save_model
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, info_of, plan_for, segment
from vllm_engine import LONGEST, Oracle, chunks_of, generate, make_engine, tokens_of

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import PrefillPlan

PATTERNS = (
    AShape(sink=tokens(64), window=tokens(128)),
    BlockSparse(keep=fraction(0.3)),
    VerticalSlash(vertical=tokens(32), slash=tokens(128), last_q=64, max_tiles=fraction(0.4)),
    Dense(),
)
LOCAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "phi3": {},
    "qwen3_moe": {},
    "gemma3_text": {"layers": 4, "layer_types": LOCAL, "sliding_window": 100},
}


def check(family: str, folder: Path) -> None:
    """Raises where an answer of an engine with a plan is not that of the transformers host."""
    model = tiny_model(family, head_dim=64, context=LONGEST, **FAMILIES[family])
    whole = info_of(model).full_layers
    bucket = every_head(model, *PATTERNS).lengths[0]
    heads = tuple(group for group in bucket.heads if group.layer in whole)
    prefill = PrefillPlan(tile={"query": 64, "key": 64}, lengths=(bucket.model_copy(update={"heads": heads}),))
    plan = plan_for(model, prefill, decode_plan(segment(whole[0], whole[1:], 48, sink=4, recent=32)))
    write_plan(plan, folder / "plan.yaml")
    given = {"sparsekv": {"plan": str(folder / "plan.yaml")}}
    engine = make_engine(str(save_model(model, folder / "model")), additional_config=given)
    prompts, oracle = [random_tokens(1, length, length)[0].tolist() for length in (1100, 700)], Oracle(model, plan)
    for prompt, cuts, output in zip(prompts, chunks_of([1100, 700]), generate(engine, prompts), strict=True):
        answer = oracle(prompt, cuts)
        assert tokens_of(output) == answer.tokens
        found = [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]
        assert found == pytest.approx(answer.logprobs, abs=2e-3)
        assert answer.density < 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_transformers_host_by_the_same_plan(family: str, tmp_path: Path) -> None:
    """Each in a process of its own: vLLM forms groups for experts with the first engine of a process or never."""
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    call = f"from pathlib import Path; from test_families import check; check({family!r}, Path({str(tmp_path)!r}))"
    ran = subprocess.run([sys.executable, "-c", call], env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert ran.returncode == 0
