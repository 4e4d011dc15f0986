"""A cache in 8 bits: our kernels beside vLLM's own over the same pages, an engine on the CPU beside the transformers
host."""

from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_engine import BUDGET, NEW, Oracle, chunks_of, generate, make_engine, tokens_of
from vllm_replay import plan_host_of

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, in_8_bits, scaled
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.paged.plan_host import Scratch
from sparsekv.runtime.stores import store as stores
from sparsekv.runtime.vllm import internals
from sparsekv.runtime.vllm.attention_backend import SparseImpl
from sparsekv.runtime.vllm.devices import check_pages, scales_of
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

Prompts = dict[int, list[int]]
CUDA = internals.current_platform.device_type == "cuda"
DEVICE = torch.device(internals.current_platform.device_type)
pytestmark = (
    pytest.mark.gpu
    if CUDA
    else pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's kernel needs AVX-512")
)
DTYPE, BACKEND = (torch.bfloat16, "triton") if CUDA else (torch.float32, "cpu")


class Pages:
    """Requests of these lengths in a cache of random bytes, and queries of their last tokens."""

    def __init__(self, lengths: tuple[int, ...], group: int, size: int, per_head: bool) -> None:
        heads, page, draw = 2, internals.platform.page, torch.Generator().manual_seed(len(lengths) + size)
        rows = max(-(-length // page) for length in lengths)
        self.lengths, self.scale = lengths, size**-0.5
        self.lengths_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.table_BP = torch.randperm(len(lengths) * rows, generator=draw).int().view(len(lengths), rows).to(DEVICE)
        self.cache = internals.empty_cache(len(lengths) * rows, heads, size, torch.uint8, DEVICE)
        numbers = torch.randn(self.cache.shape, generator=draw).to(FLOAT8).view(torch.uint8)
        self.cache.copy_(numbers.to(DEVICE))
        k_G, v_G, q_G = (torch.rand(3, heads if per_head else 1, generator=draw) + 0.2).expand(3, heads).to(DEVICE)
        self.scales = Scales(k_G.contiguous(), v_G.contiguous(), DTYPE, q_G.contiguous() if CUDA else None)
        self.q_BHD = torch.randn(len(lengths), heads * group, size, generator=draw).to(DTYPE).to(DEVICE)
        if CUDA:
            self.q_BHD = (self.q_BHD / q_G.repeat_interleave(group)[:, None]).to(FLOAT8)

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        return internals.platform.pages_of(self.cache)

    def expected(self, row: int) -> torch.Tensor:
        """[H, D] in float32."""
        k, v = (
            scaled(x_NGSD, scale_G, torch.float32)[self.table_BP[row].long()].transpose(0, 1).flatten(1, 2)
            for x_NGSD, scale_G in zip(self.pages, (self.scales.k_G, self.scales.v_G), strict=True)
        )
        k_GSD, v_GSD = (x[:, : self.lengths[row]] for x in (k, v))
        q_GND = self.q_BHD[row].float().unflatten(0, (len(k_GSD), -1))
        if self.scales.q_G is not None:
            q_GND = q_GND * self.scales.q_G[:, None, None]
        return ((q_GND @ k_GSD.mT * self.scale).softmax(-1) @ v_GSD).flatten(0, 1)

    def ours(self, selection: Selection | None = None) -> torch.Tensor:
        """[B, H, D]."""
        k_NGSD, v_NGSD = (x.view(FLOAT8) for x in self.pages)
        keys = KeyView(k_NGSD, v_NGSD, self.lengths_B, self.table_BP, scales=self.scales)
        out_BHD = torch.full(self.q_BHD.shape, torch.nan, dtype=DTYPE, device=DEVICE)
        q_BHQD, out_BHQD = self.q_BHD[:, :, None], out_BHD[:, :, None]
        decode_attention(q_BHQD, keys, selection, scale=self.scale, out=out_BHQD, backend=BACKEND)
        return out_BHD

    def theirs(self) -> torch.Tensor:
        """[B, H, D]."""
        out_BHD = torch.empty(self.q_BHD.shape, dtype=DTYPE, device=DEVICE)
        launch = internals.platform.attention(
            self.q_BHD, self.cache, self.table_BP, self.lengths, self.scale, out_BHD, self.scales
        )
        launch()
        return out_BHD


CASES = [((300, 41), 4, 64, False), ((700,), 1, 128, False), ((513, 90, 128), 16, 64, False)]
if CUDA:
    CASES += [((9000, 41), 4, 128, True), ((40_000,), 8, 256, True), ((3000, 700, 90, 1), 4, 128, False)]


@pytest.mark.parametrize(("lengths", "group", "size", "per_head"), CASES)
def test_our_error_is_at_most_that_of_vllms_kernel_on_the_same_step(
    lengths: tuple[int, ...], group: int, size: int, per_head: bool
) -> None:
    step = Pages(lengths, group, size, per_head)
    expected_BHD = torch.stack([step.expected(row) for row in range(len(lengths))])
    ours, theirs = ((found.float() - expected_BHD).norm() for found in (step.ours(), step.theirs()))
    assert ours <= max(theirs, 1e-5 * expected_BHD.norm())
    assert ours < (4e-3 if CUDA else 1e-5) * expected_BHD.norm()


@pytest.mark.skipif(not CUDA, reason="a CPU captures nothing")
def test_a_captured_step_gives_what_is_launched_bit_for_bit() -> None:
    step = Pages((9000, 300), 4, 128, False)
    launched, graph = step.ours(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.ours()
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, launched)


def layer_with(heads: int, k_scale: Any, v_scale: Any, kv_cache_dtype: str = "fp8", rounds: bool = False) -> Any:
    """What is read of a layer of vLLM, and of its implementation."""
    impl = SimpleNamespace(kv_cache_dtype=kv_cache_dtype, num_kv_heads=heads)
    scales = {"_k_scale": torch.tensor(k_scale), "_v_scale": torch.tensor(v_scale), "_q_scale": torch.tensor(0.5)}
    return SimpleNamespace(impl=impl, query_quant=object() if rounds else None, **scales)


CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))


