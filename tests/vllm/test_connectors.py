"""A prompt that one engine prefills and another decodes, with the plan on both or either."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from handed_over import cache_of, handed_over
from transformers import DynamicCache
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm_engine import NEW, TILE, Answer, Oracle, generate, make_engine, tokens_and_logprobs

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats
from sparsekv.runtime.vllm.settings import store_name

PAGE = 128
# Of each request: the length of its prompt, and which engine prefills it and which goes on.
ASKED = ((1500, "first", "second"), (2000, "first", "dense"), (1100, "dense", "second"))
CHUNK = {"max_num_batched_tokens": 3072}
HITS = "vllm:external_prefix_cache_hits"  # of the engine that was made last


@dataclass(frozen=True)
class Found:
    """What came of `ASKED`.

    Attributes:
        answers: tokens and log-probabilities of each.
        hits: tokens that the dense engine loaded.
        prefilled: tokens that the first engine prefilled sparse.
        decoded, again: tokens that the second one decoded and prefilled sparse.
    """

    answers: list[tuple[list[int], list[float]]]
    hits: int
    prefilled: int
    decoded: int
    again: int


def one_after_another(
    model: str, plan: Path, prompts: Mapping[int, list[int]], settings: Mapping[str, Any], kept: list[Any]
) -> Found:
    """By engines of this process, each of which leaves what it prefilled in a folder."""

    @contextmanager
    def engine(options: Mapping[str, Any]) -> Iterator[Any]:
        kept.append(make_engine(model, additional_config={"sparsekv": options}, **settings))
        try:
            yield kept[-1]
        finally:
            ensure_kv_transfer_shutdown()  # a process has one connector

    with engine({"plan": str(plan)}) as first:
        for length in (1500, 2000):
            generate(first, [prompts[length]], 1)
        prefilled = serving_stats(first).sparse_tokens
    with engine({"dense": True}) as dense:
        generate(dense, [prompts[1100]], 1)
        answers = {2000: tokens_and_logprobs(generate(dense, [prompts[2000]])[0])}
        hits = next(metric.value for metric in dense.get_metrics() if metric.name == HITS)
    with engine({"plan": str(plan)}) as second:
        for length in (1500, 1100):
            answers[length] = tokens_and_logprobs(generate(second, [prompts[length]])[0])
        stats = serving_stats(second)
    return Found([answers[length] for length, *_ in ASKED], hits, prefilled, stats.decode_sparse, stats.sparse_tokens)


def handed_on(first: Oracle, second: Oracle, prompt: list[int], loaded: int) -> Answer:
    """The answer of the second host to a prompt that the first one computed at once."""
    with torch.no_grad():
        with first.applied() as handle:
            _, cache = first.piece(torch.tensor([prompt]), None, 0, handle)
            given = list(handed_over(cache, loaded))
        with second.applied() as handle:
            cache = dense_cache(given) if handle is None else cache_of(handle, given)
            out, cache = second.piece(torch.tensor([prompt[loaded:]]), cache, loaded, handle)
            new, logprobs = [], []
            for _ in range(NEW):
                best = out.logits[0, -1].log_softmax(0).max(0)
                new.append(int(best.indices))
                logprobs.append(float(best.values))
                out = second.model(torch.tensor([new[-1:]]), past_key_values=cache, use_cache=True)
    return Answer(new, logprobs, None)


def dense_cache(given: list[Any]) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(given):
        cache.update(keys, values, layer)
    return cache


def check(found: Found, loaded: Sequence[int], oracles: Mapping[str, Oracle], prompts: Mapping[int, list[int]]) -> None:
    """Raises where an answer is not that of one host that is given the first `loaded` tokens' keys."""
    for (length, first, second), tokens, (new, logprobs) in zip(ASKED, loaded, found.answers, strict=True):
        expected = handed_on(oracles[first], oracles[second], prompts[length], tokens)
        assert new == expected.tokens
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert found.hits == pytest.approx(loaded[1], abs=1)
    tails = [length - tokens for (length, _, second), tokens in zip(ASKED, loaded, strict=True) if second == "second"]
    assert (found.prefilled, found.again) == (1500 + 2000, sum(tail for tail in tails if tail > TILE))
    assert found.decoded == 2 * (NEW - 1)


def test_an_engine_goes_on_with_what_another_left_in_a_folder(
    reference: LoadedModel, plan: Plan, plan_file: Path, sparse: Oracle, dense: Oracle,
    prompts: dict[int, list[int]], kept_engines: list[Any], tmp_path: Path,
) -> None:  # fmt: skip
    """As one host that is given its keys."""
    folder = {"shared_storage_path": str(tmp_path / store_name(plan))}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": folder}
    settings = CHUNK | {"kv_transfer_config": connector}
    found = one_after_another(str(reference.model.name_or_path), plan_file, prompts, settings, kept_engines)
    whole_pages = [(length - 2) // PAGE * PAGE for length, *_ in ASKED]
    check(found, whole_pages, {"first": sparse, "second": sparse, "dense": dense}, prompts)
