"""Plans beside dense on the same samples: what `verify` and the commands of bench/ measure with.

    with opened(loaded, {"both": PlanMode(plan)}) as evaluator:
        found = evaluator.beside(evaluator.dense(samples), "both")
    found.kl  # a divergence for each sample, in nats

evaluator.py runs them batch by batch, predictions.py feeds texts and reads next-token distributions, results.py has
what comes out and its intervals.
"""

from sparsekv.planner.evaluation.batches import EvalSamples
from sparsekv.planner.evaluation.evaluator import Evaluator, opened
from sparsekv.planner.evaluation.predictions import DENSE, PlanMode

__all__ = ["DENSE", "EvalSamples", "Evaluator", "PlanMode", "opened"]
