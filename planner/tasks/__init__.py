"""Task generators that serve training, calibration and evaluation, each from its own seeds and its own text."""

from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.filler import Filler, load_filler_text
from sparsekv.planner.tasks.registry import TASKS
from sparsekv.planner.tasks.samples import make_sample, make_samples, prepare
from sparsekv.planner.tasks.scoring import matches
from sparsekv.planner.tasks.types import Document, Kit, Query, Request, Sample, Split, Task, TaskError

__all__ = [
    "TASKS",
    "Document",
    "Filler",
    "Kit",
    "PieceEncoder",
    "Query",
    "Request",
    "Sample",
    "Split",
    "Task",
    "TaskError",
    "load_filler_text",
    "make_sample",
    "make_samples",
    "matches",
    "prepare",
]
