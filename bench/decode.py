"""`sparsekv bench decode`: decode steps by a plan and dense, attention alone and whole tokens.

Attention alone is one step of all layers, on CUDA a graph, against every dense kernel in turn. A whole token is run by
the unmodified model, and by this runtime dense and by each plan, in turn (token_runs.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from sparsekv.bench.dense_kernels import time_calls
from sparsekv.bench.harness import (
    Columns,
    DensePeers,
    Row,
    case_of,
    free_memory,
    in_short,
    measure,
    number,
    repeat_in_turn,
    replayed,
    try_each,
)
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.step_attention import StepAttention
from sparsekv.bench.token_runs import (
    CHECKED,
    EXACT,
    OURS,
    UNMODIFIED,
    DecodeBench,
    DecodeRuns,
    Run,
    exactly,
    median_ms,
    median_replay_ms,
)
from sparsekv.kernels.backends import choose_backend
from sparsekv.kernels.keys import Softmax
from sparsekv.planner.options import check_lengths
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import DecodePlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.describe import attention_modules
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.plan_checks import check_plan
from sparsekv.runtime.stores.store import Float8

RANDOM_NOTE = (
    "Keys and values are random, of normal distribution, and so are queries where attention is timed alone: which "
    "tokens are chosen means nothing, how many are is what the plan says."
)
ATTENTION, TOKEN = "attention", "token"  # rows
_TIMES = (
    "acceptance",
    "check_ms",
    "unmodified_ms",
    "replay_ms",
    "dense_replay_ms",
    "gbytes_per_second",
    "dense_gbytes_per_second",
    "dense_runs_ms",
    "sparse_runs_ms",
)

COLUMNS: Columns = {
    "of one": ("name", str),
    "selector": ("selector", str),
    "window": ("window", number("d")),
    "backend": ("backend", str),
    "length": ("length", format_length),
    "batch": ("batch", number("d")),
    "tokens read": ("density", number(".4f")),
    "dense ms": ("dense_ms", number(".3f")),
    "sparse ms": ("sparse_ms", number(".3f")),
    "speedup": ("speedup", number(".2f")),
    "GB/s": ("gbytes_per_second", number(".4g")),
    "dense GB/s": ("dense_gbytes_per_second", number(".4g")),
    "unmodified ms": ("unmodified_ms", number(".3f")),
    "replay ms": ("replay_ms", number(".3f")),
    "dense replay ms": ("dense_replay_ms", number(".3f")),
    "accepted": ("acceptance", number(".3f")),
    f"check of {CHECKED} ms": ("check_ms", number(".3f")),
}


def check_decode(info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench) -> None:
    """Refuses what cannot be timed on a model, from its description alone."""
    if not (bench.lengths and bench.batches) or min(*bench.batches, bench.repeats, bench.new_tokens) < 1:
        raise UsageError("expected at least one length, one row and one repeat, found none")
    if min(bench.lengths) < bench.fewest_tokens:
        raise UsageError(
            f"expected lengths of {bench.fewest_tokens} tokens or more, most of which are generated to time them, "
            f"found {min(bench.lengths)}"
        )
    check_lengths(bench.lengths, info.context_length)
    for plan in plans.values():
        if plan.decode is None:
            raise UsageError(
                "expected a plan with a decode phase, found one without; make one by hand: --set budget=2k"
            )
        check_plan(plan, info, bench.allow_mismatch, "--random-weights")
        Program.of(None, plan.decode, info)


def selector_of(plan: DecodePlan) -> tuple[str, int]:
    """The selectors of a plan's filter layers, and the most queries that one looks at."""
    segments = [segment for bucket in plan.lengths for segment in bucket.segments]
    names = dict.fromkeys(segment.selector for segment in segments)
    return "+".join(names) or "none", max((s.window for s in segments if s.selector != "last"), default=1)


