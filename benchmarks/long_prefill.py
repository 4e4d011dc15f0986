"""Prefill of a whole model at long prompts, end to end: dense against a hand-made plan, seconds and peak memory.

    python benchmarks/long_prefill.py [--lengths 32k,128k,512k,1m] [--out FILE]     on a GPU: Llama-3-8B's shape
    python benchmarks/long_prefill.py --device cpu --tiny                           does it run

The weights are random. They attend diffusely, so the plan's densities are set by hand (the budgets bound every row),
and nothing here says what sparsity keeps: it is about time and memory alone.

Three ways of running one prompt, in one process, each after one layer of it has run, medians of --repeats:
  unmodified   the model as transformers runs it with SDPA, up to --unmodified-to; "-" where it does not fit
  dense        the same through this runtime: layers in pieces, the fastest dense kernel that runs
  sparse       with the plan, index building included
From --one-layer-from on, dense is one measured layer times the number of layers. Page-locking host memory is not
counted; keys and values are complete, on the device and the host, when the clock stops.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sparsekv.plans.budget import tokens
from sparsekv.plans.lengths import parse_length, parse_lengths
from sparsekv.plans.patterns import AShape, TileShape, VerticalSlash
from sparsekv.plans.prefill import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.apply import Handle, apply
from sparsekv.runtime.chunking import Chunking
from sparsekv.runtime.describe import describe_model

_TILE = 128
# Density by length, as the reach of this project states it; between them the next longer one's.
_DENSITIES = ((32 << 10, 0.20), (128 << 10, 0.08), (512 << 10, 0.04), (1 << 20, 0.03))
_TINY = Chunking(above=256, rows=512, output_bytes=1 << 16)
_FREE_SHARE = 0.06  # of device memory, left to what allocators waste


@dataclass(frozen=True)
class Row:
    """One length."""

    device: str
    backend: str
    layers: int
    length: int
    density: float | None
    kv_host_layers: int
    unmodified_s: float | None
    dense_s: float
    dense_is: str  # measured, or how it was arrived at
    sparse_s: float
    speedup: float
    unmodified_peak_gib: float | None
    dense_peak_gib: float
    sparse_peak_gib: float
    kv_device_gib: float
    kv_host_gib: float
    locking_s: float


def main() -> None:
    """Measures each length, and prints a table."""
    args = _arguments()
    chunking = _TINY if args.tiny else Chunking(rows=args.rows)
    lengths = parse_lengths(args.lengths or ("1k,2k" if args.tiny else "32k,128k,512k,1m"))
    model = _random_model(args.device, 2 if args.tiny else args.layers, max(lengths) + 64, args.tiny)
    print(f"random weights, {model.config.num_hidden_layers} layers, {model.dtype}, {_device_name(args.device)}")
    rows = []
    for length in lengths:
        rows.append(_measure(model, length, args, chunking))
        print(_line(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", help="such as 32k,128k,512k,1m")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts: does it run")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--density", type=float, help="of every length, in place of the table's")
    parser.add_argument("--kv-host-layers", type=int, help="as few as fit by default")
    parser.add_argument("--rows", type=int, default=Chunking().rows, help="of a piece")
    parser.add_argument("--repeats", type=int, default=3, help="up to 128k; longer prompts run once")
    parser.add_argument("--one-layer-from", type=parse_length, default=1 << 20)
    parser.add_argument("--unmodified-to", type=parse_length, default=128 << 10)
    parser.add_argument("--out", type=Path, help="JSON rows")
    return parser.parse_args()


def _random_model(device: str, layers: int, context: int, tiny: bool) -> PreTrainedModel:
    shape: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if tiny:
        shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **shape,
        **heads,
        num_hidden_layers=layers,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def _plan(model: PreTrainedModel, length: int, density: float) -> Plan:
    """Even heads a_shape, odd heads vertical_slash with an eighth of their tiles' worth in columns.

    A row sees half of the tiles on average, so rows of `density / 2` of all tiles make up that density.
    """
    row = max(4, round(density / 2 * length / _TILE))
    columns = max(1, row // 8)
    window = AShape(sink=tokens(_TILE), window=tokens((row - 2) * _TILE))
    lines = VerticalSlash(
        vertical=tokens(columns * _TILE), slash=tokens(length // 16), max_tiles=tokens((row - columns) * _TILE)
    )
    heads = range(model.config.num_attention_heads)
    groups = [
        HeadGroup(layer=layer, heads=tuple(heads[first::2]), pattern=pattern)
        for layer in range(model.config.num_hidden_layers)
        for first, pattern in enumerate((window, lines))
    ]
    prefill = PrefillPlan(
        tile=TileShape(query=_TILE, key=_TILE), lengths=(PrefillBucket(up_to=None, heads=tuple(groups)),)
    )
    return Plan(status="unverified", model=describe_model(model, "random"), prefill=prefill)


def _measure(model: PreTrainedModel, length: int, args: argparse.Namespace, chunking: Chunking) -> Row:
    density = args.density or next((d for limit, d in _DENSITIES if length <= limit), _DENSITIES[-1][1])
    plan = _plan(model, length, density)
    hosts = _host_layers(model, length) if args.kv_host_layers is None else args.kv_host_layers
    prompt = torch.randint(1, model.config.vocab_size, (1, length), device=model.device)
    repeats = args.repeats if length <= 128 << 10 and not args.tiny else 1
    options: dict[str, Any] = {"backend": args.backend, "kv_host_layers": hosts, "chunking": chunking}
    unmodified = _unmodified(model, prompt, repeats) if length <= args.unmodified_to else None
    one_layer = length >= args.one_layer_from
    # One dense layer fits on the device whatever the length.
    with apply(model, plan, prefill=False, **(options | ({"kv_host_layers": 0} if one_layer else {}))) as handle:
        dense = _dense(model, prompt, handle, repeats, one_layer)
    with apply(model, plan, **options) as handle:
        sparse = _timed(model, prompt, handle, repeats)
        stats = handle.stats()
    return Row(
        device=_device_name(args.device),
        backend=handle.backend.name,
        layers=model.config.num_hidden_layers,
        length=length,
        density=stats.prefill_density,
        kv_host_layers=hosts,
        unmodified_s=unmodified and unmodified.seconds,
        dense_s=dense.seconds,
        dense_is=f"1 layer x {model.config.num_hidden_layers}" if one_layer else "measured",
        sparse_s=sparse.seconds,
        speedup=dense.seconds / sparse.seconds,
        unmodified_peak_gib=unmodified and unmodified.peak_gib,
        dense_peak_gib=dense.peak_gib,
        sparse_peak_gib=sparse.peak_gib,
        kv_device_gib=stats.kv_bytes_device / 2**30,
        kv_host_gib=stats.kv_bytes_host / 2**30,
        locking_s=sparse.locking_seconds,
    )


@dataclass(frozen=True)
class Timing:
    """One way of running one prompt."""

    seconds: float
    peak_gib: float
    locking_seconds: float = 0.0


def _unmodified(model: PreTrainedModel, prompt: torch.Tensor, repeats: int) -> Timing | None:
    with suppress(torch.OutOfMemoryError):
        return _timed(model, prompt, None, repeats)
    _clear(model)
    return None


def _dense(model: PreTrainedModel, prompt: torch.Tensor, handle: Handle, repeats: int, one_layer: bool) -> Timing:
    if not one_layer:
        return _timed(model, prompt, handle, repeats)
    layers = model.config.num_hidden_layers
    with _only(model, 1):
        first = _timed(model, prompt, handle, repeats)
    with _only(model, 0):  # embeddings, angles, norm and head remain
        rest = _timed(model, prompt, handle, repeats)
    return Timing(rest.seconds + layers * (first.seconds - rest.seconds), first.peak_gib)


@contextmanager
def _only(model: PreTrainedModel, layers: int) -> Iterator[None]:
    """The first layers alone run in each call."""
    before = model.config.num_hidden_layers
    model.config.num_hidden_layers = layers
    try:
        yield
    finally:
        model.config.num_hidden_layers = before


def _timed(model: PreTrainedModel, prompt: torch.Tensor, handle: Handle | None, repeats: int) -> Timing:
    """The median of `repeats`, each into an empty cache, after a run of one layer: that compiles what is compiled."""
    with _only(model, 1):
        _run(model, prompt, DynamicCache())
    seconds, locking = [], 0.0
    _clear(model)
    for _ in range(repeats):
        started = time.perf_counter()
        cache = DynamicCache() if handle is None else handle.new_cache(prompt.shape[1])
        locking = max(locking, time.perf_counter() - started)
        if handle is not None:
            handle.reset_stats()
        seconds.append(_run(model, prompt, cache))
        del cache  # its memory serves the next one
    return Timing(statistics.median(seconds), _peak_gib(model), locking)


@torch.no_grad()
def _run(model: PreTrainedModel, prompt: torch.Tensor, cache: Cache) -> float:
    _wait(model)
    started = time.perf_counter()
    out = model(prompt, past_key_values=cache, logits_to_keep=1)
    _wait(model)
    seconds = time.perf_counter() - started
    assert torch.isfinite(out.logits).all()
    return seconds


def _host_layers(model: PreTrainedModel, length: int) -> int:
    """As few layers in host memory as let the others' keys and values fit beside what a forward pass needs."""
    if model.device.type != "cuda":
        return 1
    config, size = model.config, 2
    states = length * config.hidden_size * size
    queries = length * config.num_attention_heads * config.head_dim * size
    layer = 2 * length * config.num_key_value_heads * config.head_dim * size
    passing = 2 * states + queries + layer + Chunking().output_bytes + (12 << 30)  # pieces, tile lists, angles
    total = torch.cuda.get_device_properties(model.device).total_memory
    room = total * (1 - _FREE_SHARE) - model.num_parameters() * size - passing
    return max(0, config.num_hidden_layers - max(0, int(room // layer)))


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _clear(model: PreTrainedModel) -> None:
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(model.device)


def _peak_gib(model: PreTrainedModel) -> float:
    return torch.cuda.max_memory_allocated(model.device) / 2**30 if model.device.type == "cuda" else 0.0


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _line(row: Row) -> str:
    unmodified = "-" if row.unmodified_s is None else f"{row.unmodified_s:.2f} s ({row.unmodified_peak_gib:.1f} GiB)"
    return (
        f"{row.length:>9,} tokens: unmodified {unmodified}, dense {row.dense_s:.2f} s ({row.dense_is}, "
        f"{row.dense_peak_gib:.1f} GiB), sparse {row.sparse_s:.2f} s at density {row.density or 1:.3f} "
        f"({row.sparse_peak_gib:.1f} GiB): {row.speedup:.2f}x; KV {row.kv_device_gib:.1f} GiB on the device, "
        f"{row.kv_host_gib:.1f} GiB on the host ({row.kv_host_layers} layers, locked in {row.locking_s:.1f} s), "
        f"{row.backend}"
    )


if __name__ == "__main__":
    main()
