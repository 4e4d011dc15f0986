"""Captured decode steps of layers in host memory: the tokens of the same plan on the device, whatever happens to the
cache. Without a GPU the graphs are emulated, with one they are real."""

import copy
import gc
import warnings
from pkgutil import resolve_name

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.kernels.backends import BackendWarning
from sparsekv.kernels.decode.slots import SlotTable
from sparsekv.plans.phases import DecodeBucket
from sparsekv.runtime.hf import graphs
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.graph_fetches import StepFetches
from sparsekv.runtime.hf.graphs import GraphWarning
from sparsekv.runtime.stores.bank import HostStore

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []
DTYPE, SIZE = (torch.bfloat16, 64) if CUDA else (torch.float32, 16)
slow_in_the_interpreter = pytest.mark.skipif(not CUDA, reason="test_graph_stores.py has the stores alone")
SEGMENT = segment(0, (1, 2), 12, sink=4, recent=10)
STEPS = 150 if CUDA else 2  # the interpreter takes a second for each
LONG = 130  # tokens of a prompt that lies in host memory: 26 slots and a ring of 74 rows are fewer


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=SIZE, heads=2, kv_heads=1, dtype=DTYPE).to(DEVICE)


@pytest.fixture
def captured(monkeypatch):
    """Steps are captured."""
    if not CUDA:
        emulate(monkeypatch)


def ids(batch, length, seed=0):
    return random_tokens(batch, length, seed).to(DEVICE)


def applied(model, offload, *segments):
    return apply(
        model, plan_for(model, None, decode_plan(*(segments or (SEGMENT,)), offload=offload)), backend="triton"
    )


def on_host(cache):
    return [layer.layer for layer in cache.layers if isinstance(layer.store, HostStore) and layer.store.is_long()]


CASES = [(2, 99, "per_kv_head")]  # becomes long on the way
if CUDA:
    CASES += [(1, LONG, "max"), (3, LONG, "per_kv_head"), (3, 99, "max"), (1, LONG + 1000, "max"), (16, LONG, "max")]


@pytest.mark.parametrize(("batch", "length", "heads"), CASES)
def test_logits_are_bit_for_bit_those_on_the_device(captured, batch, length, heads):
    """On a GPU over two rounds of the ring."""
    model = tiny_model(head_dim=SIZE, heads=4, kv_heads=2 if heads != "max" else 1, dtype=DTYPE).to(DEVICE)
    prompt, new, found = ids(batch, length), ids(batch, STEPS, 1), []
    part = segment(0, (1, 2), 12, sink=4, recent=10, heads=heads)
    for offload in ((), (1, 2)) + (((2,),) if CUDA else ()):
        with applied(model, offload, part) as handle:
            logits, cache = steps(model, prompt, new)
            assert (handle.steps.replayed, handle.steps.why_not) == (STEPS, "")
            assert on_host(cache) == list(offload)
            found.append(logits)
    assert all(torch.equal(found[0], other) for other in found[1:])


def interleaved(model, offload):
    """Logits of caches that take turns, are copied, grow, and run single launches and prefill between."""
    prompts, new, seen = [ids(1, length, length) for length in (LONG, 300)], ids(1, 2, 1), []
    with applied(model, offload) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caches = [steps(model, prompt, new[:, :0])[1] for prompt in prompts]

        def step(number, tokens=new):
            seen.append(steps(model, tokens[:, :1], tokens[:, 1:], caches[number])[0])

        step(0)
        step(1)
        caches.append(copy.deepcopy(caches[1]))
        step(2)
        caches[0].layers[1].store.reserve(700)  # other memory
        step(0)
        hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        step(0)  # a single launch, behind a replay in vain
        hook.remove()
        seen.append(model(ids(1, 80, 7), past_key_values=caches[0]).logits[:, -1:])  # another turn
        step(0)
        caches[1].reset()
        step(2)
        seen.append(steps(model, prompts[0], ids(1, 200, 5), caches[1])[0])
        step(2)
        step(0, ids(1, 100, 9))
        replayed = handle.steps.replayed
    return torch.cat(seen, 1), replayed


@pytest.mark.parametrize("offload", [(1, 2), *([()] if CUDA else [])], ids=str)
@torch.no_grad()
def test_a_captured_step_that_failed_in_the_head_leaves_no_trace(model, captured, offload):
    prompt, new = ids(1, LONG), ids(1, 2, 1)

    def fail(*_):
        raise KeyboardInterrupt

    with applied(model, offload) as handle:
        expected, _ = steps(model, prompt, new)
        _, cache = steps(model, prompt, new[:, :1])
        with model.lm_head.register_forward_pre_hook(fail), pytest.raises(KeyboardInterrupt):
            model(new[:, 1:], past_key_values=cache)
        assert cache.get_seq_length() == LONG + 1
        found, _ = steps(model, new[:, 1:], new[:, :0], cache)
        assert (handle.steps.replayed, on_host(cache)) == (5, list(offload))
    assert torch.equal(found, expected[:, 2:])
    assert cache.get_seq_length() == LONG + 2


@slow_in_the_interpreter
@torch.no_grad()
def test_caches_take_turns_and_single_launches_go_between(model, captured):
    model = copy.deepcopy(model)
    expected, replayed = interleaved(model, ())
    found, also = interleaved(model, (1, 2))
    assert torch.equal(found, expected)
    assert also == replayed


