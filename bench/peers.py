"""Other people's sparse prefill beside ours in one process, on the same planted queries, keys and values.

    python -m sparsekv.bench.peers --list                        # who is there, and the files that each needs
    python -m sparsekv.bench.peers --lengths 32k,128k --json peers.json

Peers are read from checkouts under .peers/ (git-ignored; nothing of them is in this repository):

    git clone https://github.com/microsoft/MInference        .peers/MInference
    git clone https://github.com/bytedance/FlexPrefill       .peers/FlexPrefill
    git clone https://github.com/qhfan/FlashPrefill          .peers/FlashPrefill
    git clone https://github.com/mit-han-lab/x-attention     .peers/x-attention

`--list` names the few files that are read of each (some 300 KB together), and the commits that were looked at.
FlexPrefill needs einops; MInference's index kernel is compiled on first use (nvcc). --peers is also searched for
packages (einops, flash_attn) that lie there.

Each peer runs with the settings that its authors publish for an 8B Llama, so that densities differ: they stand in the
table, and so does the error of the output, against dense attention in float32 on sampled rows, relative to its size.
Structure is planted for the density asked for, in vertical_slash heads unless --patterns says otherwise.

An adapter imports its peer from a checkout (see `Peer.files`) and gives back one call from queries, keys and values to
the output, index building included, and the density that the call comes to. What is missing is raised, and printed.
Packages of a checkout are entered without running their `__init__`, which patch or import half of transformers.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sparsekv.bench.dense_kernels import dense_calls, time_dense
from sparsekv.bench.harness import Call, Columns, Row, free_memory, in_short, measure, number, report
from sparsekv.bench.kernels import families_of, planted_index
from sparsekv.bench.planted import Planted, causal_scores, plant, sample_rows
from sparsekv.kernels.backends import BACKENDS, choose_backend, prefill_attention
from sparsekv.kernels.tiles import density
from sparsekv.plans.files import write_bytes
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.model_config import device_name, dtype_name

Attention = Callable[[], Any]  # [B, H, S, D]


@dataclass(frozen=True)
class Ready:
    """A peer that can run: its call, [B, H, S, D], and what it computes of the causal matrix.

    Attributes:
        is_attention: False where only the peer's index building runs here, and the call gives no output.
    """

    call: Attention
    density: float
    note: str = ""
    is_attention: bool = True


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        folder: of its checkout.
        url, commit: where that comes from, and the version that was looked at.
        files: all that is read of it; a whole checkout will do as well.
        modules: Python packages that it needs beside torch and Triton.
    """

    name: str
    folder: str
    url: str
    commit: str
    files: tuple[str, ...]
    modules: tuple[str, ...]
    prepare: Callable[[Planted, Path], Ready]

    def missing(self, root: Path) -> list[str]:
        """Returns what is not there to run it: files, then packages."""
        files = [str(root / self.folder / name) for name in self.files if not (root / self.folder / name).is_file()]
        return files + [f"the package {name}" for name in self.modules if importlib.util.find_spec(name) is None]


# --- MInference 1.0 ---------------------------------------------------------------------------------------------------

_PUBLISHED = (1000, 6096)  # columns and diagonals of nearly every head of its Llama-3.1-8B configuration


