"""What a long input makes on its way through the layers is bounded: no tensor of full length beyond those meant."""

import pytest
import torch
from tiny_models import TYPICAL, random_tokens, tiny_model
from tiny_plans import every_head, plan_for
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

LENGTH, ROWS, HIDDEN, FFN, HEADS, KV_HEADS, SIZE = 2048, 64, 64, 512, 4, 2, 16
SPARSE = AShape(sink=tokens(1), window=tokens(1))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made, and how many were looked at. Views of weights are none."""

    def __init__(self, model):
        super().__init__()
        self.weights = {weight.data_ptr() for weight in model.parameters()}
        self.bytes, self.name, self.seen = 0, "", 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.weights:
                self.seen += 1
                if tensor.untyped_storage().nbytes() > self.bytes:
                    self.bytes, self.name = tensor.untyped_storage().nbytes(), str(func)
        return out


def model_of(architecture, dtype):
    return tiny_model(architecture, hidden=HIDDEN, ffn=FFN, head_dim=SIZE, layers=2, dtype=dtype)


def largest(model, chunking):
    with torch.no_grad(), apply(model, plan_for(model), chunking=chunking), Largest(model) as found:
        model(random_tokens(1, LENGTH), logits_to_keep=1)
    assert found.seen > 100
    return found


@pytest.mark.parametrize("architecture", TYPICAL)
def test_no_tensor_is_larger_than_the_hidden_states(architecture):
    dtype = torch.bfloat16
    model = model_of(architecture, dtype)
    hidden = LENGTH * HIDDEN * dtype.itemsize
    assert 2 * ROWS * FFN * dtype.itemsize <= hidden  # gate and up of a piece; glm makes them at once
    assert hidden >= LENGTH * SIZE * 4  # rotary angles of all positions, in float32
    found = largest(model, Chunking(above=256, rows=ROWS, output_bytes=1))
    assert found.bytes <= hidden, found.name
    whole = largest(model, Chunking(above=1 << 30))
    assert whole.bytes > 2 * hidden  # the width of the MLP: what this is about


def peak(model, chunking):
    """Most bytes allocated at once by a forward pass beyond those before it, temporaries inside operations included."""
    prompt, plan = random_tokens(1, LENGTH), plan_for(model, every_head(model, SPARSE))
    with torch.no_grad(), apply(model, plan, chunking=chunking):
        model(prompt, logits_to_keep=1)
        with profile(profile_memory=True) as recorded:
            model(prompt, logits_to_keep=1)
    held = most = 0
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert len(changes) > 500
    return most


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_all_that_is_alive_at_once_is_the_hidden_states_the_heads_and_one_piece(architecture):
    dtype = torch.float32
    model = model_of(architecture, dtype)
    hidden = LENGTH * HIDDEN * dtype.itemsize
    queries = LENGTH * HEADS * SIZE * dtype.itemsize
    cached = 2 * 2 * LENGTH * KV_HEADS * SIZE * dtype.itemsize * 9 // 8  # both layers, keys and values, room to grow
    piece = ROWS * FFN * dtype.itemsize * 4
    positions = 4 * LENGTH * SIZE * dtype.itemsize
    index = 1 << 20  # tile lists, and a KV head's keys and values as the CPU kernel holds them
    bound = hidden + queries + queries // KV_HEADS + cached + piece + positions + index
    assert peak(model, Chunking(above=256, rows=ROWS, output_bytes=1)) <= bound
    assert peak(model, Chunking(above=1 << 30)) > bound + LENGTH * FFN * dtype.itemsize
