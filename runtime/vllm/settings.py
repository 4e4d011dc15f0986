"""Decides by the settings of an engine whether it runs its plan, and where that is: an allow-list, with a sentence for
each refusal. The table of docs/vllm.md says what was run.

Everything is checked when the engine starts: a server that came up never dies of a plan.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, model_validator

from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.errors import PlanWarning, UnsupportedError, UsageError
from sparsekv.plans.files import content_digest, executed_digest
from sparsekv.plans.phases import Segment
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.pays import Pays, parse
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.hub import plan_beside
from sparsekv.runtime.plan_checks import Host, segments_of

KEY = "sparsekv"
_ANYWAY = ', or take the risk with "allow_untested": true'

# --- what is allowed --------------------------------------------------------------------------------------------------

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": ("0.32.0",), "cuda": ("0.26.0", "0.33.0")})
"""Releases of vLLM by device. One between them starts where it has all that is used."""
FLOAT8_CACHES = ("fp8", "fp8_e4m3")
ENGINE_TO_ENGINE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector")
"""Connectors by request: the engines are told of each other."""
TO_HOST = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""From an engine to its own host memory and back."""
# Find pages by their tokens: the option that is part of a store's keys, if any, and whether the model's name is.
SHARED: Mapping[str, tuple[str | None, bool]] = MappingProxyType(
    {
        "ExampleConnector": ("shared_storage_path", False),
        "LMCacheConnectorV1": (None, True),
        "LMCacheMPConnector": (None, True),
        "MooncakeStoreConnector": ("cache_prefix", True),
    }
)
TIERS: Mapping[str, tuple[str | None, bool]] = MappingProxyType(
    {"fs": ("root_dir", True), "obj": ("prefix", True), "p2p": (None, True)}
)
"""Tiers of OffloadingConnector behind host memory: as `SHARED`."""
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")  # by which OffloadingConnector stores


def known_releases() -> str:
    return "; ".join(f"{', '.join(releases)} on {device}" for device, releases in TESTED.items())


# --- what is given ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connector:
    """One connector of an engine; a MultiConnector stands for those that it holds."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # `kv_connector_extra_config`
    module: str | None = None  # that it is loaded from, where it is not one of vLLM's own


def connectors_of(config: Mapping[str, Any]) -> tuple[Connector, ...]:
    name, options = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        return tuple(connector for part in options.get("connectors", ()) for connector in connectors_of(part))
    return () if name is None else (Connector(name, options, config.get("kv_connector_module_path")),)


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
    model: str = ""  # as the engine was told it
    connectors: tuple[Connector, ...] = ()
    modalities: tuple[str, ...] = ()  # that requests may hold beside text
    micro_batches: bool = False  # two halves of a step in turn
    one_group: bool = False  # all layers share their block tables
    fast_prefill: bool = False  # most rows of a prompt skip layers without keys of their own
    missing: tuple[str, ...] = ()  # names that are used and that the release lacks
    unknown: tuple[str, ...] = ()  # fields of a step's metadata that this version does not know
    self_drafting: bool = False  # the plan drafts, by our worker
    beside: tuple[str, ...] = ()  # of its settings, those that such drafts do not run with


class EngineOptions(BaseModel):
    """The settings of an engine: `--additional-config '{"sparsekv": {...}}'`. docs/vllm.md says what each does.
    `require` by default holds where the plan or our backend was asked for by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: StrictStr | None = None
    backend: Literal["auto", "flash", "triton", "cpu"] = "auto"
    allow_untested: StrictBool = False
    allow_mismatch: StrictBool = False
    dense: StrictBool = False
    decode: StrictBool = True
    sparse: StrictStr = "auto"
    require: StrictBool | None = None
    exact: StrictBool | Literal["decode"] = False
    draft: Annotated[StrictInt, Field(ge=1, le=16)] | None = None

    @property
    def pays(self) -> Pays | None:
        """Where the engine is sparse; None where that is to be measured."""
        return None if self.sparse == "auto" else parse(self.sparse)

    @model_validator(mode="after")
    def _consistent(self) -> EngineOptions:
        if self.sparse != "auto":
            parse(self.sparse)
        if self.exact and not self.decode:
            raise ValueError('expected "exact" with the decode of the plan, which drafts, found "decode": false')
        if self.draft is not None and not self.exact:
            raise ValueError('expected "draft" beside "exact", found it alone')
        return self

    def requires(self, by_name: bool) -> bool:
        """Returns whether an engine that cannot run its plan ends; `by_name`: the plan or our backend was named."""
        return bool(self.exact) or (by_name if self.require is None else self.require)


