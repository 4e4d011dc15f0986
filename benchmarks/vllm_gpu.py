"""What a release of vLLM has to show on a GPU: right answers by a plan, and times against its own attention.

    python benchmarks/vllm_gpu.py [--out DIR] [--only tasks,serve] [--backend flash] [--long]

In an environment with vLLM for CUDA (README, "In vLLM"). Each section is a process of its own with a time limit: one
that fails does not take the others along. A line of JSON is printed for every result; all else that an engine says goes
to a log file a section, whose end is printed where the section fails.

- tasks: `vllm_tasks.py`, retrieval tasks of the reference model at 4K in chunks of 1K.
- serve: `bench serve` on the 8B shape with random weights, steps of 16K tokens: first token at 32K and 128K (densities
  0.20 and 0.08), and 64 requests of 4000 + 500 tokens at once; the kernels that take longest in one prompt of 32K,
  dense and sparse, and the memory that is left for the cache; first tokens once more by vLLM's copy of flash-attn-4;
  with --long 16 requests of 32K + 500, 8 at once.
- flash: what our block lists mean to that copy, tests/kernels/prefill/test_flash_gpu.py. Needs pytest; only when named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECTIONS = {"tasks": 150, "serve": 430, "flash": 300}  # seconds at most
USUAL = "tasks,serve"
_LOG_LINES = 60
_LISTS = "tests/kernels/prefill/test_flash_gpu.py"


def main() -> None:
    """Runs all sections, or as a child one of them."""
    args = _arguments()
    if args.section is not None:
        _serve(args.long, args.backend)
        return
    out = Path(args.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    commands = {
        "tasks": [str(HERE / "vllm_tasks.py"), "--samples", "6", "--transformers"],
        "serve": [str(HERE / "vllm_gpu.py"), "--section", "serve", "--backend", args.backend, *["--long"] * args.long],
        "flash": [
            "-c",
            f"import sys, pytest, vllm; sys.exit(pytest.main(['-m', 'gpu', '-v', '{HERE.parent / _LISTS}']))",
        ],
    }
    results = [_section(name, commands[name], out / f"{name}.log", args.long) for name in args.only.split(",")]
    sys.exit(any(results))


def _section(name: str, command: list[str], log: Path, long: bool) -> int:
    """Its exit status; what it prints goes on."""
    start, limit = time.perf_counter(), SECTIONS[name] + (180 if long and name == "serve" else 0)
    with log.open("w") as file:
        try:
            status = subprocess.run([sys.executable, *command], stderr=file, timeout=limit, cwd=HERE.parent).returncode
        except subprocess.TimeoutExpired:
            status = 124
    _tell(section=name, status=status, seconds=round(time.perf_counter() - start), log=str(log))
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-_LOG_LINES:] if status else [line for line in lines if "sparsekv:" in line][-8:]
    print("\n".join(f"  {line[:300]}" for line in shown), flush=True)
    return status


def _tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


# --- the section that a child runs ------------------------------------------------------------------------------------


def _serve(long: bool, backend: str) -> None:
    import torch

    from sparsekv.planner.bench.random_model import hand_plan
    from sparsekv.planner.bench.serve_bench import (
        Load,
        ServeBench,
        bench_serve,
        dense_up_to,
        served_model,
        start_engines,
    )
    from sparsekv.plans.patterns import TileShape

    one, many = (Load(32768, 16), Load(131072, 16)), (Load(4000, 500, 64, 64),)
    loads = (one[0], *many, one[1], *((Load(32768, 500, 8, 16),) if long else ()))
    bench = ServeBench(loads, torch.device("cuda"), torch.bfloat16, repeats=3, step_tokens=16384, backend=backend)
    with served_model("llama3-8b", True, bench.longest) as model:
        plan, words = hand_plan(model.info, (32768, 131072), (0.20, 0.08), TileShape())
        start = time.perf_counter()
        with start_engines(model, dense_up_to(plan, 8192), bench) as engines:
            _tell(engines_started=round(time.perf_counter() - start), **_tried(lambda: _memory(engines)))
            for load in loads:
                repeats = 1 if load.requests == 16 else bench.repeats
                for row in bench_serve(engines, model, words, replace(bench, loads=(load,), repeats=repeats)):
                    _tell(**row.as_data())
            for way in ("dense", "sparse"):
                _tell(kernels=way, **_tried(lambda way=way: _kernels(engines[way], model.vocabulary)))
            if backend == "auto":
                engines.sparse.apply_model(_by_flash)
                for row in bench_serve(engines, model, words, replace(bench, loads=one)):
                    _tell(**row.as_data())


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A measurement beside the point: what it fails of is told, and ends nothing."""
    try:
        return measure()
    except Exception:
        return {"failed": traceback.format_exc()}


def _by_flash(model: Any) -> None:
    """From here on an engine prefills by flash-attn-4, or by what follows it where that fails."""
    from sparsekv.kernels.backends import Fallback

    host = next(module.impl.plan_host for module in model.modules() if hasattr(module, "impl"))
    host._fallback = Fallback("flash")


def _memory(engines: Any) -> dict[str, Any]:
    """Pages that each engine has room for, and the bytes that the sparse one has fewer of."""
    pages = {way: engines[way].llm_engine.vllm_config.cache_config for way in ("dense", "sparse")}
    blocks = {way: cache.num_gpu_blocks for way, cache in pages.items()}
    size = pages["dense"].block_size * 32 * 8 * 128 * 2 * 2
    return {"pages": blocks, "fewer_bytes": (blocks["dense"] - blocks["sparse"]) * size}


def _kernels(llm: Any, vocabulary: int) -> dict[str, Any]:
    """Milliseconds of the kernels that take longest in one prompt of 32K."""
    from torch.profiler import ProfilerActivity, profile

    from sparsekv.runtime.vllm.serving import serve

    prompt = [[1 + 7919 * n % (vocabulary - 1) for n in range(32768)]]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        timing = serve(llm, prompt, 1, 1)
    kernels = [one for one in found.key_averages() if str(one.device_type).endswith("CUDA")]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    named = {one.key[:60]: [round(one.self_device_time_total / 1e3, 1), one.count] for one in kernels[:14]}
    return {
        "first_ms": round(timing.first_seconds[0] * 1e3, 1),
        "device_ms": round(sum(one.self_device_time_total for one in kernels) / 1e3, 1),
        "longest": named,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", help="folder for logs; a new one in the folder for temporary files without it")
    parser.add_argument("--only", default=USUAL, help="sections, separated by commas")
    parser.add_argument("--long", action="store_true", help="also 16 requests of 32K + 500 tokens, 8 at once")
    parser.add_argument("--backend", default="auto", help="kernels of sparse prefill: auto, triton, flash")
    parser.add_argument("--section", choices=["serve"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
