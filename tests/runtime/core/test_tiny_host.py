"""A host without transformers, with pages and rows of different lengths, runs a plan through the core."""

import math

import pytest
import torch
from plans_samples import model_info
from tiny_host import SCALE, SIZE, TinyHost
from tiny_plans import decode_plan, segment

from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import ShapeError
from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program

HEADS, KV_HEADS = 4, 2
MODEL = model_info(4, HEADS, KV_HEADS)
PART = segment(0, (2, 3), 12, sink=3, recent=5)
PLAN = DecodePlan(
    lengths=(DecodeBucket(up_to=40, dense=True), DecodeBucket(up_to=None, segments=(PART,))),
)
PROMPTS = (100, 30, 45)  # sparse, dense by its bucket, and one that is cut in two
STEPS = 8


def embedded(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, HEADS * SIZE, generator=torch.Generator().manual_seed(seed))


def brute_force(host: TinyHost, prompt: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new tokens' outputs, row by row, with every mask written out."""
    x, keys = torch.cat((prompt, new)), len(prompt) + len(new)
    masks = torch.ones(len(x), keys).tril().bool().expand(HEADS, -1, -1).clone()
    for layer, (w_q, w_k, w_v) in enumerate(host.weights):
        q, k, v = (x @ w for w in (w_q, w_k, w_v))
        q, k, v = (y.unflatten(1, (-1, SIZE)).transpose(0, 1) for y in (q, k, v))
        k, v = (y[:KV_HEADS].repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        scores = (q @ k.mT * SCALE).masked_fill(~torch.ones(len(x), keys).tril().bool(), -math.inf)
        if layer == PART.filter:
            for row in range(len(prompt), len(x)):
                masks[:, row] = selected(scores[:, row, : row + 1], keys)
        mask = masks if layer in PART.layers else torch.ones(len(x), keys).tril().bool()
        x = x + (scores.masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
    return x[len(prompt) :]


def selected(scores_HS: torch.Tensor, keys: int) -> torch.Tensor:
    """What one decode step may see, [keys]."""
    length, seen = scores_HS.shape[1], torch.zeros(keys, dtype=torch.bool)
    if length <= 40 or length <= 3 + 12 + 5:
        seen[:length] = True
        return seen
    best = scores_HS.softmax(-1).amax(0)[3 : length - 5].topk(12).indices + 3
    seen[best], seen[:3], seen[length - 5 : length] = True, True, True
    return seen


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on the device"])
def test_a_batch_of_mixed_lengths_in_pages_decodes_as_the_plan_says(known: bool):
    host = TinyHost(Program.of(None, PLAN, MODEL), MODEL, len(PROMPTS), known=known)
    prompts = [embedded(row, count) for row, count in enumerate(PROMPTS)]
    host.prompt(0, prompts[0])
    host.prompt(1, prompts[1])
    host.prompt(2, prompts[2][:20])
    host.prompt(2, prompts[2][20:])
    new = torch.stack([embedded(10 + row, STEPS) for row in range(3)], 1)
    found = torch.stack([host.step(x_BE) for x_BE in new])
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(found[:, row], brute_force(host, prompt, new[:, row]), atol=1e-4, rtol=1e-4)
    share = host.meter.read().decode_share
    assert (0.5 < share < 1.0) if known else share is None


def test_prefill_says_that_it_takes_contiguous_keys():
    program = Program.of(None, decode_plan(PART), MODEL)
    pages, table_BP = torch.zeros(4, KV_HEADS, 16, SIZE), torch.zeros((1, 4), dtype=torch.int32)
    keys = KeyView(pages, pages, torch.tensor([10], dtype=torch.int32), table_BP)
    with pytest.raises(ShapeError, match="contiguous"):
        prefill(program.layers[0], torch.zeros(1, 4, 10, SIZE), keys, Chunk((0,), (10,)), scale=1.0, fallback=None)
