"""What keys and values in host memory have to show on one GPU: prefill, `auto`, the longest context, many requests, and
answers.

    python benchmarks/offload_goals.py [--only prefill,auto,longest,requests,answers] [--longest 1536k] [--tiny]

Each section is a process of its own with a time limit: one that fails does not take the others along. It prints lines
of JSON; what else it says goes to a log file, whose end is printed where it fails. --tiny runs all of it in a minute
and a half on a CPU, at sizes that mean nothing. Weights are random but for `answers`; plans are made by hand.

- prefill: prompts of 128K and 1M in one piece, half a_shape and half vertical_slash (densities 0.08 and 0.03), with the
  layers that only read chosen tokens in host memory (27 of 32), and with all on the device, in turn; memory is pinned
  before the clock. At 1M, 8 layers of the model (7 in host memory): KV of all 32 does not fit beside.
- auto: a token of decode at 1M, 10% of a choice new, with the layers in host memory that `auto` puts there for a prompt
  that runs in one piece.
- longest: a prompt of 1.5M tokens and 16 more with `auto` and at most 128 GiB of host memory, in one piece, and where
  memory does not suffice for that, in pieces of 256K.
- requests: 1,000 on one handle, of 40 shapes in turn; memory after each 200.
- answers: tiny-retriever at 16K and 32K, budget 5%, from host memory and on the device: the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import parse_length

SECTIONS = {"prefill": 300, "auto": 150, "longest": 330, "requests": 200, "answers": 200}  # seconds at most
_LOG_LINES = 40


def main() -> None:
    """Runs all sections, or as a child one of them."""
    args = _arguments()
    if args.section is not None:
        _tell(args.section, **_machine())
        _CHILDREN[args.section](args)
        return
    out = Path(args.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    sys.exit(any([_section(name, out / f"{name}.log", args) for name in args.only.split(",")]))


def _section(name: str, log: Path, args: argparse.Namespace) -> int:
    """Its exit status; what it prints goes on."""
    command = [sys.executable, __file__, "--section", name, "--longest", str(args.longest), *["--tiny"] * args.tiny]
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            status = subprocess.run(command, stderr=file, timeout=SECTIONS[name]).returncode
        except subprocess.TimeoutExpired:
            status = 124
    _tell(name, status=status, seconds=round(time.perf_counter() - start), log=str(log))
    if status:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        print("\n".join(f"  {line[:300]}" for line in lines), flush=True)
    return status


def _tell(section: str, **told: Any) -> None:
    print(json.dumps({"section": section} | told), flush=True)


# --- what children run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """A model of random weights with a plan that is sparse in both phases."""

    subject: Any  # BenchModel
    plan: Any  # Plan

    @classmethod
    def of(cls, length: int, density: float, filters: tuple[int, ...], layers: int, tiny: bool = False) -> Made:
        """The 8B shape; a tiny one has four layers, and a hot set of 256 tokens."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from sparsekv.bench.random_model import BenchModel, HandDecode, hand_plan
        from sparsekv.plans.patterns import TileShape, tokens
        from sparsekv.runtime.hf.describe import describe_model
        from sparsekv.runtime.hf.public_shapes import PUBLIC_SHAPES

        shape = PUBLIC_SHAPES["llama3-8b-1m"] | {"max_position_embeddings": length + 64, "num_hidden_layers": layers}
        if tiny:
            shape, filters = shape | _TINY, (0,)
        dtype = torch.bfloat16 if (device := _device()).type == "cuda" else torch.float32
        with device, torch.no_grad():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype).eval()
        info = describe_model(model, "random")
        prefill, _ = hand_plan(info, [length], [density], TileShape())
        budget = tokens(64 if tiny else 2048)
        decode = HandDecode(budget, filters, offload=True).plans(info, length)[0]["last"].decode
        assert decode is not None
        if tiny:
            offload = decode.offload.model_copy(update={"hot": tokens(256)})
            decode = decode.model_copy(update={"offload": offload})
        return cls(BenchModel(model, info, "random", "random"), prefill.model_copy(update={"decode": decode}))

    def prompt(self, length: int) -> Any:
        """Random tokens, one row."""
        import torch

        model = self.subject.model
        random = torch.Generator().manual_seed(1)
        return torch.randint(1, model.config.vocab_size, (1, length), generator=random).to(model.device)


_TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}


def _prefill(args: argparse.Namespace) -> None:
    from sparsekv.bench.harness import free_memory

    cases = ((131_072, 0.08, (2, 8, 18), 32, 3), (1 << 20, 0.03, (0,), 8, 2))
    for length, density, filters, layers, repeats in ((2048, 0.5, (0,), 4, 1),) if args.tiny else cases:
        made = Made.of(length, density, filters, layers, args.tiny)
        _tell("prefill", length=length, layers=layers, **_in_turn(made, length, repeats))
        del made
        free_memory(_device())


