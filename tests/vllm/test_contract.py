"""The installed release has what the contract names (tests/tools/test_vllm_contract.py has other releases)."""

import ast
import inspect
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm_contract as contract
from plans_samples import sharing_plan
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

import sparsekv.runtime.vllm.internals as internals
from sparsekv.plans.interop import WRITERS
from sparsekv.runtime.vllm.attention_backend import SparseBuilder, SparseImpl
from sparsekv.runtime.vllm.settings import TESTED

DEVICE = "cuda" if internals.platform is internals.OnCuda else "cpu"
Backend, Impl, Builder = internals.platform.classes()


def test_the_installed_release_is_one_of_the_tested() -> None:
    assert internals.release.partition("+")[0] in TESTED[DEVICE]


@pytest.mark.parametrize("place", contract.names_on(DEVICE))
def test_what_the_sources_have_is_there_once_they_are_imported(place: str) -> None:
    """The contract is read from text: classes and modules, as Python has them, agree."""
    module, _, kind = place.partition(":")
    found = contract.installed().names(place)
    owner = getattr(import_module(module), kind) if kind else import_module(module)
    assert found is not None
    fields = {*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "__struct_fields__", ())}
    there = {name for name in contract.names_on(DEVICE)[place] if hasattr(owner, name)} | fields
    by_init = {name for name in found if kind and not hasattr(owner, name)}
    assert set(contract.names_on(DEVICE)[place]) <= there | by_init


def test_the_installed_release_has_all_that_is_read_and_overridden() -> None:
    assert list(contract.unfulfilled(contract.installed(), DEVICE)) == []
    assert contract.unknown_metadata(contract.installed()) == ()
    assert contract.installed().names(f"{contract.METADATA}!") == {*CommonAttentionMetadata.__dataclass_fields__}


@pytest.mark.parametrize("call", contract.calls_on(DEVICE))
def test_parameters_are_those_that_python_sees(call: str) -> None:
    module, _, rest = call.partition(":")
    kind, _, name = rest.partition(".")
    method = inspect.unwrap(getattr(getattr(import_module(module), kind), name))
    assert tuple(inspect.signature(method).parameters)[1:] == contract.installed().parameters(call)


@pytest.mark.parametrize(
    ("file", "prefix"), [("models/deepseek_v32/attention.py", ""), ("model_executor/models/deepseek_v2.py", "_")]
)
def test_layers_share_choices_as_an_exported_plan_has_them(file: str, prefix: str) -> None:
    """The branch by which vLLM reads the letters is run, layer by layer; the class around it needs a GPU."""
    (key, pattern), *_ = json.loads(WRITERS["index-topk"](sharing_plan()).data).items()
    source = (Path(vllm.__file__).parent / file).read_text()
    assert f'{prefix}{key} = getattr(config, "{key}", None)' in source
    branches = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    branch = next(node for node in branches if ast.unparse(node.test) == f"{prefix}{key} is None")
    code = compile(ast.Module([branch], []), file, "exec")
    for layer, letter in enumerate(f"{pattern}FF"):  # layers of a drafter behind the last have indexers
        names = {"layer_id": layer, f"{prefix}{key}": pattern, f"{prefix}skip_topk": False}
        exec(code, {}, names)
        assert names[f"{prefix}skip_topk"] == (letter == "S"), layer


def test_what_a_release_calls_otherwise_lacks_or_tells_beyond_what_is_known_is_named(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changed(SparseImpl):
        def do_kv_cache_update(self, layer: Any, value: Any, key: Any) -> None: ...

    config = engine.llm_engine.vllm_config
    facts = internals.engine_facts(config, SparseImpl, SparseBuilder)
    assert facts.missing == facts.unknown == ()
    facts = internals.engine_facts(config, Changed)
    assert [line.rpartition(".")[2] for line in facts.missing] == ["do_kv_cache_update(layer, value, key)"]
    monkeypatch.setattr(internals, "KNOWN", internals.KNOWN - {"causal"})
    monkeypatch.setattr(internals, "READ", (*internals.READ, "gone"))
    facts = internals.engine_facts(config)
    assert (facts.missing, facts.unknown) == (("gone",), ("causal",))


def test_the_backend_attends_after_the_cache_was_written() -> None:
    assert Backend.forward_includes_kv_cache_update is False


def test_graphs_of_steps_that_only_decode_are_less_than_graphs_of_everything() -> None:
    """Those that verify as many drafts of each request are of the same rows each."""
    alone: Any = SimpleNamespace(speculative_config=None)
    drafted: Any = SimpleNamespace(speculative_config=object())
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert internals.without_prefill(alone, AttentionCGSupport.ALWAYS) is single
    assert internals.without_prefill(drafted, AttentionCGSupport.ALWAYS) is AttentionCGSupport.UNIFORM_BATCH
    for config in (alone, drafted):
        assert internals.without_prefill(config, AttentionCGSupport.NEVER) is AttentionCGSupport.NEVER
