"""What we use of vLLM is in each release of the range, and nothing is used that the contract does not name."""

import ast
import builtins
import inspect
import json
import logging
import tomllib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_contract as contract
from vllm_contract import Sources, undrafted, unfulfilled, unknown_metadata

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "tests/data/vllm").glob("*.json"))
OURS = (
    *("internals", "cache_internals", "devices", "engine_host", "attention_backend"),
    *("draft_scheduler", "self_speculator"),
)
FOLDER = ROOT / "runtime/vllm"


@dataclass
class Recorded:
    """A release as tools/record_vllm_release.py has written it down."""

    data: dict[str, Any]

    def names(self, place: str) -> frozenset[str] | None:
        assert place in self.data["names"], f"{place} is new: record all releases again (tools/record_vllm_release.py)"
        return frozenset(self.data["names"][place])

    def parameters(self, call: str) -> tuple[str, ...] | None:
        assert call in self.data["calls"], f"{call} is new: record all releases again (tools/record_vllm_release.py)"
        found = self.data["calls"][call]
        return None if found is None else tuple(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_release_has_all_that_we_use(record: Path, device: str) -> None:
    release = Recorded(json.loads(record.read_text()))
    assert list(unfulfilled(release, device)) == []
    assert unknown_metadata(release) == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_newest_release_has_all_that_exact_output_uses(device: str) -> None:
    """Those before it are not asked for it: such an engine names what it lacks."""
    assert list(undrafted(Recorded(json.loads(RECORDS[-1].read_text())), device)) == []


def test_the_first_and_the_last_release_of_the_range_are_recorded() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = extras["vllm"]
    first, last = RECORDS[0].stem, RECORDS[-1].stem
    minor = int(last.split(".")[1])
    assert asked == f"vllm>={first.rpartition('.')[0]},<0.{minor + 1}"


def attributes(tree: ast.AST) -> Iterator[str]:
    """Names that are read of something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)


def defined_here() -> set[str]:
    """Names of our own classes and functions, what these set, and those of torch and Python."""
    found = {"__init__", "__name__", "__package__"}
    for path in _own_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and path.stem == "internals":
                found.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Assign):
                found.update(one.id for one in node.targets if isinstance(one, ast.Name))
    sized = (str, dict, list, set, frozenset, tuple, torch.Size)
    others = (torch, torch.Tensor, slice, int, BaseException, logging.Logger, type, Parameter, Signature)
    modules = (builtins, torch.nn, inspect, weakref)
    found.update(name for kind in (*sized, *others, *modules) for name in dir(kind))
    scales = ("_k_scale", "_q_scale", "_v_scale")  # of a layer, by `set_default_quant_scales`
    return found.union(scales, ("format_exception", "model_copy", "monotonic", "num_hidden_layers"))


def _own_files() -> list[Path]:
    return [path for name in ("plans", "kernels", "runtime") for path in (ROOT / name).rglob("*.py")]


@pytest.mark.parametrize("name", OURS)
def test_every_attribute_that_our_code_reads_is_ours_or_in_the_contract(name: str) -> None:
    """As `get_kv_cache_shape` was not, which a release took away."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    named = set()
    for device in ("cpu", "cuda"):
        drafts = (contract.DRAFTS, contract.WORKERS[device])
        for places in (contract.names_on(device), *contract.EITHER[device], *drafts):
            named.update(one for names in places.values() for one in names)
        for call in (*contract.calls_on(device), *contract.DRAFT_CALLS):
            named.add(call.rpartition(".")[2])
    assert sorted(set(attributes(tree)) - named - defined_here()) == []


@pytest.mark.parametrize("name", OURS)
def test_every_import_from_vllm_is_in_the_contract(name: str) -> None:
    places = {**contract.names_on("cpu"), **contract.names_on("cuda")}
    for either in (*contract.EITHER["cuda"], contract.DRAFTS, *contract.WORKERS.values()):
        places |= {place: (*places.get(place, ()), *names) for place, names in either.items()}
    known = {(place, one) for place, names in places.items() if ":" not in place for one in names}
    known |= {tuple(place.split(":")) for place in places if ":" in place}
    missing = set(imported(ast.parse((FOLDER / f"{name}.py").read_text()))) - known
    assert sorted(missing) == []


DERIVED = {
    "attention_backend:SparseImpl": [impl for _, impl, _ in contract.CLASSES.values()],
    "attention_backend:SparseBuilder": [builder for *_, builder in contract.CLASSES.values()],
    "cache_internals:EvictingManager": ["vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"],
    "self_speculator:SelfSpeculator": ["vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"],
}


@pytest.mark.parametrize("place", DERIVED)
def test_our_classes_take_the_parameters_that_are_in_the_contract(place: str) -> None:
    """Else an engine of every release would be refused: it compares them with those of the classes that they have."""
    file = place.partition(":")[0]
    calls = {**contract.calls_on("cpu"), **contract.calls_on("cuda"), **contract.DRAFT_CALLS}
    own = Sources(lambda module: (FOLDER / f"{file}.py").read_text())
    checked = [
        (call, parameters)
        for base in DERIVED[place]
        for call, parameters in calls.items()
        if call.startswith(f"{base}.") and own.parameters(f"{place}.{call.rpartition('.')[2]}") is not None
    ]
    assert checked
    for call, parameters in checked:
        assert own.parameters(f"{place}.{call.rpartition('.')[2]}") == parameters, call


def made_up(**modules: str) -> Sources:
    return Sources(lambda module: modules.get(module.replace(".", "_")))


def test_names_are_found_through_bases_and_re_exports_and_where_instances_set_them() -> None:
    sources = made_up(
        v="from v.a import B as C\nfrom v.b import *\n",
        v_a="from v.b import Base\nclass B(Base):\n    x: int = 0\n    def f(self, one, two): self.y = one\n",
        v_b="try:\n    class Base:\n        z: int\n        def g(self, a): ...\nexcept ImportError:\n    gone = 1\n",
    )
    assert sources.names("v:C") == {"x", "f", "y", "z", "g"}
    assert sources.names("v:C!") == {"x", "z"}
    assert sources.names("v") == {"C", "*", "Base", "gone"}
    assert sources.parameters("v:C.f") == ("one", "two")
    assert sources.parameters("v:C.g") == ("a",)
    assert sources.names("v:D") is sources.names("w") is sources.parameters("v:C.h") is None


def test_what_a_release_lacks_is_named() -> None:
    record = json.loads(RECORDS[-1].read_text())
    record["names"]["vllm.config:CacheConfig"].remove("block_size")
    record["names"]["vllm.v1.kv_cache_layout:KVCacheLayout"] = []
    call = "vllm.v1.engine.core:EngineCore.preprocess_add_request"
    record["calls"][call] = ["request", "more"]
    record["names"][f"{contract.METADATA}!"].append("from_the_future")
    lacks = list(unfulfilled(Recorded(record), "cuda"))
    assert "CacheConfig.block_size" in lacks
    assert any("get_kv_cache_shape" in line and " or " in line and "layer_view_order" in line for line in lacks)
    assert "EngineCore.preprocess_add_request(request)" in lacks
    assert len(lacks) == 3
    assert unknown_metadata(Recorded(record)) == ("from_the_future",)
