"""The recipe: every number of the training run, in one place."""

from __future__ import annotations

from collections.abc import Mapping
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


# The default is the shipped model. The others are for measurements on models of other proportions; bfloat16 weights of
# each stay below 40 MB.
SHAPES: dict[str, Shape] = {
    "default": Shape(),
    "wide": Shape(hidden=320, layers=10, heads=10, kv_heads=2, head_dim=32, ffn=960),
    "deep": Shape(hidden=192, layers=16, heads=6, kv_heads=2, head_dim=32, ffn=576),
    "big": Shape(hidden=384, layers=12, heads=6, kv_heads=3, head_dim=64, ffn=896),
}

NO_STEP_LIMIT = 1_000_000  # steps of a stage that ends by time


@dataclass(frozen=True, slots=True)
class Stage:
    """So many steps at one row length, or as many as `seconds` hold, compilation included.

    In one recipe, either every stage has seconds or none has.
    """

    length: int
    steps: int = NO_STEP_LIMIT
    seconds: float | None = None

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
        shares: the retrieval tasks by name, and how much of the retrieval rows each gets.
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
    shares: Mapping[str, TaskShare] = field(default_factory=lambda: TASK_SHARES)
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

    def seconds_through(self, stage: int) -> float | None:
        """Training seconds after which stage number `stage` ends; None where steps end it.

        Counted from the beginning of the run, so that no stage pays for the last step of the one before.
        """
        seconds = [each.seconds for each in self.stages[: stage + 1] if each.seconds is not None]
        return sum(seconds) if seconds else None


def smoke(recipe: Recipe) -> Recipe:
    """The same run in a minute on a CPU, with the heads of its shape; it learns nothing."""
    shape = replace(recipe.shape, hidden=16 * recipe.shape.heads, layers=2, ffn=128, context=512)
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
