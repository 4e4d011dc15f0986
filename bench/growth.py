"""Contexts that grow unannounced: virtual memory beside the device store.

    python -m sparsekv.bench.growth reach    # the longest context that grows in turns, over one that is announced
    python -m sparsekv.bench.growth growth   # appends of 1,024 tokens, with 16 steps at each power of two
    python -m sparsekv.bench.growth steps    # decode steps by either store, and what mapping takes of them
    python -m sparsekv.bench.growth prompt   # the same of a prompt
    python -m sparsekv.bench.growth batch    # eight rows that a tokenizer has padded, and each alone
    python -m sparsekv.bench.growth beams    # four beams over a prompt by either store, and one

Prints a JSON object. Weights are random, of the model's shape.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, StoppingCriteria

from sparsekv.bench.hand_plans import HandDecode, hand_plan
from sparsekv.bench.harness import free_memory, wait_for
from sparsekv.bench.random_model import BenchModel, random_model
from sparsekv.bench.step_attention import fill
from sparsekv.bench.token_runs import greedy
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import CACHE_NAME, SparseLayer
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import device_name
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.page_pool import pool_of
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore, token_bytes

TURN = 16_384
WORKING = 4 << 30  # bytes that a turn takes besides keys and values
MANY = 1100  # steps, across a page of a layer of an 8B model
BEAMS, NEW = 4, 64
ROWS = (2048, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768)
WAYS = ("device", "virtual")
Found = dict[str, Any]


def main() -> None:
    """Runs one part."""
    args = _arguments()
    device = torch.device("cuda", torch.cuda.current_device())
    longest = {"reach": 4 << 20, "growth": (1 << 18) + 1024, "batch": 1 << 17}.get(args.part, 2 * args.length)
    subject = random_model(args.model, device=device, dtype=torch.bfloat16, longest=longest, layers=args.layers)
    with torch.no_grad():
        found = globals()[args.part](subject, args)
    print(json.dumps({"part": args.part, "model": subject.name, "device": device_name(device)} | found, indent=1))


def plan_of(subject: BenchModel, args: argparse.Namespace) -> Plan:
    """Made by hand: prompts at a density, steps by a budget."""
    prefill, _ = hand_plan(subject.info, (args.length,), (args.density,), TileShape(query=128, key=128))
    plans, _ = HandDecode().plans(subject.info, args.length)
    return prefill.model_copy(update={"decode": plans["last"].decode})


@contextmanager
def applied(subject: BenchModel, args: argparse.Namespace, way: str, **how: Any) -> Iterator[Handle]:
    """The model by the plan, with one of the stores."""
    free_memory(subject.model.device)
    with apply(subject.model, plan_of(subject, args), info=subject.info, **how) as handle, greedy(subject.model):
        if way == "device":
            handle._engine.paging = handle._engine.paging.without()
        yield handle


@contextmanager
def mapping() -> Iterator[dict[str, float]]:
    """Seconds inside that the calling thread spends on pages, and another one meanwhile."""
    spent, own = {"lost": 0.0, "meanwhile": 0.0}, threading.get_ident()
    methods = {name: getattr(VirtualStore, name) for name in ("_grow", "_map_ahead")}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent["lost" if threading.get_ident() == own else "meanwhile"] += time.perf_counter() - began

        return call

    for name, method in methods.items():
        setattr(VirtualStore, name, timed(method))
    try:
        yield spent
    finally:
        for name, method in methods.items():
            setattr(VirtualStore, name, method)


def stores_of(cache: Cache) -> list[DeviceStore]:
    """Of all layers."""
    found: list[Any] = [layer.store for layer in cache.layers if isinstance(layer, SparseLayer)]
    return found


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - began


# --- parts ------------------------------------------------------------------------------------------------------------


def reach(subject: BenchModel, args: argparse.Namespace) -> Found:
    """Tokens that fit beside the weights and the working memory of a turn."""
    device, layouts = subject.model.device, layouts_of(subject.model)
    working = torch.empty(WORKING, dtype=torch.uint8, device=device)
    token = 2 * sum(map(token_bytes, layouts))
    announced = next(n for n in range(torch.cuda.mem_get_info(device)[0] // token, 0, -1024) if _fits(n, layouts))
    found: Found = {"announced": announced}
    for way in WAYS:
        free_memory(device)
        stores = [_empty(way, layout, subject) for layout in layouts]
        tokens = 0
        try:
            while tokens < announced:
                step = min(TURN, announced - tokens)
                for store, layout in zip(stores, layouts, strict=True):
                    store.commit(*store.room(step, layout))
                tokens += step
        except torch.OutOfMemoryError as error:
            found[f"{way}_stopped_by"] = str(error).splitlines()[0]
        found[f"{way}_grows_to"], found[f"{way}_share"] = tokens, round(tokens / announced, 4)
        if way == "virtual":
            found["pages_beyond_tokens"] = _beyond(stores, tokens)
        del stores
    assert working.is_cuda
    return found


def _empty(way: str, layout: Layout, subject: BenchModel) -> DeviceStore:
    pool = pool_of(layout.device)
    assert pool is not None, "there is no virtual memory here: see `sparsekv doctor`"
    return DeviceStore() if way == "device" else VirtualStore(pool, subject.info.context_length)


def _fits(tokens: int, layouts: Sequence[Layout]) -> bool:
    stores = [DeviceStore() for _ in layouts]
    try:
        for store, layout in zip(stores, layouts, strict=True):
            store.reserve(tokens, layout)
    except torch.OutOfMemoryError:
        return False
    finally:
        del stores
        free_memory(layouts[0].device)
    return True


def _beyond(stores: Sequence[DeviceStore], tokens: int) -> float:
    """Pages of a layer's keys that no token lies in, on average."""
    assert stores[0].keys is not None
    token, page = token_bytes(Layout.of(stores[0].keys)), 2 << 20
    return round(statistics.mean(store.bytes.device / 2 - tokens * token for store in stores) / page, 3)


