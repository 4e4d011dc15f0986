"""A prompt that one engine prefills and another decodes, with the plan on both or either."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from vllm_engine import NEW, TILE, Answer, Oracle

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.cache import handed_over
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.connectors import store_name

PAGE = 128
# Of each request: the length of its prompt, and which engine prefills it and which goes on.
ASKED = ((1500, "first", "second"), (2700, "first", "dense"), (2000, "dense", "second"))
CONNECTED = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    sys.path.insert(0, {support!r})
    from vllm import SamplingParams
    from vllm_engine import make_engine, tokens_of
    from sparsekv.runtime.vllm.counters import serving_stats

    def ask(engine, prompt, new, params):
        asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0,
                               extra_args=params and {{"kv_transfer_params": params}})
        return engine.generate([{{"prompt_token_ids": prompt}}], asked, use_tqdm=False)[0]

    engines = {{}}
    for number, name in enumerate(("first", "second", "dense")):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str({port} + number)  # which a process of its own takes with it
        options = {{"dense": True}} if name == "dense" else {{"plan": {plan!r}}}
        engines[name] = make_engine({model!r}, max_num_batched_tokens=3072, additional_config={{"sparsekv": options}},
                                    kv_transfer_config={transfer})
    found = []
    for prompt, first, second in {asked}:
        done = ask(engines[first], prompt, 1, {remote})
        output = ask(engines[second], prompt, {new}, done.kv_transfer_params)
        chosen = output.outputs[0]
        found.append([tokens_of(output), [at[t].logprob for at, t in zip(chosen.logprobs, chosen.token_ids)]])
    hits = next(m.value for m in engines["dense"].get_metrics() if m.name == "vllm:external_prefix_cache_hits")
    stats = [serving_stats(engines[name]) for name in ("first", "second")]
    with open({out!r}, "w") as file:  # the engines' processes print as well
        json.dump([found, hits, stats[0].sparse_tokens, stats[1].decode_sparse, stats[1].sparse_tokens], file)
"""


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


@pytest.mark.timeout(900)  # three engines, each in processes of its own
@pytest.mark.parametrize(
    "connector",
    [
        "ExampleConnector",
        pytest.param(
            "NixlConnector",
            marks=pytest.mark.skipif(find_spec("nixl") is None, reason="pip install --no-deps nixl nixl-cu12"),
        ),
    ],
)
def test_an_engine_goes_on_with_what_another_prefilled_as_one_host_that_is_given_its_keys(
    connector: str, reference: LoadedModel, plan: Plan, plan_file: Path, sparse: Oracle, dense: Oracle,
    prompts: dict[int, list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    nixl = connector == "NixlConnector"
    options = {} if nixl else {"shared_storage_path": str(tmp_path / store_name(plan))}
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}
    remote = {"do_remote_decode": True, "do_remote_prefill": False} if nixl else None
    out = tmp_path / "found.json"
    script = CONNECTED.format(
        support=str(Path(__file__).parents[1] / "support"), plan=str(plan_file), new=NEW, remote=remote, port=15600,
        model=str(reference.model.name_or_path), transfer=transfer, out=str(out),
        asked=[(prompts[length], *engines) for length, *engines in ASKED],
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", script], check=True)
    found, hits, prefilled, decoded, again = json.loads(out.read_text())
    loaded = [length - 1 if nixl else (length - 2) // PAGE * PAGE for length, *_ in ASKED]
    oracles = {"first": sparse, "second": sparse, "dense": dense}
    for (length, first, second), tokens, (new, logprobs) in zip(ASKED, loaded, found, strict=True):
        expected = handed_on(oracles[first], oracles[second], prompts[length], tokens)
        assert new == expected.tokens
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert hits == pytest.approx(loaded[1], abs=1), "of the engine that was made last, whose metrics vLLM shows"
    tails = [length - tokens for (length, _, second), tokens in zip(ASKED, loaded, strict=True) if second == "second"]
    assert (prefilled, again) == (1500 + 2700, sum(tail for tail in tails if tail > TILE))
    assert decoded == 2 * (NEW - 1)
