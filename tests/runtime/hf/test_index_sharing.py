"""Layers that share the choice of an indexer: what a plan sets is what transformers runs, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_samples import sharing_plan as exported_plan
from pydantic import ValidationError
from tiny_indexers import KINDS, PLANTED, planted_model
from tiny_models import random_tokens, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

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
        with pytest.raises(UsageError, match="suspended"):
            handle.__enter__()
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
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | json.loads(exported)))
    native = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [layer.self_attn.indexer is not None for layer in native.model.layers] == [letter == "F" for letter in OTHER]
    with sparsekv.apply(model, plan):
        assert torch.equal(logits(native), logits(model))
    with pytest.raises(UnsupportedError, match="none in layers 1-3,5, which share"):
        sparsekv.apply(native, sharing_plan(native, OTHER))


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_reads_the_exported_line_over_a_config_as_the_plan_does(kind: str) -> None:
    """By a record of its reader (tools/record_sglang_reader.py), which reads a config's own `indexer_types` first."""
    record = json.loads((Path(__file__).parents[2] / "data/sglang_reader.json").read_text())
    plan, config = exported_plan(), AutoConfig.for_model(kind, num_hidden_layers=8)
    config.update(json.loads(WRITERS["index-topk"](plan).data))
    seen = {name: getattr(config, name) for name in record["reads"] if hasattr(config, name)}
    (reusing,) = [case["reusing"] for case in record["cases"] if case["config"] == seen]
    assert plan.index_sharing is not None
    assert {*reusing} == plan.index_sharing.reused


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_reuses_a_choice_attends_to_the_tokens_of_that_choice_alone(kind: str) -> None:
    """Compared with layers whose own indexers choose all tokens, of which a mask leaves those of the choice."""
    model, choices = planted_model(kind), {}
    with sparsekv.apply(model, sharing_plan(model, OTHER)):
        shared = logits(model)

    def keep(indexer: Any, given: Any, choice_BSK: torch.Tensor) -> None:
        choices["last"] = choice_BSK.long()

    def mask(attention: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        past_B1ST = named["attention_mask"]
        unchosen = past_B1ST.new_ones(past_B1ST.shape, dtype=torch.bool).scatter(-1, choices["last"][:, None], False)
        return given, named | {"attention_mask": past_B1ST.masked_fill(unchosen, torch.finfo(torch.float32).min)}

    model.set_attn_implementation("eager")  # whose masks are numbers
    for layer, letter in zip(model.model.layers, OTHER, strict=True):
        if letter == "F":
            layer.self_attn.indexer.register_forward_hook(keep)
        else:
            layer.self_attn.indexer.index_topk = IDS.shape[1]
            layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True)
    torch.testing.assert_close(logits(model), shared)


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
    with pytest.raises(ValidationError, match="found no index_sharing"):
        Plan(status="unverified", model=plan.model)
