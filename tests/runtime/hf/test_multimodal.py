"""Text through a multimodal checkpoint: its decoder loaded alone, and a plan on the whole model."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree
from typing import NamedTuple

import pytest
import torch
from model_folders import save_model
from safetensors.torch import save_file
from tiny_models import random_tokens
from tiny_multimodal import KINDS, multimodal_config, multimodal_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import AShape, Dense, VerticalSlash, fraction, tokens
from sparsekv.runtime.architecture import MODALITIES
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel, load_config, load_model
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.model_config import describe_config

CUT = Chunking(above=20, rows=33, output_bytes=1)
SPARSE = (
    AShape(sink=tokens(1), window=tokens(1)),
    VerticalSlash(vertical=tokens(9), slash=tokens(9), last_q=8, max_tiles=fraction(1.0)),
)
FULL = (AShape(sink=tokens(1), window=fraction(1.0)), Dense())
QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_vl")


class Pair(NamedTuple):
    """A multimodal model and its decoder, loaded alone from the same checkpoint."""

    kind: str
    whole: PreTrainedModel
    folder: Path
    alone: LoadedModel


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> Pair:
    whole = multimodal_model(request.param)
    folder = save_model(whole, tmp_path_factory.mktemp("multimodal") / "whole")
    return Pair(request.param, whole, folder, load_model(folder, device="cpu"))


def logits(model, pieces) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


def sparse_plan(model, layers=(2,)):
    return plan_for(model, every_head(model, *SPARSE), decode_plan(segment(1, layers, 9)))


def test_the_decoder_alone_is_the_model_of_text_and_described_as_it_is_inside(pair: Pair, tmp_path: Path) -> None:
    prompt, alone = random_tokens(1, 40), pair.alone
    with torch.no_grad():
        torch.testing.assert_close(alone.model(prompt).logits, pair.whole(prompt).logits)
    assert describe_model(pair.whole, "whole") == alone.info
    of_configs = [describe_config(config, "whole") for config in (pair.whole.config, load_config(pair.folder))]
    assert {info.fingerprint.architecture for info in of_configs} == {alone.info.fingerprint.architecture}
    released = load_model(save_model(alone.model, tmp_path / "whole"), device="cpu")
    assert released.info == alone.info


def test_names_of_newer_checkpoints_are_those_of_the_same_decoder(pair: Pair, tmp_path: Path) -> None:
    folder = copytree(pair.folder, tmp_path / "whole")
    tensors = {name: data.clone() for name, data in pair.whole.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder, device="cpu").info == pair.alone.info


def test_a_head_that_is_the_embeddings_is_not_missed(tmp_path: Path) -> None:
    config = multimodal_config("qwen3_vl")
    config.tie_word_embeddings = True
    whole = multimodal_model(config=config)
    loaded = load_model(save_model(whole, tmp_path / "tied"), device="cpu")
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert describe_model(whole, "tied") == loaded.info


def test_a_plan_that_covers_everything_gives_the_tokens_of_the_unmodified_whole_model(pair: Pair) -> None:
    whole, prompt = pair.whole, random_tokens(2, 40)
    if not pair.kind.startswith("qwen3_5"):  # whose rows have to be of one length
        prompt[1, :9] = 0
    ask = {"attention_mask": (prompt != 0).long(), "max_new_tokens": 4, "do_sample": False}
    dense = whole.generate(prompt, **ask)
    plan = plan_for(whole, every_head(whole, *FULL), decode_plan(segment(1, (2,), EVERYTHING)))
    with apply(whole, plan):
        assert torch.equal(whole.generate(prompt, **ask), dense)
        kinds = {"token_type_ids": torch.zeros_like(prompt)} if pair.kind == "gemma3" else {}
        assert torch.equal(whole.generate(prompt, **ask, **kinds), dense)
    assert torch.equal(whole.generate(prompt, **ask), dense)


SPECIAL = [
    (kind, name, None) for kind in MODALITIES for name in KINDS[kind][3] if re.search("_token_(id|index)$", name)
]
SPECIAL += [(kind, name, 128) for kind, name, _ in SPECIAL if kind.startswith("gemma")]  # beyond the vocabulary


@pytest.mark.parametrize(("kind", "name", "number"), SPECIAL)
def test_ids_that_stand_for_pictures_are_in_text_what_the_unmodified_model_has_in_their_place(kind, name, number):
    config, prompt = multimodal_config(kind), random_tokens(1, 66) % 119
    setattr(config, name, number or getattr(config, name))
    whole, special = multimodal_model(config=config), getattr(config, name)
    prompt[0, [20, 55, 64]] = special
    pieces = prompt.split([50, 13, 1, 1, 1], 1)
    given = [[{"input_ids": piece} for piece in pieces]]
    if number is None:
        given.append([{"inputs_embeds": whole.get_input_embeddings()(piece)} for piece in pieces])
    dense = [outputs(whole, calls) for calls in given]
    plans = (plan_for(whole), plan_for(whole, every_head(whole, *FULL), decode_plan(segment(1, (2,), EVERYTHING))))
    for plan in plans:
        with apply(whole, plan, chunking=CUT):
            torch.testing.assert_close([outputs(whole, calls) for calls in given], dense)
    ask = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    if number is None:
        ask["sequence_bias"] = [[[int(dense[0][0, -1].argmax()), special], 1e4]]
    answer = whole.generate(prompt, **ask)
    assert number or answer[0, 67] == special
    is_exact = not kind.startswith("qwen3_5")  # which has recurrent states
    with apply(whole, sparse_plan(whole) if is_exact else plans[1], exact=is_exact):
        assert torch.equal(whole.generate(prompt, **ask), answer)


def outputs(model, given) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return torch.cat([model(**inputs, past_key_values=cache).logits for inputs in given], 1)


BESIDE = {
    "pixel_values": torch.ones(1, 3, 28, 28),
    "image_grid_thw": torch.ones(1, 3, dtype=torch.long),
    "pixel_values_videos": torch.ones(4, 96),
    "mm_token_type_ids": torch.ones(1, 40, dtype=torch.long),
    "token_type_ids": torch.ones(1, 40, dtype=torch.long),
}


def test_inputs_beside_text_are_refused_by_name_before_they_are_looked_at(pair: Pair) -> None:
    names = ["pixel_values"]
    names += ["pixel_values_videos", "image_grid_thw", "mm_token_type_ids"] if pair.kind in QWEN else []
    names += ["token_type_ids"] if pair.kind == "gemma3" else []
    prompt = random_tokens(1, 40)
    with apply(pair.whole, sparse_plan(pair.whole)):
        for name in names:
            for call in (pair.whole, pair.whole.model, pair.whole.generate):
                with pytest.raises(UnsupportedError, match=rf"text alone under a plan, found {name}.*suspend"):
                    call(prompt, **{name: BESIDE[name]})


def test_a_picture_is_seen_again_once_the_plan_is_suspended() -> None:
    whole, prompt = multimodal_model("gemma3"), random_tokens(1, 40) % 100
    prompt[0, 5:9] = whole.config.image_token_id
    given = {"pixel_values": BESIDE["pixel_values"], "token_type_ids": (prompt == 120).long()}
    with torch.no_grad():
        seen = whole(prompt, **given).logits
        with apply(whole, sparse_plan(whole)) as handle:
            handle.suspend()
            assert torch.equal(whole(prompt, **given).logits, seen)


@pytest.mark.parametrize("kind", QWEN)
def test_positions_that_a_picture_of_before_has_moved_are_not_those_of_text(kind: str) -> None:
    whole, pieces = multimodal_model(kind), random_tokens(1, 30).split([20, 8, 1, 1], 1)
    with apply(whole, sparse_plan(whole)):
        expected = logits(whole, pieces)
        whole.model.rope_deltas = torch.tensor([[-7]])
        torch.testing.assert_close(logits(whole, pieces), expected)
        axes = torch.arange(20).expand(3, 1, 20).clone()
        torch.testing.assert_close(whole(pieces[0], position_ids=axes).logits, expected[:, :20])
        axes[2] += 1
        with pytest.raises(UnsupportedError, match="the same on each axis"):
            whole(pieces[0], position_ids=axes)


def test_a_decoder_that_cannot_run_is_refused_by_its_own_name(tmp_path: Path) -> None:
    AutoConfig.for_model("mistral3", text_config={"model_type": "mistral4"}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"'mistral4'.*MLA"):
        load_config(tmp_path)
