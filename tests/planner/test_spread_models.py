"""Models that accelerate spreads over devices, or keeps on disk layer by layer, are planned as if they were in one
place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planner_models import loaded_tiny, quick_options
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.planner.job import job_of
from sparsekv.planner.plan import PlanResult, compile_plan
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
LAYERS = tuple(f"model.layers.{layer}" for layer in range(3))


def placed(folder: Path, layers: tuple[Any, ...], last: Any, *, first: Any = "cpu") -> PreTrainedModel:
    """The tiny model with each layer, what comes before them, and what comes after them on a device or on disk."""
    loaded_tiny().model.save_pretrained(folder)
    where = dict(zip((*LAYERS, *PARTS), (*layers, first, first, last, last), strict=True))
    offload = folder / "offloaded"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, device_map=where, offload_folder=offload, dtype=torch.float32
    )
    return model.eval()


def planned(model: PreTrainedModel) -> PlanResult:
    plain = loaded_tiny()
    loaded = LoadedModel(model, plain.tokenizer, describe_model(model, "tests/tiny"))
    assert loaded.info == plain.info
    short = {"lengths": (512,), "target_density": (0.8,), "filter_layers": (0,)}
    return compile_plan(job_of(loaded, quick_options(**short, refine_rounds=1)))


def same(one: PlanResult, other: PlanResult) -> bool:
    """Whether they compute the same; what was measured is rounded otherwise where memory is aligned otherwise."""
    return (one.plan.prefill, one.plan.decode, one.plan.model) == (
        other.plan.prefill,
        other.plan.decode,
        other.plan.model,
    )


def test_a_model_whose_layers_are_partly_on_disk_gets_the_same_plan(tmp_path: Path) -> None:
    model = placed(tmp_path, ("cpu", "disk", "disk"), "disk")
    assert {weight.device.type for weight in model.parameters()} == {"cpu", "meta"}
    plan = planned(model)
    assert plan.prefill_density is not None
    assert plan.filter_layers
    assert same(plan, planned(loaded_tiny().model))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_over_two_gpus_gets_the_same_plan(tmp_path: Path) -> None:
    spread = placed(tmp_path, (0, 1, 1), 1, first=0)
    assert same(planned(spread), planned(loaded_tiny().model.to("cuda:0")))
