"""Public shapes have as many parameters as their cards say."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparsekv.bench.public_shapes import PUBLIC_SHAPES, config_of

BILLIONS = {  # that the alias does not say
    "command-a-plus": 218,
    "gemma4-e4b": 7.5,
    "glm4.5-air": 106,
    "hy3": 295,
    "laguna-xs": 33.4,
    "minimax-m2": 229,
    "phi3.5-moe": 41.9,
}


@pytest.mark.parametrize("alias", PUBLIC_SHAPES)
def test_a_public_shape_has_the_parameters_of_its_card(alias: str) -> None:
    config, _ = config_of(alias)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = BILLIONS.get(alias) or float(re.search(r"-(\d+)b", alias)[1])
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.1)
