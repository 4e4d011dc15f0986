"""Evicting layers in vLLM: memory is freed, what is kept is what the rule says, and answers are those of the
transformers host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model_folders import save_model
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, drops, every_head, plan_for, segment
from transformers import PreTrainedModel
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_engine import Oracle, generate, make_engine, tokens_and_logprobs, tokens_of
from vllm_evicting import Watch, drive, free_blocks, held_blocks, scheduler_of

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.vllm.cache_internals import evicting_spec
from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks
from sparsekv.runtime.vllm.internals import layer_number

BLOCK, CHUNK, BLOCKS = 32, 128, 84
GENERATED = 40  # tokens of an answer that layers keep
MODEL: dict[str, Any] = {"layers": 5, "head_dim": 64, "context": 1024}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(**MODEL)


@pytest.fixture(scope="module")
def plan(model: PreTrainedModel) -> Plan:
    """Layer 0 keeps everything; two rules that keep as many tokens share their blocks."""
    return plan_for(
        model,
        None,
        None,
        drops((1, 3), 50, sink=4, recent=20, generated=GENERATED, observe=30),
        drops((2,), 54, sink=0, recent=20, generated=GENERATED, observe=200, heads="per_kv_head"),
        drops((4,), fraction(0.3), sink=1, recent=3, generated=100, observe=1),
    )


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evicting")
    save_model(model, path / "model")
    write_plan(plan, path / "plan.yaml")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path, kept_engines: list[Any]) -> Any:
    """Its blocks are few, so that requests are preempted."""
    found = make_engine(
        str(folder / "model"), additional_config={"sparsekv": {"plan": str(folder / "plan.yaml")}}, block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS, max_model_len=512, max_num_batched_tokens=CHUNK,
    )  # fmt: skip
    kept_engines.append(found)
    return found


def prompt_of(length: int) -> list[int]:
    found: list[int] = random_tokens(1, length, length)[0].tolist()
    return found


def assert_answered(model: PreTrainedModel, plan: Plan, prompt: list[int], answer: list[int], logprobs: Any) -> None:
    """As by the transformers host with whole blocks kept."""
    expected = Oracle(model, rounded(plan, len(prompt))).of(prompt, [], answer)
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-3), len(prompt)


def rounded(plan: Plan, prompt: int) -> Plan:
    """The plan with rules that keep of this prompt what whole blocks have room for."""
    rules = [rule if not rule.is_lossy else EvictedBlocks.of(rule, BLOCK).rule(rule, prompt) for rule in plan.kv_cache]
    return plan.model_copy(update={"kv_cache": tuple(rules)})


def test_layers_that_keep_as_much_share_a_group_and_no_other_is_merged_with_theirs(engine: Any) -> None:
    groups = scheduler_of(engine).kv_cache_config.kv_cache_groups
    kinds = [(type(group.kv_cache_spec).__name__, *map(layer_number, group.layer_names)) for group in groups]
    assert sorted(kinds) == [*(("EvictingSpec", layer) for layer in range(1, 5)), ("FullAttentionSpec", 0)]
    specs = {group.kv_cache_spec for group in groups if hasattr(group.kv_cache_spec, "blocks")}
    assert len(specs) == 2


@pytest.mark.parametrize("length", [320, 333, 351])
def test_blocks_that_a_request_holds_are_those_of_the_arithmetic(engine: Any, plan: Plan, length: int) -> None:
    from vllm import SamplingParams

    before, inside, held = free_blocks(engine), engine.llm_engine, {}
    asked = SamplingParams(temperature=0.0, max_tokens=102, ignore_eos=True, detokenize=False)
    inside.add_request("one", {"prompt_token_ids": prompt_of(length)}, asked)
    while inside.has_unfinished_requests():
        inside.step()
        for name, request in scheduler_of(engine).requests.items():
            held[request.num_computed_tokens] = held_blocks(engine, name)
    for made in (length + 1, length + 100):
        kept = [length - (length - count) // BLOCK * BLOCK for count in (74, 74, 4 + -(-3 * length // 10))]
        expected = [-(-made // BLOCK)]
        for count, window in zip(
            (kept[0], kept[1], kept[1], kept[2]), (GENERATED, GENERATED, GENERATED, 100), strict=True
        ):
            first = -(-length // BLOCK)
            newest = max(first, (made - window) // BLOCK)
            expected.append(count // BLOCK + bool(length % BLOCK) + -(-made // BLOCK) - newest)
        assert sorted(held[made]) == sorted(expected)
    assert free_blocks(engine) == before == BLOCKS - 1


def test_answers_are_those_of_the_transformers_host_at_every_remainder_of_block_and_chunk(
    engine: Any, model: PreTrainedModel, plan: Plan
) -> None:
    """Prompts of 257 tokens end with a chunk of one."""
    lengths = [*range(2 * CHUNK, 2 * CHUNK + BLOCK + 2), 40, 90, 3 * CHUNK + 1]
    prompts = [prompt_of(length) for length in lengths]
    watch = Watch(engine, plan.evicting)
    with watch.watching():
        alone = [generate(engine, [prompt], 6)[0] for prompt in prompts[:4]]
        outputs = generate(engine, prompts, 6)
    for prompt, output in [*zip(prompts, outputs, strict=True), *zip(prompts, alone, strict=False)]:
        assert_answered(model, plan, prompt, *tokens_and_logprobs(output))
    assert watch.counts["prompts"] >= 4 * len(lengths)


@pytest.mark.parametrize(
    "count",
    [40, pytest.param(2000, marks=(pytest.mark.fuzz, pytest.mark.timeout(1800)))],
    ids=["a few requests", "many requests"],
)
def test_random_requests_keep_what_the_rules_say_and_read_no_freed_block(
    engine: Any, model: PreTrainedModel, plan: Plan, count: int
) -> None:
    watch = Watch(engine, plan.evicting)
    with watch.watching():
        done = drive(watch, engine, Random(count), count)
    assert free_blocks(engine) == BLOCKS - 1
    assert sum(one.preempted for one in done) > count // 40
    assert min(watch.counts["prompts"], watch.counts["shortened rows"]) > count
    assert 0.5 * count < len(done) <= count
    whole = [one for one in done if not one.preempted and len(one.answer) <= GENERATED]
    assert len(whole) > 0.4 * count
    for one in whole[:: count // 40]:
        assert_answered(model, plan, one.prompt, one.answer, one.logprobs)


def test_no_block_is_shared_with_a_request_that_begins_alike(engine: Any) -> None:
    prompt = random_tokens(1, 300, 7)[0].tolist()
    first, second = (generate(engine, [prompt], 6)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert tokens_of(second) == tokens_of(first)


@pytest.mark.parametrize("resumable", [True, False])
def test_a_request_whose_prompt_grows_is_refused(engine: Any, resumable: bool) -> None:
    """What it would add attends to blocks that are freed."""
    from vllm import SamplingParams

    inside = engine.llm_engine
    asked = inside.input_processor.process_inputs(
        "one", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(), ("generate",), resumable=resumable
    )
    with pytest.raises(UnsupportedError) if resumable else nullcontext():
        inside.engine_core.engine_core.preprocess_add_request(asked)


@pytest.mark.parametrize("more", [{"non_causal": True}, {"sliding_window": 64}], ids=str)
def test_a_cache_of_which_more_is_said_is_refused(more: dict[str, Any]) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    kept = EvictedBlocks.of(drops((0,), 50), 16)
    assert evicting_spec(spec, kept).page_size_bytes == spec.page_size_bytes
    with pytest.raises(UnsupportedError):
        evicting_spec(replace(spec, **more), kept)


def test_sparse_prefill_and_decode_segments_run_beside_layers_that_drop_tokens(
    model: PreTrainedModel, tmp_path: Path, kept_engines: list[Any]
) -> None:
    """Prompts in one chunk, so that the transformers host cuts them as the engine does."""
    patterns = (AShape(sink=tokens(64), window=tokens(64)), BlockSparse(keep=fraction(0.4)))
    rule = drops((3, 4), 60, sink=4, recent=20, generated=40, observe=30)
    plan = plan_for(model, every_head(model, *patterns), decode_plan(segment(0, (1, 2), 40)), rule)
    write_plan(plan, tmp_path / "plan.yaml")
    engine = make_engine(
        str(save_model(model, tmp_path / "model")), block_size=BLOCK, max_model_len=512, max_num_batched_tokens=2048,
        additional_config={"sparsekv": {"plan": str(tmp_path / "plan.yaml")}},
    )  # fmt: skip
    kept_engines.append(engine)
    prompts = [prompt_of(length) for length in (300, 417, 161)]
    for prompt, output in zip(prompts, generate(engine, prompts, 6), strict=True):
        assert_answered(model, plan, prompt, *tokens_and_logprobs(output))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_model_runner_that_gpus_have_does_the_same() -> None:
    """It needs Triton, which its interpreter is."""
    asked = os.environ | {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    names = "blocks_that_a_request or every_remainder or random_requests"
    subprocess.run([sys.executable, "-m", "pytest", __file__, "-k", names], check=True, env=asked)


RANKS = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    sys.path.insert(0, {support!r})
    from vllm_engine import generate, make_engine, tokens_and_logprobs
    engine = make_engine({model!r}, additional_config={{"sparsekv": {{"plan": {plan!r}}}}}, tensor_parallel_size=2,
        block_size={block}, max_model_len=512, max_num_batched_tokens={chunk}, num_gpu_blocks_override=300)
    print(json.dumps([tokens_and_logprobs(one) for one in generate(engine, {prompts}, 6)]))
"""


@pytest.mark.slow
def test_two_ranks_choose_as_one_does(model: PreTrainedModel, plan: Plan, folder: Path) -> None:
    prompts = [prompt_of(length) for length in (300, 257, 130)]
    script = RANKS.format(
        support=str(Path(__file__).parents[1] / "support"), model=str(folder / "model"),
        plan=str(folder / "plan.yaml"), block=BLOCK, chunk=CHUNK, prompts=prompts,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("[["))  # among lines of vLLM's log
    for prompt, answered in zip(prompts, json.loads(printed), strict=True):
        assert_answered(model, plan, prompt, *answered)
