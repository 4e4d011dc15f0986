"""sglang_rank.py RANK PORT FOLDER: one of two tensor-parallel ranks of SGLang on a CPU; prints its answers as JSON, and
the rule that it measures over a stand-in for the kernel on GPUs. By the second one's clock nothing pays."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
from typing import Any

from plans_samples import counts
from sglang_engine import STUBS, Asked, Engine, plan_of, prompt_of

sys.path[:0] = STUBS
LENGTHS = (1100, 200, 900)


def measured(engine: Engine, rank: int) -> str:
    import torch
    from sglang_paged import PagedBackend

    from sparsekv.kernels.keys import PLAIN
    from sparsekv.runtime.core.timed_layers import Place, Timers
    from sparsekv.runtime.paged import timed_kernels
    from sparsekv.runtime.sglang.engine import _engine_of
    from sparsekv.runtime.sglang.planned_backend import OnCuda, with_methods

    def timer(launches: Any, device: Any) -> list[float]:
        return [1e4, *[2e4 if rank else 5e3] * (len(launches) - 1)]  # longer than the program takes

    timed_kernels.Timers = lambda: Timers(timer, timer, timer)
    ours = with_methods(PagedBackend(engine.runner), OnCuda)
    vars(ours).update(plan_of(engine.runner.attn_backend))
    host = ours.plan_host
    host.engine, host.place = _engine_of(ours), Place("sha256:", 1536, 512, 2, {1536: counts(4, 0.4)})
    return str(timed_kernels.measured_rule(host, torch.device("cpu"), 32, None, PLAIN))


if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    both = {"tp_size": 2, "dist_init_addr": f"127.0.0.1:{port}", "attention_backend": "sparsekv"}
    engine = Engine(Path(folder), int(rank), **both)
    asked = engine.answer([Asked(prompt_of(n), at=number) for number, n in enumerate(LENGTHS)])
    stats = engine.runner.attn_backend.plan_host.counters.read()
    told = {
        "answers": [(request.tokens, request.logprobs) for request in asked],
        "cuts": [request.cuts[0] for request in asked],
        "sparse": (stats.sparse_tokens, stats.decode_sparse),
        "rule": measured(engine, int(rank)),
    }
    print(json.dumps(told), flush=True)
    os._exit(0)  # a group's threads may wait for the other rank
