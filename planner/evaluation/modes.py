"""Defines what can be compared with dense: a plan, or some phases of it, or any other way of attending."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from transformers import PreTrainedModel

from sparsekv.planner.evaluation.results import Spent
from sparsekv.plans.errors import GateError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.stores.pinned import HostMemory

PhaseName = Literal["prefill", "decode", "both"]
DENSE = "dense"  # beside the names of modes


class Mode(Protocol):
    """Something to compare with dense."""

    @property
    def stepwise(self) -> bool:
        """Returns whether answers are fed token by token, as decode does; otherwise they are part of the prefill."""

    @property
    def dense_prefill(self) -> bool:
        """Returns whether prompts run dense, so that the logits of their last row are no result of the mode."""

    def running(self, model: PreTrainedModel) -> AbstractContextManager[Callable[[], Spent]]:
        """Switches it on for the length of a `with` block, which gets what tells what was computed so far."""


@dataclass(frozen=True, slots=True)
class PlanMode:
    """A plan at work: prefill alone, decode alone, or both."""

    plan: Plan
    phase: PhaseName = "both"
    backend: str = "auto"
    kv_dtype: KVDtype | None = None  # of `apply`; the plan's own when None
    stepwise: ClassVar[bool] = True  # what is generated is decoded, whichever phase is sparse

    @property
    def dense_prefill(self) -> bool:
        return self.phase == "decode"

    @property
    def prefilled_by(self) -> Hashable:
        """Modes with equal ones can go on from one prefill; "dense" is that of the unmodified model.

        A selector that looks at older queries than the newest has them from its own prefill alone; so has a layer that
        evicts tokens.
        """
        if self.phase != "decode":
            return id(self.plan), self.backend, self.stored
        buckets = self.plan.decode.lengths if self.plan.decode else ()
        newest_alone = all(segment.selector == "last" for bucket in buckets for segment in bucket.segments)
        if not newest_alone or self.plan.retained:
            return id(self)
        return DENSE if self.stored == "auto" else (DENSE, self.stored)

    @property
    def unmodified_decode(self) -> bool:
        """Returns whether what follows the prompts is read by the unmodified model."""
        return self.phase == "prefill" and self.stored == "auto"

    @property
    def stored(self) -> KVDtype:
        return self.kv_dtype or self.plan.kv_dtype

    def check(self, length: int, spent: Spent) -> None:
        """Refuses a sample of which everything was computed although budgets leave some out: it tells nothing of what
        that loses."""
        prefill = self.plan.prefill if self.phase != "decode" else None
        decode = self.plan.decode if self.phase != "prefill" else None
        skips = {
            "prefill": prefill and prefill.skips_at(length) and spent.tiles >= spent.causal_tiles > 0,
            "decode": decode and decode.bucket(length).is_sparse_at(length) and spent.attended >= spent.cached > 0,
        }
        for phase in (phase for phase, is_whole in skips.items() if is_whole):
            raise GateError(
                f"expected {phase} of {length} tokens to be sparse, as the plan has it, found that everything was "
                "computed; `sparse` is for runs, not for measurements"
            )

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        with self.applied(model) as handle:
            yield lambda: spent_by(handle)

    def applied(self, model: PreTrainedModel, memory: HostMemory | None = None) -> Handle:
        """The plan applied; arguments as in `apply`."""
        return apply(
            model,
            self.plan,
            prefill=self.phase != "decode",
            decode=self.phase != "prefill",
            backend=self.backend,
            memory=memory,
            kv_dtype=self.stored,
            sparse="always",
        )


def spent_by(handle: Handle) -> Spent:
    found = handle.stats()
    prefill = found.prefill_tiles_computed, found.prefill_tiles_causal
    return Spent(*prefill, found.decode_tokens_attended, found.decode_tokens_cached)
