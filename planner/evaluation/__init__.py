"""Plans and other ways of attending, beside dense on the same samples: what `verify`, `eval` and curves measure with.

    found = compare(loaded, {"prefill": PlanMode(plan, "prefill"), "decode": PlanMode(plan, "decode")}, samples)
    found["decode"].kl  # a divergence for each sample, in nats

evaluator.py runs them batch by batch, predictions.py feeds texts and reads next-token distributions, results.py has
what comes out and its intervals.
"""

from sparsekv.planner.evaluation.batches import EvalSamples
from sparsekv.planner.evaluation.evaluator import Evaluator, compare, evaluate, opened
from sparsekv.planner.evaluation.predictions import DENSE, Mode, PlanMode

__all__ = ["DENSE", "EvalSamples", "Evaluator", "Mode", "PlanMode", "compare", "evaluate", "opened"]