def test_a_layer_that_reads_everything_from_host_memory_runs_as_single_launches(model, captured):
    prompt, new = ids(1, LONG), ids(1, 1, 1)
    with applied(model, ()):
        expected, _ = steps(model, prompt, new)
    plan = plan_for(model, None, decode_plan(SEGMENT, offload=(1, 2)))
    with (
        apply(model, plan, backend="triton", kv_host_layers=[0]) as handle,
        pytest.warns(match="not captured: layer 0"),
    ):
        found, _ = steps(model, prompt, new)
    assert handle.steps.replayed == 0
    assert torch.equal(found, expected)


@slow_in_the_interpreter
def test_lengths_that_are_read_as_a_whole_again_run_as_single_launches(model, captured):
    """A bucket without segments behind one with them."""
    plan = plan_for(model, None, decode_plan(SEGMENT, offload=(1, 2)))
    buckets = (
        DecodeBucket(up_to=LONG + 1, segments=(SEGMENT,)),
        DecodeBucket(up_to=LONG + 2, dense=True),
        DecodeBucket(up_to=None, segments=(SEGMENT,)),
    )
    plan = plan.model_copy(update={"decode": plan.decode.model_copy(update={"lengths": buckets})})
    prompt, new = ids(1, LONG), ids(1, 3, 1)
    with apply(model, plan, backend="triton") as handle, pytest.warns(match="at this length"):
        found, _ = steps(model, prompt, new)
    assert handle.steps.replayed == 2
    with apply(model, plan, backend="triton", offload="never") as handle:
        assert torch.equal(found, steps(model, prompt, new)[0])


def test_a_capture_that_fails_frees_what_it_made_and_the_step_runs_as_single_launches(model, captured, monkeypatch):
    prompt, new, waited = ids(1, LONG), ids(1, 1, 1), []

    def fail(self, segment, selection):
        raise torch.OutOfMemoryError("of this test")

    with applied(model, ()):
        expected, _ = steps(model, prompt, new)
    with applied(model, (1, 2)) as handle:
        monkeypatch.setattr(StepFetches, "fetch", fail)
        wait = graphs.torch.cuda.synchronize
        monkeypatch.setattr(graphs.torch.cuda, "synchronize", lambda device=None: waited.append(wait(device)))
        with pytest.warns(match="capturing failed"):
            found, cache = steps(model, prompt, new)
        assert on_host(cache) == [1, 2]
        assert (handle.steps.replayed, handle.steps.latest) == (0, None)
        assert "of this test" in handle.steps.why_not
    assert waited
    assert torch.equal(found, expected)


def test_memory_that_runs_out_as_caches_take_turns_leaves_single_launches(model, captured, monkeypatch):
    def fail(table, contents):
        table.clear()  # half way
        raise torch.OutOfMemoryError("of this test")

    token, found = ids(1, 1, 2), []
    for way in ((), (1, 2)):
        with applied(model, way) as handle, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _, cache = steps(model, ids(1, LONG), token)
            if way:
                steps(model, ids(1, LONG, 1), token)
                monkeypatch.setattr(SlotTable, "load", fail)
            found.append(steps(model, token, token[:, :0], cache)[0])
    assert [one.category for one in told] == [GraphWarning]
    assert "OutOfMemoryError: of this test" in handle.steps.why_not
    assert handle.steps.replayed == 2
    assert torch.equal(*found)


@pytest.mark.parametrize("kernel", ["place.gather_missed", *(["place.place_step"] if CUDA else [])])
def test_a_kernel_that_fetches_and_fails_is_named_and_attention_goes_on_by_triton(model, captured, monkeypatch, kernel):
    prompt, new, calls = ids(1, LONG), ids(1, 2, 1), []
    real = resolve_name(f"sparsekv.kernels.decode.{kernel}")
    fails_at = 2 if kernel == "place.gather_missed" else 1  # in the midst of the layers

    def broken(*args, **options):
        calls.append(args)
        if len(calls) == fails_at:
            raise RuntimeError("at 12:3: ptxas died")
        real(*args, **options)

    with applied(model, ()):
        expected, _ = steps(model, prompt, new)
    monkeypatch.setattr(f"sparsekv.kernels.decode.{kernel}", broken)
    with applied(model, (1, 2)) as handle, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, cache = steps(model, prompt, new)
        before, failed = len(calls), handle.steps.why_not
        assert on_host(cache) == [1, 2]
        steps(model, ids(1, 20), new[:, :1])
        assert (handle.steps.replayed, handle.steps.why_not) == (1, "")  # caches on the device are captured still
    categories = [warning.category for warning in told]
    assert (categories.count(GraphWarning), categories.count(BackendWarning)) == (1, 0)  # attention did not fail
    assert "filter layer 0" in failed
    assert "ptxas died" in failed
    assert before == len(calls) == fails_at
    assert torch.equal(found, expected)


@pytest.mark.skipif(not CUDA, reason="device memory is a GPU's")
def test_many_requests_leave_nothing_behind(model):
    def request(number):
        rows, tokens = 1 + number % 3, LONG + 37 * number % 500
        model.generate(ids(rows, tokens, number), max_new_tokens=6, do_sample=False)

    def held():
        gc.collect()
        torch.cuda.synchronize()
        with open("/proc/self/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return torch.cuda.memory_allocated(), handle._engine.memory.free_bytes, resident << 10

    with applied(model, (1, 2)) as handle, torch.no_grad():
        for number in range(40):
            request(number)
        before = held()  # whatever kernels these lengths take are loaded
        for number in range(160):
            request(number % 40)
        after = held()
        assert handle.steps.replayed == 200 * 5
    assert after[0] - before[0] < 1 << 20
    assert after[1] - before[1] < 16 << 20
    assert after[2] - before[2] < 64 << 20
