"""All tasks by name: a new task is a file and a line here."""

from sparsekv.planner.tasks.kv_retrieval import KvRetrieval
from sparsekv.planner.tasks.niah import Niah
from sparsekv.planner.tasks.perplexity import Perplexity
from sparsekv.planner.tasks.two_stage import TwoStage
from sparsekv.planner.tasks.types import Task
from sparsekv.planner.tasks.variable_tracking import VariableTracking

_ALL: tuple[Task, ...] = (
    Niah("niah_single", needles=1, tokens_per_needle=0),
    Niah("niah_multikey", needles=8, tokens_per_needle=2048),
    KvRetrieval(),
    TwoStage(),
    VariableTracking(),
    Perplexity(),
)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}
