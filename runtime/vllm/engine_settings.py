"""Says which settings of an engine run beside a plan, which do with a remark, and which are refused with which words.

The table of docs/vllm.md is made from this list (tools/build_settings_table.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.vllm.connectors import ENGINE_TO_ENGINE, SHARED, TIERS, TO_HOST, store_name, unnamed_stores
from sparsekv.runtime.vllm.engine_facts import EngineFacts, kinds_of_model, segments_of, untested
from sparsekv.runtime.vllm.exact_engine import exact_obstacles

Verdict = Literal["runs", "runs, with a remark", "refused"]
_CPU, _GPU, _LATER = "CPU, 0.32, 2026-11-27", "H100, 0.33, 2026-11-27", "H100, 0.33, 2026-11-28"
_SOURCES = "by its sources"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: as vLLM has it.
        verdict: beside a plan that evicts no tokens, at values that change something.
        told: what a reader has to know.
        seen: where it was run with a plan; a refusal is tested in words.
        obstacle: what an engine has of it that stands in the way of a plan, and what to do; None where nothing does.
    """

    name: str
    verdict: Verdict
    told: str
    seen: str
    obstacle: Callable[[EngineFacts, Plan], str | None] = lambda facts, plan: None


def check_engine(facts: EngineFacts, plan: Plan, allow_untested: bool, exact: bool = False) -> None:
    """Refuses an engine that would run the plan wrongly, or that this version was not tested on.

    Args:
        exact: the plan drafts, and dense attention verifies.

    Raises:
        UnsupportedError: it names everything that stands in the way, and what to do.
    """
    found = [*untested(facts, allow_untested), *kinds_of_model(facts, plan), *obstacles(facts, plan)]
    if exact:
        found += exact_obstacles(facts, plan)
    if found:
        listed = "\n".join(f"  {line}" for line in found)
        raise UnsupportedError(
            f"expected an engine that can run the plan of {plan.model.id}, found:\n{listed}\nChange these settings, or "
            'run without the plan: --additional-config \'{"sparsekv": {"dense": true}}\''
        )


def obstacles(facts: EngineFacts, plan: Plan) -> Iterator[str]:
    """Returns everything of an engine's settings that stands in the way of a plan."""
    yield from filter(None, (setting.obstacle(facts, plan) for setting in SETTINGS))


def _ranks(facts: EngineFacts, plan: Plan) -> str | None:
    fewest = min(shape.kv_heads for shape in plan.model.attention)
    if not plan.retained or facts.tensor_parallel <= fewest:
        return None
    return (
        f"{facts.tensor_parallel} ranks that share {fewest} KV heads, where {_evicting(plan)}: use "
        f"--tensor-parallel-size {fewest} or less"
    )


def _stages(facts: EngineFacts, plan: Plan) -> str | None:
    parted = [
        f"pipeline stages that part filter layer {chosen_by} from layers of its segment (up to {max(layers)}): use "
        "--pipeline-parallel-size 1, or set VLLM_PP_LAYER_PARTITION to keep them together"
        for chosen_by, layers in sorted({(segment.filter, segment.layers) for segment in segments_of(plan)})
        if facts.stages and not any({chosen_by, *layers} <= set(stage) for stage in facts.stages)
    ]
    return "\n  ".join(parted) or None


def _drafts(facts: EngineFacts, plan: Plan) -> str | None:
    if facts.speculative is None or not (plan.retained or facts.stages):
        return None
    where = f", where {_evicting(plan)}" if plan.retained else " over pipeline stages"
    return f"speculative decoding ({facts.speculative}){where}: remove --speculative-config"


def _cache_dtype(facts: EngineFacts, plan: Plan) -> str | None:
    if facts.kv_cache_dtype in ("auto", facts.dtype, "fp8", "fp8_e4m3"):
        return None
    return f"a KV cache of {facts.kv_cache_dtype} beside a model in {facts.dtype}: use --kv-cache-dtype auto or fp8"


def _connectors(facts: EngineFacts, plan: Plan) -> str | None:
    names = ", ".join(one.name for one in facts.connectors)
    if facts.connectors and plan.retained:
        return f"KV connectors ({names}), where {_evicting(plan)}: remove --kv-transfer-config"
    executed = plan.model_copy(update={"decode": None}) if facts.self_drafting else plan  # by what writes pages
    return "\n  ".join(unnamed_stores(facts.connectors, facts.model, store_name(executed))) or None


def _context(facts: EngineFacts, plan: Plan) -> str | None:
    ranks = facts.context_parallel
    return f"context parallelism over {ranks} ranks: set its sizes to 1" if ranks > 1 else None


