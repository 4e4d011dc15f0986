"""The same on a GPU, in half precision, with pinned memory."""

from dataclasses import replace

import pytest
import torch
from tiny_models import TYPICAL, random_tokens, steady_model, tiny_model
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, plan_for, segment

from sparsekv.kernels.decode.selection import Selection
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens
from sparsekv.runtime.core.pays import parse
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.timed_model import ModelLayers, measured_rule
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.host import Reads

pytestmark = pytest.mark.gpu
FULL = (
    AShape(sink=tokens(1), window=fraction(1.0)),
    BlockSparse(keep=fraction(1.0)),
    VerticalSlash(vertical=fraction(1.0), slash=fraction(1.0), max_tiles=fraction(1.0)),
    Dense(),
)


@pytest.fixture(scope="module", params=TYPICAL)
def model(request):
    return steady_model(request.param).cuda()


def logits(model, prompt, new):
    cache, seen = None, []
    with torch.no_grad():
        for piece in (prompt, *new.split(1, 1)):
            out = model(piece, past_key_values=cache, logits_to_keep=1)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1).float()


def test_full_density_gives_the_dense_logits(model):
    prompt, new = random_tokens(2, 700).cuda(), random_tokens(2, 5, 1).cuda()
    dense = logits(model, prompt, new)
    plan = plan_for(model, every_head(model, *FULL), decode_plan(segment(0, (1, 2), EVERYTHING)))
    with apply(model, plan) as handle:
        sparse = logits(model, prompt, new)
    assert handle.backend.name == "triton"
    assert handle.stats().prefill_density == 1.0
    assert (sparse - dense).norm() / dense.norm() < 0.03


@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
def test_layers_that_drop_tokens_keep_the_same_ones_in_captured_steps_and_free_memory(heads):
    prompt, new = random_tokens(2, 3000).cuda(), random_tokens(2, 20, 1).cuda()
    model = tiny_model(head_dim=64, dtype=torch.bfloat16, layers=6).cuda()
    plan = plan_for(model, None, None, drops((1, 2, 3, 4, 5), 200, generated=8, observe=64, heads=heads))
    with apply(model, plan, backend="triton") as handle:
        found = logits(model, prompt, new)
        assert (handle.steps.replayed, handle.steps.why_not) == (20, "")
        token = 2 * 2 * 2 * 64 * 2
        assert handle.stats().kv_bytes_device < (3400 + 5 * 213) * token
    with apply(model, plan, backend="reference") as handle:
        assert (logits(model, prompt, new) - found).norm() / found.norm() < 0.03


def test_memory_that_a_prompt_of_generate_takes_on_its_way():
    model = tiny_model(head_dim=64, dtype=torch.bfloat16, layers=12, context=1 << 17).cuda()
    plan = plan_for(model, None, None, drops(tuple(range(1, 12)), 500, generated=8))
    prompt, peaks = random_tokens(1, 100_000).cuda(), []
    for decode in (False, True):
        with torch.no_grad(), apply(model, plan, decode=decode) as handle:
            handle._engine.paging = replace(handle._engine.paging, pools={})  # pages are not counted there
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            model.generate(prompt, max_new_tokens=2)
            peaks.append(torch.cuda.max_memory_allocated())
    kv = 12 * 100_000 * 2 * 2 * 64 * 2
    assert peaks[1] < peaks[0] - 0.7 * kv


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("offload", [(), (1, 2)], ids=["device", "host"])
def test_a_model_spread_over_two_devices_decodes_as_on_one(offload):
    prompt, new = random_tokens(2, 300).cuda(), random_tokens(2, 5, 1).cuda()
    found = []
    for second in ("cuda:0", "cuda:1"):
        model = tiny_model(head_dim=64, dtype=torch.bfloat16).cuda()
        spread(model, (1,), second)
        plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 60), offload=offload))
        with apply(model, plan):
            found.append(logits(model, prompt, new))
    assert torch.equal(*found)


