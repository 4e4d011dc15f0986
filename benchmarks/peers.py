"""Other people's sparse prefill beside ours in one process, on the same planted queries, keys and values.

    python benchmarks/peers.py --list                        # who is there, and the files that each needs
    python benchmarks/peers.py --lengths 32k,128k --json peers.json

Peers are read from checkouts under .peers/ (git-ignored; nothing of them is in this repository):

    git clone https://github.com/microsoft/MInference        .peers/MInference
    git clone https://github.com/bytedance/FlexPrefill       .peers/FlexPrefill
    git clone https://github.com/qhfan/FlashPrefill          .peers/FlashPrefill
    git clone https://github.com/mit-han-lab/x-attention     .peers/x-attention

`--list` names the few files that are read of each (some 300 KB together), and the commits that were looked at.
FlexPrefill needs einops; MInference's index kernel is compiled on first use (nvcc); FlashPrefill V2 is its installed
extension `flashprefill`. --peers is also searched for packages (einops, flash_attn) that lie there.

Each peer runs with the settings that its authors publish for an 8B Llama, so that densities differ: they stand in the
table, and so does the error of the output, against dense attention in float32 on sampled rows, relative to its size.
Structure is planted for the density asked for, in vertical_slash heads unless --patterns says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from peer_adapters import PEERS, Peer, Ready

from sparsekv.bench.harness import DensePeers, dense_calls, free_memory, in_short, measure, time_dense
from sparsekv.bench.kernels import families_of
from sparsekv.bench.planted import Planted, causal_scores, plant, sample_rows
from sparsekv.kernels.backends import BACKENDS, choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import TileIndex, density
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import format_length, parse_lengths


@dataclass(frozen=True)
class Row:
    """One implementation at one length; a number that could not be had is None, and the note says why."""

    name: str
    length: int
    milliseconds: float | None = None
    dense_milliseconds: float | None = None  # of the fastest dense kernel, timed in turn
    speedup: float | None = None
    density: float | None = None
    error: float | None = None
    note: str = ""


def ours(planted: Planted, backend: str) -> Ready:
    """Index and attention of a backend of this repository."""
    q, k, v = planted.q_BHSD, planted.k_BGSD, planted.v_BGSD
    choose_backend(q.device, q.dtype, q.shape[3], backend, planted.tile)

    def index() -> TileIndex:
        return build_index(planted.patterns, q, k, planted.chunk, planted.tile, scale=planted.scale)

    def call() -> torch.Tensor:
        return prefill_attention(q, k, v, index(), planted.chunk, scale=planted.scale, backend=backend).out_BHSD

    return Ready(call, float(density(index(), planted.chunk)), f"{planted.tile.key} tiles")


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
    found = {f"sparsekv {name}": partial(ours, planted, name) for name in BACKENDS if name != "reference"}
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
    return (off / size) ** 0.5


def run(options: argparse.Namespace, length: int) -> list[Row]:
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
    calls = dense_calls(planted.q_BHSD, planted.k_BGSD, planted.v_BGSD)
    dense = time_dense(planted.q_BHSD, planted.k_BGSD, planted.v_BGSD, options.rounds)
    rows = _dense_rows(dense)
    for row in rows:
        print_row(row)
    fastest = {"dense": calls[dense.fastest]} if dense.fastest else {}
    for name, prepare in everyone(planted, options.peers, options.only).items():
        row = Row(name, length)
        try:
            row = _timed(row, planted, prepare(), fastest, options.rounds)
        except Exception as error:  # every library has its own
            row = replace(row, note=in_short(error))
        print_row(row)
        rows.append(row)
        free_memory(device)
    return rows


def _timed(row: Row, planted: Planted, ready: Ready, fastest: dict, rounds: int) -> Row:
    error = None
    if ready.is_attention:
        error = relative_error(planted, ready.call(), list(sample_rows(row.length)))
    times = measure(fastest | {"sparse": ready.call}, planted.q_BHSD.device, rounds)
    dense_ms = times.get("dense")
    speedup = dense_ms / times["sparse"] if dense_ms and ready.is_attention else None
    return replace(
        row,
        milliseconds=times["sparse"],
        dense_milliseconds=dense_ms,
        speedup=speedup,
        density=ready.density,
        error=error,
        note=ready.note,
    )


def _dense_rows(dense: DensePeers) -> list[Row]:
    timed = [Row(f"dense: {name}", dense.length, ms, density=1.0) for name, ms in dense.timed_ms.items()]
    return timed + [Row(f"dense: {name}", dense.length, note=why) for name, why in dense.refused.items()]


def print_row(row: Row) -> None:
    """One line."""
    numbers = [
        f"{value:{form}}" if value is not None else "-"
        for value, form in ((row.milliseconds, ".3f"), (row.speedup, ".2f"), (row.density, ".4f"), (row.error, ".1e"))
    ]
    cells = "".join(f"{number:>12}" for number in numbers)
    print(f"{row.name:42}{format_length(row.length):>8}{cells}  {row.note}", flush=True)


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
    at = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    print(f"{at}, torch {torch.__version__}; planted at a density of {options.density:g}: {options.patterns}")
    print(f"{'':42}{'length':>8}{'ms':>12}{'speedup':>12}{'density':>12}{'error':>12}")
    with torch.no_grad():
        rows = [row for length in options.lengths for row in run(options, length)]
    if options.json:
        record = {"device": at, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