def _micro_batches(facts: EngineFacts, plan: Plan) -> str | None:
    if not facts.micro_batches or not (segments_of(plan) or plan.retained):
        return None
    where = f", where {_evicting(plan)}" if plan.retained else " with sparse decode"
    return f"micro-batches (--enable-dbo){where}: turn them off"


def _one_group(facts: EngineFacts, plan: Plan) -> str | None:
    if not facts.one_group or not plan.retained:
        return None
    return f"block tables that all layers share, where {_evicting(plan)}: remove --disable-hybrid-kv-cache-manager"


def _fast_prefill(facts: EngineFacts, plan: Plan) -> str | None:
    if not facts.fast_prefill:
        return None
    return "prompts of which most rows skip some layers: remove --kv-sharing-fast-prefill"


def _modalities(facts: EngineFacts, plan: Plan) -> str | None:
    if not facts.modalities:
        return None
    none = json.dumps(dict.fromkeys(facts.modalities, 0))
    return (
        f"requests that may hold more than text ({', '.join(facts.modalities)}), which a plan does not know: serve "
        f"text alone by --language-model-only, or by --limit-mm-per-prompt '{none}' without --enable-mm-embeds"
    )


def _evicting(plan: Plan) -> str:
    return f"layers {format_ids(plan.retained)} evict tokens"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


SETTINGS = (
    Setting(
        "chunked prefill, mixed batches, preemption", "runs", "answers may depend on where a prompt is cut",
        f"{_CPU}; {_GPU}",
    ),
    Setting("prefix caching", "runs", "off with a plan that evicts tokens", f"{_CPU}; {_GPU}"),
    Setting("captured graphs, compilation", "runs", "sparse prefill is launched, decode is captured", _GPU),
    Setting(
        "--tensor-parallel-size", "runs",
        "filter layers exchange their choices; a plan that evicts tokens takes no more ranks than KV heads",
        f"2 ranks: {_CPU}; two {_GPU}; 4 ranks: H200, 0.33, 2026-11-28", _ranks,
    ),
    Setting(
        "--speculative-config", "runs, with a remark",
        "prefill by the plan, whose decode is off; refused with eviction, over pipeline stages and with `exact`",
        f"ngram, a draft model, EAGLE: {_CPU}; the same: H100 or H200, 0.33, 2026-11-28; MTP (a layer made for the "
        f"test) and suffix: CPU, 0.32, 2026-11-28; others {_SOURCES}", _drafts,
    ),
    Setting(
        "--pipeline-parallel-size", "refused", "unless `allow_untested`, with the layers of a segment in one stage", "",
        _stages,
    ),
    Setting(
        "--kv-cache-dtype", "runs, with a remark",
        "the model's, or fp8 (e4m3), by scales of tensors or heads; a plan made without it says so; else refused",
        f"fp8: {_CPU}; {_LATER}", _cache_dtype,
    ),
    Setting(
        "--quantization", "runs, with a remark",
        "quantised checkpoints too; unless the plan was made on these weights, one line says that its quality was not "
        "measured on them",
        f"AWQ, GPTQ, compressed-tensors (W4A16, W8A8, FP8): {_CPU}; FP8 in blocks: H200, 0.33, 2026-11-28; other FP8 "
        f"{_SOURCES}",
    ),
    Setting(
        "connectors between engines", "runs",
        f"{_code(ENGINE_TO_ENGINE)}: the plan on both or either, and the same attention backend; refused with "
        "eviction, as all connectors", f"NixlConnector (1.5.1): {_CPU}; others {_SOURCES}", _connectors,
    ),
    Setting(
        "connectors to host memory", "runs", _code(TO_HOST),
        "OffloadingConnector: H100 and H200, SimpleCPUOffloadConnector: H200, 0.33, 2026-11-28",
    ),
    Setting(
        "connectors to shared stores", "runs, with a remark",
        f"{_code(SHARED)}, and the tiers {_code(TIERS)} of OffloadingConnector: with the plan's name in their keys",
        f"ExampleConnector: {_CPU}; two {_LATER}; others {_SOURCES}",
    ),
    Setting("other connectors", "refused", "unless `allow_untested`; of MultiConnector each part is looked at", ""),
    Setting("context parallelism", "refused", "of prefill and of decode", "", _context),
    Setting(
        "--enable-dbo", "runs, with a remark", "refused with sparse decode and with eviction", _SOURCES, _micro_batches
    ),
    Setting(
        "--disable-hybrid-kv-cache-manager", "runs, with a remark", "refused with eviction",
        "Gemma2: CPU, 0.32, 2026-11-28", _one_group,
    ),
    Setting("--kv-sharing-fast-prefill", "refused", "its steps have rows that some layers skip", "", _fast_prefill),
    Setting("pictures, sound and video beside text", "refused", "a model that serves text alone runs", "", _modalities),
)  # fmt: skip
"""Everything that was looked at."""
