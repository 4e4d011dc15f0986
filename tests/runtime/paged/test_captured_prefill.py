"""Graphs of a request's chunks, beside the same layers launch by launch."""

import random
from dataclasses import replace

import pytest
import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import PLAIN, Scales, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.runtime.core.program import LayerProgram, Program, Rank
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.paged import captured_prefill
from sparsekv.runtime.paged.captured_prefill import CapturedPrefill, memory_of
from sparsekv.runtime.paged.plan_host import PlanHost, Scratch

LONGEST, PAGE = 40_000, 16


def layers_of(count: int, heads: int, kv_heads: int, rng: random.Random) -> tuple[LayerProgram, ...]:
    def pattern(number: int) -> VerticalSlash | Dense:
        if number % 5 == 4:
            return Dense()
        vertical = tokens(rng.randrange(1, 900)) if number % 3 == 0 else fraction(0.2 * rng.random() + 0.001)
        slash, most = fraction(0.02 * rng.random() + 0.0005), fraction(0.2 * rng.random() + 0.05)
        return VerticalSlash(vertical=vertical, slash=slash, max_tiles=most, last_q=rng.choice([64, 256]))

    rows = [tuple(pattern(number + layer) for number in range(heads)) for layer in range(count)]
    return tuple(
        LayerProgram(n, heads, kv_heads, None, tile=TileShape(), patterns=(row,)) for n, row in enumerate(rows)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "triton"])
@pytest.mark.parametrize("kind", ["plain", "sinks", "e4m3"])
def test_a_captured_chunk_has_the_output_of_its_launches(backend: str, kind: str) -> None:
    device = torch.device("cuda", 0)
    rng, heads, kv_heads, size = random.Random(f"{backend} {kind}"), 14, 2, 64
    torch.manual_seed(rng.randrange(1000))
    layers = layers_of(3, heads, kv_heads, rng)
    assert CapturedPrefill.takes(layers, device, torch.bfloat16, size)
    scratch = Scratch(memory_of(LONGEST), kv_heads * size, torch.bfloat16, device)
    host = PlanHost(Program(Rank(), layers), backend, scratch, LONGEST)
    captured = CapturedPrefill(
        layers, Fallback(backend), scratch.views, size, 8192, LONGEST, PAGE, torch.bfloat16, device
    )
    softmax = Softmax(sinks_H=torch.randn(heads, device=device)) if kind == "sinks" else PLAIN
    cache = torch.randn(4000, 2, PAGE, kv_heads, size, device=device, dtype=torch.bfloat16)
    scales = None
    if kind == "e4m3":
        cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = Scales(*(torch.rand(2, kv_heads, device=device) + 0.5), torch.bfloat16)
    pages = cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)
    q_THD = torch.randn(8192, heads, size, device=device, dtype=torch.bfloat16)
    graphs = 0
    for _ in range(14):
        steps = []
        for _ in range(rng.choice([1, 2])):  # requests of a step
            rows = rng.choice([rng.randrange(128, 8193), 8192, 1024, 1000])
            past = rng.choice([0, rng.randrange(LONGEST - rows), 8192])
            steps.append((object(), Chunk((past,), (past + rows,)), torch.randperm(4000, device=device).int()))
        for layer in layers:
            for name, chunk, table_P in steps:
                q, scale, meter, expected_meter = q_THD[: chunk.rows[0]], size**-0.5, Meter(), Meter()
                out = captured.attend(name, layer, q, pages, table_P, chunk, scale, softmax, meter, scales)
                if out is None:
                    continue
                out, graphs = out.clone(), graphs + 1
                keys = scratch.copy(pages, table_P, chunk.longest, scales)
                keys = type(keys)(keys.k, keys.v, keys.lengths_B, softmax=softmax)
                host.counters.meter = expected_meter
                expected = host.prefill(layer, q, keys, chunk, scale)
                found, wanted = meter.read(), expected_meter.read()
                assert found.prefill_tiles_causal == wanted.prefill_tiles_causal
                assert found.prefill_tiles_computed == pytest.approx(wanted.prefill_tiles_computed, rel=1e-3)
                wrong = ((out - expected).abs() > 0.05).float().mean()
                assert wrong < 1e-3, (layer.layer, chunk, wrong)
    assert captured.failed == ""
    assert host.backend == backend
    assert graphs > 20


