"""`sparsekv bench peers`: published methods of sparse prefill beside a plan, in one process and on the same prompts.

Each method runs twice: as its authors publish it for an 8B Llama, and at the density of the plan (or one that is asked
for), with its own knob turned there. Its published algorithm runs on our kernels, as it stands in `baselines` and
`tile_rules`; the authors' own code runs beside it where it was fetched (originals.py).

* Time is that of one layer of the shape asked for, on planted structure (planted.py): index and attention apart, and in
  one call. A method is timed at the density that it had in the model: its knob is turned to it once more.
* Quality is that of a model: divergence from dense on held-out samples, and the mean of RULER's tasks.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.baselines import SamePattern
from sparsekv.bench.dense_kernels import time_dense
from sparsekv.bench.harness import Call, Columns, Row, free_memory, in_short, measure, number
from sparsekv.bench.originals import ORIGINALS, PUBLISHED_LINES, OriginalMode, Ready
from sparsekv.bench.peers_file import At, Key, PeerRow, PeersFile, measured
from sparsekv.bench.planted import Planted, causal_scores, plant, sample_rows
from sparsekv.bench.suite import SuiteCell, SuiteSamples, run_suite
from sparsekv.bench.tile_rules import cumulative_mass, max_threshold
from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import TileIndex, density
from sparsekv.planner.evaluation import DENSE, EvalSamples, Mode, PlanMode, evaluate
from sparsekv.planner.profile.calibration import Calibration
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Pattern, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

PLAN = "sparsekv"
DENSE_NAMES = {"torch flash": "FlashAttention-2 (torch's)", "torch cuDNN": "cuDNN"}  # others keep their names
COLUMNS: Columns = {
    "method": ("name", str),
    "setting": ("setting", str),
    "length": ("length", format_length),
    "density": ("density", number(".3f")),
    "KL": ("kl", number(".3g")),
    "RULER": ("recall", number(".1f")),
    "dense RULER": ("dense_recall", number(".1f")),
    "timed at": ("timed_density", number(".3f")),
    "index ms": ("index_ms", number(".3f")),
    "attention ms": ("attention_ms", number(".3f")),
    "whole ms": ("sparse_ms", number(".3f")),
    "speedup": ("speedup", number(".2f")),
    "error": ("error", number(".1e")),
}

# --- methods ----------------------------------------------------------------------------------------------------------


class Rule(Protocol):
    """A method at one setting."""

    def index(self, call: AttentionCall) -> TileIndex:
        """Returns the index of one layer."""

    def mode(self, info: ModelInfo) -> Mode:
        """It at work in a model."""


@dataclass(frozen=True, slots=True)
class Method:
    """A published method with one knob.

    Attributes:
        setting: what the knob is called.
        published: its value in what the authors publish for an 8B Llama.
        at: its value from 0 (sparsest) to 1 (densest).
        rule: what it computes at a value.
    """

    setting: str
    published: float
    at: Callable[[float], float]
    rule: Callable[[float, TileShape], Rule]

    def fitted(self, densities: Sequence[float], target: float) -> float:
        """The value that comes to a density, read off those of `rungs`."""
        ascending = np.log(np.maximum.accumulate(np.maximum(densities, 1e-6)))
        position = float(np.interp(math.log(target), ascending, np.linspace(0.0, 1.0, _RUNGS)))
        return float(f"{self.at(position):.4g}")

    def rungs(self, tile: TileShape) -> list[Rule]:
        """The rule at values that are spread over the whole range."""
        return [self.rule(self.at(float(t)), tile) for t in np.linspace(0.0, 1.0, _RUNGS)]

    def nearest(self, target: float, tile: TileShape, call: AttentionCall) -> float:
        """The value that comes nearest to a density in one layer, by bisection."""
        least, most, found = 0.0, 1.0, dict[float, float]()
        for _ in range(_BISECTIONS):
            middle = (least + most) / 2
            value = float(f"{self.at(middle):.4g}")
            found[value] = float(density(self.rule(value, tile).index(call), call.chunk))
            least, most = (middle, most) if found[value] < target else (least, middle)
        return min(found, key=lambda value: abs(found[value] - target))


_BISECTIONS = 12
_RUNGS = 33


def _lines(scale: float, tile: TileShape) -> Rule:
    columns, diagonals = (tokens(round(scale * count)) for count in PUBLISHED_LINES)
    return SamePattern(VerticalSlash(vertical=columns, slash=diagonals, last_q=64, max_tiles=fraction(1.0)), tile)


def _mass(share: float) -> float:
    """From 0.05 to 0.9995, in steps of what is left out."""
    return float(1.0 - 0.95 * (0.0005 / 0.95) ** share)


METHODS: Mapping[str, Method] = {
    "MInference": Method("{:g} x (1000 columns, 6096 diagonals)", 1.0, lambda t: float(2.0 ** (-12 + 16 * t)), _lines),
    "XAttention": Method("tau {:g}", 0.9, _mass, partial(cumulative_mass, "antidiagonal")),
    "FlexPrefill": Method("gamma {:g}", 0.9, _mass, partial(cumulative_mass, "pooled")),
    "FlashPrefill": Method("alpha {:g}", 0.18, lambda t: float(0.99 * (1e-4 / 0.99) ** t), max_threshold),
}


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersBench:
    """Says what to measure.

    Attributes:
        methods: of METHODS.
        density: of the rows at equal density, and of what is planted; of the former the plan's own where it is None.
        planted_density: of the structure that is timed.
        originals: the folder of the authors' own code; None leaves it out.
        deadline: of `time.monotonic`; what is not begun by then is left to another run.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    tile: TileShape
    planted_density: float
    methods: tuple[str, ...] = tuple(METHODS)
    density: float | None = None
    tasks: tuple[str, ...] = ("quote_text",)
    samples: int = 5
    ruler_samples: int = 5
    rounds: int = 3
    seed: int = 0
    originals: Path | None = None
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured."""

    method: str
    at: At
    length: int

    @property
    def name(self) -> str:
        more = {"equal": " at equal density", "original": ", original code"}
        return self.method + more.get(self.at, "")


def bench_peers(
    bench: PeersBench, file: PeersFile, loaded: LoadedModel | None, plan: Plan | None, progress: Progress | None = None
) -> None:
    """Measures what a file does not hold yet, and adds each row as soon as it is known.

    Args:
        loaded: the model of quality; None measures time alone.
        plan: ours. Without one, ours is timed with budgets for what was planted.
    """
    cases = left(bench, measured(file))
    lengths: dict[int, _Length] = {}
    with (progress or Progress()).stage("peers", total=len(cases)) as step:
        for case in cases:
            if time.monotonic() > bench.deadline:
                break
            step.advance(0, note=f"{format_length(case.length)}, {case.name}")
            if case.length not in lengths:
                lengths = {}  # the tensors of one length at a time
                free_memory(bench.device)
                lengths = {case.length: _Length(bench, case.length, loaded, plan, file)}
            for row in lengths[case.length].measured(case):
                file.add(row)
            free_memory(bench.device)
            step.advance(1)


def left(bench: PeersBench, known: Collection[Key]) -> list[Case]:
    """Returns what a run still has to do."""
    dense = {
        length for _, at, length in known if at == "dense"
    }  # which kernels there are is known once they were tried
    return [
        case
        for length in bench.lengths
        for case in _cases(bench, length)
        if (length not in dense if case.at == "dense" else (case.method, case.at, length) not in known)
    ]


def _cases(bench: PeersBench, length: int) -> Iterator[Case]:
    """Dense and the plan first: the others are measured at its density."""
    yield Case("dense", "dense", length)
    yield Case(PLAN, "plan", length)
    both: tuple[At, ...] = ("published", "equal")
    yield from (Case(name, at, length) for name, at in product(bench.methods, both))
    if bench.originals is not None:
        yield from (Case(one.name, "original", length) for one in ORIGINALS if one.name in bench.methods)


class _Length:
    """Holds what rows of one length share: planted tensors, and all methods' knobs on a prompt of the model."""

    def __init__(
        self, bench: PeersBench, length: int, loaded: LoadedModel | None, plan: Plan | None, file: PeersFile
    ) -> None:
        self.bench, self.length, self.loaded, self.plan, self.file = bench, length, loaded, plan, file

    def measured(self, case: Case) -> Iterator[PeerRow]:
        """The rows of a case."""
        row = PeerRow(method=case.method, at=case.at, length=self.length)
        try:
            if case.at == "dense":
                yield from self._dense()
                return
            mode, planted = self._ways(case)
            row = row.model_copy(update={"setting": planted.setting})
            if mode is not None and self.loaded is not None:
                row = row.model_copy(update=self._quality(case.name, mode, self.loaded))
            yield row.model_copy(update=self._timed(planted, row.density))
        except Exception as error:  # every library has its own; what was measured before it is not lost
            yield row.model_copy(update={"note": in_short(error)})

    def _dense(self) -> Iterator[PeerRow]:
        peers = time_dense(*self.planted.tensors, self.bench.rounds, ranked_from=self.length + 1)
        known = {name: {"whole_ms": ms, "attention_ms": ms} for name, ms in peers.timed_ms.items()}
        for name, found in (known | {name: {"note": why} for name, why in peers.refused.items()}).items():
            row = PeerRow(
                method=DENSE_NAMES.get(name, name), at="dense", length=self.length, setting="dense", density=1.0
            )
            yield row.model_copy(update=found)

    def _ways(self, case: Case) -> tuple[Mode | None, _Planted]:
        """A case in the model, and on planted tensors."""
        if case.at == "original":
            (original,) = (one for one in ORIGINALS if one.name == case.method)
            ready = original.ready(self._folder, self.bench.device)
            return (OriginalMode(ready) if ready.is_attention else None), _Planted(ready.setting, ready=ready)
        if case.at == "plan":
            return self._ours()
        method = METHODS[case.method]
        knob = method.published if case.at == "published" else self._knob(case.method, self._target())
        rule = method.rule(knob, self.bench.tile)
        mode = rule.mode(self.loaded.info) if self.loaded else None
        return mode, _Planted(method.setting.format(knob), rule.index, method)

    @property
    def _folder(self) -> Path:
        assert self.bench.originals is not None
        return self.bench.originals

    def _ours(self) -> tuple[Mode | None, _Planted]:
        if self.plan is None:
            patterns, setting = self.planted.patterns, "budgets for what was planted"
        else:
            bucket = self.plan.prefill.bucket(self.length) if self.plan.prefill else None
            if bucket is None or bucket.dense:
                raise UsageError(f"the plan is dense at {format_length(self.length)}")
            patterns, setting = drawn_heads(self.plan, self.length, self.bench.heads), "the plan"

        def index(call: AttentionCall) -> TileIndex:
            return build_index(patterns, call.q_BHSD, call.k_BGKD, call.chunk, self.bench.tile, scale=call.scale)

        return (PlanMode(self.plan, "prefill") if self.plan else None), _Planted(setting, index)

    def _target(self) -> float:
        """The density of rows at equal density."""
        own = measured(self.file).get((PLAN, "plan", self.length))
        found = self.bench.density or (own and (own.density if own.density is not None else own.timed_density))
        if not found:
            raise UsageError("expected the plan's density, found that it was not measured; name one")
        return found

    # --- quality ---

    def _quality(self, name: str, mode: Mode, loaded: LoadedModel) -> dict[str, Any]:
        bench = self.bench
        asked = EvalSamples(bench.tasks, (self.length,), bench.samples, 1, bench.seed)
        result = evaluate(loaded, {name: mode}, asked)[name][0]
        found: dict[str, Any] = {"density": min(1.0, result.spent.density), "kl": result.agreement.kl}
        found |= {"kl_interval": result.agreement.kl_interval, "agreement": result.agreement.top1}
        if bench.ruler_samples:
            run_suite(loaded, {name: mode}, SuiteSamples((self.length,), bench.ruler_samples, 1, bench.seed), self.file)
            cells = self.file.all(SuiteCell)
            for key, which in (("recall", name), ("dense_recall", DENSE)):
                scores = [cells[which, task, self.length].recall for task in ruler_suite.RULER_SUITE]
                found[key] = 100.0 * float(np.mean(scores))
        return found

    def _knob(self, method: str, target: float) -> float:
        """The knob that comes to a density in the model, or without one on planted tensors."""
        if self.loaded is None:
            return METHODS[method].nearest(target, self.bench.tile, self._call)
        return METHODS[method].fitted(self._rung_densities[method], target)

    @cached_property
    def _rung_densities(self) -> dict[str, list[float]]:
        """Returns the densities of each method's knobs, over all layers with full attention of one prompt."""
        assert self.loaded is not None
        loaded, bench = self.loaded, self.bench
        rules = {name: METHODS[name].rungs(bench.tile) for name in bench.methods}
        found: dict[str, list[list[float]]] = {name: [[] for _ in own] for name, own in rules.items()}

        def note(call: AttentionCall) -> None:
            for name, own in rules.items() if call.window is None else ():
                for place, rule in zip(found[name], own, strict=True):
                    place.append(float(density(rule.index(call), call.chunk)))

        (prompt,) = Calibration(loaded.tokenizer, (), bench.tasks[:1], bench.seed).prompts(self.length, 1)
        ids_1S = torch.from_numpy(prompt.ids[: prompt.answer_start].astype(np.int64))[None].to(loaded.model.device)
        model: Any = loaded.model
        with capture_attention(model, note), torch.no_grad():
            model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
        return {name: [float(np.mean(place)) for place in own] for name, own in found.items()}

    # --- time ---

    @cached_property
    def planted(self) -> Planted:
        bench = self.bench
        return plant(
            ("vertical_slash",) * bench.heads,
            kv_heads=bench.kv_heads,
            head_dim=bench.head_dim,
            length=self.length,
            density=bench.planted_density,
            tile=bench.tile,
            device=bench.device,
            dtype=bench.dtype,
            seed=bench.seed,
        )

    @cached_property
    def _call(self) -> AttentionCall:
        planted = self.planted
        return AttentionCall(0, *planted.tensors, planted.chunk, planted.scale, None)

    def _timed(self, what: _Planted, wanted: float | None) -> dict[str, Any]:
        """Times a case, turned to the density that it had in the model where it has a knob."""
        if what.ready is not None:
            return self._timed_original(what.ready)
        index_of, setting = what.index, what.setting
        assert index_of is not None
        if what.method is not None and wanted is not None:
            knob = what.method.nearest(wanted, self.bench.tile, self._call)
            index_of, setting = what.method.rule(knob, self.bench.tile).index, what.method.setting.format(knob)
        call = self._call
        backend = choose_backend(call.q_BHSD.device, call.q_BHSD.dtype, self.bench.head_dim, "auto", self.bench.tile)
        index = index_of(call)

        def attend(index: TileIndex) -> torch.Tensor:
            own = self.planted.tensors
            return prefill_attention(*own, index, call.chunk, scale=call.scale, backend=backend.name).out_BHSD

        calls: dict[str, Call] = {
            "index_ms": lambda: index_of(call),
            "attention_ms": lambda: attend(index),
            "whole_ms": lambda: attend(index_of(call)),
        }
        computed = float(density(index, call.chunk))
        found = {"error": relative_error(self.planted, attend(index)), "timed_density": min(1.0, computed)}
        return {**found, "timed_setting": setting, **measure(calls, self.bench.device, self.bench.rounds)}

    def _timed_original(self, ready: Ready) -> dict[str, Any]:
        tensors = self.planted.tensors
        out_BHSD, computed = ready.measured(*tensors)
        found: dict[str, Any] = {"timed_density": min(1.0, computed), "timed_setting": ready.setting}
        if ready.is_attention:
            found["error"] = relative_error(self.planted, out_BHSD)
        del out_BHSD
        ms = measure({"own": lambda: ready.attend(*tensors)}, self.bench.device, self.bench.rounds)["own"]
        return found | {"whole_ms" if ready.is_attention else "index_ms": ms}


