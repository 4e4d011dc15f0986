"""What a release of vLLM has to show on a GPU: right answers by a plan, and times against its own attention.

    python benchmarks/vllm_gpu.py [--only tasks,first] [--step 16k,8k] [--backend auto,triton,copy] [--lengths 32k,128k]

In an environment with vLLM for CUDA (README, "In vLLM"). Each section is a process of its own with a time limit: one
that fails does not take the others along. Sections of `bench serve` run once for every step (tokens that the engine
computes at once) and backend: those of the package, or vLLM's copy of flash-attn-4, "copy". A line of JSON is printed
for every result and every section; all else that an engine says goes to a log file a section, whose end is printed
where the section fails.

- tasks: `vllm_tasks.py`, retrieval tasks of the reference model at 4K in chunks of 1K.
- requests: `vllm_requests.py`, 2,000 requests of 256 to 8K tokens of the reference model.
- first: first token at 32K and 128K, densities 0.20 and 0.08. It and all below are of the 8B shape with random weights.
- many: 64 requests of 4000 + 500 tokens at once, five times.
- long: 32 requests of 32K + 500 tokens, 8 at once, once.
- kernels: those that take longest in one prompt of 32K, dense and sparse.
- lists: what our block lists mean to that copy of flash-attn-4, tests/kernels/prefill/test_flash_gpu.py. Needs pytest.

Two engines start in about a minute. With them a section takes, on one H200: first 130 s (128K alone 110), many 200,
long 200, kernels 80.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsekv.plans.types import format_length, parse_lengths

HERE = Path(__file__).resolve().parent
SERVED = {"first": 260, "many": 330, "long": 360, "kernels": 180}  # seconds at most
OTHERS = {"tasks": 165, "requests": 420, "lists": 300}
_LOG_LINES = 60
_LISTS = "tests/kernels/prefill/test_flash_gpu.py"
# Python finds no package whose name stands for nothing: then vLLM's copy of flash-attn-4 is the one that there is.
_HIDE = "import sys; sys.modules['flash_attn'] = None; "
_DENSITIES = {32768: 0.20, 131072: 0.08}


@dataclass(frozen=True, slots=True)
class Section:
    """A process."""

    name: str
    command: tuple[str, ...]
    seconds: int  # at most


def main() -> None:
    """Runs all sections, or as a child one of them."""
    args = _arguments()
    if args.child:
        _serve(args.only[0], args.step[0], args.backend[0], args.lengths)
        return
    out = Path(args.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    results = [_run(section, out / f"{section.name}.log") for name in args.only for section in _sections(name, args)]
    sys.exit(any(results))


def _sections(name: str, args: argparse.Namespace) -> Iterator[Section]:
    if name in OTHERS:
        commands = {
            "tasks": (str(HERE / "vllm_tasks.py"), "--samples", "6", "--transformers"),
            "requests": (str(HERE / "vllm_requests.py"),),
            "lists": (
                "-c",
                f"{_HIDE}import pytest, vllm; sys.exit(pytest.main(['-m', 'gpu', '-v', '{HERE.parent / _LISTS}']))",
            ),
        }
        yield Section(name, commands[name], OTHERS[name])
        return
    for step in args.step:
        for backend in args.backend:
            given = ("--only", name, "--step", str(step), "--backend", backend)
            lengths = ("--lengths", ",".join(map(str, args.lengths)), "--child")
            command = (str(HERE / "vllm_gpu.py"), *given, *lengths)
            yield Section(f"{name}-{format_length(step)}-{backend}", command, SERVED[name])


def _run(section: Section, log: Path) -> int:
    """Its exit status; what it prints goes on."""
    start, command = time.perf_counter(), [sys.executable, *section.command]
    with log.open("w") as file:
        try:
            status = subprocess.run(command, stderr=file, timeout=section.seconds, cwd=HERE.parent).returncode
        except subprocess.TimeoutExpired:
            status = 124
    _tell(section=section.name, status=status, seconds=round(time.perf_counter() - start), log=str(log))
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-_LOG_LINES:] if status else [line for line in lines if "sparsekv:" in line][-8:]
    print("\n".join(f"  {line[:300]}" for line in shown), flush=True)
    return status


def _tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


# --- what a child runs ------------------------------------------------------------------------------------------------


def _serve(section: str, step: int, backend: str, lengths: tuple[int, ...]) -> None:
    if backend == "copy":
        sys.modules["flash_attn"] = None  # type: ignore[assignment]  # see _HIDE
    import torch

    from sparsekv.bench.serve import (
        Load,
        ServeBench,
        bench_serve,
        dense_up_to,
        dummy_plan,
        served_model,
        start_engines,
    )
    from sparsekv.kernels.prefill.flash.limits import package
    from sparsekv.plans.patterns import TileShape

    loads = {
        "first": {Load(length, 16): 3 if length < 100_000 else 2 for length in lengths},
        "many": {Load(4000, 500, 64, 64): 5},
        "long": {Load(32768, 500, 8, 32): 1},
        "kernels": {Load(32768, 1): 1},
    }[section]
    asked = "flash" if backend == "copy" else backend
    bench = ServeBench(tuple(loads), torch.device("cuda"), torch.bfloat16, step_tokens=step, backend=asked)
    planned = {length: share for length, share in _DENSITIES.items() if length <= max(bench.longest, 32768)}
    with served_model("llama3-8b", True, max(bench.longest, *planned)) as model:
        plan, words = dummy_plan(model.info, tuple(planned), tuple(planned.values()), TileShape())
        start = time.perf_counter()
        with start_engines(model, dense_up_to(plan, 8192), bench) as engines:
            _tell(engines_started=round(time.perf_counter() - start), flash=package(), **_memory(engines))
            if section == "kernels":
                for way in ("dense", "sparse"):
                    _tell(kernels=way, **_tried(lambda way=way: _kernels(engines[way], model.vocabulary)))
                return
            for load, times in loads.items():
                for row in bench_serve(engines, model, words, replace(bench, loads=(load,), repeats=times)):
                    _tell(**row.as_data())


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A measurement beside the point: what it fails of is told, and ends nothing."""
    try:
        return measure()
    except Exception:
        return {"failed": traceback.format_exc()}


def _memory(engines: Any) -> dict[str, Any]:
    """Pages that each engine has room for, and the bytes that the sparse one has fewer of."""
    pages = {way: engines[way].llm_engine.vllm_config.cache_config for way in ("dense", "sparse")}
    blocks = {way: cache.num_gpu_blocks for way, cache in pages.items()}
    size = pages["dense"].block_size * 32 * 8 * 128 * 2 * 2
    return {"pages": blocks, "fewer_bytes": (blocks["dense"] - blocks["sparse"]) * size}


def _kernels(llm: Any, vocabulary: int) -> dict[str, Any]:
    """Milliseconds of the kernels that take longest in one prompt of 32K."""
    from torch.profiler import ProfilerActivity, profile

    from sparsekv.bench.serving import serve

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
    parser.add_argument("--only", type=_names, default="tasks,first,many", help="sections, separated by commas")
    parser.add_argument("--step", type=parse_lengths, default="16k", help="tokens of a step, separated by commas")
    parser.add_argument("--backend", type=_names, default="auto", help="of sparse prefill: auto, triton, flash, copy")
    parser.add_argument("--lengths", type=parse_lengths, default="32k,128k", help="of the section first")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.only if name not in SERVED | OTHERS]
    if unknown:
        parser.error(f"expected sections of {', '.join(SERVED | OTHERS)}, found {', '.join(unknown)}")
    return args


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
