"""`sparsekv.apply`: a plan put to work on a model that stays what it was."""

from __future__ import annotations

from types import TracebackType

from transformers import PreTrainedModel

from sparsekv.kernels.dispatch import BackendChoice, choose_backend
from sparsekv.plans.schema import Plan
from sparsekv.runtime.attach import attach, check_attachable
from sparsekv.runtime.checks import check_plan
from sparsekv.runtime.describe import describe_model
from sparsekv.runtime.sparse import SparseEngine
from sparsekv.runtime.stats import Meter, RunStats


class Handle:
    """A plan at work. `close()`, or leaving its `with` block, gives the model back as it was."""

    def __init__(self, model: PreTrainedModel, engine: SparseEngine, backend: BackendChoice) -> None:
        self.backend = backend
        self._engine = engine
        self._undo = attach(model, engine)

    @property
    def closed(self) -> bool:
        """Whether the model is back as it was."""
        return not self._engine.open

    def close(self) -> None:
        """Restores the model. Caches made under this handle cannot be used any more. Again is fine."""
        self._undo()

    def stats(self) -> RunStats:
        """What was computed since the start or the last reset; waits for the device. Also after `close()`."""
        return self._engine.meter.read(self._engine.bytes)

    def reset_stats(self) -> None:
        """Starts counting anew; the bytes of the latest cache stay."""
        self._engine.meter = Meter()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def apply(
    model: PreTrainedModel,
    plan: Plan,
    *,
    prefill: bool = True,
    decode: bool = True,
    backend: str = "auto",
    allow_mismatch: bool = False,
) -> Handle:
    """Runs `model` by `plan` until the returned handle is closed; `model(...)` and `model.generate(...)` as before.

    Args:
        model: a loaded model of a supported architecture, in evaluation mode.
        plan: what to compute of it.
        prefill: False runs prefill dense.
        decode: False runs decode dense, with all KV on the device.
        backend: a kernel backend by name, or "auto".
        allow_mismatch: take a plan that was made for another architecture, as far as its layers and heads fit.

    Returns:
        The handle, which is also a context manager.

    Raises:
        UsageError: the model is in training mode, or has a plan applied already.
        UnsupportedError: an architecture, or a field of the plan, that this version cannot execute.
        PlanMismatchError: the plan was made for another model.
        BackendError: `backend` cannot run here.
    """
    check_attachable(model)
    info = describe_model(model)
    check_plan(plan, info, allow_mismatch)
    choice = choose_backend(model.device, model.dtype, info.attention[0].head_dim, backend)
    engine = SparseEngine(plan.prefill if prefill else None, plan.decode if decode else None, choice.name)
    return Handle(model, engine, choice)