def read_options(additional_config: Any) -> EngineOptions:
    given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    try:
        return EngineOptions.model_validate({} if given is None else given)
    except UsageError as error:
        raise UsageError(f'{KEY} in --additional-config, "sparse": {error}') from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join((KEY, *map(str, first["loc"])))
        known = ", ".join(EngineOptions.model_fields)
        raise UsageError(
            f"expected {KEY} in --additional-config to be an object of {known}; found at {where}: {first['msg']}; "
            "correct or remove it"
        ) from None


# --- where the plan is ------------------------------------------------------------------------------------------------


def plan_path(options: EngineOptions, model: str, revision: str | None) -> Path | None:
    """The plan file of an engine; None where none is required and none lies beside the model."""
    if options.dense:
        return None
    if options.plan is None:
        beside = plan_beside(model, revision)
        if beside is None and options.require:
            raise UsageError(
                f'expected a {PLAN_NAME} beside {model}, as "require" in --additional-config asks, found none (of a '
                'hub model: none was cached, and none came from the hub); put one there, name it by "plan", or remove '
                '"require"'
            )
        return beside
    place = Path(options.plan).expanduser()
    path = place / PLAN_NAME if place.is_dir() else place
    if not path.is_file():
        raise UsageError(
            f"expected a plan at {path}, as --additional-config asks, found no such file; correct the path, or remove "
            f'"plan" to use the {PLAN_NAME} beside the model'
        )
    return path


# --- what is refused --------------------------------------------------------------------------------------------------


def host_of(facts: EngineFacts, plan: Plan, options: EngineOptions) -> Host:
    """An engine as a host of plans, with each of its settings that would run one wrongly, or that was not tested."""
    return Host(
        "vLLM", older_queries=False, windows=False, mixed_caches=False,
        drafts=bool(options.exact), is_engine=True, ranks=facts.tensor_parallel,
        obstacles=tuple(_obstacles(facts, plan, options)),
        way_out="Change these settings, make another plan, or run without one: --additional-config "
        '\'{"sparsekv": {"dense": true}}\'',
    )  # fmt: skip


def warn_of_release(facts: EngineFacts, options: EngineOptions) -> None:
    """Warns (`PlanWarning`) of a release that was not tested and is not refused."""
    if facts.release not in TESTED.get(facts.device, ()) and not options.allow_untested:
        warnings.warn(
            f"vLLM {facts.release} on {facts.device}: tested are {known_releases()}; the names that are used of it are "
            "there, and nothing more is known",
            PlanWarning, stacklevel=3,
        )  # fmt: skip


def _obstacles(facts: EngineFacts, plan: Plan, options: EngineOptions) -> Iterator[str]:
    if not options.allow_untested:
        yield from (f"{line}{_ANYWAY}" for line in _chosen(_untested(facts)))
    yield from _chosen(_wrong(facts, plan))
    executed, rule = plan, options.pays  # by what writes pages
    if facts.self_drafting:
        executed, rule = plan.model_copy(update={"decode": None}), rule and Pays(rule.prefill)
    yield from _unnamed_stores(facts, store_name(executed, rule)) if not plan.evicting else ()
    if options.exact:
        yield from _chosen(_inexact(facts))


def _chosen(refused: Mapping[str, object]) -> Iterator[str]:
    return (sentence for sentence, holds in refused.items() if holds)


def _untested(facts: EngineFacts) -> dict[str, object]:
    engine = f"vLLM {facts.release} on {facts.device}"
    others = ", ".join(_unknown_connectors(facts.connectors))
    return {
        f"{engine}, where tested are {known_releases()}: use that": facts.device not in TESTED,
        f"{engine}, which lacks {', '.join(facts.missing)}: use {known_releases()}": facts.missing,
        f"{engine}, which tells of its steps what this sparsekv does not know ({', '.join(facts.unknown)}): use a "
        "newer sparsekv": facts.unknown,
        f"KV connectors that nobody looked at beside a plan ({others}): remove them from --kv-transfer-config": others,
        f"pipeline parallelism over {len(facts.stages)} stages: use --pipeline-parallel-size 1": facts.stages,
    }