def growth(subject: BenchModel, args: argparse.Namespace) -> Found:
    """A cache that grows from 1K to 256K."""
    model: Any = subject.model
    generator = torch.Generator().manual_seed(0)
    ids_1S = torch.randint(1, 1000, (1, 1024), generator=generator).to(model.device)
    with applied(subject, args, "virtual") as handle, mapping() as spent:
        cache, tokens, began, addresses = handle.new_cache(1, answer=0), 0, time.perf_counter(), set()
        while tokens < 1 << 18:
            model(ids_1S, logits_to_keep=1, **{CACHE_NAME: cache})
            tokens += 1024
            if tokens & (tokens - 1) == 0:
                for step in range(16):
                    model(ids_1S[:, step : step + 1], logits_to_keep=1, **{CACHE_NAME: cache})
                for store in stores_of(cache):
                    store.truncate((tokens,))
            addresses.add(tuple(x.data_ptr() for store in stores_of(cache) for x in store.tensors))
        wait_for(model.device)
        assert handle.steps is not None
        return {
            "seconds": round(time.perf_counter() - began, 2),
            "mapping_seconds": spent,
            "places": len(addresses),  # 1: nothing was copied
            "captures": handle.steps.captures,
            "replayed": handle.steps.replayed,
            "why_not": handle.steps.why_not,
            "pages_beyond_tokens": _beyond(stores_of(cache), tokens),
        }


def steps(subject: BenchModel, args: argparse.Namespace) -> Found:
    """Decode steps over random keys, dense and by the plan."""
    found: Found = {}
    for decode in (False, True):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way in WAYS:
                with applied(subject, args, way, prefill=False, decode=decode) as handle:
                    times[way].append(_step_ms(subject, handle, args.length, 256)[0])
        name = "sparse" if decode else "dense"
        found[f"{name}_step_ms"] = {way: [round(ms, 4) for ms in found_ms] for way, found_ms in times.items()}
        medians = [statistics.median(times[way]) for way in WAYS]
        found[f"{name}_virtual_over_device"] = round(medians[1] / medians[0], 4)
        with applied(subject, args, "virtual", prefill=False, decode=decode) as handle, mapping() as spent:
            ms, before = _step_ms(subject, handle, args.length, MANY, spent)
            lost = {part: seconds - before[part] for part, seconds in spent.items()}
            found[f"{name}_{MANY}_steps"] = {"ms": round(ms, 4), "mapping_seconds": lost}
            found[f"{name}_mapping_share"] = round(lost["lost"] / (MANY * ms / 1e3), 6)
    return found


