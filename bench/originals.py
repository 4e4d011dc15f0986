"""Other people's sparse prefill by their own code, fetched and never copied: the methods of `sparsekv compare` whose
names end in "_original".

    python -m sparsekv.bench.originals            # what is fetched, of which commit, and what is missing
    python -m sparsekv.bench.originals --fetch    # git clones into .peers/, which git ignores

FlexPrefill needs einops; MInference's index kernel is compiled on first use (nvcc). The folder is also searched for
packages (einops, flash_attn) that lie there. Each runs with the settings that its authors publish for an 8B Llama.
Packages of a checkout are entered without running their `__init__`, which patch or import half of transformers.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size, M tiles of 128.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from transformers import PreTrainedModel

from sparsekv.bench.tile_rules import PUBLISHED_LINES
from sparsekv.kernels.keys import PLAIN
from sparsekv.kernels.methods import Method
from sparsekv.planner.evaluation.results import Spent
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

FOLDER = Path(".peers")
_MINFERENCE_FILES = (
    "minference/ops/pit_sparse_flash_attention_v2.py",
    "minference/ops/streaming_kernel.py",
    "csrc/kernels.cpp",
    "csrc/vertical_slash_index.cu",
    "../FlexPrefill/flex_prefill/ops/minfer/minfer_attention.py",  # the runner over heads, without its model code
)
_GITHUB = "https://github.com/"


@dataclass(frozen=True, slots=True)
class Ready:
    """An original that can run.

    Attributes:
        measured: its call on queries [B, H, S, D], keys and values [B, G, S, D]: the output [B, H, S, D], and the share
            of the causal matrix that it computed.
        setting: what its authors publish.
    """

    measured: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, float]]
    setting: str


class Original(Method):
    """One project's code.

    Attributes:
        folder: of its checkout.
        url, commit: where that comes from, and the version that is fetched.
        files: all that is read of it; a whole checkout will do as well.
        modules: Python packages that it needs beside torch and Triton.
    """

    folder: ClassVar[str]
    url: ClassVar[str]
    commit: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]] = ()

    def prepare(self, root: Path) -> Ready:
        raise NotImplementedError

    def missing(self, root: Path) -> list[str]:
        """Returns what is not there to run it: files, then packages."""
        files = [str(root / self.folder / name) for name in self.files if not (root / self.folder / name).is_file()]
        return files + [f"the package {name}" for name in self.modules if importlib.util.find_spec(name) is None]

    def ready(self, root: Path, device: torch.device) -> Ready:
        """The original, where everything that it needs is there.

        Raises:
            FileNotFoundError, RuntimeError: it is not.
        """
        if missing := self.missing(root):
            raise FileNotFoundError(f"not fetched (--fetch): missing {', '.join(missing)}")
        if device.type != "cuda":
            raise RuntimeError("the original code needs a CUDA GPU")
        return self.prepare(root.resolve())


@dataclass(frozen=True, slots=True)
class OriginalMode:
    """An original in the layers with full attention, as a mode of `evaluate`; decode is dense."""

    ready: Ready

    dense_prefill: ClassVar[bool] = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        computed = causal = 0.0

        def attend(call: AttentionCall) -> torch.Tensor | None:
            nonlocal computed, causal
            if call.q_BHSD.shape[2] == 1 or call.window is not None:
                return None
            if call.q_BHSD.shape[0] > 1 or call.chunk.past[0]:
                raise UsageError("expected whole prompts, one at a time, found a batch or a chunk")
            if call.softmax != PLAIN or not math.isclose(call.scale, call.q_BHSD.shape[3] ** -0.5):
                raise UsageError("expected a plain softmax of scores over the root of the head size, found another one")
            out_BHSD, density = self.ready.measured(call.q_BHSD, call.k_BGKD, call.v_BGKD)
            computed, causal = computed + density, causal + 1.0
            return out_BHSD

        with capture_attention(model, attend):
            yield lambda: Spent(computed, causal)


# --- MInference 1.0 ---------------------------------------------------------------------------------------------------


class MInferenceCode(Original):
    name, folder, url = "minference_original", "MInference", f"{_GITHUB}microsoft/MInference"
    commit = "fb56c917f618e8645f1cfc37535afd7424d78f0d"
    files = _MINFERENCE_FILES

    def prepare(self, root: Path) -> Ready:
        """Its vertical-slash attention head by head, as its runner does; the index kernel is compiled from its csrc.

        Where neither SGLang nor vLLM is installed, whose kernel it prefers, it runs its own Triton kernel.
        """
        folder = root / "MInference"
        package = _enter("minference", folder / "minference")
        _enter("minference.ops", folder / "minference" / "ops")
        if "minference.cuda" not in sys.modules:
            from torch.utils.cpp_extension import load

            sources = [str(folder / "csrc" / name) for name in ("kernels.cpp", "vertical_slash_index.cu")]
            sys.modules["minference.cuda"] = load(name="minference_cuda", sources=sources)
        kernel: Any = importlib.import_module("minference.ops.pit_sparse_flash_attention_v2")
        package.vertical_slash_sparse_attention = kernel.vertical_slash_sparse_attention
        package.streaming_forward = importlib.import_module("minference.ops.streaming_kernel").streaming_forward
        for name, below in (
            ("flex_prefill", ""),
            ("flex_prefill.ops", "ops"),
            ("flex_prefill.ops.minfer", "ops/minfer"),
        ):
            _enter(name, root / "FlexPrefill" / "flex_prefill" / below)
        runner: Any = importlib.import_module("flex_prefill.ops.minfer.minfer_attention")
        index = f"convert_vertical_slash_indexes{'' if kernel.convert_vertical_slash_indexes_opt is None else '_opt'}"
        said = "the kernel of SGLang or vLLM" if kernel.sparse_attn_func is not None else "its Triton kernel"

        def attend(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Any:
            config = {str(head): ["vertical_and_slash", *PUBLISHED_LINES, 1.0] for head in range(q_BHSD.shape[1])}
            return runner.minfer_attention(q_BHSD, k_BGSD, v_BGSD, config)

        def measured(*tensors: torch.Tensor) -> tuple[Any, float]:
            out_BHSD, found = _watched(kernel, index, lambda: attend(*tensors))
            area = sum(
                64.0 * 64.0 * float(blocks.sum()) + 64.0 * float(singles.sum()) for blocks, _, singles, _ in found
            )
            return out_BHSD, area / 64**2 / _causal_tiles(tensors[0], 64)

        return Ready(measured, "{} columns, {} diagonals a head; {}".format(*PUBLISHED_LINES, said))


def _watched(module: Any, name: str, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Returns what a call gives, and what a function of the original returned each time meanwhile."""
    original, found = getattr(module, name), []

    def watch(*args: Any, **options: Any) -> Any:
        found.append(original(*args, **options))
        return found[-1]

    with mock.patch.object(module, name, watch):
        return call(), found


