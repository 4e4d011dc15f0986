"""Attention of long inputs: each head its pattern at every offset, in turns, in groups of heads, on either store."""

import math

import pytest
import torch
from masks import brute_heads, brute_mask
from tiny_models import random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment
from transformers import DynamicCache

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.observe import capture_attention

CUT = Chunking(above=20, rows=17, output_bytes=1)  # a group of heads at a time
WHOLE = Chunking(above=1 << 30)
TILE = 64


def close(found, expected):
    return (found - expected).norm() <= 2e-4 * expected.norm()


def talk(model, cache):
    said = random_tokens(1, 70)
    for turn in range(3):
        out = model.generate(said, past_key_values=cache, max_new_tokens=5, do_sample=False, return_dict_in_generate=1)
        cache = out.past_key_values
        said = torch.cat((out.sequences, random_tokens(1, 33, seed=turn)), 1)
    return said


@pytest.mark.parametrize("hosts", [0, 2, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_turns_pieces_and_batches_give_the_tokens_of_the_dense_model(architecture, hosts, cuts):
    model = tiny_model(architecture)
    plan = plan_for(model, every_head(model, Dense(), BlockSparse(keep=fraction(1.0))), everything())
    expected = talk(model, DynamicCache())
    prompt = random_tokens(2, 150)
    batch = model.generate(prompt, max_new_tokens=5, do_sample=False)
    with apply(model, plan, chunking=CUT, kv_host_layers=hosts) as handle:
        assert torch.equal(talk(model, DynamicCache()), expected)
        for chunk in (None, 37, 64):
            found = model.generate(prompt, max_new_tokens=5, do_sample=False, prefill_chunk_size=chunk)
            assert torch.equal(found, batch), chunk
    assert handle.stats().decode_share == 1.0
    assert (handle.stats().kv_bytes_host > 0) == (hosts > 0)
    assert len(cuts) > 20


def everything():
    return decode_plan(segment(0, (1, 2), EVERYTHING), offload=(1, 2), hot=16)


PATTERNS = (
    VerticalSlash(vertical=tokens(9), slash=tokens(20), max_tiles=tokens(192)),
    AShape(sink=tokens(5), window=tokens(40)),
    BlockSparse(keep=tokens(128)),
    Dense(),
)


class BruteForce:
    """The plan's patterns as an observer of a dense model, from the definitions: every head its own."""

    def __init__(self, patterns, tile):
        self.patterns, self.tile, self.calls = patterns, TileShape(query=tile, key=tile), 0

    def __call__(self, call):
        self.calls += 1
        place = {"scale": call.scale, "window": call.window}
        rows = brute_heads(self.patterns, call.q_BHSD, call.k_BGKD, call.chunk, self.tile, **place)
        mask = brute_mask(rows, call.chunk, self.tile, call.q_BHSD.shape[2], call.window)
        k, v = (x.repeat_interleave(2, 1) for x in (call.k_BGKD, call.v_BGKD))
        scores = torch.einsum("bhsd,bhkd->bhsk", call.q_BHSD, k) * call.scale
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def in_turns(model, prompt, turns):
    cache, seen = None, []
    with torch.no_grad():
        for piece in prompt.tensor_split(turns, 1):
            out = model(piece, past_key_values=cache)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1)


@pytest.mark.parametrize("hosts", [0, (0, 2)], ids=["device", "host"])
@pytest.mark.parametrize("turns", [(), (101,), (70, 133, 231)], ids=str)
def test_every_head_computes_its_own_pattern_at_every_offset(turns, hosts, cuts):
    model, prompt = tiny_model(layers=3), random_tokens(1, 300)
    brute = BruteForce(PATTERNS, TILE)
    with capture_attention(model, brute):
        expected = in_turns(model, prompt, turns)
    plan = plan_for(model, every_head(model, *PATTERNS, tile=TILE), everything())
    with apply(model, plan, chunking=CUT, kv_host_layers=hosts) as handle:
        torch.testing.assert_close(in_turns(model, prompt, turns), expected, atol=3e-4, rtol=3e-4)
        stats = handle.stats()
    assert brute.calls == 3 * (len(turns) + 1)
    assert len(cuts) == brute.calls
    assert stats.prefill_density < 0.95
    assert not close(in_turns(model, prompt, turns), expected)  # what is left out matters
    assert (stats.kv_bytes_host > 0) == bool(hosts)


@pytest.mark.parametrize(("output_bytes", "groups"), [(1, 2), (2 * 200 * 2 * 32 * 4, 2), (1 << 40, 1)])
def test_groups_of_heads_compute_and_count_what_all_together_do(output_bytes, groups):
    model, prompt = tiny_model(), random_tokens(2, 200)
    plan = plan_for(model, every_head(model, *PATTERNS, tile=TILE))
    with torch.no_grad(), apply(model, plan, chunking=WHOLE) as handle:
        expected, density = model(prompt).logits, handle.stats().prefill_density
    with torch.no_grad(), apply(model, plan, chunking=Chunking(20, 33, output_bytes)) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, atol=2e-4, rtol=2e-4)
        assert handle.stats().prefill_density == density < 0.95
    layer, q = Program.of(plan.prefill, None, plan.model).layers[0], torch.randn(2, 4, 200, 32)
    keys, chunk, fallback = full_view(*torch.randn(2, 2, 2, 200, 32)), Chunk.uniform(2, 0, 200), Fallback("cpu")
    whole = prefill(layer, q, keys, chunk, scale=0.2, fallback=fallback)
    given = q.clone()
    found = prefill(layer, given, keys, chunk, scale=0.2, fallback=fallback, overwrite_above=output_bytes)
    assert (found.data_ptr() == given.data_ptr()) == (groups > 1)
    assert torch.equal(found, whole)
