"""How near the peers' rules of bench/ are to their authors' code: `python tools/compare_with_authors.py X-ATTENTION
FLEXPREFILL KVPRESS QUEST`, the folders of their repositories, on a CPU.

Tensors are random, or have planted columns, diagonals and tiles. What authors choose is their code, but for the means
of key blocks, a kernel for GPUs in FlexPrefill; attention over a choice is computed here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.nn.functional import pad

from sparsekv.bench import tile_rules
from sparsekv.bench.eviction_rules import SnapKV
from sparsekv.bench.planted import plant
from sparsekv.bench.published_rules import FlexPrefill
from sparsekv.bench.selectors import Quest, Selecting
from sparsekv.bench.tile_rules import ByKVHead, XAttention
from sparsekv.kernels.methods import Layer
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.hf.observe import AttentionCall

LENGTH, TILE, HEADS, KV_HEADS, SIZE = 4096, TileShape(query=128, key=128), 4, 2, 64
GROUP, SCALE, WINDOW, PAGE, BUDGET = HEADS // KV_HEADS, SIZE**-0.5, 64, 16, 0.3
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn() -> Iterator[tuple[str, Qkv]]:
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, SIZE, generator=source) for heads in (HEADS, KV_HEADS, KV_HEADS))
    yield "random", (2.0 * q, k, v)
    shape: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": SIZE, "length": LENGTH, "tile": TILE, "density": 0.2}
    shape |= {"device": torch.device("cpu"), "dtype": torch.float32}
    yield "planted", plant(("vertical_slash", "block_sparse") * KV_HEADS, **shape).tensors


def authors(folder: Path, file: str, **beside: Any) -> Any:
    """A file of a checkout as a module, with others in place of what it imports and a CPU has no use for."""
    sys.modules |= {name.replace("__", "."): module for name, module in beside.items()}
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"authors_{Path(file).stem}", folder / file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attended(qkv: Qkv, mask_HRK: torch.Tensor) -> torch.Tensor:
    """[H, R, D] of the last rows."""
    q_HRD, k_HKD, v_HKD = qkv[0][0, :, -mask_HRK.shape[1] :], *(x[0].repeat_interleave(GROUP, 0) for x in qkv[1:])
    return (q_HRD @ k_HKD.mT * SCALE).masked_fill(~mask_HRK, -torch.inf).softmax(-1) @ v_HKD


def told(name: str, qkv: Qkv, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Of two choices of keys: how many both have, and the outputs' distance beside that from dense."""
    out, other, dense = (attended(qkv, x) for x in (ours, theirs, torch.ones_like(ours).tril(LENGTH - ours.shape[1])))
    apart, lost = ((out - x).norm() / dense.norm() for x in (other, dense))
    shared, own, of_them = (ours & theirs).sum() / (ours | theirs).sum(), ours.float().mean(), theirs.float().mean()
    return f"{name}: {shared:.4f} in common (of {own:.4f} and {of_them:.4f}); {apart:.2e} apart, dense {lost:.2e}"


def keys_of(tiles_HTM: torch.Tensor) -> torch.Tensor:
    return tiles_HTM.repeat_interleave(TILE.query, 1).repeat_interleave(TILE.key, 2).tril()


