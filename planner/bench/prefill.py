"""`sparsekv bench prefill`: a model end to end, by its plan and dense.

Dense is the fastest way there is: the unmodified model, or this runtime with the fastest dense kernel; each is tried at
every length. Runs alternate, and medians are compared.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from sparsekv.kernels.dispatch import choose_backend
from sparsekv.kernels.fallback import BackendWarning
from sparsekv.planner.bench.prefill_runs import Run, Setting, Way, layer_flops, run_prefill
from sparsekv.planner.bench.random_model import BenchModel
from sparsekv.planner.bench.ranking import RANKED_FROM, fastest_that_runs, part_of
from sparsekv.planner.bench.rows import DensePeers, PrefillRow
from sparsekv.planner.bench.timing import free_memory, in_short
from sparsekv.planner.place import device_name, dtype_name
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.apply import check_plan
from sparsekv.runtime.hf.describe import attention_groups

Found = TypeVar("Found")

# A first run as long as this is no warm-up: what is prepared once does not show in it.
_LONG_MS = 5000.0
_WARM_UP_TOKENS = 4096  # of the prompt that kernels are compiled with
_OUT_OF_REACH = 1.3  # over the fastest dense run: no longer in the running


@dataclass(frozen=True, slots=True)
class PrefillBench:
    """How to time.

    Attributes:
        repeats: runs of each, alternating.
        chunk: most tokens given to the model at once; None is all.
        backend: of sparse attention, or "auto".
        kv_host_layers: layers whose keys and values go to host memory, in place of what the plan says.
        dense_layers: measure dense on so many layers, and multiply; None measures the whole model.
    """

    lengths: tuple[int, ...]
    repeats: int = 3
    chunk: int | None = None
    backend: str = "auto"
    kv_host_layers: int | None = None
    dense_layers: int | None = None
    seed: int = 0
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or self.repeats < 1:
            raise UsageError("expected at least one length and one repeat, found none")
        if self.dense_layers is not None and self.dense_layers < 1:
            raise UsageError(f"expected at least one layer to measure dense on, found {self.dense_layers}")


def bench_prefill(
    subject: BenchModel, plan: Plan, words: str, bench: PrefillBench, progress: Progress | None = None
) -> Iterator[PrefillRow]:
    """Times every length, and gives one row each as soon as it is known.

    Args:
        words: what the plan is, for the rows.

    Raises:
        PromptError: a length is beyond the model's context.
        PlanMismatchError, UnsupportedError: the plan is not for this model.
        BackendError: the backend cannot run here.
        UsageError: dense is to be measured on, or host memory is to hold, more layers than there are.
    """
    model, info = subject.model, subject.info
    if max(bench.lengths) > info.context_length:
        raise PromptError(
            f"expected lengths within the model's context of {info.context_length} tokens, found {max(bench.lengths)}"
        )
    if bench.dense_layers is not None and bench.dense_layers + 1 > info.layers:
        raise UsageError(f"expected --dense-layers below the model's {info.layers} layers, found {bench.dense_layers}")
    if bench.kv_host_layers is not None and bench.kv_host_layers > info.layers:
        raise UsageError(f"expected --kv-host-layers up to {info.layers}, found {bench.kv_host_layers}")
    check_plan(plan, info, bench.allow_mismatch)
    tile = plan.prefill.tile if plan.prefill else None
    backend = choose_backend(model.device, model.dtype, info.attention[0].head_dim, bench.backend, tile).name
    setting = Setting(model, plan, bench.backend, bench.kv_host_layers, bench.chunk)
    with (progress or NoProgress()).stage("prefill", total=len(bench.lengths)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the plan warns of was said above
        warnings.simplefilter("default", BackendWarning)
        for length in bench.lengths:
            step.advance(0, note=f"{format_length(length)} tokens")
            blank = PrefillRow(
                subject.name,
                length,
                backend,
                device_name(model.device),
                dtype_name(model.dtype),
                subject.weights,
                words,
                info.layers,
                note=subject.note,
            )
            yield _row(blank, setting, bench)
            free_memory(model.device)
            step.advance()


def _row(blank: PrefillRow, setting: Setting, bench: PrefillBench) -> PrefillRow:
    ids_1S = _prompt(setting, blank.length, bench.seed)
    try:
        sparse = [_warmed(setting, setting.sparse(), ids_1S)]
    except Exception as error:  # out of memory, or a kernel that fails
        blank, sparse = _noted(blank, f"sparse: {in_short(error)}"), []
    tried, refused = _try_dense(setting, bench, ids_1S)
    ways, dense_note = setting.dense(), ""
    if bench.dense_layers is not None:
        dense_note = f"dense is {bench.dense_layers} measured layer(s) times {blank.layers}, once"
        if 0 < (bench.kv_host_layers or 0) < blank.layers:
            dense_note += ", without the copies of layers in host memory"
    again = tried if bench.dense_layers is None else {}
    broken = _alternate(setting, ways, again, sparse, ids_1S, bench.repeats)
    timed_ms = {name: statistics.median(run.milliseconds for run in runs) for name, runs in tried.items()}
    peers = DensePeers(blank.length, timed_ms, refused)
    row = _noted(_noted(replace(blank, dense_peers=peers), dense_note), broken)
    if peers.fastest:
        row = replace(row, dense_ms=timed_ms[peers.fastest], dense_peak=_peak(tried[peers.fastest], bench))
    return _with_sparse(row, setting, sparse) if sparse else row


def _try_dense(
    setting: Setting, bench: PrefillBench, ids_1S: torch.Tensor
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """One run of each way, and why others do not run."""
    ways, few = setting.dense(), bench.dense_layers

    def whole(name: str) -> list[Run]:
        try:
            way = ways[name]
            return [_warmed(setting, way, ids_1S) if few is None else _extrapolated(setting, way, ids_1S, few)]
        finally:
            free_memory(setting.device)

    # A model of one layer has no second one, by which ways are compared.
    if ids_1S.shape[1] < RANKED_FROM or setting.model.config.num_hidden_layers == 1:
        return _each(ways, whole)
    part_1S = ids_1S[:, : part_of(ids_1S.shape[1])]
    on_part, failed = _each(ways, lambda name: _extrapolated(setting, ways[name], part_1S, 1).milliseconds)
    tried, refused = fastest_that_runs(on_part, ids_1S.shape[1], whole)
    return tried, failed | refused


def _each(names: Iterable[str], run: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """What every way gives, and why others do not run."""
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            found[name] = run(name)
        except Exception as error:
            refused[name] = in_short(error)
    return found, refused


def _alternate(
    setting: Setting,
    ways: dict[str, Way],
    tried: dict[str, list[Run]],
    sparse: list[Run],
    ids_1S: torch.Tensor,
    repeats: int,
) -> str:
    """The other repeats: dense ways that may be the fastest, and sparse, every other round backwards.

    What fails ends the repeats, as the others would no longer be timed in turn with it; returns what there is to say.
    """
    least = min((runs[0].milliseconds for runs in tried.values()), default=0.0)
    near = [name for name, runs in tried.items() if runs[0].milliseconds <= _OUT_OF_REACH * least]
    turns = [(tried[name], ways[name]) for name in near] + ([(sparse, setting.sparse())] if sparse else [])
    for number in range(1, repeats):
        for runs, way in turns[:: -1 if number % 2 else 1]:
            try:
                runs.append(run_prefill(setting, way, ids_1S))
            except Exception as error:
                return f"repeat {number + 1} failed, and the ones before it are shown: {in_short(error)}"
    return ""


def _warmed(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
    """A run after kernels were compiled: by a short prompt, and by one layer, because long prompts may take others.

    A run that is short is repeated, so that nothing is new to it.
    """
    if setting.device.type == "cuda":
        run_prefill(setting, way, ids_1S[:, :_WARM_UP_TOKENS], layers)
        run_prefill(setting, way, ids_1S, 1)
    run = run_prefill(setting, way, ids_1S, layers)
    return run if run.milliseconds > _LONG_MS else run_prefill(setting, way, ids_1S, layers)


def _extrapolated(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int) -> Run:
    """The whole model's time, from one layer and from `layers` more."""
    count = setting.model.config.num_hidden_layers
    one = _warmed(setting, way, ids_1S, 1)
    more = _warmed(setting, way, ids_1S, 1 + layers)
    each = (more.milliseconds - one.milliseconds) / layers
    if each <= 0.0:
        raise RuntimeError("a layer more took no longer, which cannot be multiplied; measure more --dense-layers")
    return Run(one.milliseconds + (count - 1) * each, None, None)


