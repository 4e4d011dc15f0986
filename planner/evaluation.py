"""A model with and without a plan on the same held-out samples.

Dense runs once a batch and is shared by everything that is compared with it: `Mode`s, mostly a plan and the phases of
it that are switched on. A model's greedy continuation is the answer exactly when, fed the answer, it picks every next
token of it. So one forced pass tells both what it generates and how its distributions move, on the same context as
dense. A stepwise mode feeds the answer token by token, as decode does; otherwise all at once, in the prefill.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from sparsekv.planner.eval_results import EvalResult, Outcome, Spent, TaskResult
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.planner.tasks import Kit, Sample, Split, matches, prepare
from sparsekv.planner.tasks.perplexity import Perplexity
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import attention_groups
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel

# A step of decoding takes the host as long for one prompt as for many; beyond this, little is left to gain.
_MOST = 64
# Of what the weights leave. The rest is for what is not counted here: indices, what the allocator cannot use.
_SHARE = 0.4
_SCORED = Perplexity().most_scored + 1  # tokens of a prompt that are scored, at most
# Tensors as large as the float32 scores that are alive at once: both models', their logarithms, what divides them.
_SCORES = 8


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


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples whose prompts are equally long, and whose answers are."""

    samples: tuple[Sample, ...]
    prompt_BS: torch.Tensor
    answer_BA: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Batch:
        """The samples as tensors on the model's device."""

        def stacked(rows: Iterable[Any]) -> torch.Tensor:
            return torch.from_numpy(np.stack(list(rows)).astype(np.int64)).to(device)

        prompts, answers = (s.prompt_ids for s in samples), (s.answer_ids for s in samples)
        return cls(tuple(samples), stacked(prompts), stacked(answers))


def batches(samples: Iterable[Sample], size: int, device: torch.device) -> Iterator[Batch]:
    """Groups samples of equal shape, at most `size` together; the order within a shape is kept."""
    ordered = sorted(samples, key=_shape)
    for _, group in groupby(ordered, key=_shape):
        alike = list(group)
        for first in range(0, len(alike), size):
            yield Batch.of(alike[first : first + size], device)


def forced_logits(loaded: LoadedModel, batch: Batch, *, stepwise: bool, chunk: int | None = None) -> torch.Tensor:
    """What the model predicts for every token of the answer and for the one after it: [B, A + 1, V], float32.

    Args:
        loaded: the model, with a plan applied or not.
        batch: prompts and answers.
        stepwise: feed the answer token by token.
        chunk: most tokens fed at once before that; None is all.
    """
    answers = batch.answer_BA.shape[1]
    first = batch.prompt_BS if stepwise else torch.cat([batch.prompt_BS, batch.answer_BA], 1)
    with torch.no_grad():
        logits_BAV, cache = _prefill(loaded.model, first, 1 if stepwise else answers + 1, chunk, stepwise)
        if not stepwise:
            return logits_BAV.float()
        rows = [logits_BAV]
        for token_B1 in torch.split(batch.answer_BA, 1, 1):
            step = loaded.model(input_ids=token_B1, past_key_values=cache, use_cache=True)
            rows.append(step.logits)
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
    for place, piece in enumerate(pieces):
        # Rows still wanted: those of this piece among the last `keep` of all.
        after = sum(later.shape[1] for later in pieces[place + 1 :])
        wanted = max(1, min(piece.shape[1], keep - after))
        out = model(input_ids=piece, past_key_values=cache, use_cache=use_cache, logits_to_keep=wanted)
        cache = out.past_key_values
        if keep > after:
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def _ends(loaded: LoadedModel, sample: Sample, after: int) -> bool:
    text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
    return matches(text, sample.answer)


def _shape(sample: Sample) -> tuple[int, int]:
    return len(sample.prompt_ids), len(sample.answer_ids)


PhaseName = Literal["prefill", "decode", "both"]
DENSE = "dense"


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
        prefill, decode = self.phase != "decode", self.phase != "prefill"
        with apply(
            model,
            self.plan,
            prefill=prefill,
            decode=decode,
            backend=self.backend,
            allow_mismatch=self.allow_mismatch,
        ) as handle:
            yield lambda: _spent(handle.stats())


