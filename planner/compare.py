"""A model with and without a plan on the same samples, which may come from anywhere.

    reference = dense_reference(loaded, samples)  # once
    found = compare(loaded, {"prefill": PlanMode(plan, "prefill"), "decode": PlanMode(plan, "decode")}, reference)
    found["decode"].kl  # a divergence for each sample, in nats

Every mode runs as it would for a user: the prompt is prefilled, then tokens are fed one by one (by shared_prefills.py
at once where decode is dense). Two texts are fed after each prompt, each from a copy of the same cache:

1. The sample's answer, or the true text (its first `MOST_TEXT` tokens) where the task is plain text. Divergence, top-1
   agreement and likelihood are measured on it, and whether the model generates it: its greedy continuation is the
   answer exactly when, fed the answer, it picks every next token of it.
2. Dense's own greedy continuation of the prompt, of as many tokens as the answer (at most `MOST_GREEDY`). A sample
   agrees exactly when the mode picks every token of it. So agreement is known whether or not dense solves the task.
   Where dense gives the answer, both texts are one.

Logits count from the first row that the mode computed itself: with decode alone, the prompt's last row is dense's own
and would dilute the divergence. With prefill alone, the rows after the prompt attend to all of a cache that was
prefilled sparse.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, G tokens of dense's continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from sparsekv.planner.eval_results import Outcome, Spent
from sparsekv.planner.progress import Step
from sparsekv.planner.prompts_at_once import MOST_TEXT, prompts_at_once
from sparsekv.planner.tasks import Sample, matches
from sparsekv.planner.tasks.text import Ids
from sparsekv.plans.errors import PromptError
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.generate import check_numbers, piece_sizes
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.stores.pinned import HostMemory

PhaseName = Literal["prefill", "decode", "both"]
DENSE = "dense"  # beside the names of modes
MOST_GREEDY = 16  # tokens of dense's own continuation

# cuDNN, which torch prefers on Hopper, makes a plan for every number of keys that it has not met.
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Mode(Protocol):
    """Something to compare with dense."""

    @property
    def stepwise(self) -> bool:
        """Whether answers are fed token by token, as decode does; otherwise they are part of the prefill."""

    @property
    def dense_prefill(self) -> bool:
        """Whether prompts run dense, so that the logits of their last row are no result of the mode."""

    def running(self, model: PreTrainedModel) -> AbstractContextManager[Callable[[], Spent]]:
        """Switches it on for the length of a `with` block, which gets what tells what was computed so far."""


@dataclass(frozen=True, slots=True)
class PlanMode:
    """A plan at work: prefill alone, decode alone, or both."""

    plan: Plan
    phase: PhaseName = "both"
    backend: str = "auto"
    allow_mismatch: bool = False  # take a plan of another architecture, see `apply`

    @property
    def stepwise(self) -> bool:
        """See `Mode`: what is generated is decoded, whichever phase is sparse."""
        return True

    @property
    def dense_prefill(self) -> bool:
        """See `Mode`."""
        return self.phase == "decode"

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `Mode`."""
        with self.applied(model) as handle:
            yield lambda: spent_by(handle.stats())

    def applied(self, model: PreTrainedModel, memory: HostMemory | None = None) -> Handle:
        """The plan applied; arguments as in `apply`."""
        return apply(
            model,
            self.plan,
            prefill=self.phase != "decode",
            decode=self.phase != "prefill",
            backend=self.backend,
            allow_mismatch=self.allow_mismatch,
            memory=memory,
        )