def _with_sparse(row: PrefillRow, setting: Setting, runs: list[Run]) -> PrefillRow:
    milliseconds = statistics.median(run.milliseconds for run in runs)
    stats, plan, ran = runs[-1].stats, setting.plan.prefill, runs[-1].backend
    if ran is not None and ran != row.backend:
        row = _noted(replace(row, backend=ran), f"{row.backend} failed, and {ran} took over")
    if runs[-1].builder_failed:
        row = _noted(row, f"torch built the indices, which is slower: Triton failed ({runs[-1].builder_failed})")
    if stats is None:
        return replace(row, sparse_ms=milliseconds, sparse_peak=runs[-1].peak)
    tile = plan.tile if plan else TileShape()  # what the runtime counts in where there is no plan
    head_dim = attention_groups(setting.model.config)[0].head_dim
    attention = 4.0 * head_dim * tile.query * tile.key * stats.prefill_tiles_computed
    return replace(
        row,
        sparse_ms=milliseconds,
        sparse_peak=runs[-1].peak,
        density=stats.prefill_density,
        tflops=(layer_flops(setting.model, row.length) + attention) / milliseconds / 1e9,
        kv_device=stats.kv_bytes_device,
        kv_host=stats.kv_bytes_host,
    )


def _prompt(setting: Setting, length: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, setting.model.config.vocab_size, (1, length), generator=random).to(setting.device)


def _peak(runs: list[Run], bench: PrefillBench) -> int | None:
    peaks = [run.peak for run in runs if run.peak is not None]
    return max(peaks) if peaks and bench.dense_layers is None else None


def _noted(row: PrefillRow, note: str) -> PrefillRow:
    return replace(row, note="; ".join(part for part in (row.note, note) if part))
