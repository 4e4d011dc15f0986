"""Dense and modes on the same samples, batch by batch.

Dense prefills the prompts of a batch, continues them greedily, and reads their answers in one pass. Then come the
modes, those together that go on from one prefill: decode alone from dense's, and a plan's `prefill` from that of
`both`. What they then predict is what a user gets: tokens are fed one by one under the mode; where its decode is dense,
the unmodified model reads each text in one pass. Two texts are fed after each prompt, each from a copy of the cache:

1. The sample's answer, or the true text (its first `MOST_TEXT` tokens) where the task is plain text. Divergence, top-1
   agreement and likelihood are measured on it, and whether the model generates it: its greedy continuation is the
   answer exactly when, fed the answer, it picks every next token of it.
2. Dense's own greedy continuation of the prompt, of as many tokens as the answer (at most `MOST_GREEDY`). A sample
   agrees exactly when the mode picks every token of it. So agreement is known whether or not dense solves the task.
   Where dense gives the answer, both texts are one. On request it goes on for more tokens, an end token among them or
   not, and divergence and top-1 agreement are measured on it as well, apart from the answer's.

A sample may be a conversation: its turns run as a user's do, prompts as prefill and the replies between them token by
token, and the answer is that to the last prompt. Every other later prompt of a plan is dense behind the sparse ones, as
a host runs turns of few tokens. No prefill is shared then, since each mode has replies of its own in its cache.

Logits count from the first row that the mode computed itself: with decode alone, the prompt's last row is dense's own
and would dilute the divergence. With prefill alone, the rows after the prompt attend to all of a cache that was
prefilled sparse. At any time there are at most two caches of the prompts of a batch: the last text is fed to the cache
itself, or to one that takes it over layer by layer.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, G tokens of dense's continuation, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat, starmap
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from sparsekv.planner.evaluation.batches import Batch, EvalSamples, batches
from sparsekv.planner.evaluation.predictions import (
    DENSE,
    Mode,
    PlanMode,
    Prefilled,
    after_prompt,
    answered,
    continued,
    divergence,
    log_likelihood,
    prefill_turns,
    spent_by,
    until_end,
    without_plans,
)
from sparsekv.planner.evaluation.results import Comparison, EvalResult, LongText, Outcome, Spent
from sparsekv.planner.progress import Progress, StageStep, prefill_work
from sparsekv.planner.tasks import Kit, Sample, Split, prepare
from sparsekv.plans.errors import PromptError
from sparsekv.runtime.hf.apply import Handle, dense_prompts
from sparsekv.runtime.hf.cache import handed_over, keeps_keys, put_back, states_of
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.stores.pinned import HostMemory

MOST_GREEDY = 16  # tokens of dense's own continuation that are to be picked exactly
_MOST_CAPTURED = 6  # modes, the first that decode step by step, whose captured steps stay from batch to batch


def evaluate(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    asked: EvalSamples,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[EvalResult, ...]]:
    """Compares modes with dense on held-out samples of the tasks.

    Args:
        modes: what to compare with dense, by name; may be empty.
        kit: the evaluation split's, `prepare(tokenizer, Split.EVALUATION)`, for those who call this often.

    Returns:
        A result a length for each mode, and for "dense" with dense on both sides.
    """
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    asked.check_fit(source)
    total = asked.samples * len(asked.tasks) * sum(map(prefill_work, asked.lengths))
    drawn = ((length, asked.drawn(source, length)) for length in asked.lengths)
    return compared_by_length(loaded, modes, drawn, total, asked.batch, asked.prefill_chunk, progress)


def compared_by_length(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    samples: Iterable[tuple[int, Sequence[Sample]]],
    work: float,
    batch: int | None,
    chunk: int | None,
    progress: Progress | None,
) -> dict[str, tuple[EvalResult, ...]]:
    """A result a length for each mode and for "dense"; `work` is the `prefill_work` of all samples."""
    results: dict[str, list[EvalResult]] = defaultdict(list)
    with (progress or Progress()).stage("evaluate", total=(1 + len(modes)) * work) as step:
        for length, drawn in samples:
            sides = compare(loaded, modes, drawn, batch=batch, chunk=chunk, step=step)
            for name, side in sides.items():
                results[name].append(EvalResult.of(length, drawn, sides[DENSE], side))
    return {name: tuple(side) for name, side in results.items()}


def compare(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    samples: Sequence[Sample],
    *,
    batch: int | None = None,
    chunk: int | None = None,
    greedy: bool = True,
    step: StageStep | None = None,
) -> dict[str, Comparison]:
    """Compares modes with dense on samples of any origin; arguments as in `opened` and `Evaluator.compare`."""
    with opened(loaded, modes, batch, chunk, chunk, greedy=greedy) as evaluator:
        return evaluator.compare(samples, step=step)


@contextmanager
def opened(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    batch: int | None = None,
    chunk: int | None = None,
    dense_chunk: int | None = None,
    *,
    greedy: bool = True,
    text: int = 0,
) -> Iterator[Evaluator]:
    """Modes that are compared with dense again and again; the model is given back at the end.

    Args:
        batch: most samples run at once; None: as many as surely fit.
        chunk: most tokens of a prompt given to the model at once by a mode; None is all.
        dense_chunk: the same by the unmodified model, which attends through a mask behind a past: slower.
        greedy: measure exact agreement with dense's greedy continuation as well; False saves that text's decode steps.
        text: measure divergence and top-1 agreement on so many tokens of it too, at least `MOST_GREEDY` and
            fewer where the context ends before; 0 does not.

    Raises:
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied; before anything runs.
    """
    with ExitStack() as stack:
        yield Evaluator(loaded, _applied(modes, loaded.model, stack), batch, chunk, dense_chunk, greedy, text)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Made by `opened`."""

    loaded: LoadedModel
    modes: Mapping[str, Mode]
    batch: int | None
    chunk: int | None
    dense_chunk: int | None
    greedy: bool
    text: int

    def compare(self, samples: Sequence[Sample], step: StageStep | None = None) -> dict[str, Comparison]:
        """Runs dense and modes on samples.

        Args:
            samples: prompts and answers, of tasks or of the caller: `Sample(prompt_ids, answer_ids, answer, task,
                length, later)` with at least one answer token. The answer is the text to measure on; its wording
                `answer` is "" where no generated text is to be compared with it, and then `MOST_TEXT` tokens of it are
                measured on.
            step: advanced by the `prefill_work` of each sample, for dense and each mode.

        Returns:
            By mode, and for "dense": outcomes in the order of the samples, and what was computed.
        """
        if not all(len(sample.answer_ids) for sample in samples):
            raise PromptError("expected samples with at least one answer token to measure on, found one without")
        outcomes: dict[str, dict[int, Outcome]] = defaultdict(dict)
        spent: dict[str, Spent] = defaultdict(Spent)
        with closing(self._measured(samples)) as measured:  # closed, it suspends what is applied
            for name, batch, results, computed in measured:
                outcomes[name].update(zip(map(id, batch), results, strict=True))
                spent[name] += computed
                _advance(step, batch, name)
        return {
            name: Comparison(tuple(outcomes[name][id(sample)] for sample in samples), spent[name])
            for name in (DENSE, *self.modes)
        }

    def dense(self, samples: Sequence[Sample], step: StageStep | None = None) -> tuple[DenseBatch, ...]:
        """Runs dense alone, in batches that modes may run beside later; their order is that of the batches."""
        runs = []
        for batch in batches(samples, self.loaded.model, self.batch, self.text):
            run, outcomes, _ = self._dense_run(batch)
            runs.append(DenseBatch(run, outcomes))
            _advance(step, batch.samples, DENSE)
        return tuple(runs)

    def beside(self, dense: Iterable[DenseBatch], name: str, step: StageStep | None = None) -> Comparison:
        """Runs a mode on what dense ran on: outcomes in the order of the batches, and what was computed."""
        outcomes: list[Outcome] = []
        spent = Spent()
        for run in dense:
            for _, samples, results, computed in run.run.through({name: self.modes[name]}):
                outcomes += results
                spent += computed
                _advance(step, samples, name)
        return Comparison(tuple(outcomes), spent)

    def _dense_run(self, batch: Batch) -> tuple[_Run, tuple[Outcome, ...], Prefilled]:
        return _Run.of(self.loaded, batch, self.chunk, self.dense_chunk, self.greedy, self.text)

    def _measured(self, samples: Iterable[Sample]) -> Generator[Measured]:
        for batch in batches(samples, self.loaded.model, self.batch, self.text):
            run, outcomes, prompts = self._dense_run(batch)
            yield DENSE, batch.samples, outcomes, Spent()
            # a layer with a sliding window has dropped the tokens behind it
            attending = filter(keeps_keys, prompts.cache.layers)
            dense_serves = all(layer.keys.shape[2] == layer.get_seq_length() for layer in attending)
            alike = _prefilled_alike(self.modes, dense_serves, each=bool(batch.later))
            yield from run.through(alike.pop(DENSE, {}), _Source(prompts))
            del prompts  # unless a mode went on from it, that cache is there still
            for group in alike.values():
                yield from run.through(group)