def test_scales_are_of_a_tensor_or_of_each_head_and_skipped_layers_have_none() -> None:
    one = layer_with(3, 0.25, 2.0, rounds=True)
    found = scales_of(CONFIG, one.impl, one)
    assert (found.k_G.tolist(), found.v_G.tolist(), found.q_G.tolist()) == ([0.25] * 3, [2.0] * 3, [0.5] * 3)
    assert found.dtype == torch.bfloat16
    each = layer_with(2, [0.25, 0.5], [1.0, 3.0])
    found = scales_of(CONFIG, each.impl, each)
    assert (found.k_G.tolist(), found.v_G.tolist(), found.q_G) == ([0.25, 0.5], [1.0, 3.0], None)
    assert scales_of(CONFIG, layer_with(2, 1.0, 1.0, "auto").impl, None) is None


def test_queries_that_vllm_has_rounded_are_read_by_the_scales_of_their_heads() -> None:
    impl = object.__new__(SparseImpl)
    impl.num_heads, impl.num_kv_heads = 4, 2
    impl.scales = Scales(torch.ones(2), torch.ones(2), torch.bfloat16, torch.tensor([0.5, 4.0]))
    q_THD = torch.randn(3, 4, 8).to(FLOAT8)
    expected = q_THD.float() * torch.tensor([0.5, 0.5, 4.0, 4.0])[:, None]
    assert torch.equal(impl._read(q_THD), expected.bfloat16())
    assert impl._read(expected) is expected


def test_a_past_is_copied_multiplied_and_without_scales_byte_for_byte() -> None:
    step = Pages((300, 41), 4, 64, False)
    scratch, tokens = Scratch(300, 2 * 64, DTYPE, DEVICE), 290
    keys = scratch.copy(step.pages, step.table_BP[0], tokens, step.scales)
    expected = KeyView(*step.pages, torch.ones(1), step.table_BP[:1], scales=step.scales).contiguous(tokens)
    assert all(torch.equal(own, wanted) for own, wanted in zip((keys.k, keys.v), expected, strict=True))
    stored = scratch.copy(step.pages, step.table_BP[0], tokens)
    plain = KeyView(*step.pages, torch.ones(1), step.table_BP[:1]).contiguous(tokens)
    assert stored.k.dtype == torch.uint8
    assert all(torch.equal(own, wanted) for own, wanted in zip((stored.k, stored.v), plain, strict=True))


