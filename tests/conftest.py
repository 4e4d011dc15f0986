"""What every test relies on: helpers on the path, no network, and as many threads as the caller allows."""

import gc
import os
import signal
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

# Before anything imports the hub: no test may depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anything imports torch: parallel workers share the cores, they do not multiply them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore interrupts, and so do their children: tests that interrupt would fail there alone.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "extending"))

# Before anything imports triton (transformers does): without a GPU its kernels run in the interpreter.
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from interpreted_triton import prepare_interpreter

        prepare_interpreter()


def pytest_collection_finish() -> None:
    """A test that collects garbage looks through its own objects, not through those of all modules: 0.4 s each time."""
    gc.freeze()


@pytest.fixture(autouse="CI" in os.environ)
def _draws_are_the_same_each_time(request):
    """As those of property tests: one tree has one result there, and other machines explore."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=torch.cuda.is_available())
def _nothing_is_measured(monkeypatch):
    """Where sparse is faster depends on the machine: tests rely on the hint, or give a rule."""
    monkeypatch.setattr("sparsekv.runtime.hf.apply.can_capture", lambda device, backend: False)