class Replayed:
    """A graph that runs its launches again, over the same memory."""

    def __init__(self, compute) -> None:
        self.compute, self.spent_BH = compute, compute().clone()

    def replay(self) -> None:
        self.spent_BH.copy_(self.compute())


@pytest.fixture
def replayed(monkeypatch) -> None:
    """Graphs without a GPU: sizes are small, kernels run in the interpreter."""

    def capture(self, *call):
        graph = Replayed(lambda: self._compute(*call))
        return captured_prefill._Graph(graph, graph.spent_BH, call[0])

    monkeypatch.setattr(CapturedPrefill, "_capture", capture)
    monkeypatch.setattr(captured_prefill, "_SMALLEST", 256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU graphs run there")
@pytest.mark.usefixtures("replayed")
def test_a_layer_with_other_budgets_has_graphs_of_its_own() -> None:
    heads, kv_heads, size, cpu = 2, 1, 16, torch.device("cpu")
    layers = layers_of(2, heads, kv_heads, random.Random(1))
    other = replace(
        layers[0],
        patterns=((VerticalSlash(vertical=tokens(9), slash=tokens(70), max_tiles=tokens(300), last_q=64),) * heads,),
    )
    scratch = Scratch(memory_of(500), kv_heads * size, torch.float32, cpu)
    host = PlanHost(Program(Rank(), (other,)), "triton", scratch, 500)
    captured = CapturedPrefill(layers, Fallback("triton"), scratch.views, size, 256, 500, PAGE, torch.float32, cpu)
    cache, q_THD, table_P = torch.randn(100, 2, PAGE, kv_heads, size), torch.randn(200, heads, size), torch.arange(40)
    pages, chunk = (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)), Chunk((211,), (411,))
    graphs = captured.alone(other)
    first, out = (
        graphs.attend(object(), other, q_THD, pages, table_P.int(), chunk, 0.25, PLAIN, Meter()) for _ in range(2)
    )
    assert first is None
    expected = host.prefill(other, q_THD, scratch.copy(pages, table_P.int(), chunk.longest), chunk, 0.25)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU graphs run there")
@pytest.mark.usefixtures("replayed")
def test_chunks_of_several_requests_share_the_memory_of_their_graphs() -> None:
    """Steps of two requests, layer by layer, with chunks of any cut: output and counts are those of the launches."""
    rng, heads, kv_heads, size, longest = random.Random(1), 2, 1, 16, 500
    torch.manual_seed(1)
    layers, cpu = layers_of(2, heads, kv_heads, rng), torch.device("cpu")
    scratch = Scratch(memory_of(longest), kv_heads * size, torch.float32, cpu)
    host = PlanHost(Program(Rank(), layers), "triton", scratch, longest)
    captured = CapturedPrefill(layers, Fallback("triton"), scratch.views, size, 256, longest, PAGE, torch.float32, cpu)
    cache = torch.randn(100, 2, PAGE, kv_heads, size)
    pages, seen = (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)), 0
    captured.warm_up(layers[0], pages, 0.25, PLAIN)
    for _ in range(3):
        cuts = [(rng.randrange(128, 257), rng.randrange(0, 240)) for _ in range(2)]
        steps = [(object(), Chunk((past,), (past + rows,)), torch.randperm(100).int()) for rows, past in cuts]
        for layer in layers:
            for name, chunk, table_P in steps:
                q_THD, meter, expected_meter = torch.randn(chunk.rows[0], heads, size), Meter(), Meter()
                out = captured.attend(name, layer, q_THD, pages, table_P, chunk, 0.25, PLAIN, meter)
                if out is None:
                    continue
                out, seen, host.counters.meter = out.clone(), seen + 1, expected_meter
                expected = host.prefill(layer, q_THD, scratch.copy(pages, table_P, chunk.longest), chunk, 0.25)
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
                assert meter.read() == expected_meter.read()
    assert captured.failed == ""
    assert seen > 4