def spread(model, layers, device):
    """Moves these layers, and what they are called with; as loading with a device map does."""

    def moved(value, to):
        return tuple(moved(part, to) for part in value) if isinstance(value, tuple) else (
            value.to(to) if isinstance(value, torch.Tensor) else value
        )  # fmt: skip

    for layer in (model.base_model.layers[number].to(device) for number in layers):
        layer.register_forward_pre_hook(
            lambda _, args, options: (moved(args, device), {name: moved(x, device) for name, x in options.items()}),
            with_kwargs=True,
        )
        layer.register_forward_hook(lambda _, args, output: moved(output, "cuda:0"))


def test_a_decode_step_on_the_device_does_not_wait_for_it(model):
    if model.dtype == torch.float32:
        pytest.skip("torch's grouped products of experts wait in float32")
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 60, selector="uniform", window=4)))
    new = random_tokens(1, 4, 1).cuda()
    with torch.no_grad(), apply(model, plan):
        cache = model(random_tokens(1, 700).cuda()).past_key_values
        model(new[:, :1], past_key_values=cache)  # kernels compile
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in new[:, 1:].split(1, 1):
                model(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_padding_in_the_mask_of_a_decode_step_is_refused(model):
    with torch.no_grad(), apply(model, plan_for(model)):
        cache = model(random_tokens(1, 100).cuda()).past_key_values
        padded = torch.ones((1, 101), dtype=torch.long, device="cuda")
        padded[0, 3] = 0
        with pytest.raises(UnsupportedError, match="attention_mask"):
            model(random_tokens(1, 1).cuda(), past_key_values=cache, attention_mask=padded)


@pytest.mark.parametrize("hot", [tokens(0), tokens(100), fraction(0.3)], ids=str)
def test_pinned_memory_holds_what_was_moved(hot):
    whole, moved = DeviceStore(), HostStore(hot, None, Reads((tokens(64),), 4, 10))
    for count in (3000, 1, 1, 500, *[1] * 300):
        k, v = torch.randn(2, 2, 2, count, 64, device="cuda", dtype=torch.bfloat16)
        whole.append(k, v)
        moved.append(k, v)
    length, counts_B = whole.length, torch.full((2,), 64, dtype=torch.int32, device="cuda")
    lengths_B = torch.full((2,), length, dtype=torch.int32, device="cuda")
    there, back = whole.view(lengths_B), moved.view(lengths_B)
    assert torch.equal(there.k[:, :, :length], back.k)
    assert torch.equal(there.v[:, :, :length], back.v)
    chosen = torch.stack([torch.randperm(length - 14, device="cuda")[:64].sort().values + 4 for _ in range(2)])
    keys, found, _ = moved.gather(Selection(chosen.int()[:, None], counts_B, 4, 10), lengths_B)
    for b in range(2):
        ends = torch.arange(4, device="cuda"), torch.arange(length - 10, length, device="cuda")
        wanted = torch.cat((ends[0], chosen[b], ends[1]))
        at = found.chosen_BgN[b, 0].long()
        assert torch.equal(keys.k[b][:, at], there.k[b][:, wanted])
        assert torch.equal(keys.v[b][:, at], there.v[b][:, wanted])
    assert moved.rows.on_host.is_pinned()
    assert moved.bytes.device < whole.bytes.device


def test_where_a_plan_is_faster_is_measured_once(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "sparsekv.runtime.hf.timed_model._SECONDS", 120.0
    )  # a rule for which time was short is not kept
    pattern = VerticalSlash(vertical=tokens(64), slash=tokens(64), max_tiles=tokens(256))
    plan = plan_for(model, every_head(model, pattern), decode_plan(segment(0, (1, 2), 64)))
    program = Program.of(plan.prefill, plan.decode, plan.model)
    here = (plan, program, plan.model, model, "triton", False)
    rule = measured_rule(*here)
    assert parse(str(rule)) == rule
    (file,) = (tmp_path / "sparsekv").glob("pays-*.json")
    assert str(rule) in file.read_text()
    monkeypatch.setattr(ModelLayers, "compiled_rule", lambda *given: pytest.fail("measured again"))
    assert measured_rule(*here) == rule
