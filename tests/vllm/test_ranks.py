"""Two tensor-parallel ranks: the heads of each compute the plan, and choose as one rank does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engine import NEW, Oracle, chunks_of

from sparsekv.runtime.hf.load import LoadedModel

TWO_RANKS = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    sys.path.insert(0, {support!r})
    from vllm_engine import generate, make_engine, tokens_of
    from sparsekv.runtime.vllm.counters import serving_stats
    config = {{"sparsekv": {{"plan": {plan!r}, "compare_ranks": True}}}}
    engine = make_engine({model!r}, additional_config=config, tensor_parallel_size=2)
    found = []
    for prompt in {prompts}:
        (output,) = generate(engine, [prompt])
        chosen = output.outputs[0]
        found.append([tokens_of(output), [at[t].logprob for at, t in zip(chosen.logprobs, chosen.token_ids)]])
    stats = serving_stats(engine)
    print(json.dumps([found, stats.decode_sparse, stats.sparse_tokens, stats.rank_differences]))
"""


def test_ranks_answer_as_one_does(
    reference: LoadedModel, plan_file: Path, sparse: Oracle, prompts: dict[int, list[int]]
) -> None:
    """One segment chooses by the heads of all ranks, the other by KV head; prefill is sparse by head."""
    asked = [prompts[length] for length in (700, 1500, 2700)]
    model, support = str(reference.model.name_or_path), str(Path(__file__).parents[1] / "support")
    script = TWO_RANKS.format(support=support, plan=str(plan_file), model=model, prompts=asked)
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    found, decoded, prefilled, differences = json.loads(done.stdout.splitlines()[-1])
    for prompt, (tokens, logprobs) in zip(asked, found, strict=True):
        answer = sparse(prompt, chunks_of([len(prompt)])[0])
        assert tokens == answer.tokens
        assert logprobs == pytest.approx(answer.logprobs, abs=1e-3)
    assert differences == 0
    assert decoded == 2 * (NEW - 1)
    assert prefilled > 3000