@dataclass(frozen=True, slots=True)
class _Planted:
    """Holds what is timed of a case: an index of ours with a method's knob, or an original's call."""

    setting: str
    index: Callable[[AttentionCall], TileIndex] | None = None
    method: Method | None = None
    ready: Ready | None = None


def drawn_heads(plan: Plan, length: int, count: int) -> tuple[Pattern, ...]:
    """So many heads' patterns of a plan, evenly over all heads of its layers with full attention."""
    assert plan.prefill is not None
    bucket = plan.prefill.bucket(length)
    model = plan.model
    every = [one for layer in model.full_layers for one in bucket.patterns(layer, model.by_layer[layer].heads)]
    return tuple(every[(2 * number + 1) * len(every) // (2 * count)] for number in range(count))


def relative_error(planted: Planted, out_BHSD: torch.Tensor) -> float:
    """|| out - dense || / || dense || on sampled rows, dense in float32."""
    rows = list(sample_rows(planted.chunk.longest))
    off, size = 0.0, 0.0
    group = planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1]
    for head in range(planted.q_BHSD.shape[1]):
        expected_RD = causal_scores(planted, head, rows).softmax(1) @ planted.v_BGSD[0, head // group].float()
        off += float((out_BHSD[0, head, rows].float() - expected_RD).square().sum())
        size += float(expected_RD.square().sum())
    return float((off / size) ** 0.5)


def fastest_dense(result: PeersFile, length: int) -> PeerRow | None:
    """The dense kernel that every ratio is against."""
    rows = [row for row in result.all(PeerRow).values() if row.at == "dense" and row.length == length and row.whole_ms]
    return min(rows, key=lambda row: row.whole_ms or 0.0, default=None)


def table_rows(result: PeersFile, lengths: Sequence[int]) -> list[Row]:
    """The rows of a file as benches print them, by length."""
    device, dtype = result.settings.device, result.settings.dtype
    return [
        Row(
            name=one.method if one.at == "dense" else Case(one.method, one.at, length).name,
            length=length,
            device=device,
            dtype=dtype,
            dense_ms=dense.whole_ms if (dense := fastest_dense(result, length)) else None,
            sparse_ms=one.whole_ms,
            density=one.density,
            own={name: getattr(one, name) for name in PeerRow.model_fields if name not in _SHOWN},
            note=one.note,
        )
        for length in lengths
        for one in result.all(PeerRow).values()
        if one.length == length
    ]


_SHOWN = ("length", "density", "whole_ms", "note")
