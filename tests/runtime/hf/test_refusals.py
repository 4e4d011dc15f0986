"""What would give wrong tokens is refused before it runs, with a way out."""

import threading
import time
from functools import partial

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GenerationConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from sparsekv.kernels import backends
from sparsekv.plans.errors import (
    BackendError,
    PlanMismatchError,
    PlanWarning,
    PromptError,
    SparseKVError,
    UnsupportedError,
    UsageError,
)
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Target
from sparsekv.runtime.hf.apply import apply


@pytest.fixture
def planned(model):
    with torch.no_grad(), apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8)))):
        yield model


def padded(columns: int) -> torch.Tensor:
    """A mask of two rows, of which the second has three tokens of padding in front."""
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[1, :3] = 0
    return mask


TWO, SIX, BOUNDS = random_tokens(2, 6), random_tokens(1, 6), torch.tensor([0, 3, 6])
HOLE = torch.tensor([[1] * 6, [1, 1, 0, 1, 1, 1]])
MORE_IS_ASKED = {"input_ids": TWO, "attention_mask": padded(6)}


@pytest.mark.parametrize(
    ("call", "given", "error", "said"),
    [
        *((call, {"input_ids": TWO, "attention_mask": HOLE}, UnsupportedError, "a hole")
          for call in ("model", "decoder", "generate")),
        ("model", {"attention_mask": torch.ones(1, 1, 6, 6)}, UnsupportedError, "2D attention_mask"),
        ("model", {"attention_mask": {"full_attention": None}}, UnsupportedError, "2D attention_mask"),
        ("model", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, UnsupportedError, "packed"),
        *(("model", {name: BOUNDS}, UnsupportedError, name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")),
        ("model", {"output_attentions": True}, UnsupportedError, "output_attentions"),
        ("model", {"input_ids": torch.ones(1, 0, dtype=torch.long)}, PromptError, "empty prompt"),
        ("model", {"is_causal": False}, UnsupportedError, "causal"),
        ("model", {"output_hidden_states": True, **MORE_IS_ASKED}, UnsupportedError, "more is asked"),
        ("model", {"position_ids": torch.arange(6)[None], **MORE_IS_ASKED}, UnsupportedError, "position_ids"),
        ("behind 1", {"position_ids": torch.arange(6)[None]}, UnsupportedError, "from the 20 cached tokens"),
        ("behind 1", {"attention_mask": torch.ones(1, 6)}, UnsupportedError, r"\(1, 26\).*found \(1, 6\)"),
        *(("generate behind 2", {"input_ids": TWO[:, :new], "attention_mask": padded(20 + new)}, UnsupportedError,
           "padding") for new in (1, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_call_that_would_give_wrong_logits_is_refused(planned, call: str, given: dict, error, said: str):
    if "behind" in call:
        given = {"past_key_values": planned(random_tokens(int(call[-1]), 20)).past_key_values} | given
    calls = {"decoder": planned.base_model, "generate": partial(planned.generate, max_new_tokens=2)}
    with pytest.raises(error, match=said):
        calls.get(call.split()[0], planned)(**{"input_ids": SIX} | given)


def test_attention_that_is_not_causal(planned, monkeypatch):
    planned(SIX, is_causal=True)
    monkeypatch.setattr(planned.config, "is_causal", False, raising=False)
    with pytest.raises(UnsupportedError, match="causal"):
        planned(SIX)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"prompt_lookup_num_tokens": 3}, "prompt lookup"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"dola_layers": "high"}, "DoLa"),
        ({"cache_implementation": "static"}, "cache implementation"),
        ({"cache_implementation": "offloaded"}, "cache implementation"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_ways_of_generating_that_need_another_cache(planned, options: dict, what: str):
    prompt, own = random_tokens(1, 6), planned.generation_config
    with planned.get_input_embeddings().register_forward_pre_hook(lambda *_: pytest.fail("something ran")):
        with pytest.raises(UnsupportedError, match=what):
            planned.generate(prompt, **options)
        with pytest.raises(UnsupportedError, match=what):
            planned.generate(prompt, generation_config=GenerationConfig(**options))
        planned.generation_config = GenerationConfig(**options)
        try:
            with pytest.raises(UnsupportedError, match=what):
                planned.generate(prompt)
        finally:
            planned.generation_config = own


def test_assisted_generation(planned):
    with pytest.raises(UnsupportedError, match="assisted"):
        planned.generate(random_tokens(1, 6), assistant_model=tiny_model(layers=1))
    with pytest.raises(UnsupportedError, match="assisted"):
        tiny_model(seed=5).generate(random_tokens(1, 6), assistant_model=planned, max_new_tokens=8)


def test_an_unsupported_architecture():
    other = BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16))
    with pytest.raises(UnsupportedError, match="'bert'"):
        apply(other.eval(), None)


def test_a_plan_of_another_model_on_request(model):
    other = tiny_model(layers=5)
    fits = plan_for(other, None, decode_plan(segment(0, (1, 2), 8)))
    with pytest.raises(PlanMismatchError, match="with allow_mismatch=True"):
        apply(model, fits)
    with pytest.warns(PlanWarning, match="another architecture"):
        apply(model, fits, allow_mismatch=True).close()
    with pytest.raises(PlanMismatchError, match="cannot run"):
        apply(model, plan_for(other, None, decode_plan(segment(0, (1, 4), 8))), allow_mismatch=True)


class NothingRuns(TorchDispatchMode):
    """No operation of torch takes place, so that no tensor is made either."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        pytest.fail(f"{function} ran")


def test_segments_that_do_not_fit_the_model_are_refused_before_anything_is_allocated(model):
    other = tiny_model(layers=5)
    plan = plan_for(other, None, decode_plan(segment(0, (1, 4), 8), offload=(1, 4), hot=1 << 20))
    info, was = info_of(model), model.config._attn_implementation
    with NothingRuns(), pytest.raises(PlanMismatchError, match="cannot run"):
        apply(model, plan, info=info, allow_mismatch=True)
    assert model.config._attn_implementation == was


def test_fields_that_nothing_executes_yet(model):
    two = Target(device="cpu", tensor_parallel=2, backend="cpu", dtype="float32")
    plan = plan_for(model).model_copy(update={"targets": (two,)})
    with pytest.raises(UnsupportedError, match="tensor_parallel: 2"):
        apply(model, plan)


def test_tensor_parallel_models(model):
    class Parallel(LlamaForCausalLM):
        tp_size = 2

    with pytest.raises(UnsupportedError, match="2 tensor-parallel ranks"):
        apply(Parallel(model.config).eval(), plan_for(model))


def test_a_backend_that_is_not_built_yet(model):
    with pytest.raises(BackendError, match="flash"):
        apply(model, plan_for(model), backend="flash")
    assert model.config._attn_implementation == "sdpa"


def test_a_plan_may_be_the_path_of_one(model, tmp_path):
    write_plan(plan_for(model), tmp_path / "plan.yaml")
    for path in (tmp_path / "plan.yaml", str(tmp_path / "plan.yaml")):
        apply(model, path).close()
    with pytest.raises(UsageError, match="nowhere"):
        apply(model, "nowhere.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": None}, "path"),
        ({"plan": {"kind": "sparsekv.plan"}}, "{'kind'"),
        ({"prefill": "no"}, "prefill"),
        ({"decode": 1}, "decode"),
        ({"allow_mismatch": "yes"}, "allow_mismatch"),
        ({"backend": None}, "backend"),
        ({"backend": "fast"}, "fast"),
        ({"info": "tiny"}, "ModelInfo"),
        ({"chunking": 4096}, "chunking"),
        ({"exact": "prefill"}, "exact"),
        ({"kv_dtype": "fp4"}, "auto or fp8"),
        ({"sparse": "sometimes"}, "expected always, never, or thresholds"),
        ({"offload": "sometimes"}, "auto, always, never"),
        ({"offload": ["auto"]}, "auto, always, never"),
        ({"offload": "auto", "kv_host_layers": 1}, "found both"),
        *(({"kv_host_layers": asked}, r"0(-2| to 3)") for asked in (4, -1, (3,), (0, -2))),
        *(({"kv_host_layers": asked}, "kv_host_layers to be")
          for asked in ("3", "0-2", True, 1.5, (0, "1"), (0, 1.0), {0: 1})),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_mean_nothing(model, options: dict, said: str):
    with pytest.raises(SparseKVError, match=said) as refused:
        apply(model, **{"plan": plan_for(model)} | options)
    assert refused.value.exit_code == 2
    assert model.config._attn_implementation == "sdpa"


def test_8_bits_on_a_device_that_has_none(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9" in (backends.float8_obstacle("triton", torch.device("cuda")) or "")
    monkeypatch.setattr("sparsekv.runtime.hf.apply.float8_obstacle", lambda *given: "it is old")
    with pytest.raises(BackendError, match="it is old"):
        apply(model, plan_for(model), kv_dtype="fp8")


def test_two_threads_under_one_handle(model, monkeypatch):
    """The second one is refused, the first goes on undisturbed."""
    monkeypatch.setattr("sparsekv.runtime.hf.attach._PATIENCE", 0.05)
    started, refused = threading.Event(), threading.Event()
    found = []

    class Waits(BaseStreamer):
        def put(self, value):
            started.set()
            assert refused.wait(30)

        def end(self):
            pass

    prompt = random_tokens(1, 20)
    with torch.no_grad(), apply(model, plan_for(model)):
        expected = model.generate(prompt, max_new_tokens=3)
        generate = partial(model.generate, prompt, max_new_tokens=3, streamer=Waits())
        thread = threading.Thread(target=lambda: found.append(torch.no_grad()(generate)()))
        thread.start()
        assert started.wait(30)
        for call in (model, partial(model.generate, max_new_tokens=2)):
            with pytest.raises(UsageError, match="one thread"):
                call(prompt)
        refused.set()
        thread.join(30)
        assert torch.equal(found[0], expected)
        assert model(prompt).logits.shape[1] == 20  # free again


def test_a_thread_that_streams_may_be_followed_by_the_next_turn_at_once(model):
    """The streamer ends before `generate` has returned."""
    prompt = random_tokens(1, 20)
    ended = threading.Event()

    class Ends(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            ended.set()
            time.sleep(0.2)

    with torch.no_grad(), apply(model, plan_for(model)):
        generate = torch.no_grad()(partial(model.generate, prompt, max_new_tokens=2, streamer=Ends()))
        thread = threading.Thread(target=generate)
        thread.start()
        assert ended.wait(30)
        assert model.generate(prompt, max_new_tokens=2).shape == (1, 22)
        thread.join(30)
