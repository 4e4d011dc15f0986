"""NVIDIA ModelOpt's `sparse_attention_config` of a model's config.json: groups of attention modules with an algorithm.

Its own algorithm, `softmax_skip`, leaves out tiles whose scores lie below a threshold while they are computed, which no
pattern of a plan does. The patterns of a plan stand as groups of their own, by name, one for each layer and pattern.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from sparsekv.plans.errors import PlanError, UnsupportedError
from sparsekv.plans.interop.source import Exported, Format, Imported, Source, as_json
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import PATTERNS
from sparsekv.plans.phases import PrefillPlan
from sparsekv.plans.schema import Plan, to_data

_FORMAT = Format(frozenset(f"prefill.{name}" for name in ("tile", "lengths.up_to", "lengths.dense", "lengths.heads")))
_TARGET = "model.layers.{}.self_attn"
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.self_attn")


def missed(source: Source) -> str | None:
    """Names the lack of a file without such groups; None where it has them."""
    groups = _config(source).get("config_groups")
    return None if isinstance(groups, dict) and groups else 'no "sparse_attention_config" with "config_groups"'


def read(source: Source, model: ModelInfo) -> Imported:
    """The groups that name patterns of a plan."""
    config = _config(source)
    groups = [group for group in config["config_groups"].values() if isinstance(group, dict)]
    names = {str(group.get("sparse_algo", group.get("algorithm"))) for group in groups}
    own = [group for group in groups if str(group.get("sparse_algo")) in PATTERNS]
    if not own:
        raise UnsupportedError(
            f"expected a group whose algorithm a plan can say ({', '.join(PATTERNS)}), found "
            f"{', '.join(sorted(names))}: a plan says which tiles are computed before any is; "
            "compile one with `sparsekv plan`"
        )
    heads = [{"layer": layer} | _pattern(group) for group in own for layer in _layers(group)]
    lengths = [{"up_to": config.get("dense_up_to"), "dense": True}] if config.get("dense_up_to") else []
    try:
        plan = PrefillPlan.model_validate(
            {
                "tile": config.get("tile", {"query": 128, "key": 128}),
                "lengths": [*lengths, {"up_to": None, "heads": heads}],
            }
        )
    except ValidationError as error:
        raise PlanError(f"expected groups that make a plan, found: {error.errors()[0]['msg']}; correct them") from None
    left = sorted(names - {str(group["sparse_algo"]) for group in own})
    notes = [f"groups of {', '.join(left)} are left out: no pattern of a plan does that"] if left else []
    return Imported(prefill=plan, notes=tuple(notes))


def write(plan: Plan) -> Exported:
    """The longest bucket; lengths below it are dense where the first bucket is."""
    if plan.prefill is None:
        raise PlanError("expected a plan with a prefill phase, found none: this format holds nothing else")
    bucket = plan.prefill.bucket(plan.model.context_length)
    if not bucket.heads:
        raise PlanError(
            "expected a plan whose prefill is sparse at its longest prompts, found it dense there: this format holds "
            "nothing else"
        )
    groups = {}
    for number, group in enumerate(bucket.heads):
        data = {name: value for name, value in to_data(group).items() if value is not None}
        pattern = data.pop("pattern")
        groups[f"group_{number}"] = {"sparse_algo": pattern, "targets": [_TARGET.format(data.pop("layer"))]} | data
    first, longest = plan.prefill.lengths[0], bucket.model_copy(update={"up_to": None})
    cut = plan.prefill.model_copy(update={"lengths": (first, longest) if first.dense else (longest,)})
    lost = _FORMAT.lost(plan.model_copy(update={"prefill": cut}))
    if len(plan.prefill.lengths) > 1 + first.dense:
        lost.append("`prefill.lengths`: all buckets but that of the longest prompts")
    config: dict[str, Any] = {"config_groups": groups, "tile": to_data(plan.prefill.tile)}
    if first.dense and first.up_to:
        config["dense_up_to"] = first.up_to
    config["producer"] = {"name": "sparsekv"}
    lost.append("for engines that know ModelOpt's own algorithms alone: all of it, as these patterns are others")
    return Exported(as_json({"sparse_attention_config": config}), tuple(lost))


def _config(source: Source) -> dict[str, Any]:
    data = source.json
    found = data.get("sparse_attention_config", data) if isinstance(data, dict) else {}
    return found if isinstance(found, dict) else {}


def _layers(group: dict[str, Any]) -> list[int]:
    targets = group.get("targets")
    found = [_LAYER.fullmatch(one) for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
    if not found or None in found:
        raise PlanError(f"expected targets such as {_TARGET.format(0)}, found {targets!r:.60}; name the layers")
    return [int(one[1]) for one in found if one]


def _pattern(group: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in group.items() if name not in ("sparse_algo", "targets")}
    return own | {"pattern": group["sparse_algo"]}
