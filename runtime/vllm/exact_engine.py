"""Exact output in an engine (docs/exact.md): the configuration by which it drafts by its own plan, and whether a step
drafts, by the gain of earlier drafts of such rows and lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.paged.metrics import REPORT_SECONDS, Drafted
from sparsekv.runtime.vllm.settings import plan_path, read_options

WORKER = f"{__package__}.self_speculator.ExactWorker"
SCHEDULER = f"{__package__}.draft_scheduler.exact_scheduler"
_SPECULATIVE = {"--spec-method": "spec_method", "--spec-model": "spec_model", "--spec-tokens": "spec_tokens"}
DRAFTED = 4  # tokens
_CAPTURED = 512  # tokens of a captured step at most, as vLLM has it
_USUAL_ROWS = (128, 256, 384, 512)  # --max-num-seqs where it is not given, by device: more than 512 are not captured


def ask_for_drafts(args: Any) -> None:
    """Writes into the arguments of an engine (`EngineArgs`) what exact output takes, where they ask for it: a draft
    model, which is the target itself and reserves a slot for each drafted token, our worker and scheduler, and sizes of
    graphs.
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
    if flags := [name for name, is_given in given.items() if is_given]:
        raise UnsupportedError(
            f'expected exact output to draft by the plan alone, found {", ".join(flags)}; remove that, or "exact"'
        )
    if plan_path(options, args.model, args.revision) is None:
        raise UsageError(f'expected a plan that drafts exact output, found none beside {args.model}; name it by "plan"')
    drafted = options.draft or DRAFTED
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
    compilation = args.compilation_config
    if not any(
        (args.cudagraph_capture_sizes, compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
    ):
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
    full = {min(most, _CAPTURED) for most in (*rows, _CAPTURED - _CAPTURED % new)}
    # vLLM rounds a size up to whole drafts: rows without drafts need a graph there, too.
    ends = {size + rounded for size in full for rounded in (-size % new, -(size % new))}
    wide = {count * new for count in (*counts, *full)}
    few = {count for count in counts if count < new}
    return sorted(size for size in wide | full | ends | few if 0 < size <= _CAPTURED)


def dense_up_to(plan: Plan) -> int:
    """Returns the longest context such that it and every shorter one is decoded dense, where drafts cannot pay."""
    buckets = plan.decode.lengths if plan.decode else ()
    sparse = next((at for at, bucket in enumerate(buckets) if bucket.segments), 0)
    return buckets[sparse - 1].up_to or 0 if sparse else 0


Say = Callable[[str], None]
_SHARE = 1 << 10  # shorter contexts are counted as one


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is over."""

    rows: Mapping[str, int]
    drafts: Mapping[str, int]  # tokens of its draft that it verified, where it had any
    accepted: Mapping[str, int]
    lengths: Mapping[str, int]  # tokens of each request, those of the step included

    @property
    def drafted(self) -> int | None:
        """Tokens that every request verified; None where they differ, or one of them was not decoding."""
        sizes = {self.drafts.get(request, 0) for request in self.rows}
        decoding = all(rows == 1 + self.drafts.get(request, 0) for request, rows in self.rows.items())
        return sizes.pop() if len(sizes) == 1 and decoding else None


class Drafting:
    """The drafts of one engine: of one length, or none, as at contexts that the plan decodes dense. Between two steps
    of the same requests lie a draft and the pass that verifies it: the time between their outputs is that of a
    cycle."""

    def __init__(
        self, drafted: int, dense_up_to: int, say: Say, publish: Callable[[Mapping[str, Drafted]], None]
    ) -> None:
        self._drafted, self._dense_up_to, self._say, self._publish = drafted, dense_up_to, say, publish
        self._paces: dict[tuple[int, int], DraftLength] = defaultdict(lambda: DraftLength((0, drafted)))
        self._last: dict[tuple[int, int], int] = {}
        self._told: set[tuple[int, int]] = set()
        self._before: tuple[frozenset[str], float] = (frozenset(), -math.inf)
        self._new: dict[str, Drafted] = defaultdict(Drafted)
        self._reported_at: float | None = None
        self.counts: dict[str, Drafted] = defaultdict(Drafted)  # by length

    def next(self, lengths: Mapping[str, int]) -> int:
        key = self._key(lengths)
        if not lengths or sum(lengths.values()) <= self._dense_up_to * len(lengths):
            return 0
        pace = self._paces[key]
        size = pace.next(self._drafted)
        if self._last.get(key) and not size and key not in self._told:
            self._told.add(key)
            rows, length = (1 << max(0, bits - 1) for bits in key)
            self._say(
                f"drafts of {self._drafted} tokens do not pay for {rows} or more rows of {format_length(length)} or "
                f"more: {pace.agreement:.0%} of them count; it decodes dense there, and tries again now and then"
            )
        self._last[key] = size
        return size

    def ran(self, step: Step, now: float) -> None:
        """A step is over, and its output came now, in seconds of a clock that never goes back."""
        for request, tokens in step.drafts.items():
            for counts in (self.counts, self._new):
                count = counts[_bucket(step.lengths[request])]
                count.drafted += tokens
                count.accepted += step.accepted.get(request, 0)
        requests, drafted = frozenset(step.rows), step.drafted
        before, began = self._before
        if (
            drafted is not None
            and requests == before
            and sum(step.lengths.values()) > self._dense_up_to * len(requests)
        ):
            pace = self._paces[self._key(step.lengths)]
            pace.ran(drafted, now - began, [step.accepted.get(request, 0) for request in step.drafts])
        self._before = (requests if drafted is not None else frozenset(), now)
        self._report(now)

    def _report(self, now: float) -> None:
        self._reported_at = now if self._reported_at is None else self._reported_at
        if self._new and now - self._reported_at >= REPORT_SECONDS:
            lines = (f"{count.accepted:,} of {count.drafted:,} at {length}" for length, count in self._new.items())
            self._say(f"drafted tokens that count: {', '.join(lines)}")
            self._publish(self._new)
            self._new, self._reported_at = defaultdict(Drafted), now

    @staticmethod
    def _key(lengths: Mapping[str, int]) -> tuple[int, int]:
        return len(lengths).bit_length(), (sum(lengths.values()) // max(1, len(lengths))).bit_length()


def _bucket(length: int) -> str:
    """The power of two below a length."""
    return format_length(max(_SHARE, 1 << (max(1, length).bit_length() - 1)))
