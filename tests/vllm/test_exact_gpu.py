"""Exact output inside vLLM with captured graphs and asynchronous scheduling. Needs an NVIDIA GPU.

    VLLM_BATCH_INVARIANT=1 python -m pytest tests/vllm/test_exact_gpu.py -x -q -s

bfloat16 leaves differences, where two tokens are nearly as likely: no more than its rounding explains. Of the 200
requests below 46 are expected to part, float32 parts from bfloat16 in 54, and drafts taken in half of the near ties, by
an engine that is not exact, in 78 to 113 (on a CPU). VLLM_BATCH_INVARIANT=1 leaves fewer, though dense still parts from
itself where a prefix was cached. What is printed says where answers part, and which graphs there are.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from exact_engines import DRAFT, ask, at_random, counted, drafting_as, drafting_plan, exactly, scheduler_of, texts
from vllm_engine import CAPTURED, make_engine, preemptions, tokens_of
from vllm_steps import chi_square

from sparsekv.bench.vllm_engines import asking_for_ours
from sparsekv.plans.files import write_plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats

pytestmark = pytest.mark.gpu
STRICT = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
SMALL = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2 << 30,
    "dtype": "bfloat16",
    "kernel_config": {"enable_jit_warmup": False},  # of samplers, which takes minutes
}
NOISE = 1 / 16  # nats, of the lead of a token: one step of a bfloat16 logit between 8 and 16
NEAR = 4 * NOISE
FEW = 68  # blocks of 16 tokens: one of the longest requests, and little more


@pytest.fixture(scope="module")
def engines(
    reference: LoadedModel, tmp_path_factory: pytest.TempPathFactory, kept_engines: list[Any]
) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    write_plan(drafting_plan(reference.info, 6), path)
    model = str(reference.model.name_or_path)

    def drafts(**settings: Any) -> Any:
        llm = make_engine(model, additional_config=exactly(path), **(SMALL | asking_for_ours() | settings))
        drafting_as(llm, at_random())
        return llm

    def dense(**settings: Any) -> Any:
        config = {"sparsekv": {"dense": True}}
        how = {"disable_log_stats": True, "logprobs_mode": "processed_logprobs"}  # what is penalised is no near tie
        return make_engine(model, additional_config=config, **(SMALL | how | settings))

    found = {
        "eager": drafts(num_gpu_blocks_override=512),
        "captured": drafts(num_gpu_blocks_override=512, **CAPTURED),
        "few": drafts(num_gpu_blocks_override=FEW, **CAPTURED),
        "dense": dense(num_gpu_blocks_override=512, **CAPTURED),
    }
    kept_engines.extend(found.values())
    for name, llm in found.items():
        print(f"\n{name}: {describe(llm)}")
    return found


def describe(llm: Any) -> str:
    """The scheduler, what is captured, and what drafts."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    target = Counter((d.cg_mode.name, d.uniform_token_count) for d in runner.cudagraph_manager.graphs)
    graphs = getattr(runner.speculator, "_graphs", None)
    drafted = None if graphs is None else Counter((d.cg_mode.name, d.num_tokens) for d in graphs.graphs)
    builders = [type(b).__name__ for groups in runner.attn_groups for g in groups for b in g.metadata_builders]
    return (
        f"{type(scheduler_of(llm)).__mro__[0:2]}; target graphs {dict(target)}; draft graphs {drafted}; "
        f"speculator {type(runner.speculator).__name__}; builders {builders}"
    )


def parted(found: Sequence[Any], expected: Sequence[Any]) -> list[str]:
    """Where answers part from dense ones: at tokens that are as good as equal to dense attention."""
    lines = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        mine, its = tokens_of(one), tokens_of(other)
        at = next((n for n, (x, y) in enumerate(zip(mine, its, strict=False)) if x != y), None)
        if at is None:
            assert len(mine) == len(its), f"request {number} ends at token {len(mine)}, dense at {len(its)}"
            continue
        likely, prompt = other.outputs[0].logprobs[at], len(one.prompt_token_ids)
        lead = likely[its[at]].logprob - likely[mine[at]].logprob if mine[at] in likely else math.inf
        assert lead <= NEAR, f"request {number} parts at token {at}, where dense prefers its own by {lead:.4f}"
        lines.append(
            f"request {number} ({prompt} tokens) parts at token {at} of {len(its)} (position {prompt + at}): "
            f"{mine[at : at + 6]} for {its[at : at + 6]}, which dense prefers by {lead:.4f}"
        )
    return lines


def by_rounding(expected: Sequence[Any]) -> float:
    """How many of dense attention's answers part where rounding adds normal noise to the lead of each token."""
    together = 0.0
    for output in expected:
        ranked = [sorted((p.logprob for p in step.values()), reverse=True) for step in output.outputs[0].logprobs]
        leads = [first - second for first, second, *_ in ranked]
        together += 1 - math.prod(1 - math.erfc(lead / NOISE / math.sqrt(2)) / 2 for lead in leads)
    return together


