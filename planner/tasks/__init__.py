"""Task generators that serve training, calibration and evaluation, each from its own seeds and its own text.

A new task is a class that follows `Task`, in retrieval.py or a file of its own, and a line in `TASKS`.
"""

from sparsekv.planner.tasks.documents import Document, Kit, Query, Request, Sample, Task
from sparsekv.planner.tasks.perplexity import Perplexity
from sparsekv.planner.tasks.retrieval import KvRetrieval, Niah, TwoStage, VariableTracking
from sparsekv.planner.tasks.samples import make_sample, make_samples, matches, prepare
from sparsekv.planner.tasks.text import Filler, PieceEncoder, Split, TaskError, load_filler_text

_ALL: tuple[Task, ...] = (
    Niah("niah_single", needles=1, tokens_per_needle=0),
    Niah("niah_multikey", needles=8, tokens_per_needle=2048),
    KvRetrieval(),
    TwoStage(),
    VariableTracking(),
    Perplexity(),
)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}

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
