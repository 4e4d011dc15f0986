"""What a request may ask of an engine with a plan, each held against the transformers host given the same steps."""

import copy
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm_engine import BUDGET, Oracle, make_engine
from vllm_replay import assert_replayed, recorded

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

Prompts = dict[int, list[int]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [({"choice": ["12", "345"]}, r"12|345"), ({"regex": r"[0-9]{4}"}, r"\d{4}"), ({"json": SCHEMA}, r"(?s)\{.*")],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_structured_output_has_its_form_and_the_logits_of_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: Prompts, wanted: dict[str, Any], pattern: str
) -> None:
    asked = SamplingParams(temperature=1.0, max_tokens=16, structured_outputs=StructuredOutputsParams(**wanted))
    with recorded(engine) as recording:
        (output,) = engine.generate([{"prompt_token_ids": prompts[700]}], asked, use_tqdm=False)
    assert re.fullmatch(pattern, output.outputs[0].text)
    assert_replayed(sparse, recording)


def test_several_answers_to_one_prompt_have_the_logits_of_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: Prompts
) -> None:
    asked = SamplingParams(n=3, temperature=1.0, max_tokens=5, logprobs=2, ignore_eos=True)
    with recorded(engine) as recording:
        (output,) = engine.generate([{"prompt_token_ids": prompts[1100]}], asked, use_tqdm=False)
    assert_replayed(sparse, recording)
    assert [len(one.token_ids) for one in output.outputs] == [5, 5, 5]
    for one in output.outputs:
        for length, (token, at) in enumerate(zip(one.token_ids, one.logprobs, strict=True), 1100):
            rows = [float(rows.logits_V.log_softmax(0)[token]) for rows in recording if rows.length == length]
            assert any(at[token].logprob == pytest.approx(found, abs=1e-4) for found in rows)


@torch.no_grad()
def test_log_probabilities_of_a_prompt_are_those_of_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: Prompts
) -> None:
    prompt, cache, expected = prompts[1100], None, []
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    with sparse.applied():
        for first, end in pairwise((*range(0, len(prompt), BUDGET), len(prompt))):
            out = sparse.model(torch.tensor([prompt[first:end]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected += list(out.logits[0].log_softmax(-1))
    found = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert found == pytest.approx(
        [float(row[token]) for row, token in zip(expected, prompt[1:], strict=False)], abs=1e-3
    )


RANK, ALPHA = 8, 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Any, folder: Path) -> Any:
    """Writes a random LoRA adapter; the model with it merged."""
    torch.manual_seed(0)
    merged, weights = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in ADAPTED:
            down, up = torch.randn(RANK, module.in_features) * 0.05, torch.randn(module.out_features, RANK) * 0.05
            module.weight.data += ALPHA / RANK * up @ down
            weights |= {f"base_model.model.{name}.lora_{part}.weight": x for part, x in (("A", down), ("B", up))}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ADAPTED, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.fixture(scope="module")
def taking_adapters(reference: LoadedModel, plan_file: Path, kept_engines: list[Any]) -> Any:
    config = {"sparsekv": {"plan": str(plan_file)}}
    name = str(reference.model.name_or_path)
    engine = make_engine(name, additional_config=config, disable_log_stats=True, enable_lora=True, max_lora_rank=RANK)
    kept_engines.append(engine)
    return engine


def test_an_adapter_is_prefilled_as_by_the_transformers_host_with_it_merged(
    taking_adapters: Any, reference: LoadedModel, plan: Plan, sparse: Oracle, prompts: Prompts, tmp_path: Path
) -> None:
    adapted = Oracle(make_adapter(reference.model, tmp_path), plan)
    asked = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for ours, other, adapter in (
        (adapted, sparse, LoRARequest("random", 1, str(tmp_path))),
        (sparse, adapted, None),
    ):
        with recorded(taking_adapters) as recording:
            (output,) = taking_adapters.generate(
                [{"prompt_token_ids": prompts[700]}], asked, use_tqdm=False, lora_request=adapter
            )
        assert output.num_cached_tokens == 0, "pages of the other weights"
        assert_replayed(ours, recording)
        with pytest.raises(AssertionError):
            assert_replayed(other, recording)
