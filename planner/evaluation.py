"""A model with and without a plan on the same held-out samples.

Dense runs once and is shared by everything that is compared with it: `Mode`s, mostly a plan and the phases of it that
are switched on. A mode is switched on once for all samples, tasks and lengths.

A model's greedy continuation is the answer exactly when, fed the answer, it picks every next token of it. So one forced
pass tells both what it generates and how its distributions move, on the same context as dense. A stepwise mode feeds
the answer token by token, as decode does; otherwise the answer is part of the prefill.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from sparsekv.planner.eval_results import EvalResult, Outcome, Spent, TaskResult
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.progress import Progress, Step
from sparsekv.planner.tasks import TASKS, Kit, Sample, Split, matches, prepare
from sparsekv.planner.tasks.perplexity import Perplexity
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import LEAST_CHUNK
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import attention_groups
from sparsekv.runtime.hf.generate import check_numbers, piece_sizes
from sparsekv.runtime.hf.load import LoadedModel

PhaseName = Literal["prefill", "decode", "both"]
DENSE = "dense"
# Dense logits that wait in host memory for the modes; with more, modes are switched on again for later samples.
_WAITING_BYTES = 8 << 30
# A step of decoding takes the host as long for one prompt as for many; beyond this, little is left to gain.
_MOST = 64
# Of what the weights leave. The rest is for what is not counted here: indices, what the allocator cannot use.
_SHARE = 0.4
_SCORED = Perplexity().most_scored + 1  # tokens of a prompt that are scored, at most
# Tensors as large as the float32 scores that are alive at once: both models', their logarithms, what divides them.
_SCORES = 8


class Mode(Protocol):
    """Something to compare with dense."""

    @property
    def stepwise(self) -> bool:
        """Whether answers are fed token by token, as decode does."""

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
        """See `Mode`."""
        return self.phase != "prefill"

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `Mode`."""
        with apply(
            model,
            self.plan,
            prefill=self.phase != "decode",
            decode=self.phase != "prefill",
            backend=self.backend,
            allow_mismatch=self.allow_mismatch,
        ) as handle:
            yield lambda: _spent(handle.stats())


@dataclass(frozen=True, slots=True)
class EvalSamples:
    """Samples that neither training nor calibration used, and how they are fed.

    Attributes:
        lengths: most tokens of prompt and answer together.
        samples: of each task and length.
        batch: most samples run at once; None: as many as surely fit. Only samples of equal shape share a batch.
        prefill_chunk: most tokens of a prompt given to the model at once; None is all.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    batch: int | None = None
    seed: int = 0
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tasks) - set(TASKS))
        if unknown:
            raise UsageError(f"expected tasks of {', '.join(sorted(TASKS))}, found {', '.join(unknown)}")
        if self.prefill_chunk is not None and self.prefill_chunk < LEAST_CHUNK:
            raise UsageError(
                f"expected a prefill chunk of at least {LEAST_CHUNK} tokens, found {self.prefill_chunk}; thousands are "
                "sensible"
            )

    def check_fit(self, kit: Kit) -> None:
        """Finds out, without running a model, whether every task fits every length.

        Raises:
            PromptError: one does not.
        """
        for length, task in product(self.lengths, self.tasks):
            next(held_out(kit, task, length, 1, self.seed))

    def batches(self, kit: Kit, model: PreTrainedModel) -> Iterator[tuple[Sample, ...]]:
        """The samples in batches, one length after the other."""
        for length in self.lengths:
            drawn = (sample for task in self.tasks for sample in held_out(kit, task, length, self.samples, self.seed))
            yield from batches(drawn, self.batch or prompts_at_once(model, length))


def evaluate(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    asked: EvalSamples,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[EvalResult, ...]]:
    """Evaluates some modes, and dense once, on the same samples.

    Args:
        loaded: the model, with nothing applied to it.
        modes: what to compare with dense, by name; may be empty.
        kit: the evaluation split's, `prepare(tokenizer, Split.EVALUATION)`, for those who call this often.

    Returns:
        A result a length for each mode, and for "dense" with dense on both sides.

    Raises:
        PromptError: a task does not fit a length.
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    found = {name: _Findings() for name in (DENSE, *modes)}
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    asked.check_fit(source)
    _check_modes(modes, loaded.model)
    total = asked.samples * len(asked.tasks) * len(asked.lengths) * len(found)
    with (progress or Progress()).stage("evaluate", total=total) as step, torch.no_grad():
        for some in _rounds(asked.batches(source, loaded.model), loaded.model):
            dense = []
            for samples in some:
                logits_BAV = _measure(loaded, samples, asked, found[DENSE])
                check_numbers(loaded.model, "logits", logits_BAV)
                dense.append((samples, logits_BAV.to("cpu", loaded.model.dtype)))
                step.advance(len(samples), f"{samples[0].length} tokens, dense")
            for name, mode in modes.items():
                _compare(loaded, name, mode, dense, asked, found[name], step)
    return {
        name: tuple(own.result(found[DENSE], length, asked.tasks) for length in asked.lengths)
        for name, own in found.items()
    }


