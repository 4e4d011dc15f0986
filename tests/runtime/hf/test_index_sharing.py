"""Layers that share the choice of an indexer: what a plan sets is what transformers runs, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_indexers import KINDS, PLANTED, planted_model
from tiny_models import random_tokens, tiny_model
from transformers import AutoModelForCausalLM

import sparsekv
from sparsekv.plans.errors import PlanMismatchError, UnsupportedError, UsageError
from sparsekv.plans.interop import WRITERS
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.plan_checks import Host, refuse

OTHER = "FSSSFS"
IDS = random_tokens(2, 96)


def sharing_plan(model: Any, pattern: str) -> Plan:
    info = describe_model(model, "tests/indexers")
    return Plan(status="unverified", model=info, index_sharing=IndexSharing(pattern=pattern, lengths=(96,)))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS).logits
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_under_a_plan_is_that_plans_until_it_is_closed(kind: str) -> None:
    model = planted_model(kind)
    dense, new = logits(model), {"max_new_tokens": 4, "do_sample": False}
    text = model.generate(IDS, **new)
    with sparsekv.apply(model, sharing_plan(model, PLANTED)) as handle:
        assert torch.equal(logits(model), dense), "planted layers choose alike"
        assert torch.equal(model.generate(IDS, **new), text)
        with pytest.raises(UsageError, match="applied"):
            sparsekv.apply(model, sharing_plan(model, OTHER))
        with pytest.raises(UnsupportedError, match="a cache of transformers"):
            handle.new_cache(8)
    with sparsekv.apply(model, sharing_plan(model, OTHER)) as handle:
        shared = logits(model)
        assert not torch.equal(shared, dense)
        handle.suspend()
        assert torch.equal(logits(model), dense)
        handle.resume()
        assert torch.equal(logits(model), shared)
    assert torch.equal(logits(model), dense)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_lacks_indexer_keys_is_refused_once_layers_choose_for_themselves(kind: str) -> None:
    model = planted_model(kind)
    with sparsekv.apply(model, sharing_plan(model, OTHER)) as handle:
        cache = model(IDS[:, :-2], use_cache=True).past_key_values
        shared = model(IDS[:, -2:-1], past_key_values=cache).logits
        assert shared.isfinite().all()
        handle.suspend()
        with pytest.raises(UsageError, match="begin with a new cache"):
            model(IDS[:, -1:], past_key_values=cache)


def test_a_plan_without_shared_layers_is_one_too() -> None:
    model = planted_model("glm_moe_dsa", "FS")
    with (
        sparsekv.apply(model, sharing_plan(model, "FF")),
        pytest.raises(UsageError, match="applied"),
    ):
        sparsekv.apply(model, sharing_plan(model, "FS"))
    sparsekv.apply(model, sharing_plan(model, "FS")).close()


def test_transformers_runs_the_exported_pattern_as_the_plan_does(tmp_path: Path) -> None:
    model = planted_model("glm_moe_dsa")
    plan = sharing_plan(model, OTHER)
    exported = WRITERS["index-topk"](plan).data
    assert exported == b'{"index_topk_pattern": "FSSSFS"}\n'
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["indexer_types"]  # which goes over the pattern, as the export says
    assert any("indexer_types" in lost for lost in WRITERS["index-topk"](plan).lost)
    (tmp_path / "config.json").write_text(json.dumps(config | json.loads(exported)))
    native = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [layer.self_attn.indexer is not None for layer in native.model.layers] == [letter == "F" for letter in OTHER]
    with sparsekv.apply(model, plan):
        assert torch.equal(logits(native), logits(model))
    with pytest.raises(UnsupportedError, match="none in layers 1-3,5, which share"):
        sparsekv.apply(native, sharing_plan(native, OTHER))


@pytest.mark.parametrize(
    "asked",
    [
        {"exact": True},
        {"prefill": False},
        {"offload": "always"},
        {"kv_dtype": "fp8"},
        {"sparse": "never"},
        {"backend": "cpu"},
    ],
)
def test_what_a_shared_choice_does_not_change_cannot_be_asked_for(asked: dict[str, Any]) -> None:
    model = planted_model("glm_moe_dsa", "FS")
    with pytest.raises(UsageError, match=f"{next(iter(asked))}.* beside it"):
        sparsekv.apply(model, sharing_plan(model, "FS"), **asked)


def test_other_models_and_hosts_refuse_it() -> None:
    model = planted_model("glm_moe_dsa", "FS")
    plan = sharing_plan(model, "FS")
    with pytest.raises(PlanMismatchError, match="model type"):
        sparsekv.apply(tiny_model(layers=2), plan)
    with pytest.raises(UnsupportedError, match="--to index-topk"):
        refuse(plan, plan.model, Host("vLLM"))
    with pytest.raises(UnsupportedError, match="sparsekv plan"):
        sparsekv.apply(model, plan.model_copy(update={"index_sharing": None}))