def _step_ms(
    subject: BenchModel, handle: Handle, length: int, count: int, spent: dict[str, float] | None = None
) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step; and what was spent before the first one."""
    model: Any = subject.model
    layouts = layouts_of(model)
    cache: Any = model(torch.ones((1, 1), dtype=torch.int64, device=model.device))[CACHE_NAME]
    fill((layer for layer in cache.layers if isinstance(layer, SparseLayer)), length - 1, layouts, 0)
    ids_11 = torch.ones((1, 1), dtype=torch.int64, device=model.device)
    for _ in range(4):
        model(ids_11, logits_to_keep=1, **{CACHE_NAME: cache})
    before = dict(spent or {})

    def run() -> None:
        for _ in range(count):
            model(ids_11, logits_to_keep=1, **{CACHE_NAME: cache})

    seconds = _seconds(run, model.device)
    assert handle.steps is not None
    assert not handle.steps.why_not
    return seconds / count * 1e3, before


def prompt(subject: BenchModel, args: argparse.Namespace) -> Found:
    """One prompt after another, the first of which finds no page in the pool."""
    model: Any = subject.model
    ids_1S = torch.randint(1, 1000, (1, args.length), generator=torch.Generator().manual_seed(0)).to(model.device)
    found: Found = {}
    pool = pool_of(model.device)
    assert pool is not None
    for way in WAYS:
        with applied(subject, args, way):
            runs = []
            for number in range(args.repeats + 1):
                if number == args.repeats:
                    pool.trim()  # the last one creates all pages anew
                with mapping() as spent:
                    seconds = _seconds(lambda: model(ids_1S, logits_to_keep=1), model.device)
                runs.append({"seconds": round(seconds, 4), **spent, "share": round(spent["lost"] / seconds, 5)})
            found[way] = runs
    return found


def batch(subject: BenchModel, args: argparse.Namespace) -> Found:
    """Padding on the left, as tokenizers pad for `generate`."""
    model: Any = subject.model
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 1000, (1, count), generator=generator).to(model.device) for count in ROWS]
    ids_BS = torch.zeros((len(rows), max(ROWS)), dtype=torch.int64, device=model.device)
    mask_BS = torch.zeros_like(ids_BS)
    for row, ids_1S in enumerate(rows):
        ids_BS[row, -ids_1S.shape[1] :], mask_BS[row, -ids_1S.shape[1] :] = ids_1S[0], 1
    with applied(subject, args, "virtual") as handle:
        together = {"max_new_tokens": 32, "attention_mask": mask_BS}
        out = model.generate(ids_BS, **together)[:, max(ROWS) :]
        told = {"max_new_tokens": 32, "return_dict_in_generate": True, "output_logits": True}
        alone = [model.generate(ids_1S, **told) for ids_1S in rows]
        cache: Any = None
        padded, single = [], []
        for _ in range(args.repeats):
            cache = None
            single.append(_seconds(lambda: [model(x, logits_to_keep=1) for x in rows], model.device))

            def run() -> None:
                nonlocal cache
                cache = model(ids_BS, attention_mask=mask_BS, logits_to_keep=1)[CACHE_NAME]

            padded.append(_seconds(run, model.device))
        stored = sum(ROWS) * 2 * sum(map(token_bytes, layouts_of(model)))
        return {
            "gaps": [_gap(one, other) for one, other in zip(out, alone, strict=True)],
            "prefill_seconds": padded,
            "one_by_one_seconds": single,
            "prefill_over_one_by_one": round(statistics.median(padded) / statistics.median(single), 4),
            "kv_bytes_over_tokens": round(sum(store.bytes.device for store in stores_of(cache)) / stored, 4),
            "why_not": handle.steps.why_not if handle.steps else "not captured",
        }


def beams(subject: BenchModel, args: argparse.Namespace) -> Found:
    """Milliseconds of a token behind the first one. transformers runs the prompt once for each beam."""
    model: Any = subject.model
    ids_1S = torch.randint(1, 1000, (1, args.length), generator=torch.Generator().manual_seed(0)).to(model.device)
    found: Found = {}
    how = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(ids_1S)}  # some id may be that of padding
    for way in WAYS:
        with applied(subject, args, way) as handle:
            for count in (1, BEAMS):
                runs, clock = [], _Clock()
                for _ in range(args.repeats + 1):
                    clock.times.clear()
                    model.generate(ids_1S, num_beams=count, **how, stopping_criteria=[clock])
                    runs.append(round((clock.times[-1] - clock.times[0]) / (len(clock.times) - 1) * 1e3, 4))
                found[f"{way}_{count}_beams_ms"] = runs[1:]  # the first one captures
            found[f"{way}_why_not"] = handle.steps.why_not if handle.steps else "not captured"
    medians = [statistics.median(found[f"{way}_{BEAMS}_beams_ms"]) for way in WAYS]
    return found | {"virtual_over_device": round(medians[1] / medians[0], 4)}


class _Clock(StoppingCriteria):
    """Notes when each token is there, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids_BS: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        wait_for(ids_BS.device)
        self.times.append(time.perf_counter())
        done_B: Any = torch.zeros(ids_BS.shape[0], dtype=torch.bool, device=ids_BS.device)
        return done_B  # type: ignore[no-any-return]


def _gap(ids_T: torch.Tensor, alone: Any) -> tuple[int, float, float] | None:
    """At which new token a row in a batch first differs from the row alone, how far apart the logits of the two tokens
    are alone, and the spacing of bfloat16 there."""
    ids = alone.sequences[0, -len(ids_T) :]
    at = next((number for number, same in enumerate((ids == ids_T).tolist()) if not same), None)
    if at is None:
        return None
    logits_V = alone.logits[at][0].float()
    best = float(logits_V[ids[at]])
    return at, best - float(logits_V[ids_T[at]]), 2.0 ** (math.floor(math.log2(abs(best))) - 7)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["reach", "growth", "steps", "prompt", "batch", "beams"])
    parser.add_argument("--model", default="llama3-8b", help="whose shape")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--length", type=lambda text: parse_lengths(text)[0], default=131_072)
    parser.add_argument("--density", type=float, default=0.08, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
