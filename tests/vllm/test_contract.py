"""Every name of vLLM that our two files of its internals use is there, and takes what we give it."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
from vllm import LLM
from vllm.config import CacheConfig
from vllm.v1.attention.backend import AttentionCGSupport

import sparsekv.runtime.vllm.internals as internals
from sparsekv.runtime.vllm import cache_internals, contract
from sparsekv.runtime.vllm.engine_facts import TESTED

DEVICE = "cuda" if internals.platform is internals.OnCuda else "cpu"
OTHERS = "flash_attn" if DEVICE == "cpu" else "cpu_attn"  # the backend of the other device, which need not import here
Backend, Impl, Builder = internals.platform.classes()
IMPORTS = [
    (node.module, alias.name)
    for source in (internals, cache_internals)
    for node in ast.walk(ast.parse(Path(inspect.getfile(source)).read_text()))
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
    for alias in node.names
    if not node.module.endswith(OTHERS)
]


def test_the_installed_release_is_one_of_the_tested() -> None:
    assert internals.release.partition("+")[0] in TESTED[DEVICE]


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_is_imported_is_there(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


def test_the_installed_release_has_all_that_is_read_and_overridden() -> None:
    assert list(contract.unfulfilled(Impl, Builder)) == []


def test_what_a_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.FIELDS, CacheConfig, {"block_size", "blocks"})
    monkeypatch.setitem(contract.METHODS, LLM, ("generate", "vanish"))
    assert list(contract.unfulfilled(Impl, Builder)) == ["CacheConfig.blocks", "LLM.vanish"]
    assert internals.missing_names() == ()
    monkeypatch.setitem(TESTED, DEVICE, ())
    assert internals.missing_names() == ("CacheConfig.blocks", "LLM.vanish")


def test_the_backend_attends_after_the_cache_was_written() -> None:
    assert Backend.forward_includes_kv_cache_update is False


def test_graphs_of_steps_that_only_decode_are_less_than_graphs_of_everything() -> None:
    assert internals.without_prefill(AttentionCGSupport.ALWAYS) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert internals.without_prefill(AttentionCGSupport.NEVER) is AttentionCGSupport.NEVER
