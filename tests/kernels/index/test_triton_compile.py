"""The index kernels compiled for Hopper, launched as on a GPU up to the launch itself; that needs no GPU."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from kernel_resources import SHARED, compiling_for, resources
from sparsekv.kernels.index.build import empty_index
from sparsekv.kernels.index.layout import FamilyHeads, IndexCall
from sparsekv.kernels.index.triton import block_sparse, vertical_slash
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import tokens
from sparsekv.plans.patterns import BlockSparse, TileShape, VerticalSlash

def build(past, length, vertical, heads, last_q=64):
    pattern = VerticalSlash(
        vertical=tokens(vertical), slash=tokens(50), max_tiles=tokens(vertical), last_q=last_q
    )
    q, k = torch.empty(1, 8, length - past, 128).bfloat16(), torch.empty(1, 2, length + 5, 128).bfloat16()
    call = IndexCall.of(q, k, Chunk((past,), (length,)), TileShape(), 0.1, None)
    blocks = BlockSparse(keep=tokens(vertical + 128))
    for module, chosen in ((vertical_slash, pattern), (block_sparse, blocks)):
        prepared = module.prepare(FamilyHeads.of((chosen,) * len(heads), heads), call)
        prepared.fill(empty_index([prepared.widths], call.layout, ()))

with compiling_for(90) as built:
    build(0, 600, 100, range(8))
    build(77, 1234, 333, (1, 2, 5))
    build(128, 129 + 4096, 1, (7,))
first, *others = [built[start : start + 10] for start in range(0, len(built), 10)]
assert len(others) == 2
for other in others:
    for (name, kernel), (_, again) in zip(first, other, strict=True):
        assert kernel is again, f"{name} is compiled again for another length, budget or number of heads"
with compiling_for(90) as longer:
    build(0, 600, 100, range(8), last_q=256)
for name, kernel in first + longer:
    registers, spilled = resources(kernel.asm["cubin"])
    assert spilled == 0, f"{name} spills {spilled} bytes"
    assert kernel.metadata.shared <= SHARED[90], name
print(*(name for name, _ in first))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spilling_and_once_for_all_lengths() -> None:
    # In a process of its own: here, Triton was imported as an interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("stats", "lines", "select", "crossings", "diagonals", "rows", "pool", "pool", "products", "choose")
    assert done.stdout.split() == [f"{name}_kernel" for name in names]
