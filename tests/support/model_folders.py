"""Models as folders on disk, the way the command line meets them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import tiny_tokenizer
from tiny_plans import decode_plan, every_head, plan_for, segment
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.plans.patterns import AShape, Dense, tokens
from sparsekv.plans.schema import Plan


def save_model(model: PreTrainedModel, folder: Path, template: str | None = None) -> Path:
    """The model, and the tokenizer of single characters with a chat template or none."""
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def sparse_plan(model: PreTrainedModel) -> Plan:
    """Both phases sparse, the last of three layers offloaded."""
    prefill = every_head(model, AShape(sink=tokens(64), window=tokens(64)), Dense())
    return plan_for(model, prefill, decode_plan(segment(0, (1, 2), 64), offload=(2,)))


def write_eagle(target: Any, folder: Path) -> Path:
    """Writes a random drafter of EAGLE, of one layer of the target's shape, and returns where."""
    config = deepcopy(target)
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    torch.manual_seed(0)
    drafter = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in drafter.state_dict().items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) / config.hidden_size**0.5
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder
