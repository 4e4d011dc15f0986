"""sglang_rank.py RANK PORT FOLDER: one of two tensor-parallel ranks of SGLang on a CPU; prints its answers as JSON."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
from sglang_engine import STUBS, Asked, Engine, prompt_of

sys.path[:0] = STUBS
LENGTHS = (1100, 200, 900)

if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    both = {"tp_size": 2, "dist_init_addr": f"127.0.0.1:{port}", "attention_backend": "sparsekv"}
    engine = Engine(Path(folder), int(rank), **both)
    asked = engine.answer([Asked(prompt_of(n), at=number) for number, n in enumerate(LENGTHS)])
    counts = engine.runner.attn_backend.plan_host.counters.read()
    told = {
        "answers": [(request.tokens, request.logprobs) for request in asked],
        "cuts": [request.cuts[0] for request in asked],
        "sparse": (counts.sparse_tokens, counts.decode_sparse),
    }
    print(json.dumps(told), flush=True)
    os._exit(0)  # a group's threads may wait for the other rank
