"""Which backend is chosen, and what a user is told when the one asked for cannot run."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsekv.kernels import backends, tiles
from sparsekv.kernels.backends import choose_backend, dense_by_triton, is_backend_failure
from sparsekv.kernels.index import build
from sparsekv.kernels.prefill.flash import limits
from sparsekv.kernels.tiles import TileIndex
from sparsekv.plans.errors import BackendError, PlanError, ShapeError
from sparsekv.plans.patterns import TileShape

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine whose GPU has the given compute capability, as far as torch says."""
    pytest.importorskip("triton")

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


def test_a_machine_without_gpu_gets_cpu_and_is_told_why_not_the_others() -> None:
    choice = choose_backend("cpu", torch.float32, 64)
    assert choice.name == "cpu"
    assert [name for name, _ in choice.rejected] == ["flash", "triton"]
    assert "Hopper" in choice.rejected[0][1]
    assert "GPU" in choice.rejected[1][1]


def test_a_gpu_gets_triton_and_is_told_about_flash(gpu) -> None:
    gpu(9, 0)
    choice = choose_backend("cuda", torch.bfloat16, 128)
    assert choice.name == "triton"
    assert "pip install flash-attn-4" in dict(choice.rejected)["flash"]
    assert choose_backend("cuda", torch.bfloat16, 512).name == "triton"
    gpu(8, 6)
    assert "found 8.6" in dict(choose_backend("cuda", torch.bfloat16, 128).rejected)["flash"]


def test_a_gpu_without_triton_is_told_so_and_is_served_by_torch(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    gpu(9, 0)
    monkeypatch.setattr(tiles, "has_triton", lambda: False)
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    monkeypatch.setattr(build, "has_triton", lambda: False)
    monkeypatch.setitem(sys.modules, "sparsekv.kernels.index.triton", None)
    assert choose_backend("cuda", torch.bfloat16, 128, "reference").name == "reference"
    with pytest.raises(BackendError, match="Triton is not installed: pip install"):
        choose_backend("cuda", torch.bfloat16, 128)
    assert not build.builds_by_triton(torch.device("cuda"))
    counts_BHT, live_BHTN = torch.tensor([[[1, 2]]]).as_subclass(OnGpu), torch.tensor([[[[1], [3]]]])
    index = TileIndex(TileShape(), live_BHTN, counts_BHT, live_BHTN, live_BHTN, torch.tensor([False]))
    assert float(tiles.computed_tiles(index)) == 3 + 3 / 128


@pytest.mark.parametrize(
    ("shape", "backend", "ours"),
    [((1, 8, 64, 512), "triton", True), ((1, 8, 64, 256), "triton", False), ((1, 8, 1, 512), "triton", False),
     ((1, 8, 64, 512), "reference", False)],
)  # fmt: skip
def test_dense_prompts_of_heads_that_torch_has_no_fast_kernel_for_go_to_ours(shape, backend, ours) -> None:
    assert dense_by_triton(SimpleNamespace(is_cuda=True, shape=shape), backend=backend) is ours


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "requested", "message"),
    [
        ((7, 5), torch.float16, 128, "auto", r"8.0 \(Ampere\) and newer, found 7.5"),
        ((9, 0), torch.bfloat16, 1024, "auto", "multiples of 8 from 16 to 512, found 1024"),
        ((9, 0), torch.bfloat16, 128, "cpu", "main memory"),
        (None, torch.float32, 64, "flash", "'flash'.*backend=auto"),
        (None, torch.float32, 64, "triton", "needs a CUDA or ROCm GPU"),
        (None, torch.float32, 64, "cuda", "'cuda'"),
        (None, torch.float64, 64, "auto", "float64"),
    ],
    ids=str,
)
def test_what_no_backend_or_not_the_one_asked_for_can_run_is_refused(
    gpu, capability, dtype, head_dim: int, requested: str, message: str
) -> None:
    if capability:
        gpu(*capability)
    with pytest.raises(BackendError, match=message):
        choose_backend("cuda" if capability else "cpu", dtype, head_dim, requested)


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package of that name, of a release or of nobody knows which."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}

    def install(release: str | None = "4.0.0b36", code: str = "") -> None:
        package = tmp_path / "flash_attn"
        (package / "cute").mkdir(parents=True)
        (package / "__init__.py").write_text(code)
        (package / "cute" / "__init__.py").touch()
        if release is not None:
            about = tmp_path / f"flash_attn_4-{release}.dist-info" / "METADATA"
            about.parent.mkdir()
            about.write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {release}\n")
        monkeypatch.syspath_prepend(tmp_path)
        limits._installed.cache_clear()

    yield install
    limits._installed.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def hopper(gpu, flash_attn) -> None:
    """A Hopper GPU with flash-attn-4 installed."""
    gpu(9, 0)
    flash_attn()


