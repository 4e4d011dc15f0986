"""Which tasks a model is calibrated and verified on: those that say something about it, found out before profiling."""

from __future__ import annotations

from itertools import islice

import torch

from sparsekv.planner.evaluation.batches import batches
from sparsekv.planner.evaluation.predictions import answered, prefill
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.progress import Progress
from sparsekv.planner.settled import Settled
from sparsekv.planner.tasks import QUOTE_TASKS, RETRIEVAL_TASKS, TASKS, Kit, Split, prepare
from sparsekv.plans.errors import PromptError
from sparsekv.runtime.hf.load import LoadedModel

# A task that is not solved at this length is not solved at longer ones.
_LENGTH = 2048
# Characters of text for so many tokens: enough for every tokenizer, and quick to encode.
_CHARACTERS_PER_TOKEN = 16
_SAMPLES = {"cpu": 2, "cuda": 4}
# Retrieval tasks that are taken at most: on a CPU every task is half a minute of verification at 8K tokens.
_MOST_RETRIEVAL = {"cpu": 2}


def with_tasks(
    loaded: LoadedModel, options: Settled, known: tuple[str, ...] = (), progress: Progress | None = None
) -> Settled:
    """The options with their tasks; where none were asked for, quotations, what the model solves, and plain text.

    Args:
        options: settled.
        known: the tasks that an earlier profile of the model was made with; then nothing is run.
    """
    if options.tasks or known:
        return options.but(tasks=options.tasks or known)
    length, samples = min(_LENGTH, *options.lengths), _SAMPLES.get(loaded.model.device.type, _SAMPLES["cpu"])
    (progress or Progress()).say("trying out which tasks the model can answer ...")
    kit = prepare(loaded.tokenizer, Split.CALIBRATION, characters=_CHARACTERS_PER_TOKEN * length)
    most = _MOST_RETRIEVAL.get(loaded.model.device.type, len(RETRIEVAL_TASKS))
    solved = solved_tasks(loaded, kit, RETRIEVAL_TASKS, length, samples, options.seed, most)
    chosen = {*QUOTE_TASKS, *solved, "perplexity"}
    return options.but(tasks=tuple(name for name in TASKS if name in chosen))


def solved_tasks(
    loaded: LoadedModel,
    kit: Kit,
    tasks: tuple[str, ...],
    length: int,
    samples: int,
    seed: int = 0,
    most: int | None = None,
) -> tuple[str, ...]:
    """The tasks of which the unmodified model's greedy answers are right at least half of the time.

    Args:
        loaded: the model, with nothing applied to it.
        tasks: those with right answers; one that does not fit the length is not solved.
        samples: of each task.
        most: later tasks are not tried once so many are solved.
    """
    solved = (task for task in tasks if _is_solved(loaded, kit, task, length, samples, seed))
    return tuple(islice(solved, most))


def _is_solved(loaded: LoadedModel, kit: Kit, task: str, length: int, samples: int, seed: int) -> bool:
    try:
        drawn = list(held_out(kit, task, length, samples, seed))
    except PromptError:
        return False
    right = 0
    for batch in batches(drawn, loaded.model):
        ids_BS = torch.cat([batch.prompt_BS, batch.answer_BA], 1)
        with torch.no_grad():
            logits_BAV = prefill(loaded.model, ids_BS, None, batch.answer_BA.shape[1] + 1).logits_BKV
        right += sum(map(bool, answered(loaded, batch, logits_BAV.argmax(-1))))
        if 2 * right >= samples:
            return True
    return False
