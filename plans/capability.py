"""What a valid plan may ask for that this version cannot execute yet. The runtime refuses such a plan, naming it."""

from __future__ import annotations

from collections.abc import Iterator

from sparsekv.plans.layers import format_ids
from sparsekv.plans.schema import Plan


def unsupported(plan: Plan) -> list[str]:
    """One line for each thing in `plan` that cannot be executed, naming its field; empty when all can."""
    return list(dict.fromkeys([*_model(plan), *_prefill(plan), *_decode(plan), *_cache(plan), *_targets(plan)]))


def _model(plan: Plan) -> Iterator[str]:
    for number, group in enumerate(plan.model.attention):
        if group.kind == "linear":
            yield f"model.attention[{number}]: linear attention (layers {format_ids(group.layers)})"


def _prefill(plan: Plan) -> Iterator[str]:
    for number, bucket in enumerate(plan.prefill.lengths if plan.prefill else ()):
        place = f"prefill.lengths[{number}]"
        if bucket.reuse:
            yield f"{place}.reuse: tiles reused by layers {', '.join(format_ids(r.layers) for r in bucket.reuse)}"


def _decode(plan: Plan) -> Iterator[str]:
    for number, bucket in enumerate(plan.decode.lengths if plan.decode else ()):
        for position, segment in enumerate(bucket.segments):
            place = f"decode.lengths[{number}].segments[{position}]"
            if segment.scope == "local":
                yield f"{place}.scope: local, a choice for each tensor-parallel rank"


def _cache(plan: Plan) -> Iterator[str]:
    for number, rule in enumerate(plan.kv_cache or ()):
        if rule.keep != "all":
            yield f"kv_cache[{number}].keep: lossy retention (layers {format_ids(rule.layers)}); only `all` is executed"


def _targets(plan: Plan) -> Iterator[str]:
    for number, target in enumerate(plan.targets):
        if target.tensor_parallel > 1:
            yield f"targets[{number}].tensor_parallel: {target.tensor_parallel} ranks; only 1 is executed"