def check(llm: Any, dense: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """Answers are dense attention's, or part at near ties, at most as many as rounding explains and three standard
    deviations. Dense attention one request at a time parts from itself less often (11 of 200, where drafts do in 33): a
    step that verifies has more rows."""
    before = counted(llm)
    found, expected = (ask(one, prompts, logprobs=5, **sampling) for one in (llm, dense))
    lines, some = parted(found, expected), by_rounding(expected)
    drafted, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
    print(f"\n{len(prompts)} requests, {accepted} of {drafted} drafted tokens count, {len(lines)} part ({some:.1f})")
    print("\n".join(lines))
    assert len(lines) <= 1 + some + 3 * math.sqrt(some)
    return found


@pytest.mark.parametrize("name", ["eager", "captured"])
@pytest.mark.parametrize("lengths", [(700,), (150, 90, 230, 300, 20), tuple(range(100, 900, 100))])
def test_greedy_answers_are_dense_attentions(engines: dict[str, Any], name: str, lengths: tuple[int, ...]) -> None:
    before = counted(engines[name])
    check(engines[name], engines["dense"], texts(sum(lengths), lengths), max_tokens=40)
    drafted, accepted = (now - then for now, then in zip(counted(engines[name]), before, strict=True))
    assert 0 < accepted < drafted
    assert serving_stats(engines[name]).decode_sparse > 0


def test_a_captured_draft_is_the_draft_of_launched_steps(engines: dict[str, Any]) -> None:
    """The same requests, drafts in every step: as many of them count."""
    counts = {}
    for name in ("eager", "captured"):
        drafting_as(engines[name], lambda lengths: DRAFT)
        before = counted(engines[name])
        answers = [tokens_of(one) for one in ask(engines[name], texts(77, (200, 400, 600)), max_tokens=48)]
        counts[name] = (*(now - then for now, then in zip(counted(engines[name]), before, strict=True)), answers)
        drafting_as(engines[name], at_random())
    print({name: found[:2] for name, found in counts.items()})
    (drafted, accepted, _), (other, others, _) = counts["eager"], counts["captured"]
    assert 0 < accepted < drafted
    assert abs(accepted / drafted - others / other) < (1e-9 if STRICT else 0.1)


def test_many_ragged_requests_with_preemptions(engines: dict[str, Any]) -> None:
    lengths = [20 + 7 * (number % 31) for number in range(200)]
    check(engines["few"], engines["dense"], texts(2, lengths), max_tokens=32)
    assert preemptions(engines["few"]) > 0


def test_prefix_hits(engines: dict[str, Any]) -> None:
    llm, dense = engines["captured"], engines["dense"]
    prompts = texts(3, (110, 333))
    first = check(llm, dense, prompts, max_tokens=60)
    longer = [[*prompt, *tokens_of(one), 7] for prompt, one in zip(prompts, first, strict=True)]
    again = check(llm, dense, longer, max_tokens=24)
    assert all(one.num_cached_tokens > len(prompt) for one, prompt in zip(again, prompts, strict=True))


def test_stops_and_the_longest_length(engines: dict[str, Any]) -> None:
    llm, dense = engines["captured"], engines["dense"]
    prompts = texts(4, (100, 130, 75))
    tokens = tokens_of(ask(dense, prompts[:1], max_tokens=12)[0])
    check(llm, dense, prompts, max_tokens=12, stop_token_ids=[tokens[5]])
    check(llm, dense, prompts, max_tokens=12, stop=[llm.get_tokenizer().decode(tokens[3:5])])
    check(llm, dense, prompts, max_tokens=1)
    check(llm, dense, texts(5, (1024 - 9, 1024 - 2)), max_tokens=50)


def test_aborts_leave_the_others_as_they_are(engines: dict[str, Any]) -> None:
    from vllm import SamplingParams

    prompts, engine, answers = texts(6, (140, 90, 200)), engines["captured"].llm_engine, {}
    expected = [tokens_of(one) for one in ask(engines["dense"], prompts, max_tokens=24)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    ids = [engine.add_request(f"r{number}", {"prompt_token_ids": one}, params) for number, one in enumerate(prompts)]
    for step in range(400):
        if step == 6:
            engine.abort_request([ids[1]], internal=True)
        answers |= {one.request_id: tokens_of(one) for one in engine.step()}
        if not engine.has_unfinished_requests():
            break
    print(answers, expected)
    if STRICT:
        assert (answers["r0"], answers["r2"]) == (expected[0], expected[2])
    assert len(answers["r0"]) == len(answers["r2"]) == 24


def test_penalties_and_structured_output(engines: dict[str, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    llm, dense, prompts = engines["captured"], engines["dense"], texts(8, (100, 140))
    check(llm, dense, prompts, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    shape = StructuredOutputsParams(regex="[0-9]{3}[a-c]{5}")
    check(llm, dense, prompts, structured_outputs=shape, ignore_eos=False)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 8},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2},
    ],
    ids=["cool", "top-k", "top-p", "penalty"],
)
def test_sampled_answers_are_distributed_as_dense_attentions(engines: dict[str, Any], sampling: dict[str, Any]) -> None:
    """The chi-square of two samples of 5,000 answers: of the second and third token, which may be drafted."""
    (prompt,) = texts(9, (100,))
    drafting_as(engines["captured"], lambda lengths: DRAFT)
    counts = []
    for name in ("captured", "dense"):
        answers = ask(engines[name], [prompt] * 5000, max_tokens=4, **sampling)
        counts.append(Counter(tuple(tokens_of(one)[1:3]) for one in answers))
    drafting_as(engines["captured"], at_random())
    square, free = chi_square(*counts)
    print(f"\n{sampling}: chi-square {square:.1f} of {free} degrees; most common {counts[0].most_common(3)}, "
          f"{counts[1].most_common(3)}")  # fmt: skip
    assert free >= 3
    assert square < free + 4.5 * math.sqrt(2 * free)


def test_a_seed_gives_the_same_answer_again(engines: dict[str, Any]) -> None:
    llm = engines["captured"]
    drafting_as(llm, lambda lengths: DRAFT)
    answers = [tokens_of(ask(llm, texts(10, (100,)), temperature=1.0, seed=5, max_tokens=30)[0]) for _ in range(2)]
    drafting_as(llm, at_random())
    print(answers)
    assert answers[0] == answers[1]
