"""Tensor-parallel ranks: the heads of each compute the plan, and choose as one rank does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from model_folders import save_model
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from vllm_engine import LONGEST, NEW, Oracle, chunks_of

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, VerticalSlash, fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

RANKS = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    sys.path.insert(0, {support!r})
    from vllm_engine import generate, make_engine, tokens_and_logprobs
    from sparsekv.runtime.vllm.counters import serving_stats
    config = {{"sparsekv": {{"plan": {plan!r}, "compare_ranks": True}}}}
    engine = make_engine({model!r}, additional_config=config, tensor_parallel_size={ranks})
    found = []
    for prompt in {prompts}:
        found += map(tokens_and_logprobs, generate(engine, [prompt]))
    stats = serving_stats(engine)
    with open({out!r}, "w") as file:  # the ranks print as well
        json.dump([found, stats.decode_sparse, stats.sparse_tokens, stats.rank_differences], file)
"""


def check(model: Path, plan: Plan, asked: Sequence[list[int]], ranks: int, folder: Path, oracle: Oracle) -> list[int]:
    """Tokens that were decoded and prefilled sparse. Raises where an answer is not one rank's, or choices differ."""
    write_plan(plan, folder / "plan.yaml")
    names = {"support": Path(__file__).parents[1] / "support", "plan": folder / "plan.yaml", "out": folder / "out.json"}
    text = {name: str(path) for name, path in (*names.items(), ("model", model))}
    subprocess.run([sys.executable, "-c", RANKS.format(prompts=list(asked), ranks=ranks, **text)], check=True)
    found, *counted, differences = json.loads(names["out"].read_text())
    for prompt, (answer, logprobs) in zip(asked, found, strict=True):
        expected = oracle(prompt, chunks_of([len(prompt)])[0])
        assert answer == expected.tokens
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert differences == 0
    return counted


def test_ranks_answer_as_one_does(
    reference: LoadedModel, plan: Plan, sparse: Oracle, prompts: dict[int, list[int]], tmp_path: Path
) -> None:
    """One segment chooses by the heads of all ranks, the other by KV head; prefill is sparse by head."""
    asked = [prompts[length] for length in (700, 1500, 2700)]
    decoded, prefilled = check(Path(reference.model.name_or_path), plan, asked, 2, tmp_path, sparse)
    assert decoded == 2 * (NEW - 1)
    assert prefilled > 3000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_kv_heads_answer_as_one_does(
    reference: LoadedModel, plan: Plan, prompts: dict[int, list[int]], tmp_path: Path
) -> None:
    """Of two KV heads each is on two of four ranks, and all heads choose together."""
    buckets = tuple(
        bucket.model_copy(
            update={"segments": tuple(one.model_copy(update={"heads": "max"}) for one in bucket.segments)}
        )
        for bucket in plan.decode.lengths
    )
    together = plan.model_copy(update={"decode": plan.decode.model_copy(update={"lengths": buckets})})
    asked = [prompts[length] for length in (700, 1500, 2700)]
    oracle = Oracle(reference.model, together)
    decoded, _ = check(Path(reference.model.name_or_path), together, asked, 4, tmp_path, oracle)
    assert decoded == 2 * (NEW - 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_eight_ranks_answer_as_one_does_also_where_they_share_kv_heads(tmp_path: Path, kv_heads: int) -> None:
    model = tiny_model("llama", layers=4, heads=8, kv_heads=kv_heads, head_dim=64, hidden=256, context=LONGEST)
    patterns = (
        AShape(sink=tokens(64), window=tokens(128)),
        BlockSparse(keep=fraction(0.3)),
        VerticalSlash(vertical=tokens(32), slash=tokens(128), last_q=64, max_tiles=fraction(0.4)),
    )
    plan = plan_for(model, every_head(model, *patterns), decode_plan(segment(0, (1, 2, 3), 48, sink=4, recent=32)))
    asked = [random_tokens(1, length, length)[0].tolist() for length in (300, 1100)]
    decoded, _ = check(save_model(model, tmp_path / "model"), plan, asked, 8, tmp_path, Oracle(model, plan))
    assert decoded == len(asked) * (NEW - 1)
