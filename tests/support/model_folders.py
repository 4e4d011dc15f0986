"""Models as folders on disk, the way the command line meets them."""

from __future__ import annotations

from pathlib import Path

from tiny_models import tiny_tokenizer
from tiny_plans import decode_plan, every_head, plan_for, segment
from transformers import PreTrainedModel

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