def _wrong(facts: EngineFacts, plan: Plan) -> dict[str, object]:
    """Everything that would run, and wrong."""
    evicts = f", where layers {format_ids(plan.evicting)} evict tokens" if plan.evicting else ""
    segments = segments_of(plan)
    names = ", ".join(connector.name for connector in facts.connectors)
    none = json.dumps(dict.fromkeys(facts.modalities, 0))
    return {
        **_parted(facts, segments),
        f"speculative decoding ({facts.speculative}){evicts or ' over pipeline stages'}: remove "
        "--speculative-config": facts.speculative is not None and (evicts or facts.stages),
        f"a KV cache of {facts.kv_cache_dtype} beside a model in {facts.dtype}: use --kv-cache-dtype auto or "
        "fp8": facts.kv_cache_dtype not in ("auto", facts.dtype, *FLOAT8_CACHES),
        f"KV connectors ({names}){evicts}: remove --kv-transfer-config": evicts and facts.connectors,
        f"context parallelism over {facts.context_parallel} ranks: set its sizes to 1": facts.context_parallel > 1,
        f"micro-batches (--enable-dbo){evicts or ' with sparse decode'}: turn them off": facts.micro_batches
        and (evicts or segments),
        f"block tables that all layers share{evicts}: remove --disable-hybrid-kv-cache-manager": evicts
        and facts.one_group,
        "prompts of which most rows skip some layers: remove --kv-sharing-fast-prefill": facts.fast_prefill,
        f"requests that may hold more than text ({', '.join(facts.modalities)}), which a plan does not know: serve "
        f"text alone by --language-model-only, or by --limit-mm-per-prompt '{none}' without "
        "--enable-mm-embeds": facts.modalities,
    }


def _parted(facts: EngineFacts, segments: Sequence[Segment]) -> dict[str, object]:
    return {
        f"pipeline stages that part filter layer {segment.filter} from layers of its segment (up to "
        f"{max(segment.layers)}): use --pipeline-parallel-size 1, or set VLLM_PP_LAYER_PARTITION to keep them "
        "together": facts.stages and not any({segment.filter, *segment.layers} <= set(stage) for stage in facts.stages)
        for segment in segments
    }


def _inexact(facts: EngineFacts) -> dict[str, object]:
    return {
        "exact output in an engine whose configuration was not made by `vllm serve`, `vllm.LLM` or `EngineArgs` with "
        "sparsekv installed: nothing drafts there": not facts.self_drafting,
        "exact output over pipeline stages: use --pipeline-parallel-size 1": facts.stages,
        f"exact output beside {', '.join(facts.beside)}: turn that off": facts.beside,
    }


def _unknown_connectors(connectors: Sequence[Connector]) -> Iterator[str]:
    """Yields the unknown connectors, each with its store where that alone is unknown."""
    for connector in connectors:
        if connector.module is not None or connector.name not in (*ENGINE_TO_ENGINE, *TO_HOST, *SHARED):
            yield connector.name
        elif connector.name == "OffloadingConnector":
            spec = connector.options.get("spec_name", _SPECS[0])
            tiers = [tier.get("type") for tier in connector.options.get("secondary_tiers", ())]
            yield from (f"{connector.name} with {other}" for other in (spec, *tiers) if other not in (*_SPECS, *TIERS))


def store_name(plan: Plan, rule: Pays | None = None) -> str:
    """The name of a plan and its rule (None where each engine measures its own), which the keys of a shared store have
    to hold: engines find pages there by their tokens alone, and the keys of a sparse prefill are not dense
    attention's."""
    digest = executed_digest(plan)
    if rule is not None:
        digest = content_digest({"plan": digest, "rule": str(rule)})
    return f"plan-{digest.removeprefix('sha256:')[:8]}"


def _unnamed_stores(facts: EngineFacts, name: str) -> Iterator[str]:
    """Yields the options to set for each store whose keys do not hold a name."""
    folder = facts.model.rstrip("/").rpartition("/")[2]  # all that some of them take
    for connector in facts.connectors:
        stores = [(connector.name, connector.options, SHARED[connector.name])] if connector.name in SHARED else []
        if connector.name == "OffloadingConnector":
            tiers = [(tier.get("type"), tier) for tier in connector.options.get("secondary_tiers", ())]
            stores = [(f"{connector.name}, tier {kind}", tier, TIERS[kind]) for kind, tier in tiers if kind in TIERS]
        for store, options, (option, by_model) in stores:
            if (option and name in str(options.get(option, ""))) or (by_model and name in folder):
                continue
            ways = [f'"{option}": "...{name}"'] if option else []
            ways += [f"a model folder (or a link to it) whose name ends in {name}"] if by_model else []
            yield f"{store} without the plan's name in its keys: use {' or '.join(ways)}"


def check_engine_layer(
    layer: LayerProgram, heads: int, kv_heads: int, window: int | None, keys_of: int | None = None
) -> None:
    """Refuses a layer that vLLM runs with another shape or window than the model's config says, by which the plan is
    lowered: vLLM takes some windows from elsewhere."""
    expected, actual = (layer.heads, layer.kv_heads, layer.window, layer.keys_of), (heads, kv_heads, window, keys_of)
    if expected != actual:
        raise UnsupportedError(
            f"expected layer {layer.layer} with (heads, KV heads, window, layer of its keys) {expected}, as the config "
            f"of the model says, found that vLLM runs it with {actual}; run this model without a plan"
        )