# --- an engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(reference: LoadedModel, plan_file: Any, kept_engines: list[Any]) -> Any:
    if CUDA:
        pytest.skip("test_float8_gpu.py has engines on a GPU")
    settings = {"kv_cache_dtype": "fp8", "disable_log_stats": True}
    config = {"sparsekv": {"plan": str(plan_file)}}
    kept_engines.append(make_engine(str(reference.model.name_or_path), additional_config=config, **settings))
    return kept_engines[-1]


@pytest.fixture
def scale(stored: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """That of all layers' keys, and half of that of their values, in both hosts."""
    of_k, of_v = 0.03, 0.015

    def load(model: Any) -> None:
        for block in model.model.layers:
            layer = block.self_attn.attn
            layer._k_scale_float, layer._v_scale_float = of_k, of_v
            heads = torch.ones(layer.num_kv_heads)
            layer.impl.scales = Scales(heads * of_k, heads * of_v, torch.float32)

    stored.apply_model(load)
    turns = cycle((of_k, of_v))  # keys are asked for first
    monkeypatch.setattr(stores, "_power_of_two", lambda x_BGSD: torch.full(x_BGSD.shape[1:2], next(turns)))
    assert stored.reset_prefix_cache()
    reset_stats(stored)
    return of_k


def test_prompts_at_once_are_answered_as_by_the_transformers_host(
    stored: Any, reference: LoadedModel, plan: Plan, scale: float
) -> None:
    """But for numbers between two of 8 bits that rounding in float32 decides, each of which is a 16th off then. These
    prompts' answers hardly depend on such numbers; those of most others change in the transformers host too where keys
    are multiplied by 1 + 2.5e-7 before they are rounded."""
    kit = prepare(reference.tokenizer, Split.EVALUATION)
    asked = [make_sample(TASKS["niah_single"], kit, n + NEW, 3, n).prompt_ids.tolist() for n in (700, 2700)]
    outputs, cuts = generate(stored, asked), chunks_of([len(prompt) for prompt in asked])
    oracle = Oracle(reference.model, plan, kv_dtype="fp8")
    for output, prompt, ends in zip(outputs, asked, cuts, strict=True):
        answer = oracle(prompt, ends)
        assert tokens_of(output) == answer.tokens
        found = [next(iter(at.values())).logprob for at in output.outputs[0].logprobs]
        assert found == pytest.approx(answer.logprobs, abs=5e-3)
    stats = serving_stats(stored)
    assert stats.prefill_density < 0.9
    assert stats.failures == 0


def test_pages_are_written_and_read_by_any_scale(stored: Any, scale: float) -> None:
    def check(model: Any) -> list[bool]:
        layer = model.model.layers[0].self_attn.attn
        layer._k_scale.fill_(scale)
        layer._v_scale.fill_(scale / 2)
        spec = layer.get_kv_cache_spec(layer.impl._config())
        k_NGSD, v_NGSD = check_pages(layer.impl._config(), layer.impl, layer, spec, DEVICE)
        return [bool((x_NGSD[1] != 0).all() and (x_NGSD[0] == 0).all()) for x_NGSD in (k_NGSD, v_NGSD)]

    assert stored.apply_model(check) == [[True, True]]


def test_sparse_prefill_attends_to_what_the_cache_has_from_the_first_chunk_on(
    stored: Any, prompts: Prompts, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pasts = plan_host_of(stored), []
    given = host.prefill

    def prefill(layer: Any, q_THD: torch.Tensor, keys: KeyView, chunk: Chunk, *rest: Any) -> torch.Tensor:
        pasts.append(chunk.past[0])
        for x_1GKD, of_all in ((keys.k, scale), (keys.v, scale / 2)):
            scale_G = torch.full(x_1GKD.shape[1:2], of_all)
            assert torch.equal(scaled(in_8_bits(x_1GKD, scale_G), scale_G, torch.float32), x_1GKD)
        return given(layer, q_THD, keys, chunk, *rest)

    monkeypatch.setattr(host, "prefill", prefill)
    generate(stored, [prompts[700]], 1)
    assert {*pasts} == {0, BUDGET}
