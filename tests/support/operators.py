"""Counts what a step asks of torch and of our own functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts tensor operators, and calls of our own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))

    def called(self, frame: Any, event: str, called: Any) -> None:
        if event in ("call", "c_call") and frame.f_globals.get("__name__", "").startswith("sparsekv."):
            name = frame.f_code.co_qualname  # operators of a layer are in the engine's own, where none is seen
            self.calls[name if event == "call" else f"{name}: {called.__name__}"] += 1
