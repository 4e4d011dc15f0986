"""The model of a benchmark: loaded, or of its shape with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsekv.cli.arguments import Subject
from sparsekv.cli.bench_rows import Benched
from sparsekv.cli.output import tell
from sparsekv.planner.options import Hardware

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.harness import Row
    from sparsekv.bench.random_model import BenchModel


def subject_of(flags: Benched, device: torch.device, dtype: torch.dtype, **how: Any) -> BenchModel:
    """The model, for a run of which `random_model` says `how`."""
    from sparsekv.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.model_config import dtype_name

    if flags.random_weights:
        subject = random_model(flags.model, device=device, dtype=dtype, **how)
        tell(subject.note)
        return subject
    loaded = Subject(flags.model).load(Hardware(device=str(device), dtype=dtype_name(dtype)))
    return BenchModel(loaded.model, loaded.info, flags.model, "loaded")


def title_of(subject: BenchModel, row: Row, words: str) -> str:
    """What stands above the rows."""
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"