def ours_of(rule: ByKVHead, qkv: Qkv, first: bool = True) -> torch.Tensor:
    """Beside the diagonal with the first tile or without: the one before the diagonal no code of authors has."""
    limits, must_TM = tile_rules.tile_limits, torch.eye(LENGTH // TILE.key, dtype=torch.bool)
    must_TM[:, 0] |= first
    tile_rules.tile_limits = lambda tiles, rows: (must_TM[None], limits(tiles, rows)[1])
    found = rule.tiles(*qkv[:2], Layer(2, Chunk.uniform(1, 0, LENGTH), TILE, SCALE), BUDGET)[0]
    tile_rules.tile_limits = limits
    return keys_of(found)


def xattention(folder: Path, kind: str, qkv: Qkv) -> Iterator[str]:
    module = authors(folder, "xattn/src/Xattention.py", block_sparse_attn=MagicMock(), xattn__src__kernels=MagicMock())
    mass, to, k_BHKD = XAttention.mass(BUDGET), torch.Tensor.to, qkv[1].repeat_interleave(GROUP, 1)
    torch.Tensor.to = lambda x, *how, **named: x if how == ("cuda",) else to(x, *how, **named)
    how: dict[str, Any] = {"threshold": mass, "chunk_size": LENGTH, "use_triton": False}
    sums_BHTM, tiles_BHTM = module.xattn_estimate(qkv[0], k_BHKD, TILE.key, tile_rules.STRIDE, **how)
    torch.Tensor.to = to
    behind_BHTM = module.find_blocks_chunked(pad(sums_BHTM, (1, 0)), 1, mass, None, decoding=False)[..., 1:]
    paper, name = type("Paper", (XAttention,), {"further": 0})(), f"{kind}, XAttention, tau {mass:.3g}"
    yield told(f"{name}, odd rows as theirs", qkv, ours_of(paper, qkv), keys_of(tiles_BHTM[0]))
    yield told(f"{name}, so, in later chunks", qkv, ours_of(paper, qkv, first=False), keys_of(behind_BHTM[0]))
    yield told(f"{name}, as compared", qkv, ours_of(XAttention(), qkv), keys_of(tiles_BHTM[0]))


def flexprefill(folder: Path, kind: str, qkv: Qkv) -> Iterator[str]:
    module = authors(folder, "flex_prefill/ops/flex_prefill_attention.py", einops=MagicMock())
    module.rearrange = lambda x, words: x.flatten(1, 2)
    module.triton_bnhd_pool = lambda x, size: x.unflatten(1, (-1, size)).mean(2)
    count, gamma = LENGTH // TILE.key, FlexPrefill.gamma(BUDGET)
    chosen = module.get_active_blocks(*(x.transpose(1, 2) for x in qkv), TILE.key, gamma, 512 // TILE.key, count, 0.1)
    at_HE = [torch.zeros(count * count, dtype=torch.bool).index_fill(0, at, True) for at in chosen[0]]
    theirs = keys_of(torch.stack(at_HE).unflatten(1, (count, count)))
    yield told(f"{kind}, FlexPrefill, gamma {gamma:.3g}", qkv, ours_of(FlexPrefill(), qkv), theirs)


def snapkv(folder: Path, kind: str, qkv: Qkv) -> Iterator[str]:
    none: Any = SimpleNamespace(ScorerPress=object, get_prerope_query_states=None)
    others = dict.fromkeys(("kvpress__presses__scorer_press", "kvpress__utils"), none)
    module = authors(folder, "kvpress/presses/snapkv_press.py", **others)
    q_BHWD, k_BHKD = qkv[0][:, :, -WINDOW:], qkv[1].repeat_interleave(GROUP, 1)
    hidden_WK = torch.ones(WINDOW, LENGTH, dtype=torch.bool).tril(LENGTH - WINDOW).logical_not()
    weights_BHWK = (q_BHWD @ k_BHKD.mT * SCALE).masked_fill(hidden_WK, -torch.inf).softmax(-1)
    layer_of_theirs = MagicMock(**{"config.num_attention_heads": HEADS})
    given = layer_of_theirs, torch.empty(1, LENGTH, 1), *qkv[1:], weights_BHWK, {}
    theirs_BGK = module.SnapKVPress(window_size=WINDOW).score(*given)
    layer = Layer(0, Chunk.uniform(1, LENGTH - WINDOW, LENGTH), TILE, SCALE)
    ours_BGK = SnapKV().scores(q_BHWD, *qkv[1:], layer, None)
    ours_BGK[..., -WINDOW:] = torch.inf
    halves = (x >= x.topk(LENGTH // 2, -1).values[..., -1:] for x in (ours_BGK[0], theirs_BGK[0]))
    yield told(f"{kind}, SnapKV, half of the keys", qkv, *(x.repeat_interleave(GROUP, 0)[:, None] for x in halves))


def quest(folder: Path, kind: str, qkv: Qkv) -> Iterator[str]:
    module, seen = authors(folder, "evaluation/quest_attention.py"), list[torch.Tensor]()
    module.apply_rotary_pos_emb = lambda q, k, *rotation: (q, k)
    choose, pages = module.local_heavy_hitter_mask, 64
    module.local_heavy_hitter_mask = lambda *given: seen.append(choose(*given)) or seen[-1]
    for groups, words in ((HEADS, "a KV head for each query head"), (KV_HEADS, "two query heads a KV head")):
        own = qkv[0], *(x.repeat_interleave(groups // KV_HEADS, 1) for x in qkv[1:])
        made = {f"{name}_proj": lambda _, x=x: x[:, :, -1:].transpose(1, 2) for name, x in zip("qkv", own, strict=True)}
        shape = {"num_heads": HEADS, "num_key_value_heads": groups, "num_key_value_groups": HEADS // groups}
        shape |= {"head_dim": SIZE, "hidden_size": HEADS * SIZE, "layer_id": 2, "chunk_size": PAGE}
        made |= {"token_budget": pages * PAGE, "o_proj": lambda x: x, "rotary_emb": lambda *_: (0, 0)}
        layer = SimpleNamespace(**made, **shape)
        past = tuple(x[:, :, :-1] for x in own[1:])
        module.forward(layer, torch.empty(1, 1, 1), None, torch.tensor([[LENGTH - 1]]), past)
        call = AttentionCall(2, own[0][:, :, -1:], *own[1:], Chunk.uniform(1, LENGTH - 1, LENGTH), SCALE, None)
        found: Any = Selecting(Quest(), (pages * PAGE + LENGTH // PAGE) / LENGTH)(call)
        ours = found.seen_BGS[0].repeat_interleave(HEADS // groups, 0)[:, None]
        yield told(f"{kind}, Quest, {pages} pages, {words}", qkv, ours, seen[-1][0])


if __name__ == "__main__":
    with torch.no_grad():
        for kind, qkv in drawn():
            for rule, folder in zip((xattention, flexprefill, snapkv, quest), sys.argv[1:], strict=True):
                print(*rule(Path(folder), kind, qkv), sep="\n", flush=True)