def _check_modes(modes: Mapping[str, Mode], model: PreTrainedModel) -> None:
    """Switches each on and off, so that one that cannot be is found out before dense is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        for mode in modes.values():
            with mode.running(model):
                pass


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples whose prompts are equally long, and whose answers are."""

    samples: tuple[Sample, ...]
    prompt_BS: torch.Tensor
    answer_BA: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Batch:
        """The samples as tensors on the model's device."""
        both = ([sample.prompt_ids for sample in samples], [sample.answer_ids for sample in samples])
        prompt_BS, answer_BA = (torch.from_numpy(np.stack(rows).astype(np.int64)).to(device) for rows in both)
        return cls(tuple(samples), prompt_BS, answer_BA)


def batches(samples: Iterable[Sample], size: int) -> Iterator[tuple[Sample, ...]]:
    """Groups samples of equal shape, at most `size` together; the order within a shape is kept."""
    for _, group in groupby(sorted(samples, key=_shape), key=_shape):
        equal = tuple(group)
        yield from (equal[first : first + size] for first in range(0, len(equal), size))


def _shape(sample: Sample) -> tuple[int, int]:
    return len(sample.prompt_ids), len(sample.answer_ids)


def _rounds(groups: Iterable[tuple[Sample, ...]], model: PreTrainedModel) -> Iterator[list[tuple[Sample, ...]]]:
    """Batches whose dense logits together fit what may wait for the modes."""
    config: Any = model.config
    some: list[tuple[Sample, ...]] = []
    waiting = 0
    for samples in groups:
        own = len(samples) * (len(samples[0].answer_ids) + 1) * config.vocab_size * model.dtype.itemsize
        if some and waiting + own > _WAITING_BYTES:
            yield some
            some, waiting = [], 0
        some.append(samples)
        waiting += own
    if some:
        yield some