@dataclass(frozen=True, slots=True, eq=False)
class DenseBatch:
    """Prompts that dense ran on, without their cache."""

    run: _Run
    outcomes: tuple[Outcome, ...]


def _advance(step: StageStep | None, samples: Iterable[Sample], name: str) -> None:
    for sample in samples:
        (step or StageStep()).advance(prefill_work(sample.length), f"{sample.task}, {sample.length} tokens, {name}")


Measured = tuple[str, tuple[Sample, ...], tuple[Outcome, ...], Spent]
"""The name of a mode, or dense, the samples of a batch, their outcomes, and what was computed."""


class _Applied:
    """A plan's mode on a handle that serves all batches, and is suspended in between.

    Args:
        keeps_steps: captured decode steps stay from batch to batch.
    """

    def __init__(self, mode: PlanMode, handle: Handle, keeps_steps: bool) -> None:
        handle.suspend()
        self.check = mode.check
        self.prefilled_by, self.dense_prefill = mode.prefilled_by, mode.dense_prefill
        self.dense_decode, self.unmodified_decode = mode.phase == "prefill", mode.unmodified_decode
        self.handle, self._keeps_steps = handle, keeps_steps
        self.dense_prompts: Callable[[], AbstractContextManager[None]] = (
            nullcontext if mode.plan.prefill is None else partial(dense_prompts, handle)
        )

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `Mode`; tells what was computed in this block."""
        self.handle.resume()
        self.handle.reset_stats()
        try:
            yield partial(spent_by, self.handle)
        finally:
            self.handle.suspend()
            if self.handle.steps and not self._keeps_steps:
                self.handle.steps.release()


def _applied(modes: Mapping[str, Mode], model: PreTrainedModel, stack: ExitStack) -> dict[str, Mode]:
    memory, opened = HostMemory(), count()
    stack.callback(memory.close)

    def applied(mode: PlanMode) -> _Applied:
        keeps_steps = not mode.unmodified_decode and next(opened) < _MOST_CAPTURED
        return _Applied(mode, stack.enter_context(mode.applied(model, memory)), keeps_steps)

    return {name: applied(mode) if isinstance(mode, PlanMode) else mode for name, mode in modes.items()}


def _prefilled_alike(modes: Mapping[str, Mode], dense_serves: bool, each: bool) -> dict[Hashable, dict[str, Mode]]:
    """Groups that share a prefill; each its own on request. Modes whose decode is dense come last: they can go on from
    any cache."""
    groups: dict[Hashable, dict[str, Mode]] = defaultdict(dict)
    for name, mode in sorted(modes.items(), key=lambda item: isinstance(item[1], _Applied) and item[1].dense_decode):
        key: Hashable = mode.prefilled_by if isinstance(mode, _Applied) and not each else name
        groups[key if key != DENSE or dense_serves else name][name] = mode
    return groups


def _decodes_unmodified(mode: Mode) -> bool:
    return isinstance(mode, _Applied) and mode.unmodified_decode


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Prefilled prompts, by whom (None: by the unmodified model), and what that computed."""

    prompts: Prefilled
    owner: Mode | None = None
    spent: Spent = field(default_factory=Spent)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A batch, and what dense predicts for it.

    Attributes:
        picked_BA: [B, A + 1], the likeliest tokens on the way through the answer.
        log_BAV: [B, A + 1, V], log-probabilities, float32.
        greedy_BG: dense's greedy continuation of the prompts; no token where it is not asked for.
        counted_BG: which of its tokens count for exact agreement: those up to an end token.
        text_BGV: log-probabilities of it, where divergence is measured on it too.
    """

    loaded: LoadedModel
    batch: Batch
    chunk: int | None
    picked_BA: torch.Tensor
    log_BAV: torch.Tensor
    greedy_BG: torch.Tensor
    counted_BG: torch.Tensor
    text_BGV: torch.Tensor | None

    @classmethod
    @torch.no_grad()
    def of(
        cls, loaded: LoadedModel, batch: Batch, chunk: int | None, dense_chunk: int | None, greedy: bool, text: int
    ) -> tuple[_Run, tuple[Outcome, ...], Prefilled]:
        """Prefills the prompts, continues them greedily from a copy of the cache, and reads the answers in one pass."""
        model: Any = loaded.model
        prompts, tokens = prefill_turns(model, batch, dense_chunk), min(batch.answer_BA.shape[1], MOST_GREEDY)
        tokens = max(tokens, min(text, loaded.info.context_length - batch.past))
        greedy_BGV, states = prompts.logits_BKV[:, :0], states_of(prompts.cache)
        with without_plans():
            if greedy:
                greedy_BGV = continued(model, deepcopy(prompts) if tokens > 1 else prompts, tokens)
            logits_BAV = after_prompt(model, prompts, batch.answer_BA, stepwise=False)
        put_back(prompts.cache, states)
        check_numbers(model, "logits", logits_BAV)
        log_BAV, greedy_BG = logits_BAV.log_softmax(-1), greedy_BGV.argmax(-1)
        text_BGV, counted_BG = greedy_BGV.log_softmax(-1) if text else None, until_end(model, greedy_BG)
        run = cls(loaded, batch, chunk, logits_BAV.argmax(-1), log_BAV, greedy_BG, counted_BG, text_BGV)
        return run, tuple(replace(outcome, kl=0.0) for outcome in run.outcomes([logits_BAV, greedy_BGV])), prompts

    def through(self, modes: Mapping[str, Mode], source: _Source | None = None) -> Iterator[Measured]:
        """Measures modes that go on from one prefill: the source, which is used up, or that of the first of them."""
        names = list(modes)
        for name, mode in modes.items():
            read, spent, source = self._predicted(mode, source, last=name == names[-1])
            if isinstance(mode, _Applied):
                mode.check(self.batch.past, spent)
            first = int(mode.dense_prefill and not self.batch.later)  # a later prompt runs behind what was decoded
            yield name, self.batch.samples, self.outcomes(read, first), spent

    @torch.no_grad()
    def _predicted(
        self, mode: Mode, source: _Source | None, *, last: bool
    ) -> tuple[list[torch.Tensor], Spent, _Source]:
        """Logits for each text, what was computed, and where the next mode goes on from."""
        with mode.running(self.loaded.model) as spent:
            if source is None:
                dense = mode.dense_prompts if isinstance(mode, _Applied) else nullcontext
                source = _Source(prefill_turns(self.loaded.model, self.batch, self.chunk, dense), mode, spent())
            read = [] if _decodes_unmodified(mode) else self._read(mode, source, last)
            computed = replace(spent(), tiles=source.spent.tiles, causal_tiles=source.spent.causal_tiles)
        if _decodes_unmodified(mode):
            with without_plans():
                read = self._read(mode, source, last)
        return read, computed, source

    @property
    def _texts(self) -> list[torch.Tensor]:
        """[B, A] each: what a mode is fed after the prompts; the longer one where both begin alike."""
        answer_BA, fed_BG = self.batch.answer_BA, self.greedy_BG[:, :-1]
        tokens = min(answer_BA.shape[1], fed_BG.shape[1])
        same_BG = answer_BA[:, :tokens] == fed_BG[:, :tokens]
        if self.text_BGV is None:
            same_BG |= ~self.counted_BG[:, :tokens]
        return [max(answer_BA, fed_BG, key=_width)] if same_BG.all() else [answer_BA, fed_BG]

    def _read(self, mode: Mode, source: _Source, last: bool) -> list[torch.Tensor]:
        stepwise, texts = not _decodes_unmodified(mode), self._texts
        return [
            after_prompt(
                self.loaded.model,
                Prefilled(source.prompts.logits_BKV, self._cache(mode, source, final=last and text_BA is texts[-1])),
                text_BA,
                stepwise=stepwise,
            )
            for text_BA in texts
        ]

    def _cache(self, mode: Mode, source: _Source, *, final: bool) -> Cache:
        """One to feed a text to; the last one is that of the source itself, or takes it over layer by layer."""
        given: Cache = source.prompts.cache
        if source.owner is mode and not _decodes_unmodified(mode):
            return given if final else deepcopy(given)
        layers = handed_over(given if final else copy(given), self.batch.past)
        assert isinstance(mode, _Applied)
        if not mode.unmodified_decode:
            return mode.handle.cache_of(layers)
        config: Any = config_of(self.loaded.model)
        cache = DynamicCache(config=config)
        for number, layer in enumerate(layers):
            if not isinstance(layer, LinearAttentionLayer):
                cache.update(*layer, number)
            elif isinstance(cache.layers[number], LinearAttentionLayer):  # else of an MLP alone, which has nothing
                cache.layers[number] = layer
        return cache

    def outcomes(self, read: Sequence[torch.Tensor], first: int = 0) -> tuple[Outcome, ...]:
        """Predictions for the texts beside dense; rows before the `first` are dense's own."""
        logits_BAV = read[0][:, : self.picked_BA.shape[1]]
        picked_BA, log_BAV = logits_BAV.argmax(-1), logits_BAV.log_softmax(-1)
        agreed_BA = (self.picked_BA == picked_BA)[:, first:]
        rows = zip(
            answered(self.loaded, self.batch, picked_BA),
            log_likelihood(self.batch.answer_BA, log_BAV).tolist(),
            divergence(self.log_BAV[:, first:], log_BAV[:, first:]).tolist(),
            agreed_BA.sum(1).tolist(),
            repeat(agreed_BA.shape[1]),
            self._exact(read[-1]),
            self._long_texts(read[-1], first),
        )
        return tuple(starmap(Outcome, rows))

    def _exact(self, logits_BAV: torch.Tensor) -> list[bool | None]:
        tokens = min(self.greedy_BG.shape[1], self.batch.answer_BA.shape[1], MOST_GREEDY)
        if not tokens:
            return [None] * len(self.batch.samples)
        same_BG = logits_BAV[:, :tokens].argmax(-1) == self.greedy_BG[:, :tokens]
        same: list[bool | None] = (same_BG | ~self.counted_BG[:, :tokens]).all(1).tolist()
        return same

    def _long_texts(self, logits_BGV: torch.Tensor, first: int) -> list[LongText | None]:
        if self.text_BGV is None:
            return [None] * len(self.batch.samples)
        dense_BGV, tokens = self.text_BGV[:, first:], self.greedy_BG.shape[1]
        log_BGV = logits_BGV[:, first:tokens].log_softmax(-1)
        agreed_B = (log_BGV.argmax(-1) == self.greedy_BG[:, first:]).sum(1)
        kl_B = divergence(dense_BGV, log_BGV)
        return list(map(LongText, kl_B.tolist(), agreed_B.tolist(), repeat(tokens - first)))


def _width(text_BA: torch.Tensor) -> int:
    return text_BA.shape[1]
