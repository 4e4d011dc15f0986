"""The recipe: every number of the training run, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """The network (Llama architecture)."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    rope_theta: float = 1e6
    # The longest length of training: positions behind it were never seen, and the configuration says so.
    context: int = 32768
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Stage:
    """So many steps at one row length."""

    length: int
    steps: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"train-{self.length}"


@dataclass(frozen=True, slots=True)
class TaskShare:
    """How much of the retrieval rows one task gets, and how many statements it plants at most.

    Statements are drawn log-uniformly from 1 to one for every `tokens_per_statement` tokens; 0 leaves the task's
    own number.
    """

    weight: float
    tokens_per_statement: int


TASK_SHARES: dict[str, TaskShare] = {
    "niah_single": TaskShare(0.03, 0),
    "niah_multikey": TaskShare(0.22, 40),
    "kv_retrieval": TaskShare(0.30, 0),
    "two_stage": TaskShare(0.20, 160),
    "variable_tracking": TaskShare(0.25, 100),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model is trained.

    Attributes:
        tokens_per_step: over all micro-batches.
        micro_tokens: tokens a micro-batch, at least one row.
        text_share: share of rows that are plain text; the others hold retrieval documents.
        split_chance: chance that a span of a row is divided into two documents, again and again.
        shortest_document: spans are not divided below this.
        tokens_per_query: one query for every so many tokens of a document,
        most_queries: but no more than this.
        decay_share: the last part of the last stage, in which learning rates fall to zero.
    """

    shape: Shape = field(default_factory=Shape)
    stages: tuple[Stage, ...] = (Stage(512, 350), Stage(2048, 350), Stage(8192, 450), Stage(32768, 500))
    tokens_per_step: int = 262_144
    micro_tokens: int = 131_072
    text_share: float = 0.35
    split_chance: float = 0.35
    shortest_document: int = 192
    tokens_per_query: int = 64
    most_queries: int = 32
    muon_lr: float = 0.02
    muon_decay: float = 0.01
    adam_lr: float = 3e-3
    warmup_steps: int = 60
    decay_share: float = 0.7
    seed: int = 0
    eval_lengths: tuple[int, ...] = (4096, 16384, 32768)
    eval_samples: int = 200

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)


def smoke(recipe: Recipe) -> Recipe:
    """The same run in a minute on a CPU; it learns nothing."""
    shape = replace(recipe.shape, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=128, context=512)
    return replace(
        recipe,
        shape=shape,
        stages=(Stage(128, 6), Stage(256, 6)),
        tokens_per_step=1024,
        micro_tokens=512,
        shortest_document=128,
        warmup_steps=2,
        eval_lengths=(256, 512),
        eval_samples=3,
    )
