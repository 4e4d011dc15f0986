"""A document of 100K tokens that comes back from host memory, or from another engine, and decodes by the plan in
captured graphs. Needs an NVIDIA GPU, and takes two for two engines where there are two. Each engine is in processes of
its own, as vLLM has one connector in a process."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm_engine import TILE

from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import parse
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.settings import TO_HOST, store_name

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
PAGE, LENGTH, NEW = 16, 100_000, 32
RULE = f"prefill=0x{TILE} decode=0x1"  # whatever a device measures: a tiny model gains nothing
ROOM = 400  # pages beyond one document, so that a second one has to take those of the first
SCRIPT = """
import json, os, sys
if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
                      VLLM_USE_FLASHINFER_SAMPLER="0")
    sys.path.insert(0, {support!r})
    from vllm import SamplingParams
    from vllm_engine import make_engine, tokens_of
    from sparsekv.runtime.vllm.engine_host import serving_stats

    def ask(engine, prompt, new={new}, params=None):
        asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0,
                               extra_args=params and {{"kv_transfer_params": params}})
        return engine.generate([{{"prompt_token_ids": prompt}}], asked, use_tqdm=False)[0]

    def engine(number=0, transfer={transfer}):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % {devices})
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(15700 + number)
        return make_engine(
            {model!r}, dtype="bfloat16", hf_overrides={{"max_position_embeddings": 1 << 17}},
            max_model_len={length} + 96, max_num_batched_tokens={step}, num_gpu_blocks_override={blocks},
            gpu_memory_utilization=0.3, enforce_eager=False,
            compilation_config={{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
            additional_config={{"sparsekv": {{"plan": {plan!r}, "sparse": {rule!r}}}}}, kv_transfer_config=transfer)

    def loaded(engine):
        name = "vllm:external_prefix_cache_hits"
        return next((metric.value for metric in engine.get_metrics() if metric.name == name), 0)

    with open({asked!r}) as file:
        first, second = json.load(file)
{body}
    found = [[tokens_of(one), one.outputs[0].cumulative_logprob] for one in (expected, output)]
    with open({out!r}, "w") as file:
        json.dump([*found, hits, stats.decode_sparse], file)
"""
BACK = """
    other, one = engine(transfer=None), engine()  # vLLM shows the counts of the engine that was made last
    turn = first + second[:40]
    ask(other, first)
    expected = ask(other, turn)  # behind the same keys, which the device has cached
    ask(one, first), ask(one, second)
    output = ask(one, turn)
    hits, stats = loaded(one), serving_stats(one)
"""
HANDED_OVER = """
    one, other = engine(0), engine(1)
    done = ask(one, first, 1, {remote})
    output = ask(other, first, params=done.kv_transfer_params)
    hits, stats = loaded(other), serving_stats(other)
    expected = ask(one, first)
"""


def run(body: str, folder: Path, model: str, plan: Path, transfer: Any, documents: list[list[int]]) -> list[Any]:
    asked, out = folder / "asked.json", folder / "found.json"
    asked.write_text(json.dumps(documents))
    script = SCRIPT.format(
        support=str(Path(__file__).parents[1] / "support"), model=model, plan=str(plan), transfer=transfer, body=body,
        length=LENGTH, step=8192 if body == BACK else LENGTH + 96, new=NEW, asked=str(asked), out=str(out),
        rule=RULE, blocks=LENGTH // PAGE + ROOM, devices=min(2, torch.accelerator.device_count()),
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", script], check=True)
    return json.loads(out.read_text())


def documents(count: int) -> list[list[int]]:
    """Two random ones, each `count` tokens behind whole pages."""
    return [Random(seed).choices(range(8, 4096), k=LENGTH // PAGE * PAGE - PAGE + count) for seed in range(2)]


@pytest.mark.parametrize("connector", TO_HOST)
def test_pages_of_an_idle_session_come_back_from_host_memory_for_its_next_turn_which_decodes_sparse(
    connector: str, reference: LoadedModel, plan_file: Path, tmp_path: Path
) -> None:
    options = {"cpu_bytes_to_use": 4 << 30}
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}
    model = str(reference.model.name_or_path)
    expected, found, hits, decoded = run(BACK, tmp_path, model, plan_file, transfer, documents(1))
    assert hits > LENGTH - (ROOM + 1) * PAGE
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=0.1)
    assert decoded == 3 * (NEW - 1)


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
def test_a_document_that_another_engine_prefilled_decodes_sparse(
    connector: str, reference: LoadedModel, plan: Plan, plan_file: Path, tmp_path: Path
) -> None:
    nixl = connector == "NixlConnector"
    options = {} if nixl else {"shared_storage_path": str(tmp_path / store_name(plan, parse(RULE)))}
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options}
    remote = {"do_remote_decode": True, "do_remote_prefill": False} if nixl else None
    body, asked = HANDED_OVER.format(remote=remote), documents(1 if nixl else 2)  # the last rows are computed again
    expected, found, hits, decoded = run(body, tmp_path, str(reference.model.name_or_path), plan_file, transfer, asked)
    assert hits >= len(asked[0]) - 2
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=0.1)
    assert decoded == NEW - 1
