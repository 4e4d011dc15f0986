"""A model and its plan as an ONNX graph, run by onnxruntime, against the transformers host."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import info_of, plan_for, segment

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.onnx.export import ACTIVATIONS, FIELDS, export, new_folder

TOKENS, PROMPT = 12, 150
SHARE = DecodeBudget(fraction=0.25, at_most=60)


def buckets(*segments: Segment, dense_up_to: int | None = None) -> DecodePlan:
    """One bucket with segments, behind a dense one if asked for."""
    dense = [] if dense_up_to is None else [DecodeBucket(up_to=dense_up_to, dense=True)]
    return DecodePlan(lengths=(*dense, DecodeBucket(up_to=None, segments=segments)))


def small(chosen_by: int, layers: tuple[int, ...], budget: DecodeBudget | int = 20, **options: Any) -> Segment:
    return segment(chosen_by, layers, budget, **{"sink": 3, "recent": 9, **options})


PLANS = {
    "one choice": buckets(small(0, (1, 2))),
    "a share": buckets(small(0, (1, 2), SHARE)),
    "dense up to a length inside the answer": buckets(small(0, (1, 2)), dense_up_to=PROMPT + 5),
    "by KV head": buckets(small(0, (1, 2), heads="per_kv_head")),
    "a map of heads": buckets(small(0, (1, 2), heads={1: (1, 0), 2: (0, 0)})),
    "a filter layer that is sparse": buckets(small(0, (0, 1)), small(2, (2,), 30)),
    "a budget that covers the context": buckets(small(0, (1, 2), 400)),
    "no sinks": buckets(small(0, (1, 2), sink=0)),
}


class Session:
    """A graph in onnxruntime, with caches that are written in place."""

    def __init__(
        self, model: Any, decode: DecodePlan | None, folder: Path, batch: int = 1, capacity: int = 256
    ) -> None:
        plan = plan_for(model, decode=decode)
        self.path = export(model, plan, Program.of(None, decode, info_of(model)), folder / "onnx")
        onnx.checker.check_model(str(self.path))
        self.session = ort.InferenceSession(str(self.path), providers=["CPUExecutionProvider"])
        kind = np.float16 if model.dtype == torch.float16 else np.float32
        self.caches = {
            one.name: ort.OrtValue.ortvalue_from_numpy(np.zeros((batch, one.shape[1], capacity, one.shape[3]), kind))
            for one in self.session.get_inputs()[2:]
        }

    def __call__(self, ids: np.ndarray, past: np.ndarray) -> np.ndarray:
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        binding.bind_cpu_input("past", past.copy())
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(f"{name}.out", cache)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()

    def answer(self, ids: np.ndarray, pieces: int = 64) -> list[int]:
        """The likeliest tokens behind a prompt that is given in pieces."""
        past, found = np.zeros(1, np.int64), []
        for start in range(0, ids.shape[1], pieces):
            part = ids[:, start : start + pieces]
            logits = self(part, past)
            past += part.shape[1]
        for _ in range(TOKENS):
            found.append(int(logits[0].argmax()))
            logits = self(np.asarray([found[-1:]], np.int64), past)
            past += 1
        return found


def prompt(length: int = PROMPT, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 100, (1, length))


def by_transformers(model: Any, decode: DecodePlan | None, ids: np.ndarray) -> list[int]:
    ids_BS = torch.from_numpy(ids)
    with apply(model, plan_for(model, decode=decode)):
        out = model.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=TOKENS, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", PLANS)
def test_tokens_are_those_of_the_transformers_host(name: str, llama: Any, tmp_path: Path) -> None:
    ids = prompt()
    expected = by_transformers(llama, PLANS[name], ids)
    assert Session(llama, PLANS[name], tmp_path).answer(ids) == expected
    covers = name == "a budget that covers the context"
    assert (expected == by_transformers(llama, None, ids)) or not covers


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_each_architecture_is_written(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.generation_config.eos_token_id = None
    plan = PLANS["one choice"]
    assert Session(model, plan, tmp_path).answer(prompt()) == by_transformers(model, plan, prompt())


def test_rows_of_other_lengths_are_as_alone(llama: Any, tmp_path: Path) -> None:
    """One has fewer candidates than others choose, and one attends to everything."""
    plan, lengths = PLANS["one choice"], (150, 35, 20)
    together = Session(llama, plan, tmp_path / "all", batch=3)
    for row, length in enumerate(lengths):
        alone = Session(llama, plan, tmp_path / str(row))
        ids = prompt(length, row)
        alone(ids, np.zeros(1, np.int64))
        for name, cache in together.caches.items():
            rows = cache.numpy().copy()
            rows[row] = alone.caches[name].numpy()[0]
            cache.update_inplace(rows)
        single = alone(np.asarray([[7]]), np.asarray([length]))
        if row == 0:
            expected = [single]
        else:
            expected.append(single)
    found = together(np.asarray([[7], [7], [7]]), np.asarray(lengths))
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_a_step_writes_its_token_in_place_and_nothing_else(llama: Any, tmp_path: Path) -> None:
    session = Session(llama, PLANS["one choice"], tmp_path)
    session(prompt(), np.zeros(1, np.int64))
    before = {name: cache.numpy().copy() for name, cache in session.caches.items()}
    places = {name: cache.data_ptr() for name, cache in session.caches.items()}
    session(np.asarray([[5]]), np.asarray([PROMPT]))
    for name, cache in session.caches.items():
        assert cache.data_ptr() == places[name]
        changed = (cache.numpy() != before[name]).any((0, 1, 3)).nonzero()[0].tolist()
        assert changed == [PROMPT]


def test_half_precision_is_near(llama: Any, tmp_path: Path) -> None:
    half = tiny_model("llama").half()
    whole, found = (
        Session(model, PLANS["one choice"], tmp_path / str(model.dtype))(prompt(), np.zeros(1, np.int64))
        for model in (llama, half)
    )
    np.testing.assert_allclose(found, whole, atol=0.2)


def test_the_file_says_what_it_is(llama: Any, tmp_path: Path) -> None:
    facts = {one.key: one.value for one in onnx.load(Session(llama, PLANS["a share"], tmp_path).path).metadata_props}
    assert facts["sparsekv.status"] == "unverified"
    assert facts["sparsekv.prefill"] == "dense"
    assert "fraction: 0.25" in facts["sparsekv.plan"]


@pytest.mark.parametrize(
    ("model", "plan", "word"),
    [
        ({"model_type": "glm"}, PLANS["one choice"], "glm"),
        ({"model_type": "llama"}, buckets(small(0, (1, 2), selector="uniform", window=4)), "newest query"),
        ({"model_type": "llama", "dtype": torch.bfloat16}, PLANS["one choice"], "bfloat16"),
    ],
)
def test_what_the_graph_cannot_hold_is_refused_by_name(model: Any, plan: DecodePlan, word: str, tmp_path: Path) -> None:
    made = tiny_model(model["model_type"]).to(model.get("dtype", torch.float32))
    with pytest.raises(UnsupportedError, match=word):
        Session(made, plan, tmp_path)
    assert not (tmp_path / "onnx").exists()


KINDS = ("llama", "mistral", "qwen2", "qwen3")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)  # fmt: skip


def random_model(kind: str, rng: np.random.Generator) -> Any:
    """One of this type, with any value of each field that changes what it computes."""

    def draw(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    heads, groups = draw((4, 2), (4, 4), (8, 2), (4, 1))
    options: dict[str, Any] = {
        "hidden_act": draw(*ACTIVATIONS),
        "rms_norm_eps": draw(1e-6, 1e-5, 0.3),
        "rope_parameters": draw(*ROPES) | {"rope_theta": draw(100.0, 10000.0, 1e6)},
        "tie_word_embeddings": draw(True, False),
        **({"attention_bias": draw(True, False)} if kind in ("llama", "qwen3") else {}),
        **({"mlp_bias": draw(True, False)} if kind == "llama" else {}),
    }
    sizes = {"layers": 2, "heads": heads, "kv_heads": groups, "head_dim": 16, "ffn": draw(48, 96)}
    if kind == "qwen2":  # which takes the size of a head from the width
        sizes["hidden"] = 16 * heads
    model = tiny_model(kind, seed=int(rng.integers(1 << 16)), **sizes, **options)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_(std=0.3)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_random_config_gives_the_logits_of_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    model = random_model(kind, np.random.default_rng([seed, KINDS.index(kind)]))
    ids = prompt(70, seed)
    found = Session(model, None, tmp_path)(ids, np.zeros(1, np.int64))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits[:, -1].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model("llama", layers=1, hidden_act=name), prompt(20)
    found = Session(model, None, tmp_path)(ids, np.zeros(1, np.int64))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits[:, -1].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_config_is_followed_or_known_to_change_nothing(kind: str) -> None:
    assert set(tiny_model(kind).config.to_dict()) <= FIELDS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "mish"),
        ("logits_scaling", 2.0),
        ("final_logit_softcapping", 30.0),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_field_that_the_graph_does_not_follow_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedError, match=field):
        Session(model, None, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails_after", range(3))
def test_a_folder_that_cannot_be_written_leaves_nothing_behind(fails_after: int, tmp_path: Path) -> None:
    """As on a full disk; the next try has the name for itself."""
    place = tmp_path / "deep" / "onnx"

    def fill() -> None:
        with new_folder(place) as made:
            for number in range(fails_after):
                (made / str(number)).write_bytes(b"1")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UsageError, match=rf"cannot write {place}: No space"):
        fill()
    assert not place.exists()
    assert not list(place.parent.iterdir())
    with new_folder(place) as made:
        (made / "whole").write_bytes(b"1")
    assert [one.name for one in place.iterdir()] == ["whole"]
    assert [one.name for one in place.parent.iterdir()] == ["onnx"]
