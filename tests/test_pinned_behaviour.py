"""What must stay as it is through every rewrite: the bytes of compiled plans, and the outputs of two hosts.

A pin that is changed on purpose is replaced by what the failing test left in its `tmp_path`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_samples import model_info
from tiny_host import SIZE, TinyHost
from tiny_plans import segment
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sparsekv
from sparsekv.planner.job import job_of_profile
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.records import read_measured
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.runtime.core.program import Program

DATA = Path(__file__).parent / "data"
FAMILIES = {
    "a_shape": AShape(sink=tokens(64), window=tokens(192)),
    "vertical_slash": VerticalSlash(vertical=tokens(48), slash=tokens(3), max_tiles=fraction(0.6)),
    "block_sparse": BlockSparse(keep=fraction(0.4)),
}
NEW = 8
COMPILED: dict[str, dict[str, Any]] = {
    "default": {},
    "density": {"phases": "prefill", "target_density": "0.7"},
    "lines": {"families": "vertical_slash", "target_density": "0.7,0.5"},
    "loss": {"phases": "decode", "decode_budget": "256", "loss": 0.1},
    "fixed_filters": {"phases": "decode", "filter_layers": "1,6", "offload": True},
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_plan_compiled_from_a_profile_has_the_bytes_it_had(name: str, tmp_path: Path):
    asked = PlanOptions(lengths="2k,4k", verify="none", **COMPILED[name])
    profile = read_measured(Profile, DATA / "profile.json")
    write_plan(compile_plan(job_of_profile("tiny-retriever", asked, profile)).plan, tmp_path / "plan.yaml")
    digests = ("integrity:", "  versions:", "  profile:", "  device_cost:")  # of releases and of the files read
    lines = (tmp_path / "plan.yaml").read_text().splitlines(keepends=True)
    found = "".join(line for line in lines if not line.startswith(digests))
    (tmp_path / f"{name}.yaml").write_text(found)
    assert found == (DATA / "compiled" / f"{name}.yaml").read_text()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_pinned(host: str, family: str, found: dict[str, Any], tmp_path: Path) -> None:
    """Numbers to 1e-4, tokens exactly."""
    (tmp_path / f"{host}.json").write_text(json.dumps({family: found}))
    pinned = json.loads((DATA / f"{host}.json").read_text())[family]
    assert found.keys() == pinned.keys()
    for name, values in found.items():
        if name == "tokens":
            assert values == pinned[name]
        else:
            torch.testing.assert_close(torch.tensor(values), torch.tensor(pinned[name]), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def retriever() -> tuple[PreTrainedModel, torch.Tensor]:
    """The shipped model and a prompt of 762 tokens."""
    folder = resolve_model("tiny-retriever").path_or_id
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (DATA / "prompt.txt").read_text()
    return model, AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids


def test_the_reference_model_computes_what_it_did(retriever, family: str, tmp_path: Path):
    model, prompt = retriever
    with sparsekv.apply(model, sparsekv.load_plan(DATA / f"{family}.sparsekv.yaml"), backend="cpu") as handle:
        with torch.no_grad():
            prefill = model(prompt).logits[0, [100, 300, 500, 761], ::512]
        prefill_density = handle.stats().prefill_density
        out = model.generate(
            prompt,
            max_new_tokens=NEW + 1,
            min_new_tokens=NEW + 1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        decode = torch.stack([logits[0, ::512] for logits in out.logits])
        shares = [prefill_density, handle.stats().decode_share]
    assert all(0.1 < share < 0.9 for share in shares)
    new = out.sequences[0, prompt.shape[1] :].tolist()
    found = {"prefill": prefill.tolist(), "decode": decode.tolist(), "shares": shares, "tokens": new}
    assert_pinned("tiny_retriever", family, found, tmp_path)


def embedded(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 4 * SIZE, generator=torch.Generator().manual_seed(seed))


def test_the_tiny_host_computes_what_it_did(family: str, tmp_path: Path):
    model = model_info(4)
    heads = tuple(HeadGroup(layer=layer, heads=(0, 1, 3), pattern=FAMILIES[family]) for layer in range(4))
    prefill = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=heads),))
    part = segment(0, (1, 2, 3), 40, sink=4, recent=16)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=128, dense=True), DecodeBucket(up_to=None, segments=(part,))))
    host = TinyHost(Program.of(prefill, decode, model), model, rows=2, pages=48)
    long, cut = embedded(0, 700), embedded(1, 610)
    seen = [host.prompt(0, long)[::100, :4], host.prompt(1, cut[:256])[::100, :4], host.prompt(1, cut[256:])[::100, :4]]
    steps = torch.stack([host.step(x_BE) for x_BE in embedded(2, 2 * NEW).view(NEW, 2, -1)])
    stats = host.meter.read()
    found = {
        "prefill": torch.cat(seen).tolist(),
        "decode": steps[..., :4].tolist(),
        "shares": [stats.prefill_density, stats.decode_share],
    }
    assert_pinned("tiny_host", family, found, tmp_path)