def minference(planted: Planted, root: Path, counts: tuple[int, int] | None = _PUBLISHED) -> Ready:
    """Its vertical-slash attention head by head, as its runner does; the index kernel is compiled from its csrc.

    Where neither SGLang nor vLLM is installed, whose kernel it prefers, it runs its own Triton kernel.

    Args:
        counts: columns and diagonals of every head; None for those that were planted.
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
    for name, below in (("flex_prefill", ""), ("flex_prefill.ops", "ops"), ("flex_prefill.ops.minfer", "ops/minfer")):
        _enter(name, root / "FlexPrefill" / "flex_prefill" / below)
    runner: Any = importlib.import_module("flex_prefill.ops.minfer.minfer_attention")
    config = {
        str(head): ["vertical_and_slash", *(counts or _planted_counts(planted, head)), 1.0]
        for head in range(planted.q_BHSD.shape[1])
    }

    def call() -> Any:
        return runner.minfer_attention(planted.q_BHSD, planted.k_BGSD, planted.v_BGSD, config)

    fast = kernel.convert_vertical_slash_indexes_opt is not None
    found = _watched(kernel, f"convert_vertical_slash_indexes{'_opt' if fast else ''}", call)
    area = sum(64.0 * 64.0 * float(blocks.sum()) + 64.0 * float(singles.sum()) for blocks, _, singles, _ in found)
    density = area / 64**2 / _causal_tiles(planted, 64)
    said = "the kernel of SGLang or vLLM" if kernel.sparse_attn_func is not None else "its Triton kernel"
    columns, diagonals = counts or _planted_counts(planted, 0)
    return Ready(call, density, f"{columns} columns, {diagonals} diagonals a head; {said}")


def minference_planted(planted: Planted, root: Path) -> Ready:
    """The same with as many columns and diagonals as were planted."""
    return minference(planted, root, None)


def _planted_counts(planted: Planted, head: int) -> tuple[int, int]:
    """And room for the 30 columns and 100 diagonals that it always takes, and the 64 on which it sees a sink."""
    truth = planted.heads[head]
    if not truth.bands:
        raise ValueError("only vertical_slash heads have columns and diagonals: run with --patterns vertical_slash")
    return len(truth.columns_C) + 30, sum(stop - first for first, stop in truth.bands) + 164


def _watched(module: Any, name: str, call: Attention) -> list[Any]:
    """Returns what a function of the peer returns each time while its attention runs once."""
    original, found = getattr(module, name), []

    def watch(*args: Any, **options: Any) -> Any:
        found.append(original(*args, **options))
        return found[-1]

    with mock.patch.object(module, name, watch):
        call()
    return found


def _causal_tiles(planted: Planted, side: int) -> float:
    """Square tiles of all heads on and below the diagonal."""
    tiles = -(-planted.chunk.longest // side)
    return planted.q_BHSD.shape[1] * tiles * (tiles + 1) / 2


# --- FlexPrefill ------------------------------------------------------------------------------------------------------


def flex_prefill(planted: Planted, root: Path) -> Ready:
    """With the settings of its README for Llama-3.1-8B."""
    for name, below in (("flex_prefill", ""), ("flex_prefill.ops", "ops")):
        _enter(name, root / "FlexPrefill" / "flex_prefill" / below)
    module: Any = importlib.import_module("flex_prefill.ops.flex_prefill_attention")
    q_BSHD, k_BSGD, v_BSGD = _by_token(planted)
    settings = {"gamma": 0.9, "tau": 0.1, "min_budget": 1024, "max_budget": None, "block_size": 128}

    def call() -> Any:
        return module.flex_prefill_attention(q_BSHD, k_BSGD, v_BSGD, **settings).transpose(1, 2)

    _, of_square = module.flex_prefill_attention(q_BSHD, k_BSGD, v_BSGD, **settings, return_computational_ratio=True)
    tiles = -(-planted.chunk.longest // 128)
    return Ready(call, of_square * 2 * tiles / (tiles + 1), "gamma 0.9, tau 0.1, at least 1024 tokens")


# --- FlashPrefill -----------------------------------------------------------------------------------------------------


def flash_prefill(planted: Planted, root: Path) -> Ready:
    """The Triton version, with the settings of its vLLM patch for Llama."""
    _stand_in_for_fla()
    package = f"{__name__}_flash_prefill"
    _enter(package, root / "FlashPrefill" / "ops")
    module: Any = importlib.import_module(f"{package}.flashprefill_native_forward")
    q_BSHD, k_BSGD, v_BSGD = _by_token(planted)
    out_BSHD = torch.empty_like(q_BSHD)

    def call() -> Any:
        module.flash_prefill(q_BSHD, k_BSGD, v_BSGD, out_BSHD, 128, 2, 4, 0.18, 2, 0)
        return out_BSHD.transpose(1, 2)

    counts = _watched(module, "deal_output_score", call)[0][1]
    return Ready(call, float(counts.sum()) / _causal_tiles(planted, 128), "alpha 0.18")


# --- XAttention -------------------------------------------------------------------------------------------------------


def x_attention(planted: Planted, root: Path) -> Ready:
    """Index building alone, stride 16 and threshold 0.9: its attention kernel (block_sparse_attn) is not built here.

    Keys are repeated for every query head, as its model code does; that is not counted.
    """
    sys.path.insert(0, str(root / "x-attention"))
    stand_in: Any = types.ModuleType("block_sparse_attn")
    stand_in.block_sparse_attn_func = None
    try:
        with mock.patch.dict(sys.modules, {"block_sparse_attn": stand_in}):
            module: Any = importlib.import_module("xattn.src.Xattention")
    finally:
        sys.path.remove(str(root / "x-attention"))
    group, length = planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1], planted.chunk.longest
    q_BHSD, k_BHSD = planted.q_BHSD.contiguous(), planted.k_BGSD.repeat_interleave(group, 1)
    power = 1 << (length - 1).bit_length()
    chunk = max(2048, min(max(2048, power), 128 * 1024 * 2048 // power))  # the default of its prefill function

    def estimate() -> Any:
        with _a_name_with_100():
            _, mask = module.xattn_estimate(q_BHSD, k_BHSD, block_size=128, stride=16, threshold=0.9, chunk_size=chunk)
        return mask

    tiles = -(-length // 128)
    density = float(estimate()[:, :, :tiles, :tiles].sum()) / _causal_tiles(planted, 128)
    return Ready(estimate, density, "stride 16, threshold 0.9; index building alone", is_attention=False)


def _a_name_with_100() -> AbstractContextManager[object]:
    """It uses its Triton kernels only on GPUs with 100 in their name; they run on others as well, and far faster."""
    real = torch.cuda.get_device_properties

    class Named:
        def __init__(self, device: Any = None) -> None:
            self._real, self.name = real(device), "H100"

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    return mock.patch.object(torch.cuda, "get_device_properties", Named)


# --- how they are reached ---------------------------------------------------------------------------------------------

_MINFERENCE_FILES = (
    "minference/ops/pit_sparse_flash_attention_v2.py",
    "minference/ops/streaming_kernel.py",
    "csrc/kernels.cpp",
    "csrc/vertical_slash_index.cu",
    "../FlexPrefill/flex_prefill/ops/minfer/minfer_attention.py",  # the runner over heads, without its model code
)
_MINFERENCE = "https://github.com/microsoft/MInference", "fb56c917f618e8645f1cfc37535afd7424d78f0d"

_GITHUB = "https://github.com/"
_XATTN = ("__init__.py", "src/Xattention.py", "src/kernels.py", "src/utils.py")
PEERS = (
    Peer("MInference", "MInference", *_MINFERENCE, _MINFERENCE_FILES, (), minference),
    Peer("MInference, planted counts", "MInference", *_MINFERENCE, _MINFERENCE_FILES, (), minference_planted),
    Peer("FlexPrefill", "FlexPrefill", f"{_GITHUB}bytedance/FlexPrefill", "a24b27bf117fd6ad4ba34b0db82c598e7786fd59",
         ("flex_prefill/ops/flex_prefill_attention.py",), ("einops",), flex_prefill),
    Peer("FlashPrefill", "FlashPrefill", f"{_GITHUB}qhfan/FlashPrefill", "74e42f3d4f636b4f0744c6ffbb7768d35bb0d10e",
         ("ops/flashprefill_native_forward.py",), (), flash_prefill),
    Peer("XAttention", "x-attention", f"{_GITHUB}mit-han-lab/x-attention", "e37988770b9d1bebd489eba011d615f35587ba08",
         tuple(f"xattn/{name}" for name in _XATTN), (), x_attention),
)  # fmt: skip


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


def _by_token(planted: Planted) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, S, heads, D] each; planted tensors lie so in memory, and nothing is copied."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (planted.q_BHSD, planted.k_BGSD, planted.v_BGSD))
    return q, k, v


COLUMNS: Columns = {
    "attention": ("name", str),
    "length": ("length", format_length),
    "ms": ("sparse_ms", number(".3f")),
    "index alone": ("index_ms", number(".3f")),
    "speedup": ("speedup", number(".2f")),
    "density": ("density", number(".4f")),
    "error": ("error", number(".1e")),
}


def ours(planted: Planted, backend: str) -> Ready:
    """Index and attention of a backend of this repository."""
    q = planted.q_BHSD
    choose_backend(q.device, q.dtype, q.shape[3], backend, planted.tile)

    def call() -> torch.Tensor:
        index = planted_index(planted)
        found = prefill_attention(*planted.tensors, index, planted.chunk, scale=planted.scale, backend=backend)
        return found.out_BHSD

    return Ready(call, float(density(planted_index(planted), planted.chunk)), f"{planted.tile.key} tiles")


def theirs(planted: Planted, peer: Peer, root: Path) -> Ready:
    """A peer, where everything that it needs is there."""
    missing = peer.missing(root)
    if missing:
        raise FileNotFoundError(f"missing: {', '.join(missing)}; see --list")
    if not planted.q_BHSD.is_cuda:
        raise RuntimeError("it needs a CUDA GPU")
    return peer.prepare(planted, root)


def everyone(planted: Planted, root: Path, wanted: list[str]) -> dict[str, Callable[[], Ready]]:
    """Names, and what prepares them; what cannot run raises there."""
    found: dict[str, Callable[[], Ready]] = {
        f"sparsekv {name}": partial(ours, planted, name) for name in BACKENDS if name != "reference"
    }
    found |= {peer.name: partial(theirs, planted, peer, root) for peer in PEERS}
    return {name: call for name, call in found.items() if not wanted or any(w.lower() in name.lower() for w in wanted)}


def relative_error(planted: Planted, out_BHSD: torch.Tensor, rows: list[int]) -> float:
    """|| out - dense || / || dense || on these rows, dense in float32."""
    off, size = 0.0, 0.0
    group = planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1]
    for head in range(planted.q_BHSD.shape[1]):
        expected_RD = causal_scores(planted, head, rows).softmax(1) @ planted.v_BGSD[0, head // group].float()
        off += float((out_BHSD[0, head, rows].float() - expected_RD).square().sum())
        size += float(expected_RD.square().sum())
    return float((off / size) ** 0.5)


def run(options: argparse.Namespace, length: int) -> Iterator[Row]:
    """Everyone at one length, on the same tensors, each timed in turn with the fastest dense kernel."""
    device = torch.device(options.device)
    planted = plant(
        families_of(options.patterns, options.heads),
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        length=length,
        density=options.density,
        tile=TileShape(query=options.tile, key=options.tile),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        seed=options.seed,
    )
    calls, peers = dense_calls(*planted.tensors), time_dense(*planted.tensors, options.rounds)
    fastest = {"dense": calls[peers.fastest]} if peers.fastest else {}
    for name, prepare in everyone(planted, options.peers, options.only).items():
        row = Row(
            name=name,
            length=length,
            device=device_name(device),
            dtype=dtype_name(planted.q_BHSD.dtype),
            own={"error": None, "index_ms": None},
            peers=peers,
        )
        try:
            yield _timed(row, planted, prepare(), fastest, options.rounds)
        except Exception as error:  # every library has its own
            yield row.plus(in_short(error))
        free_memory(device)


def _timed(row: Row, planted: Planted, ready: Ready, fastest: Mapping[str, Call], rounds: int) -> Row:
    row = row.plus(ready.note, density=ready.density)
    if ready.is_attention:
        row = row.plus(error=relative_error(planted, ready.call(), list(sample_rows(row.length))))
    times = measure({**fastest, "sparse": ready.call}, planted.q_BHSD.device, rounds)
    found = {"sparse_ms" if ready.is_attention else "index_ms": times["sparse"]}
    return row.plus(dense_ms=times.get("dense"), **found)


def print_peers(root: Path) -> None:
    """Who is there, and what each needs."""
    for peer in PEERS:
        missing = peer.missing(root)
        print(f"{peer.name}: {'missing ' + ', '.join(missing) if missing else 'complete'}")
        print(f"  {peer.url} at {peer.commit}")
        for name in peer.files:
            print(f"  {(root / peer.folder / name).resolve()}")
        for name in peer.modules:
            print(f"  the package {name}")


def main() -> int:
    """Lists the peers, or runs them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="who is there, and what each needs")
    parser.add_argument("--lengths", type=parse_lengths, default=(32768, 131072))
    parser.add_argument("--density", type=float, default=0.05, help="that structure is planted at")
    parser.add_argument("--patterns", default="vertical_slash", help="as of `sparsekv bench kernels`")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only those with one of these words")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tile", type=int, choices=(64, 128), default=128, help="ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the checkouts")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    options.peers = options.peers.resolve()
    sys.path.append(str(options.peers))
    if options.list:
        print_peers(options.peers)
        return 0
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device cpu tries this script on ours alone, at small --lengths")
    print(f"torch {torch.__version__}; planted at a density of {options.density:g}: {options.patterns}", flush=True)
    with torch.no_grad():
        rows = [row for length in options.lengths for row in run(options, length)]
    print(report(rows, rows[0].device, COLUMNS))
    if options.json:
        record = {"device": rows[0].device, "torch": torch.__version__, "rows": [row.data() for row in rows]}
        write_bytes(options.json, (json.dumps(record, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