@pytest.mark.parametrize("release", ["4.0.0", None])
def test_a_release_of_flash_attn_that_was_not_tested_runs_on_request_only(gpu, flash_attn, release) -> None:
    gpu(9, 0)
    flash_attn(release)
    choice = choose_backend("cuda", torch.bfloat16, 128)
    assert choice.name == "triton"
    assert "was not tested" in dict(choice.rejected)["flash"]
    assert choose_backend("cuda", torch.bfloat16, 128, "flash", TileShape()).name == "flash"


def test_the_extra_installs_the_release_that_was_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["flash"] == [f"flash-attn-4=={limits.FLASH_ATTN_4.tested[-1]}"]


@pytest.mark.usefixtures("hopper")
def test_flash_is_chosen_first_and_for_tiles_that_it_takes() -> None:
    assert choose_backend("cuda", torch.bfloat16, 128).name == "flash"
    choice = choose_backend("cuda", torch.bfloat16, 128, tile=TileShape(query=64, key=64))
    assert choice.name == "triton"
    assert "64 x 64" in dict(choice.rejected)["flash"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile", "message"),
    [
        (torch.float32, 128, None, "float16 and bfloat16"),
        (torch.bfloat16, 512, None, "from 16 to 256, found 512"),
        (torch.bfloat16, 100, None, "from 16 to 256, found 100"),
        (torch.bfloat16, 256, TileShape(), "key tiles of 64"),
        (torch.bfloat16, 192, TileShape(), "key tiles of 64"),
        (torch.bfloat16, 128, TileShape(query=64, key=64), "query tiles of 128"),
    ],
)
def test_flash_asked_for_where_it_cannot_run_says_why(dtype, head_dim: int, tile, message: str) -> None:
    with pytest.raises(BackendError, match=f"'flash'.*{message}.*backend=auto"):
        choose_backend("cuda", dtype, head_dim, "flash", tile)


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((8, 0), "9.0 \\(Hopper\\), found 8.0"),
        ((10, 0), "per 256"),
        ((12, 0), "12.0"),
        ((9, 0), "flash-attn-4 was not installed when this process started .pip install .*flash"),
    ],
    ids=str,
)
def test_gpus_that_flash_does_not_serve_are_named(gpu, flash_attn, capability, message: str) -> None:
    gpu(*capability)
    flash_attn("2.8.3", "raise ImportError('flash_attn_2_cuda.so: undefined symbol')")  # an older one is not it
    with pytest.raises(BackendError, match=message):
        choose_backend("cuda", torch.bfloat16, 128, "flash")


def test_reference_runs_on_request_only() -> None:
    assert choose_backend("cpu", torch.float32, 64, "reference").name == "reference"
    assert choose_backend("cpu", torch.float32, 64, "cpu").reason == "requested"


def test_choosing_imports_no_triton_and_starts_no_gpu() -> None:
    code = (
        "import sys, torch\n"
        "from sparsekv.kernels.backends import choose_backend\n"
        "choose_backend('cpu', torch.float32, 64)\n"
        "assert not {'triton', 'flash_attn', 'cutlass'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def error_of(module: str) -> Exception:
    """As a compiler raises it."""
    return type("CompilationError", (Exception,), {"__module__": module})()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        error_of("triton.compiler.errors"),
        error_of("cutlass.base_dsl.common"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
        BackendError("strides"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_failures_of_kernels_are_told(error: Exception) -> None:
    assert is_backend_failure(error, torch.device("cpu"))


@pytest.mark.parametrize(
    "error",
    [
        *(kind("of this test") for kind in (TypeError, AttributeError, IndexError, KeyError, ValueError)),
        *(kind("of this test") for kind in (AssertionError, NotImplementedError, ShapeError, PlanError)),
        RuntimeError("The size of tensor a (64) must match the size of tensor b (128)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_code_are_not_taken_for_failures_of_kernels(error: Exception) -> None:
    assert not is_backend_failure(error, torch.device("cpu"))
