"""What each layer of any plan is in decode, and that every role verifies drafts by dense attention."""

import torch
from hypothesis import given
from plans_samples import model_info
from plans_strategies import KV_HEADS, LAYERS, decode_plans
from tiny_plans import decode_plan, drops, segment

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.keys import KeyView
from sparsekv.plans.phases import DecodePlan
from sparsekv.runtime.core.program import Program, count_step, decode
from sparsekv.runtime.core.roles import DENSE, Evicting, Filter, Follower, Role
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.store import Resident

MODEL = model_info(LAYERS, 2 * KV_HEADS, KV_HEADS)
MIXED = Program.of(
    None,
    decode_plan(segment(0, (0, 1), 4), segment(2, (3,), 4, heads="per_kv_head")),
    model_info(6, 4, 2),
    evicting={5: drops((5,), 8)},
)


@given(decode_plans())
def test_a_layer_chooses_follows_or_is_dense_as_the_segments_say(plan: DecodePlan) -> None:
    segments = next((bucket.segments for bucket in plan.lengths if bucket.segments), ())
    program = Program.of(None, plan, MODEL)
    assert program.segments == tuple(program.layers[one.filter].role.segment for one in segments)
    for layer in program.layers:
        role, mine = layer.role, [one for one in segments if layer.layer in (one.filter, *one.layers)]
        for one in mine:
            assert role.segment.filter == one.filter
            assert (role.filters is not None) == (one.filter == layer.layer)
            assert (role.follows is None) == (layer.layer not in one.layers)
        assert (role is DENSE) == (not mine)


@given(decode_plans())
def test_layers_are_counted_with_the_tokens_that_the_plan_says_they_read(plan: DecodePlan) -> None:
    program = Program.of(None, plan, MODEL)
    for length in (1, 700, 40_000):
        count_step(program, [length], meter := Meter())
        read = dict.fromkeys(range(LAYERS), length)
        for one in plan.bucket(length).segments:
            read |= {layer: one.read_tokens(layer, length) for layer in one.layers}
        assert meter.read().decode_tokens_attended == sum(read.values())


def test_every_role_verifies_a_draft_by_dense_attention() -> None:
    source = torch.Generator().manual_seed(0)
    q_BHQD, k_BGSD = (torch.randn(2, heads, tokens, 8, generator=source) for heads, tokens in ((4, 3), (2, 64)))
    lengths_B = torch.tensor([50, 64], dtype=torch.int32)
    keys, state = KeyView(k_BGSD, k_BGSD, lengths_B), DecodeState(MIXED.segments)
    state.begin(lengths_B, lengths_B.device)
    expected = decode_attention(q_BHQD, keys, scale=0.3, backend="cpu").out_BHSD
    kinds = {type(layer.role) for layer in MIXED.layers}
    assert kinds == {Role, Filter, Follower, Evicting}
    for layer in MIXED.layers:
        out = decode(layer, q_BHQD, Resident(keys), state, scale=0.3, backend="cpu", verifies=True)
        assert torch.equal(out, expected)


def test_what_verifies_runs_the_layers_that_do_not_choose_or_follow_unchanged() -> None:
    kinds = [type(layer.role) for layer in MIXED.dense_in_decode.layers]
    assert kinds == [Role] * 5 + [Evicting]
