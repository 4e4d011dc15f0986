"""A prompt that one engine prefills and another decodes, with the plan on both or either."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm_engine import NEW, TILE, Answer, Oracle, generate, make_engine, tokens_and_logprobs

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.cache import handed_over
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats
from sparsekv.runtime.vllm.settings import store_name

PAGE = 128
# Of each request: the length of its prompt, and which engine prefills it and which goes on.
ASKED = ((1500, "first", "second"), (2700, "first", "dense"), (2000, "dense", "second"))
CHUNK = {"max_num_batched_tokens": 3072}
TOGETHER = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    sys.path.insert(0, {support!r})
    from vllm import SamplingParams
    from vllm_engine import make_engine, tokens_and_logprobs
    from sparsekv.runtime.vllm.engine_host import serving_stats

    def ask(engine, prompt, new, params):
        asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0,
                               extra_args={{"kv_transfer_params": params}})
        return engine.generate([{{"prompt_token_ids": prompt}}], asked, use_tqdm=False)[0]

    engines = {{}}
    for number, name in enumerate(("first", "second", "dense")):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str({port} + number)  # which a process of its own takes with it
        options = {{"dense": True}} if name == "dense" else {{"plan": {plan!r}}}
        engines[name] = make_engine({model!r}, additional_config={{"sparsekv": options}}, **{settings})
    found = []
    for prompt, first, second in {asked}:
        done = ask(engines[first], prompt, 1, {{"do_remote_decode": True, "do_remote_prefill": False}})
        found.append(tokens_and_logprobs(ask(engines[second], prompt, {new}, done.kv_transfer_params)))
    hits = next(m.value for m in engines["dense"].get_metrics() if m.name == {hits!r})
    stats = [serving_stats(engines[name]) for name in ("first", "second")]
    with open({out!r}, "w") as file:  # the engines' processes print as well
        json.dump([found, hits, stats[0].sparse_tokens, stats[1].decode_sparse, stats[1].sparse_tokens], file)
"""
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
        for length in (1500, 2700):
            generate(first, [prompts[length]], 1)
        prefilled = serving_stats(first).sparse_tokens
    with engine({"dense": True}) as dense:
        generate(dense, [prompts[2000]], 1)
        answers = {2700: tokens_and_logprobs(generate(dense, [prompts[2700]])[0])}
        hits = next(metric.value for metric in dense.get_metrics() if metric.name == HITS)
    with engine({"plan": str(plan)}) as second:
        for length in (1500, 2000):
            answers[length] = tokens_and_logprobs(generate(second, [prompts[length]])[0])
        stats = serving_stats(second)
    return Found([answers[length] for length, *_ in ASKED], hits, prefilled, stats.decode_sparse, stats.sparse_tokens)


def beside_each_other(
    model: str, plan: Path, prompts: Mapping[int, list[int]], settings: Mapping[str, Any], out: Path
) -> Found:
    """By engines in processes of their own, which send each other what they prefilled."""
    script = TOGETHER.format(
        support=str(Path(__file__).parents[1] / "support"), plan=str(plan), new=NEW, port=15600, model=model, hits=HITS,
        settings=dict(settings), out=str(out), asked=[(prompts[length], *engines) for length, *engines in ASKED],
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", script], check=True)
    return Found(*json.loads(out.read_text()))


def handed_on(first: Oracle, second: Oracle, prompt: list[int], loaded: int) -> Answer:
    """The answer of the second host to a prompt that the first one computed at once."""
    with torch.no_grad():
        with first.applied() as handle:
            _, cache = first.piece(torch.tensor([prompt]), None, 0, handle)
            given = list(handed_over(cache, loaded))
        with second.applied() as handle:
            cache = dense_cache(given) if handle is None else handle.cache_of(given)
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
    assert (found.prefilled, found.again) == (1500 + 2700, sum(tail for tail in tails if tail > TILE))
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


@pytest.mark.timeout(900)  # three engines, each in processes of its own
@pytest.mark.skipif(find_spec("nixl") is None, reason="pip install --no-deps nixl nixl-cu12")
def test_an_engine_goes_on_with_what_another_sends(
    reference: LoadedModel, plan_file: Path, sparse: Oracle, dense: Oracle, prompts: dict[int, list[int]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """As one host that is given its keys."""
    settings = CHUNK | {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    model = str(reference.model.name_or_path)
    found = beside_each_other(model, plan_file, prompts, settings, tmp_path / "found.json")
    all_but_one = [length - 1 for length, *_ in ASKED]
    check(found, all_but_one, {"first": sparse, "second": sparse, "dense": dense}, prompts)
