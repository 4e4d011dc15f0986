"""What rounding alone does to a model in float32: dense in bfloat16, the scale that the gates can be held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.planner.evaluation.results import Spent


class Rounded:
    """Dense in bfloat16, as a mode of `compare`."""

    stepwise = True
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """Weights that are stored in bfloat16 come back as they were."""
        weights: Any = model
        weights.to(torch.bfloat16)
        try:
            yield lambda: Spent()
        finally:
            weights.to(torch.float32)
