"""Tensor-parallel ranks: the heads of each compute the plan, and choose as one rank does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comparing_worker import RankDifferences, digests
from model_folders import save_model
from plans_samples import model_info
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from vllm_engine import LONGEST, NEW, Oracle, chunks_of

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, VerticalSlash, fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.load import LoadedModel

RANKS = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    sys.path.insert(0, {support!r})
    from vllm_engine import generate, make_engine, tokens_and_logprobs
    from sparsekv.runtime.vllm.engine_host import serving_stats
    config = {{"sparsekv": {{"plan": {plan!r}}}}}
    engine = make_engine({model!r}, additional_config=config, tensor_parallel_size={ranks},
        worker_cls="comparing_worker.ComparingWorker")
    found = []
    for prompt in {prompts}:
        found += map(tokens_and_logprobs, generate(engine, [prompt]))
    stats = serving_stats(engine)
    with open({out!r}, "w") as file:  # the ranks print as well
        json.dump([found, stats.decode_sparse, stats.sparse_tokens, engine.collective_rpc("rank_differences")], file)
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
    assert differences == [0] * ranks
    return counted


@pytest.mark.parametrize("other", ["same", "another token", "one fewer"])
def test_choices_in_which_ranks_differ_are_counted_row_by_row(other: str) -> None:
    """The other rank is this one, but for its choice in one row."""
    source = torch.Generator().manual_seed(0)
    counts_B = torch.tensor([5, ALL, 7], dtype=torch.int32)
    chosen_B1N = torch.rand(3, 1, 300, generator=source).topk(7).indices.int().sort().values
    elsewhere_B = digests(Selection(chosen_B1N, counts_B, 4, 16)).view(torch.float32)
    differences = RankDifferences(lambda x_B: torch.stack((elsewhere_B, x_B)), torch.device("cpu"))
    changed_B1N, fewer_B = chosen_B1N.clone(), counts_B.clone()
    changed_B1N[0, 0, 5:] += 1  # behind its count
    changed_B1N[1] += 1  # attends to everything
    if other == "another token":
        changed_B1N[2, 0, 3] += 1
    elif other == "one fewer":
        fewer_B[2] -= 1
    program = Program.of(None, decode_plan(segment(0, (1,), 40)), model_info(layers=4, heads=4, kv_heads=2))
    together, alone = (replace(program.segments[0], across_ranks=across) for across in (True, False))
    differences(together, Selection(changed_B1N, fewer_B, 4, 16))
    differences(alone, Selection(chosen_B1N + 9, counts_B, 4, 16))
    assert differences.count == (other != "same")


def test_ranks_answer_as_one_does(
    reference: LoadedModel, plan: Plan, sparse: Oracle, prompts: dict[int, list[int]], tmp_path: Path
) -> None:
    """One segment chooses by the heads of all ranks, the other by KV head; prefill is sparse by head."""
    asked = [prompts[length] for length in (700, 1100)]
    decoded, prefilled = check(Path(reference.model.name_or_path), plan, asked, 2, tmp_path, sparse)
    assert decoded == NEW - 1
    assert prefilled > 1000


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
