"""The phases of one plan on the same prompts with two prefills a prompt in place of four.

Phase `decode` goes on from what dense left of a prompt, and one sparse prefill serves `both` and `prefill`. Each phase
has a handle of its own, suspended while another one runs, so that decode steps are captured once for all prompts.

What is measured is the same as by `compare`, a phase after the other, but for rounding: apart, `decode` prefills by our
dense kernels, and `prefill` decodes by them; here the unmodified model does both, and reads each text behind a prompt
in one pass. Where dense's cache does not serve (a layer with a sliding window has dropped tokens, a selector looks at
older queries than the newest), `decode` prefills for itself.

At any time there are at most two caches of the prompts of a batch, as there are apart: one that is handed over is let
go of layer by layer, and each text is fed to one copy at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from sparsekv.planner.compare import (
    DENSE,
    Batch,
    DenseBatch,
    Mode,
    PhaseName,
    PlanMode,
    Prefilled,
    fed_logits,
    few_rows,
    prefill,
    spent_by,
)
from sparsekv.planner.eval_results import Outcome, Spent
from sparsekv.planner.tasks import Sample
from sparsekv.runtime.hf.apply import Handle
from sparsekv.runtime.hf.cache import handed_over, holds_all
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.stores.pinned import HostMemory

_SPARSE: tuple[PhaseName, ...] = ("both", "prefill")  # phases with the same prefill


class Measured(NamedTuple):
    """What a mode, or dense, did on samples of one batch."""

    name: str
    samples: tuple[Sample, ...]
    outcomes: tuple[Outcome, ...]
    spent: Spent


def phases_of_one_plan(modes: Mapping[str, Mode]) -> dict[str, PlanMode]:
    """The modes if they are phases of one plan, each once; else none."""
    found = {name: mode for name, mode in modes.items() if isinstance(mode, PlanMode)}
    plans = [replace(mode, phase="both") for mode in found.values()]
    phases = {mode.phase for mode in found.values()}
    same = len(phases) == len(found) == len(modes) and all(one == plans[0] for one in plans)
    return found if same else {}


def measured_together(
    loaded: LoadedModel, modes: Mapping[str, PlanMode], batches: Iterable[tuple[Sample, ...]], chunk: int | None
) -> Generator[Measured]:
    """Runs dense and the phases of one plan, on one batch after the other.

    Args:
        loaded: the model, with nothing applied to it.
        modes: of `phases_of_one_plan`.
        batches: samples of equal shape.
        chunk: most tokens of a prompt given to the model at once; None is all.

    Raises:
        PlanMismatchError, UnsupportedError, BackendError: the plan cannot be applied; before anything runs.
        UnsupportedError: the model overflows in its dtype.
    """
    with _suspended(loaded, modes) as phases:
        for samples in batches:
            yield from _measured(loaded, phases, samples, chunk)


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """A phase with its handle, which is suspended."""

    name: str
    mode: PlanMode
    handle: Handle

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.handle.resume()
        self.handle.reset_stats()
        try:
            yield
        finally:
            self.handle.suspend()

    def goes_on_from(self, dense: Prefilled) -> bool:
        """Whether it can decode what dense prefilled."""
        return self.handle.takes_over and holds_all(dense.cache)


@contextmanager
def _suspended(loaded: LoadedModel, modes: Mapping[str, PlanMode]) -> Iterator[dict[PhaseName, _Phase]]:
    with ExitStack() as stack:
        memory = HostMemory()  # for all: caches of one phase make room for those of the next
        stack.callback(memory.close)
        found = {}
        for name, mode in modes.items():
            handle = stack.enter_context(mode.applied(loaded.model, memory))
            handle.suspend()
            found[mode.phase] = _Phase(name, mode, handle)
        yield found


def _measured(
    loaded: LoadedModel, phases: Mapping[PhaseName, _Phase], samples: tuple[Sample, ...], chunk: int | None
) -> Iterator[Measured]:
    dense, left = DenseBatch.prefilled(loaded, samples, chunk)
    yield Measured(DENSE, samples, dense.outcomes, Spent())
    run, decode = _Run(loaded, dense, Batch.of(samples, loaded.model.device)), phases.get("decode")
    source = _Source(left, Spent()) if decode and decode.goes_on_from(left) else None
    del left  # a cache that does not serve is freed before anything else is prefilled
    if decode:
        yield run.through(decode, source)[0]
    sparse, source = [phases[name] for name in _SPARSE if name in phases], None
    for phase in sparse:
        found, source = run.through(phase, source, keep=phase is not sparse[-1])
        yield found


class _Source(NamedTuple):
    """What prefilled the prompts for the next phase, and what that computed."""

    prefilled: Prefilled
    spent: Spent


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One batch, which dense has run."""

    loaded: LoadedModel
    dense: DenseBatch
    batch: Batch

    def through(self, phase: _Phase, source: _Source | None, *, keep: bool = False) -> tuple[Measured, _Source | None]:
        """What the phase does after prompts that are prefilled: by the source, which is used up, or here. With `keep`
        it becomes the source of another phase."""
        dense_decode = phase.mode.phase == "prefill"
        with phase.at_work(), torch.no_grad():
            own, computed = source or self._prefilled(phase)
            if not dense_decode:
                own = own if source is None else self._taken_by(phase, own)
                read = fed_logits(self.loaded.model, own, self._texts, keep=keep)
            spent = replace(spent_by(phase.handle.stats()), tiles=computed.tiles, causal_tiles=computed.causal_tiles)
        if dense_decode:
            read = self._read_densely(own)
        outcomes = self.dense.scored(self.loaded, self.batch, read, phase.mode.dense_prefill)
        measured = Measured(phase.name, self.dense.samples, outcomes, spent)
        return measured, _Source(own, computed) if keep else None

    @property
    def _texts(self) -> list[torch.Tensor]:
        return self.dense.texts(self.batch)

    @property
    def _tokens(self) -> int:
        return self.batch.prompt_BS.shape[1]

    def _prefilled(self, phase: _Phase) -> _Source:
        own = prefill(self.loaded.model, self.batch.prompt_BS, self.dense.chunk)
        return _Source(own, spent_by(phase.handle.stats()))

    def _taken_by(self, phase: _Phase, prefilled: Prefilled) -> Prefilled:
        layers = handed_over(prefilled.cache, self._tokens)
        return Prefilled(prefilled.logits_BAV, phase.handle.cache_of(layers))

    def _read_densely(self, prefilled: Prefilled) -> list[torch.Tensor]:
        """What the unmodified model predicts for the texts, [B, A + 1, V] each, float32; the cache is used up."""
        model: Any = self.loaded.model
        cache = DynamicCache(config=model.config)
        for number, (k_BGSD, v_BGSD) in enumerate(handed_over(prefilled.cache, self._tokens)):
            cache.update(k_BGSD, v_BGSD, number)
        *others, last = self._texts
        with torch.no_grad(), few_rows():
            copied = ((text_BA, deepcopy(cache)) for text_BA in others)
            rows = [
                model(input_ids=text_BA, past_key_values=own, use_cache=True).logits
                for text_BA, own in (*copied, (last, cache))
            ]
        return [torch.cat([prefilled.logits_BAV, rows_BAV], 1).float() for rows_BAV in rows]