def _in_turn(made: Made, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of a prefill, medians, after one each that does not count."""
    import torch

    from sparsekv.bench.harness import wait_for
    from sparsekv.runtime.hf.apply import apply
    from sparsekv.runtime.stores.pinned import HostMemory

    model, ids_1S = made.subject.model, made.prompt(length)
    seconds: dict[str, list[float]] = {"never": [], "always": []}
    found: dict[str, Any] = {}
    with closing(HostMemory()) as memory, torch.no_grad():
        for number in range(1 + repeats):
            for mode in list(seconds)[:: -1 if number % 2 else 1]:
                with apply(model, made.plan, offload=mode, memory=memory, allow_mismatch=True) as handle:
                    cache = handle.new_cache(length)
                    wait_for(model.device)
                    start = time.perf_counter()
                    model(ids_1S, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    wait_for(model.device)  # copies to host memory included
                    seconds[mode].append(time.perf_counter() - start)
                    stats, backend = handle.stats(), handle.backend.name
                    del cache
                found[mode] = {"host_layers": len(handle.host_layers), "host_bytes": stats.kv_bytes_host}
                found |= {"density": stats.prefill_density, "backend": backend}
    medians = {mode: statistics.median(taken[1:]) for mode, taken in seconds.items()}
    return {"ratio": medians["always"] / medians["never"], "medians": medians, "all": seconds} | found


def _auto(args: argparse.Namespace) -> None:
    from sparsekv.bench.decode import DecodeBench, greedy
    from sparsekv.bench.offload import OffloadRuns

    length = 2048 if args.tiny else 1 << 20
    made = Made.of(length, 0.03, (2, 8, 18), 32, args.tiny)
    bench = DecodeBench((length,), new_tokens=8 if args.tiny else 192)
    runs = OffloadRuns(made.subject, {"last": made.plan}, bench, None if args.tiny else 0.1)
    with closing(runs.memory), runs.applied("auto", made.plan) as handle, greedy(made.subject.model):
        cache = runs.filled(handle, length, 1, answer=bench.new_tokens)
        milliseconds = runs.token_ms(cache, 1, handle.reset_stats)
        stats, replay = handle.stats(), runs.replay_ms(handle)
        _tell(
            "auto",
            length=length,
            host_layers=sorted(handle.host_layers),
            token_ms=milliseconds,
            tokens_per_second=1e3 / milliseconds,
            replay_ms=replay,
            miss_share=stats.miss_share,
            device_bytes=stats.kv_bytes_device,
            host_bytes=stats.kv_bytes_host,
            not_captured=runs.why_not(handle),
        )


def _longest(args: argparse.Namespace) -> None:
    import torch

    from sparsekv.bench.harness import free_memory
    from sparsekv.runtime.hf.memory import Available, MemoryModel, ModelSize, Request
    from sparsekv.runtime.stores.pinned import HostMemory

    prompt, answer = (2048, 4) if args.tiny else (args.longest, 16)
    made = Made.of(prompt + answer, 0.015, (2, 8, 18), 32, args.tiny)
    model, plan, device = made.subject.model, made.plan, _device()
    size = replace(ModelSize.of(model, made.subject.info), weights=0)  # they are there already
    estimate = MemoryModel(size, plan.prefill, plan.decode, device.type == "cpu", "auto")
    with closing(HostMemory()) as memory:
        for chunk in (None, 1 << 18):
            free_memory(device)
            here, request = Available.here([device]), Request(prompt, answer, 1, chunk)
            available = replace(here, host=min(128 << 30, (here.host or 128 << 30) + memory.free_bytes))
            longest = estimate.longest(request, available)
            _tell("longest", chunk=chunk, device_free=here.device, host=available.host, longest_that_fits=longest)
            try:
                estimate.check(request, available)
                _tell("longest", chunk=chunk, **_run_longest(made, memory, request))
                return
            except (UsageError, torch.OutOfMemoryError) as error:
                _tell("longest", chunk=chunk, failed=str(error)[:600])
        sys.exit(1)


def _run_longest(made: Made, memory: Any, request: Any) -> dict[str, Any]:
    import torch

    from sparsekv.runtime.hf.apply import apply
    from sparsekv.runtime.hf.generate import piece_sizes

    model, device = made.subject.model, _device()
    with apply(model, made.plan, offload="auto", memory=memory, allow_mismatch=True) as handle, torch.no_grad():
        start = time.perf_counter()
        cache = handle.new_cache(request.tokens, answer=request.answer, chunk=request.chunk)
        pinned, ids_1S = time.perf_counter() - start, made.prompt(request.prompt)
        start = time.perf_counter()
        for size in list(piece_sizes(request.prompt, request.piece))[:-1]:
            at = cache.get_seq_length()
            model(ids_1S[:, at : at + size], past_key_values=cache, use_cache=True, logits_to_keep=1)
        arrived = _generate(model, ids_1S, cache, request.answer)
        steps = [after - before for before, after in pairwise(arrived)]
        stats, steps_of = handle.stats(), handle.steps
        return {
            "prompt": request.prompt,
            "host_layers": sorted(handle.host_layers),
            "pinning_seconds": pinned,
            "prefill_seconds": arrived[0] - start,
            "tokens": len(arrived),
            "step_ms": statistics.median(steps) * 1e3,
            "captured": steps_of and steps_of.replayed,
            "not_captured": steps_of and steps_of.why_not,
            "host_bytes": stats.kv_bytes_host,
            "device_bytes": stats.kv_bytes_device,
            "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "density": stats.prefill_density,
            "backend": handle.backend.name,
        }


def _generate(model: Any, ids_1S: Any, cache: Any, answer: int) -> list[float]:
    """When each new token was there, in seconds of the clock."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    from sparsekv.bench.decode import greedy

    arrived: list[float] = []

    class Clock(BaseStreamer):
        def put(self, value: Any) -> None:
            arrived.append(time.perf_counter())

        def end(self) -> None:
            pass

    with greedy(model):
        mask_1S = torch.ones_like(ids_1S)
        model.generate(ids_1S, attention_mask=mask_1S, past_key_values=cache, max_new_tokens=answer, streamer=Clock())
    return arrived[1:]  # the prompt is put as well


def _requests(args: argparse.Namespace) -> None:
    import torch

    from sparsekv.bench.decode import greedy
    from sparsekv.runtime.hf.apply import apply
    from sparsekv.runtime.stores.pinned import HostMemory

    count, each = (8, 4) if args.tiny else (1000, 200)
    made = Made.of(4096, 0.5, (0,), 4, tiny=True)
    model = made.subject.model
    with (
        closing(HostMemory()) as memory,
        apply(model, made.plan, offload="always", memory=memory, allow_mismatch=True) as handle,
        greedy(model),
        torch.no_grad(),
    ):
        seen = []
        for number in range(count):
            # longest first: free blocks of host memory are all there within 200 requests
            ids_BS = made.prompt(3300 - 400 * (number % 8)).repeat(5 - number // 8 % 5, 1)
            mask_BS = torch.ones_like(ids_BS)
            model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=6)
            if (number + 1) % each == 0:
                seen.append(_held(memory))
                _tell("requests", requests=number + 1, **seen[-1])
        stats, steps = handle.stats(), handle.steps
        grown = {name: after - seen[0][name] for name, after in seen[-1].items()}
        _tell("requests", grown=grown, captured=steps and steps.replayed, fetched=stats.host_tokens_fetched)


def _held(memory: Any) -> dict[str, int]:
    """Bytes once no request is under way: all blocks of host memory are free for the next one."""
    import torch

    from sparsekv.bench.harness import wait_for

    gc.collect()
    wait_for(device := _device())
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {"device": allocated, "pinned": memory.free_bytes, "resident": resident << 10}


def _answers(args: argparse.Namespace) -> None:
    from eval_generated import answers

    from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Split, make_samples, prepare
    from sparsekv.plans.patterns import fraction
    from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload, Segment
    from sparsekv.plans.schema import Plan
    from sparsekv.runtime.hf.apply import apply
    from sparsekv.runtime.hf.load import load_model

    loaded = load_model("tiny-retriever", device=str(_device()))
    layers, budget = (2, 3, 4, 5, 6), DecodeBudget(fraction=0.05, at_most=1 << 20)
    segment = Segment(filter=1, layers=layers, budget=budget, sink=4, recent=128)
    buckets = (DecodeBucket(up_to=None, segments=(segment,)),)
    decode = DecodePlan(lengths=buckets, offload=Offload(layers=layers, hot=fraction(0.1)))
    plan = Plan(status="unverified", model=loaded.info, decode=decode)
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    names = RETRIEVAL_TASKS[:1] if args.tiny else RETRIEVAL_TASKS
    for length in (2048,) if args.tiny else (16_384, 32_768):
        samples = {name: list(make_samples(TASKS[name], kit, length, 0, 1 if args.tiny else 4)) for name in names}
        found, told = {}, {}
        for mode in ("never", "always"):
            with apply(loaded.model, plan, offload=mode) as handle:
                found[mode] = [answers(loaded, handle, kit, samples[name], 2) for name in names]
                stats, steps = handle.stats(), handle.steps
            told[mode] = {"right": sum(one.right for one in found[mode]), "captured": steps and steps.replayed}
        tokens = {mode: [ids for one in some for ids in one.generated] for mode, some in found.items()}
        same = sum(one == other for one, other in zip(*tokens.values(), strict=True))
        counts = {"answers": len(tokens["never"]), "same": same, "new_tokens": sum(map(len, tokens["never"]))}
        _tell(
            "answers", length=length, **counts, **told, miss_share=stats.miss_share, fetched=stats.host_tokens_fetched
        )


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _machine() -> dict[str, str]:
    from importlib.metadata import version

    from sparsekv.runtime.model_config import device_name

    return {"device": device_name(_device())} | {name: version(name) for name in ("torch", "triton", "transformers")}


_CHILDREN: dict[str, Callable[[argparse.Namespace], None]] = {
    "prefill": _prefill,
    "auto": _auto,
    "longest": _longest,
    "requests": _requests,
    "answers": _answers,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", help="folder for logs; a new one in the folder for temporary files without it")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--longest", type=parse_length, default=3 << 19, help="tokens of the longest prompt")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
