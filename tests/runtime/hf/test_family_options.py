"""Options of a config that change which parts the layers of a family have."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import every_head, plan_for

from sparsekv.plans.patterns import AShape, Dense, fraction, tokens
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

CUT = Chunking(above=20, rows=17, output_bytes=1)
OPTIONS = [
    ("cohere", {"use_qk_norm": True}),
    ("exaone4", {"sliding_window": None}),
    ("glm4_moe", {"use_qk_norm": False}),
    ("granite_swa", {"layer_rope_theta": [1e4, 0, 1e5]}),
    ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2, 3]}),
    ("phi", {"qk_layernorm": True, "hidden": 128}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=str)
def test_a_plan_that_covers_everything_gives_the_logits_of_the_unmodified_model(family: str, options: dict) -> None:
    model, text = tiny_model(family, **options), random_tokens(2, 90)
    plan = plan_for(model)
    bucket = every_head(model, AShape(sink=tokens(1), window=fraction(1.0)), Dense()).lengths[0]
    heads = tuple(group for group in bucket.heads if group.layer in plan.model.full_layers)
    prefill = PrefillPlan(tile={"query": 64, "key": 64}, lengths=(bucket.model_copy(update={"heads": heads}),))
    with torch.no_grad():
        dense = model(text).logits
        with apply(model, plan.model_copy(update={"prefill": prefill}), chunking=CUT):
            torch.testing.assert_close(model(text).logits, dense, atol=1e-3, rtol=1e-3)
