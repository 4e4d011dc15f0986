"""Everything that a plan does, on one small model of each family beside the usual ones."""

from contextlib import suppress

import pytest
import torch
from brute_force import BruteForce
from masks import AmbiguousScoresError
from tiny_models import MORE, SHARED, WINDOWED, random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, info_of, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.patterns import AShape, Dense, VerticalSlash, fraction, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

LENGTH, NEW = 90, 3
CUT, WHOLE = Chunking(above=20, rows=33, output_bytes=1), Chunking(above=1 << 30)
FULL = (AShape(sink=tokens(1), window=fraction(1.0)), Dense())
SPARSE = (
    AShape(sink=tokens(1), window=tokens(1)),
    VerticalSlash(vertical=tokens(9), slash=tokens(9), last_q=8, max_tiles=fraction(1.0)),
)
LOCAL = {"layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 2], "sliding_window": 24}


@pytest.fixture(scope="module", params=(*MORE, SHARED))
def model(request):
    options, kinds = dict(LOCAL) if request.param in WINDOWED else {}, LOCAL["layer_types"]
    if request.param == SHARED:
        options |= {"layers": 5, "layer_types": [*kinds, kinds[-1]]}
    return tiny_model(request.param, **{"layers": 4, "head_dim": 16, "hidden": 32, "ffn": 32} | options)


def text_of(length: int, seed: int = 0) -> torch.Tensor:
    """Each token once: where two are alike in a layer without positions, no choice between them is right."""
    return torch.randperm(127, generator=torch.Generator().manual_seed(seed))[None, :length] + 1


def logits(model, pieces) -> torch.Tensor:
    cache = DynamicCache()
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


def followers(model, *evicting: int) -> tuple[int, ...]:
    return tuple(layer for layer in info_of(model).full_layers[1:] if layer not in evicting)


def last_alone(model) -> int:
    """The last layer whose keys no other one reads."""
    info = info_of(model)
    return max({*info.full_layers} - info.sharing)


def sparse_plan(model, *evicting: int):
    own = segment(0, followers(model, *evicting), 9)
    rules = [drops(evicting, 20)] if evicting else []
    return plan_for(model, every_head(model, *SPARSE), decode_plan(own), *rules)


def full_plan(model):
    return plan_for(model, every_head(model, *FULL), decode_plan(segment(0, followers(model), EVERYTHING)))


def by_brute_force(model, plan, sizes: list[int]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """A text whose choices are clear, and its logits by the definitions of the plan."""
    for seed in range(9):
        pieces = text_of(sum(sizes), seed).split(sizes, 1)
        with BruteForce(model, plan), suppress(AmbiguousScoresError):
            return pieces, logits(model, pieces)
    raise AssertionError("expected a text without near ties")


def check_by_brute_force(model, plan, sizes: list[int], **options) -> None:
    pieces, expected = by_brute_force(model, plan, sizes)
    with apply(model, plan, chunking=CUT, **options):
        torch.testing.assert_close(logits(model, pieces), expected, atol=1e-3, rtol=1e-3)


def test_the_layers_with_a_window_are_those_that_the_model_has(model) -> None:
    windowed = model.config.model_type in WINDOWED
    found = [group.kind for _, group in sorted(info_of(model).by_layer.items())]
    assert found == ["full", "sliding" if windowed else "full", *["full"] * (len(found) - 2)]


@pytest.mark.parametrize("chunking", [CUT, WHOLE], ids=["cut", "whole"])
def test_a_plan_that_covers_everything_gives_the_logits_of_the_unmodified_model(model, chunking) -> None:
    text = text_of(LENGTH + NEW)
    with torch.no_grad():
        dense = model(text).logits
    with apply(model, full_plan(model), chunking=chunking):
        found = logits(model, text.split([LENGTH, *[1] * NEW], 1))
    torch.testing.assert_close(found, dense, atol=1e-3, rtol=1e-3)


def test_two_turns_in_pieces_with_a_layer_in_host_memory_are_those_of_brute_force(model) -> None:
    check_by_brute_force(model, sparse_plan(model), [60, 20, 1, 1, 10, 1], kv_host_layers=[2])


def test_a_layer_that_evicts_attends_to_what_brute_force_leaves(model) -> None:
    check_by_brute_force(model, sparse_plan(model, last_alone(model)), [LENGTH, 1, 1, 1])


def test_drafts_that_dense_attention_verifies_are_its_own_tokens(model) -> None:
    prompt = text_of(LENGTH)
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    dense = model.generate(prompt, **ask)
    with apply(model, sparse_plan(model), exact=True):
        assert torch.equal(model.generate(prompt, **ask), dense)


def test_a_padded_batch_gives_the_tokens_of_the_unmodified_model(model) -> None:
    rows = random_tokens(2, LENGTH)
    rows[1, :30] = 0
    ask = {"attention_mask": (rows != 0).long(), "max_new_tokens": NEW, "do_sample": False}
    dense = model.generate(rows, **ask)
    with apply(model, full_plan(model)):
        assert torch.equal(model.generate(rows, **ask), dense)