@dataclass(slots=True)
class _Findings:
    """Of one mode, by length."""

    outcomes: dict[tuple[int, str], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[int, Spent] = field(default_factory=lambda: defaultdict(Spent))

    def result(self, dense: _Findings, length: int, tasks: Sequence[str]) -> EvalResult:
        both = ((task, dense.outcomes[length, task], self.outcomes[length, task]) for task in tasks)
        return EvalResult((length,), {task: TaskResult(tuple(a), tuple(b)) for task, a, b in both}, self.spent[length])


def _measure(
    loaded: LoadedModel,
    samples: tuple[Sample, ...],
    asked: EvalSamples,
    found: _Findings,
    stepwise: bool = False,
    dense_BAV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs a batch and notes its outcomes, with the divergence from dense logits where they are given; the logits."""
    batch = Batch.of(samples, loaded.model.device)
    logits_BAV = forced_logits(loaded, batch, stepwise=stepwise, chunk=asked.prefill_chunk)
    kl = [0.0] * len(samples)
    if dense_BAV is not None:
        kl = divergence(dense_BAV.to(loaded.model.device).float(), logits_BAV)
    rows = zip(answered(loaded, batch, logits_BAV), log_likelihood(batch, logits_BAV), kl, strict=True)
    for sample, row in zip(samples, rows, strict=True):
        found.outcomes[sample.length, sample.task].append(Outcome(*row))
    return logits_BAV


def _compare(
    loaded: LoadedModel,
    name: str,
    mode: Mode,
    dense: Sequence[tuple[tuple[Sample, ...], torch.Tensor]],
    asked: EvalSamples,
    found: _Findings,
    step: Step,
) -> None:
    before = Spent()
    with mode.running(loaded.model) as spent:
        for length, group in groupby(dense, key=lambda one: one[0][0].length):
            for samples, dense_BAV in group:
                _measure(loaded, samples, asked, found, mode.stepwise, dense_BAV)
                step.advance(len(samples), f"{length} tokens, {name}")
            after = spent()
            found.spent[length] += after - before
            before = after


def _spent(stats: RunStats) -> Spent:
    return Spent(
        stats.prefill_tiles_computed,
        float(stats.prefill_tiles_causal),
        float(stats.decode_tokens_attended),
        float(stats.decode_tokens_cached),
    )


def forced_logits(loaded: LoadedModel, batch: Batch, *, stepwise: bool, chunk: int | None = None) -> torch.Tensor:
    """What the model predicts for every token of the answer and for the one after it: [B, A + 1, V], float32.

    Args:
        stepwise: feed the answer token by token.
        chunk: most tokens fed at once before that; None is all.
    """
    answers = batch.answer_BA.shape[1]
    first = batch.prompt_BS if stepwise else torch.cat([batch.prompt_BS, batch.answer_BA], 1)
    with torch.no_grad():
        logits_BAV, cache = _prefill(loaded.model, first, 1 if stepwise else answers + 1, chunk, stepwise)
        rows = [logits_BAV]
        for token_B1 in torch.split(batch.answer_BA, 1, 1) if stepwise else ():
            rows.append(loaded.model(input_ids=token_B1, past_key_values=cache, use_cache=True).logits)
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
    """Mean KL(dense || sparse) of the next-token distributions at the answer's positions, in nats."""
    dense, sparse = dense_BAV[:, :-1].log_softmax(-1), sparse_BAV[:, :-1].log_softmax(-1)
    kl_BA = (dense.exp() * (dense - sparse)).sum(-1).double()
    means: list[float] = kl_BA.mean(1).clamp(min=0.0).tolist()
    return means


def _prefill(
    model: Any, ids_BS: torch.Tensor, keep: int, chunk: int | None, use_cache: bool
) -> tuple[torch.Tensor, Any]:
    tokens = ids_BS.shape[1]
    pieces = torch.split(ids_BS, piece_sizes(tokens, chunk) if chunk else [tokens], 1)
    use_cache = use_cache or len(pieces) > 1
    cache, logits = None, []
    for position, piece in enumerate(pieces):
        # Rows still wanted: those of this piece among the last `keep` of all.
        after = sum(later.shape[1] for later in pieces[position + 1 :])
        wanted = max(1, min(piece.shape[1], keep - after))
        out = model(input_ids=piece, past_key_values=cache, use_cache=use_cache, logits_to_keep=wanted)
        cache = out.past_key_values
        if keep > after:
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def _ends(loaded: LoadedModel, sample: Sample, after: int) -> bool:
    text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
    return matches(text, sample.answer)


def prompts_at_once(model: PreTrainedModel, length: int) -> int:
    """Prompts of `length` tokens that run together, a power of two; one on a CPU, where one keeps all cores busy."""
    if model.device.type != "cuda":
        return 1
    total: int = torch.cuda.get_device_properties(model.device).total_memory
    left = total - sum(weight.numel() * weight.element_size() for weight in model.parameters())
    fitting = int(_SHARE * left) // (length * bytes_per_token(model) + bytes_to_score(model))
    return 1 << (max(1, min(_MOST, fitting)).bit_length() - 1)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Keys and values of all layers, and what the widest layer holds while an unmodified model computes it."""
    config: Any = model.config
    cached = sum(2 * len(group.layers) * group.kv_heads * group.head_dim for group in attention_groups(config))
    # Two hidden states, queries, the output of attention; then the MLP: what is gated, its gate, their product.
    held = 2 * config.hidden_size + 2 * config.num_attention_heads * attention_groups(config)[0].head_dim
    widest: int = held + 3 * config.intermediate_size
    return (cached + widest) * torch.empty((), dtype=model.dtype).element_size()


def bytes_to_score(model: PreTrainedModel) -> int:
    """The scores of the vocabulary for the tokens of one answer, as often as evaluation holds them."""
    config: Any = model.config
    vocabulary: int = config.vocab_size
    return _SCORES * 4 * _SCORED * vocabulary
