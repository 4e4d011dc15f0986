"""Task generators that serve training, calibration, verification and evaluation, each with its own seeds and text.

A new task is a class that follows `Task`, in a file of its own or that of its kind, and a line in its kind's tuple.
"""

from sparsekv.planner.tasks.documents import Document, DocumentRequest, Kit, Query, Sample, Task, Turn
from sparsekv.planner.tasks.quotes import Perplexity, Quote
from sparsekv.planner.tasks.retrieval import KvRetrieval, Niah, SecondQuestion, TwoStage, VariableTracking
from sparsekv.planner.tasks.ruler import Cwe, Fwe, NiahMultiquery, NiahMultivalue, Vt
from sparsekv.planner.tasks.samples import make_sample, make_samples, matches, prepare
from sparsekv.planner.tasks.text import Filler, PieceEncoder, Split, TaskError, load_filler_text

# Any language model can answer these: it copies what stood before.
_QUOTES: tuple[Task, ...] = (
    Quote("quote_text", prose=True),
    Quote("quote_code", prose=False),
)
_RETRIEVAL: tuple[Task, ...] = (
    Niah("niah_single", needles=1, tokens_per_needle=0),
    Niah("niah_multikey", needles=8, tokens_per_needle=2048),
    KvRetrieval(),
    TwoStage(),
    VariableTracking(),
)
# Only where they are asked for by name.
_RULER: tuple[Task, ...] = (NiahMultivalue(), NiahMultiquery(), Vt(), Cwe(), Fwe())

TASKS: dict[str, Task] = {task.name: task for task in (*_QUOTES, *_RETRIEVAL, Perplexity(), *_RULER, SecondQuestion())}
QUOTE_TASKS = tuple(task.name for task in _QUOTES)
RETRIEVAL_TASKS = tuple(task.name for task in _RETRIEVAL)
RULER_TASKS = tuple(task.name for task in _RULER)
# One key among many like it, several keys, several values: few heads answer these, and other tasks do not show them.
HARD_TASKS = ("niah_multikey", "kv_retrieval", "niah_multivalue", "niah_multiquery")

__all__ = [
    "HARD_TASKS",
    "QUOTE_TASKS",
    "RETRIEVAL_TASKS",
    "RULER_TASKS",
    "TASKS",
    "Document",
    "DocumentRequest",
    "Filler",
    "Kit",
    "PieceEncoder",
    "Query",
    "Sample",
    "Split",
    "Task",
    "TaskError",
    "Turn",
    "load_filler_text",
    "make_sample",
    "make_samples",
    "matches",
    "prepare",
]