def bench_decode(
    subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench, progress: Progress | None = None
) -> Iterator[Row]:
    """Times every length with every batch, and gives two rows a plan as soon as they are known: one step of attention
    alone, and one token of the whole model.

    A case that fails or does not fit in memory is rows with a note. `density` is tokens attended to over tokens cached,
    over all layers. Of a row's own: how filter layers weigh the last queries; of attention, the keys and values that it
    has to read over its time; of a token, the unmodified model, and captured steps alone (without the head, sampling
    and the host).

    Args:
        plans: by name; `check_decode` has seen them.
        words: what the plans are, for the rows.
    """
    model = subject.model
    backend = choose_backend(model.device, model.dtype, subject.info.largest_head, bench.backend).name
    runs, cases = DecodeRuns(subject, plans, bench), list(product(bench.lengths, bench.batches))
    own = {"model": subject.name, "weights": subject.weights, "plan": words, "layers": subject.info.layers}
    own["kv_dtype"] = bench.kv_dtype
    with (progress or Progress()).stage("decode", total=2 * len(cases)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what plans warn of was said before; what is not captured stands in the rows
        for length, batch in cases:
            row = Row(
                name=ATTENTION,
                length=length,
                backend=backend,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                own={"batch": batch, "selector": "", "window": 1} | dict.fromkeys(_TIMES) | own,
                note=subject.note,
            )
            what = f"{format_length(length)} tokens, batch {batch}"
            step.advance(0, note=f"{what}: attention")
            yield from _attention_rows(row, runs)
            free_memory(model.device)
            step.advance(note=f"{what}: whole tokens")
            yield from token_rows(row.plus(name=TOKEN), runs)
            free_memory(model.device)
            step.advance()


def _named(row: Row, runs: DecodeRuns) -> dict[str, tuple[Row, DecodePlan]]:
    """The row of each plan, and its decode phase."""
    found = {}
    for name, plan in runs.plans.items():
        assert plan.decode is not None, "check_decode has seen it"
        selector, window = selector_of(plan.decode)
        elsewhere = plan.decode.offload and row.name == ATTENTION
        note = "attention alone has all keys on the device, tokens read offloaded layers from the host"
        found[name] = row.plus(note if elsewhere else "", selector=selector, window=window), plan.decode
    return found


def _attention_rows(row: Row, runs: DecodeRuns) -> list[Row]:
    bench, subject, device, named = runs.bench, runs.subject, runs.model.device, _named(row, runs)
    layouts = tuple(replace(layout, batch=row.own["batch"]) for layout in layouts_of(subject.model))
    try:
        softmax = softmax_of(subject.model)
        float8 = bench.kv_dtype == "fp8"
        attention = StepAttention(subject.info, layouts, row.length, row.backend, bench.seed, softmax, float8)
        calls = {name: replayed(call, device) for name, call in attention.dense().items()}
        peers = time_calls(calls, row.length, device, bench.repeats)
        turns = {"dense": calls[peers.fastest]} if peers.fastest else {}
        calls.clear()  # and the memory of graphs
        sparse = {name: replayed(attention.by_plan(plan), device) for name, (_, plan) in named.items()}
        ran, failed = try_each(sparse, lambda name: sparse[name]())
        times = measure(turns | {name: sparse[name] for name in ran}, device, bench.repeats)
    except Exception as error:  # out of memory
        return [row.plus(f"{case_of(row)}: {in_short(error)}") for row, _ in named.values()]
    first = next(iter(subject.info.full_layers), 0)
    group = subject.info.group_of(first)
    stored = Float8.layout(layouts[first]) if bench.kv_dtype == "fp8" else layouts[first]
    token_bytes, token_flops = 2 * stored.token_bytes, 4 * group.heads * group.head_dim
    rows, dense_ms = [], times.get("dense")
    for name, (named_row, plan) in named.items():
        row = named_row.plus(dense_ms=dense_ms, peers=peers)
        if name in failed:
            rows.append(row.plus(f"{case_of(row)}, by the plan: {failed[name]}"))
            continue
        counts, ms = attention.counted(plan), times[name]
        rows.append(
            row.plus(
                sparse_ms=ms,
                density=counts.decode_share,
                tflops=counts.decode_tokens_attended * token_flops / ms / 1e9,
                gbytes_per_second=counts.decode_tokens_attended * token_bytes / ms / 1e6,
                dense_gbytes_per_second=counts.decode_tokens_cached * token_bytes / dense_ms / 1e6
                if dense_ms
                else None,
            )
        )
    return rows


def softmax_of(model: PreTrainedModel) -> Softmax:
    """The soft cap and the sinks of a model, of its first layer."""
    sinks_H = getattr(attention_modules(model)[0], "sinks", None)
    return Softmax(getattr(model.config, "attn_logit_softcapping", None) or 0.0, sinks_H)


def token_rows(row: Row, runs: DecodeRuns) -> list[Row]:
    """Returns the rows of whole tokens at the length and batch of a row, one or two a plan."""

    def run(way: str) -> Run:
        return runs.run(way, row.length, row.own["batch"])

    first, failed = try_each(runs.ways, run)
    found = {way: [one] for way, one in first.items()}
    ended = repeat_in_turn(found, run, runs.bench.repeats)
    dense = {way: median_ms(found[way]) for way in (UNMODIFIED, OURS) if way in found}
    peers = DensePeers(row.length, dense, {way: failed[way] for way in (UNMODIFIED, OURS) if way in failed})
    row = row.plus(
        *(f"dense steps are not captured: {one.why_not}" for one in found.get(OURS, [])[-1:] if one.why_not),
        dense_ms=peers.least_ms,
        unmodified_ms=dense.get(UNMODIFIED),
        dense_replay_ms=median_replay_ms(found.get(OURS, [])),
        dense_runs_ms=[one.milliseconds for one in found[peers.fastest]] if peers.fastest else None,
        peers=peers,
    )
    rows = []
    for name, (named, _) in _named(row, runs).items():
        if name not in found:
            rows.append(named.plus(f"{case_of(row)}, by the plan: {failed[name]}", ended))
            continue
        last = found[name][-1]
        why_not = last.why_not and f"steps by the plan are not captured: {last.why_not}"
        share = last.stats and last.stats.decode_share
        times: dict[str, Any] = {"sparse_ms": median_ms(found[name]), "replay_ms": median_replay_ms(found[name])}
        times["sparse_runs_ms"] = [one.milliseconds for one in found[name]]
        rows.append(named.plus(why_not, ended, density=share, **times))
        if runs.bench.exact:
            rows.append(_exact_row(named, found, failed, exactly(name), ended))
    return rows


def _exact_row(row: Row, found: Mapping[str, Sequence[Run]], failed: Mapping[str, str], way: str, ended: str) -> Row:
    if way not in found:
        return row.plus(f"{case_of(row)}, {way}: {failed[way]}", name=EXACT)
    last = found[way][-1]
    assert last.stats is not None
    return row.plus(
        last.why_not and f"steps of {way} are not captured: {last.why_not}",
        ended,
        name=EXACT,
        sparse_ms=median_ms(found[way]),
        density=last.stats.decode_share,
        acceptance=last.stats.acceptance,
        check_ms=last.check_ms,
    )
