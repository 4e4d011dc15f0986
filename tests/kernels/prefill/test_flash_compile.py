"""The calls into flash-attn-4 compiled for Hopper, where the package is installed; that needs no GPU.

In a process of its own: which architecture to compile for is read from the environment at import.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

PROGRAM = """
import contextlib, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute.interface import _flash_attn_fwd
from sparsekv.kernels.prefill.flash import call
from sparsekv.kernels.prefill.flash.call import BlockLists
from sparsekv.kernels.prefill.flash.call import CallPart
from sparsekv.plans.patterns import TileShape

call.check_layout = lambda name, tensor: None  # fake tensors have no address
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
kernels = _flash_attn_fwd.compile_cache.cache

def part(D, window, H, S, K):
    q, k, v, out = (torch.empty(1, h, n, D, dtype=torch.bfloat16, device="cuda")
                    for h, n in ((H, S), (H // 4, K), (H // 4, K), (H, S)))
    return CallPart(q, k, v, out, torch.empty(1, H, S, device="cuda"), 0.1, window)

def lists(key, window, S, K, W, D=128, H=8):
    T = -(-S // 128)
    counts, whole, masked = (torch.empty(shape, dtype=torch.int32, device="cuda")
                             for shape in ((1, H, T), (1, H, T, W), (1, H, T, 2)))
    made = BlockLists(TileShape(query=128, key=key), counts, whole, counts, masked)
    call.attend_lists(part(D, window, H, S, K), made)

with FakeTensorMode():
    lists(128, None, 1000, 1500, 6)
    assert len(kernels) == 1
    lists(128, None, 3000, 3000, 9)
    lists(128, None, 300, 400, 1)
    assert len(kernels) == 1, "a length, a past or a width of lists was compiled for"
    lists(64, 300, 1000, 1500, 6, D=256)
    call.attend_dense(part(128, None, 8, 1000, 1500))
    call.attend_dense(part(128, 200, 8, 1000, 1500))
    assert len(kernels) == 4
    call.attend_dense(part(128, None, 8, 4000, 9000))
    call.attend_dense(part(128, 300, 8, 4000, 9000))
    assert len(kernels) == 4
print("compiled", len(kernels))
"""


def _installed() -> bool:
    try:
        return bool(version("flash-attn-4"))
    except PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _installed(), reason="needs the extra: pip install 'sparsekv[flash]'")
def test_calls_compile_for_hopper_and_lengths_compile_nothing_again() -> None:
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | target, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled 4"
