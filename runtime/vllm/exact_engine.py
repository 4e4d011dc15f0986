"""Has an engine that is asked for exact output (docs/exact.md) draft by its own plan: what its configuration says for
that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.exact_gain import exact_gains
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.vllm.settings import plan_path, read_options

WORKER = f"{__package__}.self_speculator.ExactWorker"
SCHEDULER = f"{__package__}.draft_scheduler.exact_scheduler"
_SPECULATIVE = {"--spec-method": "spec_method", "--spec-model": "spec_model", "--spec-tokens": "spec_tokens"}
DRAFTED = 4  # tokens, where no prices say otherwise
_CAPTURED = 512  # tokens of a captured step at most, as vLLM has it
_USUAL_ROWS = (128, 256, 384, 512)  # --max-num-seqs where it is not given, by device: more than 512 are not captured


def ask_for_drafts(args: Any) -> None:
    """Writes into the arguments of an engine (`EngineArgs`) what exact output takes, where they ask for it: a draft
    model, which is the target itself and reserves a slot for each drafted token, our worker and scheduler, and sizes of
    graphs.

    Raises:
        UsageError: there is no plan to draft by.
        UnsupportedError: another drafter, worker or scheduler was asked for.
    """
    options = read_options(args.additional_config)
    if not options.exact or options.dense or args.worker_cls == WORKER:
        return
    given = {
        "--speculative-config": args.speculative_config is not None,
        **{flag: getattr(args, name, None) is not None for flag, name in _SPECULATIVE.items()},
        "--worker-cls": args.worker_cls != "auto",
        "--scheduler-cls": args.scheduler_cls is not None,
    }
    if found := [name for name, is_given in given.items() if is_given]:
        raise UnsupportedError(
            f'expected exact output to draft by the plan alone, found {", ".join(found)}; remove that, or "exact"'
        )
    path = plan_path(options, args.model, args.revision)
    if path is None:
        raise UsageError(f'expected a plan that drafts exact output, found none beside {args.model}; name it by "plan"')
    drafted = options.draft or drafts_of(load_plan(path))
    args.speculative_config = {
        "method": "draft_model",
        "model": args.model,
        "revision": args.revision,
        "num_speculative_tokens": drafted,
        # By rows, as vLLM captures steps with drafts and without for what it names; our scheduler chooses.
        "num_speculative_tokens_per_batch_size": [[1, 1, 0], [2, 2, drafted]],
    }
    args.worker_cls, args.scheduler_cls = WORKER, SCHEDULER
    if args.max_num_seqs == 1:
        args.max_num_seqs = 2
    asked = args.compilation_config
    if not any((args.cudagraph_capture_sizes, asked.cudagraph_capture_sizes, asked.max_cudagraph_capture_size)):
        args.cudagraph_capture_sizes = capture_sizes(drafted, _most_rows(args))


def _most_rows(args: Any) -> Sequence[int]:
    """Returns the most rows at once, or every number that this may be: vLLM chooses after us."""
    if args.max_num_seqs:
        return (args.max_num_seqs,)
    return (*_USUAL_ROWS, args.max_num_batched_tokens or _CAPTURED)  # a step has no more rows than tokens


def capture_sizes(drafted: int, rows: Sequence[int]) -> list[int]:
    """Returns the tokens of captured steps: of one number vLLM looks for a graph among those of the next size alone,
    and so each holds as many rows that verify a draft as rows without.

    Args:
        rows: most at once, or every number that this may be. No more are captured, with drafts or without, and the
            largest sizes below would leave out those above them.
    """
    new = drafted + 1
    counts = sorted({max(1, (1 << power) * part // 4) for power in range(10) for part in (4, 5, 6, 7)})
    full = {min(one, _CAPTURED) for one in (*rows, _CAPTURED - _CAPTURED % new)}
    # vLLM rounds a size up to whole drafts: rows without drafts need a graph there, too.
    ends = {size + rounded for size in full for rounded in (-size % new, -(size % new))}
    wide = {count * new for count in (*counts, *full)}
    few = {count for count in counts if count < new}
    return sorted(size for size in wide | full | ends | few if 0 < size <= _CAPTURED)


def drafts_of(plan: Plan) -> int:
    """Returns how many tokens a draft has: those that gain most at the longest priced length."""
    gains = list(exact_gains(plan))
    return (max(gains, key=lambda gain: gain.length).drafted if gains else 0) or DRAFTED


def dense_up_to(plan: Plan) -> int:
    """Returns the longest context such that it and every shorter one is decoded dense, where drafts cannot pay."""
    buckets = plan.decode.lengths if plan.decode else ()
    sparse = next((at for at, bucket in enumerate(buckets) if bucket.segments), 0)
    return buckets[sparse - 1].up_to or 0 if sparse else 0
