"""Engines of vLLM that draft by a plan, and requests that reach what drafts could break."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan

DRAFT = 3


def drafting_plan(info: ModelInfo, budget: int, bound: int = 64) -> Plan:
    """A plan whose decode is sparse from `bound` on; few tokens make drafts that often do not count."""

    def segments(tokens: int) -> tuple[Segment, ...]:
        given = {"budget": DecodeBudget(tokens=tokens), "sink": 2, "recent": 8}
        return (
            Segment(filter=1, layers=(2, 3, 4), **given),
            Segment(filter=6, layers=(6, 7, 8, 9), heads="per_kv_head", **given),
        )

    lengths = (DecodeBucket(up_to=bound, dense=True), DecodeBucket(up_to=None, segments=segments(budget)))
    return Plan(status="unverified", model=info, decode=DecodePlan(lengths=lengths))


def exactly(path: Any, **options: Any) -> dict[str, Any]:
    """The additional config of an engine that drafts by the plan whatever a device measures: tiny models gain nothing,
    and all drafts that are dense count."""
    own = {"plan": str(path), "exact": True, "draft": DRAFT, "allow_untested": True, "sparse": "always"}
    return {"sparsekv": own | options}


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def drafting_as(llm: Any, sizes: Callable[[Mapping[str, int]], int]) -> None:
    """Has an engine draft as many tokens as `sizes` says of a step's lengths."""
    scheduler_of(llm).drafting.next = sizes


def at_random(seed: int = 0) -> Callable[[Mapping[str, int]], int]:
    """Drafts in most steps."""
    source = random.Random(seed)
    return lambda lengths: source.choice((0, DRAFT, DRAFT))


def counted(llm: Any) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    counts = scheduler_of(llm).drafting.counts.values()
    return sum(one.drafted for one in counts), sum(one.accepted for one in counts)


def texts(seed: int, lengths: Sequence[int], vocabulary: int = 400) -> list[list[int]]:
    """Prompts of random tokens."""
    source = random.Random(seed)
    return [[source.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


def ask(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
    """The outputs of prompts that an engine gets at once, greedy where nothing else is said."""
    from vllm import SamplingParams

    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | sampling))
    return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], params, use_tqdm=False)
