"""Held-out samples, and the batches that they run in: of equal shape, as many as surely fit the memory of the device.

Shapes: B batch, S tokens of a prompt, R tokens of a reply, A tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.tasks import Kit, Sample
from sparsekv.planner.tasks.text import Ids
from sparsekv.plans.model import kv_bytes
from sparsekv.plans.schema import Plan
from sparsekv.runtime.architecture import record_of, recurrence_of
from sparsekv.runtime.hf.describe import config_of, takes_one_piece
from sparsekv.runtime.hf.memory import latent_numbers
from sparsekv.runtime.model_config import attention_groups

STEP = 16_384  # tokens of a prompt at once
# Tokens that are fed of a text that is no answer: each is a decode step of every mode. No answer of a task is longer
# where the vocabulary holds words.
MOST_TEXT = 64
# A step of decoding takes the host as long for one prompt as for many; beyond this, little is left to gain.
_MOST = 64
# Of all prompts together, however much there is: an 8B model with two of 32K tokens stays within 40 GB.
_MOST_BYTES = 20 << 30
# Of what the weights leave. The rest is for what is not counted here: indices, what the allocator cannot use.
_SHARE = 0.4
_WHOLE_SHARE = 0.8  # the same for one prompt of dense
_SCORED = MOST_TEXT + 1  # rows that are scored, and the one after
# Tensors as large as the float32 scores that are alive at once: both models', their logarithms, what divides them.
_SCORES = 8


def prompt_step(model_type: str, cuts: bool, asked: int | None = None) -> int | None:
    """Most tokens of a prompt at once, in calibration and in every test: `asked` or `STEP`; None is all of it.

    Args:
        cuts: False where layers evict, which choose at the end of a prompt, or are in host memory, which each piece
            reads back. transformers begins recurrent states anew in each.
    """
    return asked or (STEP if cuts and not takes_one_piece(model_type) else None)


def step_of(plan: Plan, asked: int | None = None) -> int | None:
    """The `prompt_step` of a plan."""
    cuts = not (plan.evicting or (plan.decode and plan.decode.offload))
    return prompt_step(plan.model.model_type, cuts, asked)


@dataclass(frozen=True, slots=True)
class EvalSamples:
    """Samples that neither training nor calibration used, and how they are fed.

    Attributes:
        lengths: most tokens of prompt and answer together.
        samples: of each task and length.
        batch: most samples run at once; None: as many as surely fit. Only samples of equal shape share a batch.
        prefill_chunk: most tokens of a prompt given to the model at once; None is all.
        first: the number of the first of them: what was drawn before is not drawn again.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int = 1
    batch: int | None = None
    seed: int = 0
    prefill_chunk: int | None = None
    first: int = 0

    def check_fit(self, kit: Kit) -> None:
        """Refuses a task that does not fit a length, without running a model."""
        kit = kit.shared_by(self.tasks, self.lengths)
        for length, task in product(self.lengths, self.tasks):
            next(held_out(kit, task, length, 1, self.seed))

    def drawn(self, kit: Kit, length: int) -> list[Sample]:
        kit = kit.shared_by(self.tasks, self.lengths)
        each = (held_out(kit, task, length, self.samples, self.seed, self.first) for task in self.tasks)
        return [sample for some in each for sample in some]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples whose prompts are equally long, and whose answers are, turn by turn.

    Attributes:
        later: replies [B, R] and the prompts [B, S] behind them.
    """

    samples: tuple[Sample, ...]
    prompt_BS: torch.Tensor
    answer_BA: torch.Tensor
    later: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def past(self) -> int:
        return self.prompt_BS.shape[1] + sum(ids.shape[1] for turn in self.later for ids in turn)

    @classmethod
    def of(cls, samples: Iterable[Sample], device: torch.device) -> Batch:
        some = tuple(samples)

        def stacked(rows: Iterable[Ids]) -> torch.Tensor:
            return torch.from_numpy(np.stack(list(rows)).astype(np.int64)).to(device)

        turns = zip(*(sample.later for sample in some), strict=True)
        later = tuple((stacked(r for r, _ in turn), stacked(p for _, p in turn)) for turn in turns)
        return cls(some, stacked(sample.prompt_ids for sample in some), stacked(map(_fed, some)), later)


def batches(
    samples: Iterable[Sample], model: PreTrainedModel, most: int | None = None, text: int = 0
) -> Iterator[Batch]:
    """Groups samples of equal shape; the order within a shape is kept.

    Args:
        most: samples in a batch; None: as many as surely fit beside the longest.
        text: tokens of dense's own continuation that are scored beside the answer.
    """
    ordered = sorted(samples, key=_shape)
    size = most or prompts_at_once(model, max((sum(_shape(sample)) for sample in ordered), default=1), text)
    for _, group in groupby(ordered, key=_shape):
        equal = tuple(group)
        for first in range(0, len(equal), size):
            yield Batch.of(equal[first : first + size], model.device)


def _shape(sample: Sample) -> tuple[int, ...]:
    return (len(sample.prompt_ids), *(len(ids) for turn in sample.later for ids in turn), len(_fed(sample)))


def _fed(sample: Sample) -> Ids:
    return sample.answer_ids if sample.answer else sample.answer_ids[:MOST_TEXT]


def prompts_at_once(model: PreTrainedModel, length: int, text: int = 0) -> int:
    """Prompts of `length` tokens that run together, a power of two; one on a CPU, where one keeps all cores busy.

    Args:
        text: tokens that are scored beside an answer.
    """
    if model.device.type != "cuda":
        return 1
    to_score: int = _SCORES * 4 * (_SCORED + text) * cast(Any, config_of(model)).vocab_size
    room = min(int(_SHARE * _beside_weights(model)), _MOST_BYTES)
    fitting: int = room // (length * bytes_per_token(model, length) + to_score)
    return 1 << (max(1, min(_MOST, fitting)).bit_length() - 1)


def dense_step(model: PreTrainedModel, length: int) -> int | None:
    """Most tokens at once of a prompt that the unmodified model runs on: all of it, which is faster, where it fits."""
    taken = length * bytes_per_token(model, length)
    fits = model.device.type != "cuda" or taken <= _WHOLE_SHARE * _beside_weights(model)
    return None if fits else prompt_step(cast(Any, config_of(model)).model_type, cuts=True)


def _beside_weights(model: PreTrainedModel) -> int:
    """Bytes of the model's device without those of its weights."""
    total: int = torch.cuda.get_device_properties(model.device).total_memory
    here = (weight for weight in model.parameters() if weight.device == model.device)  # others may be elsewhere
    return total - sum(weight.numel() * weight.element_size() for weight in here)


def bytes_per_token(model: PreTrainedModel, length: int) -> int:
    """Keys and values of all layers, and beside them the larger of a copy, as another text is fed, and what the widest
    layer holds while an unmodified model computes a prompt of `length` tokens."""
    config: Any = config_of(model)
    groups = attention_groups(config)
    latent, item = latent_numbers(config), model.dtype.itemsize
    cached = latent * item or kv_bytes(groups, 1, item)
    # Two hidden states, queries, the output of attention; then the MLP: what is gated, its gate, their product.
    held = 2 * config.hidden_size + 2 * max(group.heads * group.head_dim for group in groups if group.kind != "linear")
    widest: int = held + 3 * record_of(config.model_type).width_of(config)
    recurrent = recurrence_of(config).token_bytes if any(group.kind == "linear" for group in groups) else 0
    # An indexer's scores of all heads in float32, before and after what is below 0 is 0.
    scores = 8 * config.index_n_heads * length if latent else 0
    return cached + max(cached, widest * item + scores, recurrent)