def evaluate(
    loaded: LoadedModel,
    plan: Plan | None,
    tasks: Sequence[str],
    length: int,
    samples: int,
    *,
    phase: PhaseName = "both",
    backend: str = "auto",
    batch: int = 1,
    seed: int = 0,
    prefill_chunk: int | None = None,
    allow_mismatch: bool = False,
    progress: Progress | None = None,
) -> EvalResult:
    """Evaluates one plan against dense; without a plan, dense is on both sides.

    See `evaluate_modes` for the arguments and errors, `apply` for `allow_mismatch`.
    """
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, backend, allow_mismatch)} if plan else {}
    results = evaluate_modes(
        loaded, modes, tasks, length, samples, batch=batch, seed=seed, prefill_chunk=prefill_chunk, progress=progress
    )
    return results[phase if plan else DENSE]


def evaluate_modes(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    tasks: Sequence[str],
    length: int,
    samples: int,
    *,
    batch: int = 1,
    seed: int = 0,
    prefill_chunk: int | None = None,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> dict[str, EvalResult]:
    """Evaluates some modes, and dense once, on samples that neither training nor calibration used.

    Args:
        loaded: the model, with nothing applied to it.
        modes: what to compare with dense, by name; may be empty.
        tasks: names of tasks.
        length: most tokens of prompt and answer together.
        samples: of each task.
        batch: most samples run at once; only samples of equal shape share a batch.
        seed: of the sample set.
        prefill_chunk: most tokens of a prompt given to the model at once; None is all.
        kit: the evaluation split's, `prepare(tokenizer, Split.EVALUATION)`, for those who call this often.
        progress: where to report.

    Returns:
        A result a mode, and one named "dense" with dense on both sides.

    Raises:
        UsageError: an unknown task.
        PromptError: a task does not fit the length.
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    found: dict[str, dict[str, list[Outcome]]] = {name: {task: [] for task in tasks} for name in (DENSE, *modes)}
    spent = {name: Spent() for name in found}
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    drawn = (sample for task in tasks for sample in held_out(source, task, length, samples, seed))
    with (progress or NoProgress()).stage("evaluate", total=samples * len(tasks) * len(found)) as step:
        for some in batches(drawn, batch, loaded.model.device):
            dense = forced_logits(loaded, some, stepwise=False, chunk=prefill_chunk)
            _note(found[DENSE], some, _outcomes(loaded, some, dense, dense))
            step.advance(len(some.samples), f"{length} tokens, dense")
            for name, mode in modes.items():
                sparse, cost = _run(loaded, mode, some, prefill_chunk)
                _note(found[name], some, _outcomes(loaded, some, dense, sparse))
                spent[name] += cost
                step.advance(len(some.samples), f"{length} tokens, {name}")
    return {
        name: EvalResult(
            (length,), {task: TaskResult(tuple(found[DENSE][task]), tuple(own[task])) for task in tasks}, spent[name]
        )
        for name, own in found.items()
    }


def _run(loaded: LoadedModel, mode: Mode, batch: Batch, chunk: int | None) -> tuple[torch.Tensor, Spent]:
    with mode.running(loaded.model) as spent:
        return forced_logits(loaded, batch, stepwise=mode.stepwise, chunk=chunk), spent()


def _spent(stats: RunStats) -> Spent:
    return Spent(
        stats.prefill_tiles_computed,
        float(stats.prefill_tiles_causal),
        float(stats.decode_tokens_attended),
        float(stats.decode_tokens_cached),
    )


def _outcomes(loaded: LoadedModel, batch: Batch, dense: torch.Tensor, sparse: torch.Tensor) -> list[Outcome]:
    kl = [0.0] * len(batch.samples) if dense is sparse else divergence(dense, sparse)
    rows = zip(answered(loaded, batch, sparse), log_likelihood(batch, sparse), kl, strict=True)
    return [Outcome(*row) for row in rows]


def _note(found: dict[str, list[Outcome]], batch: Batch, outcomes: Sequence[Outcome]) -> None:
    for sample, outcome in zip(batch.samples, outcomes, strict=True):
        found[sample.task].append(outcome)
