"""Cuts, preemptions, prefix hits, cancelled requests, sessions, as vLLM made them, replayed in transformers."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams
from vllm_engine import CROSSOVER, DECODE_BOUND, TILE, Oracle, preemptions
from vllm_replay import PAGE, assert_replayed, plan_host_of, recorded

from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import Pays, Thresholds
from sparsekv.runtime.vllm.engine_host import serving_stats

FUZZ_FIRST, FUZZ_COUNT = (
    int(os.environ.get(name, default)) for name, default in (("FUZZ_FIRST", 100), ("FUZZ_COUNT", 30))
)
SESSION = 1  # a seed of two agents, in which all of it happens but for a preemption


@dataclass(frozen=True)
class Request:
    """A prompt and how it is answered."""

    prompt: list[int]
    asked: SamplingParams

    @property
    def pages(self) -> int:
        """Of the prompt."""
        return -(-len(self.prompt) // PAGE)


def draw_request(source: random.Random, texts: list[list[int]]) -> Request:
    """Many begin alike, and many fill their last page almost, so that answers ask for another one."""
    text = source.choice(texts)
    first = source.choice((0, 0, source.randrange(len(text) // 2)))
    length = PAGE * source.randrange(2, 9) - source.choice((source.randrange(1, 8), source.randrange(PAGE)))
    asked = SamplingParams(
        temperature=source.choice((0.0, 1.0)), max_tokens=source.choice((1, 8, 24, 40)), ignore_eos=True
    )
    return Request(text[first : first + length], asked)


@contextmanager
def cramped(engine: Any, budget: int, pages: int) -> Iterator[None]:
    """The engine with so many tokens of a step and so many pages."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    pool, before = scheduler.kv_cache_manager.block_pool, scheduler.max_num_scheduled_tokens
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - pages)
    scheduler.max_num_scheduled_tokens = budget
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before
        pool.free_blocks(taken)


def serve(engine: Any, source: random.Random, requests: list[Request]) -> list[Any]:
    """Requests come at random steps, and few are cancelled; what ended."""
    inner, waiting, running, ended = engine.llm_engine, list(enumerate(requests)), set(), []
    while waiting or inner.has_unfinished_requests():
        while waiting and (source.random() < 0.6 or not running):
            number, request = waiting.pop()
            inner.add_request(str(number), {"prompt_token_ids": request.prompt}, request.asked)
            running.add(str(number))
        ended += [output for output in inner.step() if output.finished]
        running -= {output.request_id for output in ended}
        if running and source.random() < 0.02:
            gone = source.choice(sorted(running))
            inner.abort_request([gone])
            running.remove(gone)
    return ended


def check(engine: Any, sparse: Oracle, prompts: dict[int, list[int]], seed: int) -> tuple[int, int]:
    """Serves random requests and replays them; how many were preempted, and how many found others' pages."""
    source = random.Random(seed)
    requests = [draw_request(source, [prompts[1500], prompts[2000], prompts[2700]]) for _ in range(6)]
    pages = max(sum(request.pages for request in requests[-3:]), max(request.pages for request in requests) + 1)
    before = preemptions(engine)
    with cramped(engine, source.randrange(96, 513), pages), recorded(engine) as recording:
        ended = serve(engine, source, requests)
    assert engine.reset_prefix_cache(), "pages are still taken"
    assert_replayed(sparse, recording)
    return preemptions(engine) - before, sum(output.num_cached_tokens > 0 for output in ended)


@pytest.mark.parametrize("seed", [3])
def test_every_step_of_cramped_requests_has_the_logits_of_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: dict[int, list[int]], seed: int
) -> None:
    preempted, hits = check(engine, sparse, prompts, seed)
    assert preempted > 0
    assert hits > 0
    assert serving_stats(engine).decode_sparse > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FUZZ_FIRST, FUZZ_FIRST + FUZZ_COUNT))
def test_every_step_of_cramped_requests_has_the_logits_of_the_transformers_host_in_the_long_run(
    engine: Any, sparse: Oracle, prompts: dict[int, list[int]], seed: int
) -> None:
    check(engine, sparse, prompts, seed)


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def always(sparse: Oracle, plan: Plan) -> Oracle:
    """The plan in the transformers host, whatever the rule: a replay asks it for sparse rows alone."""
    return Oracle(sparse.model, plan, sparse="always")


LONGEST = 11  # pages of a session: one that does not fit would wait for ever


