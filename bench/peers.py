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
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from sparsekv.bench.dense_kernels import dense_calls, time_dense
from sparsekv.bench.harness import Call, Columns, Row, free_memory, in_short, measure, number, report
from sparsekv.bench.kernels import families_of, planted_index
from sparsekv.bench.peer_adapters import PEERS, Peer, Ready
from sparsekv.bench.planted import Planted, causal_scores, plant, sample_rows
from sparsekv.kernels.backends import BACKENDS, choose_backend, prefill_attention
from sparsekv.kernels.tiles import density
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.model_config import device_name, dtype_name

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
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