def spent_by(stats: RunStats) -> Spent:
    """What a handle computed."""
    return Spent(
        stats.prefill_tiles_computed,
        float(stats.prefill_tiles_causal),
        float(stats.decode_tokens_attended),
        float(stats.decode_tokens_cached),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DenseReference:
    """What dense predicts for some samples, in host memory: measured once, for any number of calls of `compare`.

    Attributes:
        samples: in the order of the caller.
        outcomes: of dense itself, a sample each.
    """

    samples: tuple[Sample, ...]
    outcomes: tuple[Outcome, ...]
    batches: tuple[DenseBatch, ...]
    order: tuple[int, ...]  # where the samples of the batches, one after the other, are among `samples`


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mode on the samples of a `DenseReference`.

    Attributes:
        outcomes: a sample each, in the order of `DenseReference.samples`.
        spent: what the mode computed, over all samples.
    """

    outcomes: tuple[Outcome, ...]
    spent: Spent

    @property
    def kl(self) -> tuple[float, ...]:
        """Mean divergence from dense of each sample, in nats."""
        return tuple(outcome.kl for outcome in self.outcomes)


def dense_reference(
    loaded: LoadedModel,
    samples: Sequence[Sample],
    *,
    batch: int | None = None,
    chunk: int | None = None,
    greedy: bool = True,
    step: Step | None = None,
) -> DenseReference:
    """Runs dense on samples, for `compare`.

    Args:
        loaded: the model, with nothing applied to it.
        samples: prompts and answers, of tasks or of the caller: `Sample(prompt_ids, answer_ids, answer, task, length)`
            with at least one answer token. The answer is the text to measure on; its wording `answer` is "" where no
            generated text is to be compared with it, and then `MOST_TEXT` tokens of it are measured on.
        batch: most samples run at once; None: as many as surely fit.
        chunk: most tokens of a prompt given to the model at once, here and in `compare`; None is all.
        greedy: measure exact agreement with dense's greedy continuation as well; False saves that text's decode steps.
        step: advanced by a sample each.

    Raises:
        PromptError: a sample without an answer token.
        UnsupportedError: the model overflows in its dtype.
    """
    if not all(len(sample.answer_ids) for sample in samples):
        raise PromptError("expected samples with at least one answer token to measure on, found one without")
    order = sorted(range(len(samples)), key=lambda place: _shape(samples[place]))
    longest = max((sum(_shape(sample)) for sample in samples), default=1)
    groups = batches(samples, batch or prompts_at_once(loaded.model, longest))
    found = []
    for group in groups:
        found.append(DenseBatch.of(loaded, group, chunk, greedy))
        (step or Step()).advance(len(group), "dense")
    outcomes = _ordered(order, (outcome for one in found for outcome in one.outcomes))
    return DenseReference(tuple(samples), outcomes, tuple(found), tuple(order))


def compare(
    loaded: LoadedModel, modes: Mapping[str, Mode], reference: DenseReference, step: Step | None = None
) -> dict[str, Comparison]:
    """Measures modes against dense on the samples of a reference, which may serve any number of calls.

    Args:
        loaded: the model of the reference, with nothing applied to it.
        modes: what to measure, by name, such as `{"both": PlanMode(plan)}`; each is switched on once.
        reference: from `dense_reference`.
        step: advanced by a sample of each mode.

    Returns:
        By mode: a sample's divergence, agreement and correctness, and what was computed.

    Raises:
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    found = {}
    for name, mode in modes.items():
        outcomes: list[Outcome] = []
        with mode.running(loaded.model) as spent:
            for one in reference.batches:
                outcomes += one.compared(loaded, mode)
                (step or Step()).advance(len(one.samples), name)
            found[name] = Comparison(_ordered(reference.order, outcomes), spent())
    return found


def _ordered(order: Sequence[int], outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    return tuple(outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples whose prompts are equally long, and whose answers are."""

    samples: tuple[Sample, ...]
    prompt_BS: torch.Tensor
    answer_BA: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Batch:
        """The samples as tensors on the model's device."""
        both = ([sample.prompt_ids for sample in samples], [_fed(sample) for sample in samples])
        prompt_BS, answer_BA = (torch.from_numpy(np.stack(rows).astype(np.int64)).to(device) for rows in both)
        return cls(tuple(samples), prompt_BS, answer_BA)


def batches(samples: Iterable[Sample], size: int) -> Iterator[tuple[Sample, ...]]:
    """Groups samples of equal shape, at most `size` together; the order within a shape is kept."""
    for _, group in groupby(sorted(samples, key=_shape), key=_shape):
        equal = tuple(group)
        yield from (equal[first : first + size] for first in range(0, len(equal), size))


def _shape(sample: Sample) -> tuple[int, int]:
    return len(sample.prompt_ids), len(_fed(sample))


def _fed(sample: Sample) -> Ids:
    return sample.answer_ids if sample.answer else sample.answer_ids[:MOST_TEXT]


@dataclass(frozen=True, slots=True, eq=False)
class DenseBatch:
    """What dense predicts for samples of equal shape.

    Attributes:
        logits_BAV: [B, A + 1, V] in the model's dtype: for every token of the answer and the one after it.
        greedy_BG: dense's greedy continuation of the prompts; None where it is not asked for.
        counted_BG: which of its tokens count: those up to an end token.
    """

    samples: tuple[Sample, ...]
    chunk: int | None
    logits_BAV: torch.Tensor
    greedy_BG: torch.Tensor | None
    counted_BG: torch.Tensor | None
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(
        cls, loaded: LoadedModel, samples: tuple[Sample, ...], chunk: int | None = None, greedy: bool = True
    ) -> DenseBatch:
        """Prefills the prompts, continues them greedily from a copy of the cache, and reads the answers in one pass.

        The logits wait in host memory.

        Raises:
            UnsupportedError: the model overflows in its dtype.
        """
        found = cls.prefilled(loaded, samples, chunk, greedy)[0]
        return replace(found, logits_BAV=found.logits_BAV.cpu())

    @classmethod
    def prefilled(
        cls, loaded: LoadedModel, samples: tuple[Sample, ...], chunk: int | None = None, greedy: bool = True
    ) -> tuple[DenseBatch, Prefilled]:
        """`of` with the logits on the device, and what the prompts left; the cache goes on with what was fed of the
        answers."""
        model: Any = loaded.model
        batch = Batch.of(samples, model.device)
        greedy_BG = counted_BG = None
        with torch.no_grad():
            last_B1V, cache = prefill(model, batch.prompt_BS, chunk)
            with few_rows():
                if greedy:
                    tokens = min(batch.answer_BA.shape[1], MOST_GREEDY)
                    greedy_BG = _continued(model, last_B1V, deepcopy(cache) if tokens > 1 else None, tokens)
                    counted_BG = _until_end(model, greedy_BG).cpu()
                rest_BAV = model(input_ids=batch.answer_BA, past_key_values=cache, use_cache=True).logits
            logits_BAV = torch.cat([last_B1V, rest_BAV], 1)
        check_numbers(model, "logits", logits_BAV)
        rows = zip(answered(loaded, batch, logits_BAV), log_likelihood(batch, logits_BAV.float()), strict=True)
        scored, exact = logits_BAV.shape[1], True if greedy else None
        outcomes = tuple(Outcome(right, nll, 0.0, scored, scored, exact) for right, nll in rows)
        continued_BG = None if greedy_BG is None else greedy_BG.cpu()
        found = cls(samples, chunk, logits_BAV.to(model.dtype), continued_BG, counted_BG, outcomes)
        return found, Prefilled(last_B1V, cache)

    def compared(self, loaded: LoadedModel, mode: Mode) -> tuple[Outcome, ...]:
        """The same samples through a mode that is switched on."""
        batch = Batch.of(self.samples, loaded.model.device)
        read = forced_logits(loaded, batch.prompt_BS, self.texts(batch), stepwise=mode.stepwise, chunk=self.chunk)
        return self.scored(loaded, batch, read, mode.dense_prefill)

    def texts(self, batch: Batch) -> list[torch.Tensor]:
        """[B, A] each: what a mode is fed after the prompts of the batch."""
        if self.greedy_BG is None or self._answers_greedily(batch.answer_BA):
            return [batch.answer_BA]
        return [batch.answer_BA, self.greedy_BG[:, :-1].to(batch.answer_BA.device)]

    def scored(
        self, loaded: LoadedModel, batch: Batch, read: Sequence[torch.Tensor], dense_prefill: bool
    ) -> tuple[Outcome, ...]:
        """What a mode that predicted `read` for `texts` is beside dense; see `forced_logits` and `Mode`."""
        logits_BAV = read[0]
        first = int(dense_prefill)
        dense_BAV = self.logits_BAV.to(logits_BAV.device).float()
        agreed_BA = dense_BAV[:, first:].argmax(-1) == logits_BAV[:, first:].argmax(-1)
        rows = zip(
            answered(loaded, batch, logits_BAV),
            log_likelihood(batch, logits_BAV),
            divergence(dense_BAV[:, first:], logits_BAV[:, first:]),
            agreed_BA.sum(1).tolist(),
            strict=True,
        )
        exact = self._exact(read[-1])
        return tuple(Outcome(*row, agreed_BA.shape[1], same) for row, same in zip(rows, exact, strict=True))

    def _answers_greedily(self, answer_BA: torch.Tensor) -> bool:
        """Whether the answers begin with dense's own continuations, as far as those are fed."""
        assert self.greedy_BG is not None
        assert self.counted_BG is not None
        fed = self.greedy_BG.shape[1] - 1
        return bool(((answer_BA[:, :fed].cpu() == self.greedy_BG[:, :fed]) | ~self.counted_BG[:, :fed]).all())

    def _exact(self, logits_BAV: torch.Tensor) -> list[bool | None]:
        if self.greedy_BG is None or self.counted_BG is None:
            return [None] * len(self.samples)
        picked_BG = logits_BAV[:, : self.greedy_BG.shape[1]].argmax(-1).cpu()
        same: list[bool | None] = ((picked_BG == self.greedy_BG) | ~self.counted_BG).all(1).tolist()
        return same


@contextmanager
def few_rows() -> Iterator[None]:
    """For an unmodified model that goes on behind a past: on Hopper saves a tenth of a second a step."""
    with sdpa_kernel(_WITHOUT_PLANS):
        yield


def _continued(model: Any, last_B1V: torch.Tensor, cache: Any, tokens: int) -> torch.Tensor:
    """[B, G]: so many tokens, each the likeliest."""
    picked = [last_B1V.argmax(-1)]
    while len(picked) < tokens:
        picked.append(model(input_ids=picked[-1], past_key_values=cache, use_cache=True).logits.argmax(-1))
    return torch.cat(picked, 1)


def _until_end(model: Any, ids_BG: torch.Tensor) -> torch.Tensor:
    """[B, G]: which tokens come before an end token, or are the first one."""
    ends = model.generation_config.eos_token_id
    is_end_BG = torch.isin(ids_BG, torch.tensor([] if ends is None else ends, device=ids_BG.device))
    return is_end_BG.long().cumsum(1) - is_end_BG.long() == 0


def forced_logits(
    loaded: LoadedModel,
    prompt_BS: torch.Tensor,
    texts: Sequence[torch.Tensor],
    *,
    stepwise: bool,
    chunk: int | None = None,
) -> list[torch.Tensor]:
    """What the model predicts for every token of some texts and for the one after: [B, A + 1, V] each, float32.

    Args:
        texts: [B, A] each, what may follow the same prompts.
        stepwise: prefill the prompts, then feed the texts token by token; otherwise texts are part of the prefill.
        chunk: most tokens prefilled at once; None is all.
    """
    with torch.no_grad():
        if not stepwise:
            wholes = ((torch.cat([prompt_BS, text_BA], 1), text_BA.shape[1] + 1) for text_BA in texts)
            return [prefill(loaded.model, ids_BS, chunk, keep).logits_BAV.float() for ids_BS, keep in wholes]
        return fed_logits(loaded.model, prefill(loaded.model, prompt_BS, chunk), texts)


def fed_logits(
    model: Any, prefilled: Prefilled, texts: Sequence[torch.Tensor], *, keep: bool = False
) -> list[torch.Tensor]:
    """What a model predicts for texts that are fed token by token after prefilled prompts, as `forced_logits`.

    Every text but the last has a copy of the cache, one at a time; with `keep` the last one as well.
    """
    last_B1V, cache = prefilled
    with torch.no_grad():
        copied = [_after_text(model, last_B1V, deepcopy(cache), text_BA) for text_BA in (texts if keep else texts[:-1])]
        return copied if keep else [*copied, _after_text(model, last_B1V, cache, texts[-1])]


def _after_text(model: Any, last_B1V: torch.Tensor, cache: Any, text_BA: torch.Tensor) -> torch.Tensor:
    rows = [last_B1V]
    for token_B1 in torch.split(text_BA, 1, 1) if text_BA.shape[1] else ():
        rows.append(model(input_ids=token_B1, past_key_values=cache, use_cache=True).logits)
    return torch.cat(rows, 1).float()


def answered(loaded: LoadedModel, batch: Batch, logits_BAV: torch.Tensor) -> list[bool | None]:
    """Whether greedy generation gives each answer; None where a sample has no text to compare (perplexity)."""
    picked_BA = logits_BAV.argmax(-1)
    whole_B = (picked_BA[:, :-1] == batch.answer_BA).all(1).tolist()
    after_B = picked_BA[:, -1].tolist()
    return [
        None if not sample.answer else whole and _ends(loaded, sample, after)
        for sample, whole, after in zip(batch.samples, whole_B, after_B, strict=True)
    ]


def log_likelihood(batch: Batch, logits_BAV: torch.Tensor) -> list[float]:
    """Mean negative log-likelihood of the answer tokens of each sample, in nats."""
    log_BAV = logits_BAV[:, :-1].log_softmax(-1)
    nll_BA = -log_BAV.gather(-1, batch.answer_BA[..., None])[..., 0]
    means: list[float] = nll_BA.double().mean(1).tolist()
    return means


def divergence(dense_BAV: torch.Tensor, sparse_BAV: torch.Tensor) -> list[float]:
    """Mean KL(dense || sparse) of the next-token distributions of each sample, over all rows, in nats."""
    dense, sparse = dense_BAV.log_softmax(-1), sparse_BAV.log_softmax(-1)
    kl_BA = (dense.exp() * (dense - sparse)).sum(-1).double()
    means: list[float] = kl_BA.mean(1).clamp(min=0.0).tolist()
    return means


class Prefilled(NamedTuple):
    """What prompts left: the logits of their last rows, and the cache."""

    logits_BAV: torch.Tensor
    cache: Any


def prefill(model: Any, ids_BS: torch.Tensor, chunk: int | None, keep: int = 1) -> Prefilled:
    """Runs prompts; the logits are those of the last `keep` rows."""
    tokens = ids_BS.shape[1]
    pieces = torch.split(ids_BS, piece_sizes(tokens, chunk) if chunk else [tokens], 1)
    cache, logits = None, []
    for position, piece in enumerate(pieces):
        # Rows still wanted: those of this piece among the last `keep` of all.
        after = sum(later.shape[1] for later in pieces[position + 1 :])
        wanted = max(1, min(piece.shape[1], keep - after))
        out = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=wanted)
        cache = out.past_key_values
        if keep > after:
            logits.append(out.logits)
    return Prefilled(torch.cat(logits, 1), cache)


def _ends(loaded: LoadedModel, sample: Sample, after: int) -> bool:
    text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
    return matches(text, sample.answer)
