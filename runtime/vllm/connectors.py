"""Says which KV connectors run beside a plan.

Without eviction a decode step keeps nothing from the one before: where pages come from does not matter to a plan. It
matters whom they reach: the keys of a sparse prefill are not dense attention's, so that a store in which engines find
pages by their tokens has to be named after the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sparsekv.plans.files import executed_digest
from sparsekv.plans.schema import Plan

ENGINE_TO_ENGINE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector")
"""By request: the engines are told of each other."""
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
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")  # what OffloadingConnector stores by


@dataclass(frozen=True, slots=True)
class Connector:
    """One connector of an engine; a MultiConnector stands for those that it holds.

    Attributes:
        name: its class.
        options: `kv_connector_extra_config`.
        module: that it is loaded from, where it is not one of vLLM's own.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str | None = None


def connectors_of(config: Mapping[str, Any]) -> tuple[Connector, ...]:
    """Returns the connectors of an engine, by its `--kv-transfer-config`."""
    name, options = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        return tuple(one for part in options.get("connectors", ()) for one in connectors_of(part))
    return () if name is None else (Connector(name, options, config.get("kv_connector_module_path")),)


def store_name(plan: Plan) -> str:
    """Returns what the keys of a shared store have to hold: of what the plan executes in this engine."""
    return f"plan-{executed_digest(plan).removeprefix('sha256:')[:8]}"


def unknown_connectors(connectors: Sequence[Connector]) -> Iterator[str]:
    """Returns those of which nothing is known here, each with its store where that alone is unknown."""
    for one in connectors:
        if one.module is not None or one.name not in (*ENGINE_TO_ENGINE, *TO_HOST, *SHARED):
            yield one.name
        elif one.name == "OffloadingConnector":
            spec = one.options.get("spec_name", _SPECS[0])
            tiers = [tier.get("type") for tier in one.options.get("secondary_tiers", ())]
            yield from (f"{one.name} with {other}" for other in (spec, *tiers) if other not in (*_SPECS, *TIERS))


def unnamed_stores(connectors: Sequence[Connector], model: str, name: str) -> Iterator[str]:
    """Returns what to set of each store whose keys do not hold a name."""
    for one in connectors:
        if one.name in SHARED:
            yield from _unnamed(one.name, one.options, SHARED[one.name], model, name)
        for tier in one.options.get("secondary_tiers", ()) if one.name == "OffloadingConnector" else ():
            if (kind := tier.get("type")) in TIERS:
                yield from _unnamed(f"{one.name}, tier {kind}", tier, TIERS[kind], model, name)


def _unnamed(
    store: str, options: Mapping[str, Any], keyed_by: tuple[str | None, bool], model: str, name: str
) -> Iterator[str]:
    option, by_model = keyed_by
    folder = model.rstrip("/").rpartition("/")[2]  # all that some of them take
    held = [str(options.get(option, "")) if option else "", folder if by_model else ""]
    if not any(name in one for one in held):
        ways = [f'"{option}": "...{name}"'] if option else []
        ways += [f"a model folder (or a link to it) whose name ends in {name}"] if by_model else []
        yield f"{store} without the plan's name in its keys: use {' or '.join(ways)}"