def play(engine: Any, source: random.Random, text: list[int], agents: int) -> list[Any]:
    """Turns of agents, each of which goes on from its prompt and answer before, or from an earlier part of it; new ones
    come at random steps. Returns the outputs."""
    inner, ended = engine.llm_engine, []
    history = {str(agent): text[200 * agent : 200 * agent + source.randrange(300, 700)] for agent in range(agents)}
    turns = dict.fromkeys(history, source.randrange(2, 4))
    idle = sorted(history)
    while idle or inner.has_unfinished_requests():
        while idle and (source.random() < 0.4 or not inner.has_unfinished_requests()):
            name = idle.pop(source.randrange(len(idle)))
            asked = SamplingParams(temperature=0.0, max_tokens=source.choice((1, 8, 24)), ignore_eos=True)
            inner.add_request(name, {"prompt_token_ids": history[name]}, asked)
        for output in inner.step():
            if not output.finished:
                continue
            ended.append(output)
            name, first = output.request_id, source.randrange(1000)
            before = [*history[name], *output.outputs[0].token_ids]
            shared = source.choice((len(before), len(before), len(before) // 2))
            history[name] = [*before[:shared], *text[first : first + source.choice((3, 60, 130, 300))]]
            turns[name] -= 1
            idle += [name] if turns[name] else []
    return ended


def draw_rule(source: random.Random) -> Pays:
    """Pieces, and rows of decode alone or beside prompts, that are dense behind sparse ones."""
    rows, tokens = source.choice((2, TILE, 150)), source.choice((0, CROSSOVER + PAGE))
    decode, mixed = (
        source.choice((Thresholds(), Thresholds((1,), (0,)), Thresholds((1, 2), (900, DECODE_BOUND)))) for _ in "ab"
    )
    return Pays(Thresholds((rows,), (tokens,)), decode, mixed)


def check_sessions(engine: Any, always: Oracle, text: list[int], seed: int, agents: int = 3) -> tuple[int, int, int]:
    """Plays random sessions by a random rule and replays them.

    Returns:
        The numbers of turns that found pages, of prefixes that were evicted before their turn, and of pieces that the
        rule runs dense behind a sparse past.
    """
    source = random.Random(seed)
    pool = cramped(engine, source.randrange(96, 513), source.randrange(LONGEST, 15))
    with patch.object(plan_host_of(engine), "pays", draw_rule(source)), pool, recorded(engine) as recording:
        ended = play(engine, source, text, agents)
    assert engine.reset_prefix_cache(), "pages are still taken"
    assert_replayed(always, recording)
    later = ended[agents:]
    evicted = sum(output.num_cached_tokens + PAGE < len(output.prompt_token_ids) // 2 for output in later)
    dense = sum(rows.prompt and rows.past > CROSSOVER and not rows.sparse for rows in recording)
    return sum(output.num_cached_tokens > 0 for output in ended), evicted, dense


def test_turns_behind_cached_and_evicted_pasts_have_the_logits_of_undisturbed_sessions(
    engine: Any, always: Oracle, prompts: dict[int, list[int]]
) -> None:
    """At equal cuts, row by row."""
    hits, evicted, dense = check_sessions(engine, always, prompts[2700], SESSION, agents=2)
    assert hits > 0
    assert evicted > 0
    assert dense > 0
    stats = serving_stats(engine)
    assert min(stats.sparse_tokens, stats.decode_sparse, stats.decode_dense) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FUZZ_FIRST, FUZZ_FIRST + FUZZ_COUNT))
def test_sessions_have_the_logits_of_undisturbed_ones_in_the_long_run(
    engine: Any, always: Oracle, prompts: dict[int, list[int]], seed: int
) -> None:
    check_sessions(engine, always, prompts[2700], seed)


def test_a_replay_with_other_cuts_differs(
    engine: Any, sparse: Oracle, dense: Oracle, prompts: dict[int, list[int]]
) -> None:
    """What the comparison is worth: neither dense attention nor another cut passes."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with recorded(engine) as recording:
        engine.generate([{"prompt_token_ids": prompts[700]}], asked, use_tqdm=False)
    assert_replayed(sparse, recording)
    with pytest.raises(AssertionError):
        assert_replayed(dense, recording)
    first, second = recording
    moved = [first.part(0, 500), first.part(500, 512), second]
    with pytest.raises(AssertionError):
        assert_replayed(sparse, moved)
