"""Two tensor-parallel ranks, of which each has half of the heads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from sglang_engine import NEW, prompt_of
from sglang_rank import LENGTHS
from vllm_engine import Oracle

from sparsekv.runtime.core.pays import parse

SCRIPT = Path(__file__).parents[1] / "support" / "sglang_rank.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_ranks_answer_as_the_transformers_host_and_have_the_rule_of_the_first(
    folder: Path, sparse: Oracle, tmp_path: Path
) -> None:
    """A choice is made from the scores of all heads, and the patterns of prefill follow the heads of a rank."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], f"{first[1][-2000:]}\n{second[1][-2000:]}"
    told, other = (json.loads(out.splitlines()[-1]) for out, _ in (first, second))
    assert told == other
    for length, (tokens, logprobs), cuts in zip(LENGTHS, told["answers"], told["cuts"], strict=True):
        answer = sparse(prompt_of(length), cuts[:-1], NEW)
        assert tokens == answer.tokens
        assert logprobs == pytest.approx(answer.logprobs, abs=1e-3)
    assert parse(told["rule"]).decode.pays(1, 1536)
    assert len(list(tmp_path.rglob("pays-*.json"))) == 1
    chunks = (pair for cuts in told["cuts"] for pair in pairwise([0, *cuts]))
    assert told["sparse"] == [sum(end - start for start, end in chunks if end > 384), 2 * (NEW - 1)]