def _causal_tiles(q_BHSD: torch.Tensor, side: int) -> float:
    """Square tiles of all heads on and below the diagonal."""
    tiles = -(-q_BHSD.shape[2] // side)
    return q_BHSD.shape[1] * tiles * (tiles + 1) / 2


# --- FlexPrefill ------------------------------------------------------------------------------------------------------


class FlexPrefillCode(Original):
    name, folder, url = "flexprefill_original", "FlexPrefill", f"{_GITHUB}bytedance/FlexPrefill"
    commit = "a24b27bf117fd6ad4ba34b0db82c598e7786fd59"
    files = ("flex_prefill/ops/flex_prefill_attention.py",)
    modules = ("einops",)

    def prepare(self, root: Path) -> Ready:
        """With the settings of its README for Llama-3.1-8B."""
        for name, below in (("flex_prefill", ""), ("flex_prefill.ops", "ops")):
            _enter(name, root / "FlexPrefill" / "flex_prefill" / below)
        module: Any = importlib.import_module("flex_prefill.ops.flex_prefill_attention")
        settings = {"gamma": 0.9, "tau": 0.1, "min_budget": 1024, "max_budget": None, "block_size": 128}

        def measured(*tensors: torch.Tensor) -> tuple[Any, float]:
            call = module.flex_prefill_attention
            out_BSHD, of_square = call(*_by_token(*tensors), **settings, return_computational_ratio=True)
            tiles = -(-tensors[0].shape[2] // 128)
            return out_BSHD.transpose(1, 2), of_square * 2 * tiles / (tiles + 1)

        return Ready(measured, "gamma 0.9, tau 0.1, at least 1024 tokens")


# --- FlashPrefill -----------------------------------------------------------------------------------------------------


class FlashPrefillCode(Original):
    name, folder, url = "flashprefill_original", "FlashPrefill", f"{_GITHUB}qhfan/FlashPrefill"
    commit = "74e42f3d4f636b4f0744c6ffbb7768d35bb0d10e"
    files = ("ops/flashprefill_native_forward.py",)

    def prepare(self, root: Path) -> Ready:
        """The Triton version, with the settings of its vLLM patch for Llama."""
        _stand_in_for_fla()
        package = f"{__name__}_flash_prefill"
        _enter(package, root / "FlashPrefill" / "ops")
        module: Any = importlib.import_module(f"{package}.flashprefill_native_forward")

        def attend(*tensors: torch.Tensor) -> Any:
            q_BSHD, k_BSGD, v_BSGD = _by_token(*tensors)
            out_BSHD = torch.empty_like(q_BSHD)
            module.flash_prefill(q_BSHD, k_BSGD, v_BSGD, out_BSHD, 128, 2, 4, 0.18, 2, 0)
            return out_BSHD.transpose(1, 2)

        def measured(*tensors: torch.Tensor) -> tuple[Any, float]:
            out_BHSD, found = _watched(module, "deal_output_score", lambda: attend(*tensors))
            return out_BHSD, float(found[0][1].sum()) / _causal_tiles(tensors[0], 128)

        return Ready(measured, "alpha 0.18, 2 sink and 4 recent blocks")


# --- how they are reached ---------------------------------------------------------------------------------------------


def _enter(name: str, folder: Path) -> Any:
    """A package whose modules can be imported, without running what its `__init__` would."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return sys.modules[name]


def _stand_in_for_fla() -> None:
    """The two decorators that FlashPrefill takes from flash-linear-attention, where that is not installed."""
    if "fla" in sys.modules or importlib.util.find_spec("fla") is not None:
        return

    def contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            return function(*(x.contiguous() if isinstance(x, torch.Tensor) else x for x in args), **options)

        return wrapped

    utils: Any = types.ModuleType("fla.utils")
    utils.contiguous, utils.autocast_custom_fwd = contiguous, torch.amp.custom_fwd(device_type="cuda")
    sys.modules["fla"], sys.modules["fla.utils"] = types.ModuleType("fla"), utils


def _by_token(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[B, S, heads, D] each; tensors of models lie so in memory, and nothing is copied."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


ORIGINALS: tuple[type[Original], ...] = (MInferenceCode, FlexPrefillCode, FlashPrefillCode)

# --- fetching ---------------------------------------------------------------------------------------------------------


def fetch(root: Path, originals: Sequence[type[Original]] = ORIGINALS) -> Iterator[str]:
    """Clones each at its commit into a folder of its own, and says so; one that is there at that commit stays.

    Raises:
        UsageError: git fails, or a folder holds something else.
    """
    for one in originals:
        folder = root / one.folder
        if _head(folder) == one.commit:
            yield f"{one.name}: {folder} is at {one.commit}"
            continue
        if folder.exists() and any(folder.iterdir()) and not (folder / ".git").exists():
            raise UsageError(f"expected a clone of {one.url} or nothing in {folder}, found other files; remove them")
        folder.mkdir(parents=True, exist_ok=True)
        steps = (("init",), ("fetch", "--depth", "1", one.url, one.commit), ("checkout", one.commit))
        for name, *args in steps:
            done = _git(folder, name, "-q", *args)
            if done.returncode:
                raise UsageError(f"expected to fetch {one.commit} of {one.url}, found: {done.stderr.strip():.300}")
        yield f"{one.name}: fetched {one.commit} of {one.url} into {folder}"


def _git(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False)


def _head(folder: Path) -> str:
    return _git(folder, "rev-parse", "HEAD").stdout.strip() if (folder / ".git").exists() else ""


def main() -> int:
    """Lists the originals, or fetches them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="clone what is not there")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.fetch:
        print(*fetch(options.folder), sep="\n")
    for one in ORIGINALS:
        missing = one().missing(options.folder)
        print(f"{one.name}: {'missing ' + ', '.join(missing) if missing else 'complete'}")
        print(f"  {one.url} at {one.commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
