"""What planning gives back: the plan, and what is worth telling about it."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.plans.schema import Plan, Prediction, Quality


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and what is worth telling about it.

    Attributes:
        plan: the plan; verified unless that was left out, or the gate had nothing to hold against it.
        seconds: of the whole run.
        attempts: plans that were verified, the last one included.
        remarks: what to know about the verification, what was given up to meet the gate, heads that run dense, and
            what could not be predicted.
    """

    plan: Plan
    seconds: float
    attempts: int
    remarks: tuple[str, ...]

    @property
    def prefill_density(self) -> float | None:
        """Predicted share of tiles at the longest profiled length; None where prefill is not planned."""
        estimates = [entry.prefill for entry in self._lengths if entry.prefill]
        return estimates[-1].density if estimates else None

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted ratio of dense to sparse attention time, of prefill if planned, at the longest profiled length."""
        for phase in ("prefill", "decode"):
            estimates = [getattr(entry, phase) for entry in self._lengths if getattr(entry, phase)]
            if estimates:
                return float(estimates[-1].dense_us / max(estimates[-1].sparse_us, 1e-9))
        return None

    @property
    def filter_layers(self) -> tuple[int, ...]:
        """The filter layers of the longest bucket."""
        decode = self.plan.decode
        return tuple(segment.filter for segment in decode.lengths[-1].segments) if decode else ()

    @property
    def quality(self) -> Quality | None:
        """What was measured."""
        return self.plan.quality

    @property
    def _lengths(self) -> tuple[Prediction, ...]:
        return self.plan.cost.lengths if self.plan.cost else ()
