"""The problems of the flash backend: what it refuses is left out, tiles are those that it takes.

And a stand-in for flash-attn-4 with the arguments of 4.0.0b36, so that the calls into it can be run without a GPU.
"""

import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from attention_cases import Case

from sparsekv.plans.patterns import TileShape

SQUARE, TALL = TileShape(query=128, key=128), TileShape(query=128, key=64)

TILE_CASES = [
    Case("one tile", lengths=(128,), heads=1, tile=SQUARE),
    Case("less than a tile", lengths=(19,), tile=SQUARE),
    Case("ragged end", lengths=(401,), tile=SQUARE, dim=128),
    Case("half tiles", lengths=(401,), tile=TALL),
    Case("every tile", lengths=(520,), tile=TALL, share=1.0),
    Case("rows that see nothing", lengths=(520,), tile=SQUARE, share=0.05),
    Case("groups of four", lengths=(300,), heads=8, kv_heads=2, tile=SQUARE),
    Case("a KV head each", lengths=(300,), heads=2, kv_heads=2, tile=TALL),
    Case("dense heads within groups", lengths=(300,), heads=8, kv_heads=2, tile=SQUARE, dense_heads=(1, 2, 7)),
    Case("a dense group", lengths=(300,), heads=6, kv_heads=3, tile=TALL, dense_heads=(1, 2, 3, 4, 5), past=(10,)),
    Case("all heads dense", lengths=(300,), tile=SQUARE, dense_heads=(0, 1)),
    Case("aligned past", past=(256,), lengths=(520,), tile=SQUARE),
    Case("unaligned past", past=(77,), lengths=(460,), tile=SQUARE, dense_heads=(0,)),
    Case("unaligned past, half tiles", past=(77,), lengths=(460,), tile=TALL, dim=128),
    Case("one row on a long past", past=(250,), lengths=(251,), tile=SQUARE),
    Case("batch rows of other lengths", past=(0, 70, 5, 5), lengths=(330, 310, 5, 9), tile=SQUARE, spare_rows=3),
    Case("alike batch rows", past=(9, 9, 9), lengths=(200, 200, 300), tile=TALL, spare_keys=70, dense_heads=(1,)),
    Case("memory behind the keys", lengths=(240,), tile=SQUARE, spare_keys=60, spare_rows=140),
    Case("token-major memory", lengths=(240,), heads=4, kv_heads=2, tile=SQUARE, token_major=True),
    Case("window within a tile", lengths=(400,), tile=SQUARE, window=30, dense_heads=(1,)),
    Case("window of one token", lengths=(300,), tile=TALL, window=1, share=1.0, dense_heads=(0,)),
    Case("window over tiles", lengths=(700,), tile=SQUARE, window=290, share=0.8, dense_heads=(1,)),
    Case("window, unaligned past", past=(90,), lengths=(633,), tile=TALL, window=240, share=0.8, dense_heads=(0,)),
    Case("window longer than the prompt", lengths=(230,), tile=SQUARE, window=1000),
]
COLUMN_CASES = [
    Case("columns", lengths=(260,), tile=SQUARE, share=0.3, columns=40),
    Case("no tiles, only columns", lengths=(190,), tile=TALL, share=0.0, columns=70, dim=128),
    Case("columns between dense heads", past=(37,), lengths=(200,), heads=4, kv_heads=2, tile=SQUARE, columns=20,
         dense_heads=(2,), share=0.2, token_major=True),
    Case("columns in a window", past=(37,), lengths=(330,), tile=TALL, window=60, columns=100, share=0.5),
    Case("columns of a ragged batch", past=(0, 70, 5), lengths=(130, 110, 5), tile=SQUARE, columns=20, spare_rows=3,
         spare_keys=9, share=0.1),
    Case("columns, bfloat16", lengths=(200,), tile=SQUARE, columns=40, dtype=torch.bfloat16),
    Case("columns, head size 40", lengths=(150,), tile=SQUARE, dim=40, columns=20, dtype=torch.float16),
]  # fmt: skip

_LARGE = [
    Case("large", lengths=(4096,), heads=8, kv_heads=2, tile=SQUARE, share=0.3, columns=300),
    Case("large, dense heads", lengths=(4096,), heads=8, kv_heads=2, tile=SQUARE, share=0.05, columns=300,
         dense_heads=(1, 4, 5, 6, 7)),
    Case("large, ragged batch", past=(0, 1111, 512), lengths=(3000, 4001, 777), heads=4, kv_heads=2, tile=SQUARE,
         share=0.2, columns=500, dense_heads=(2,), spare_keys=100),
    Case("large window", lengths=(4000,), tile=SQUARE, window=1500, share=0.6, columns=200, dense_heads=(1,)),
]  # fmt: skip


def half(cases: list[Case]) -> list[Case]:
    """The same in bfloat16, the only kind of numbers besides float16 that the GPU takes."""
    return [
        case if case.dtype != torch.float32 else replace(case, name=f"{case.name}, bf16", dtype=torch.bfloat16)
        for case in cases
    ]


# Both tiles at every head size that takes them, and the small problems above.
GPU_CASES = [
    *half(TILE_CASES + COLUMN_CASES),
    *half([replace(case, name=f"{case.name}, size {dim}", dim=dim) for case in _LARGE for dim in (64, 96, 128)]),
    *half(
        [
            replace(case, name=f"{case.name}, half tiles, size {dim}", dim=dim, tile=TALL)
            for case in _LARGE
            for dim in (64, 96, 128, 192, 256)
        ]
    ),
    *(replace(case, name=f"{case.name}, fp16", dim=128, dtype=torch.float16) for case in _LARGE),
]


# --- flash-attn-4, as far as the backend calls it ------------------------------------------------------------------


def stand_in() -> dict[str, ModuleType]:
    """Modules by name, to be put where imports look."""
    cute = _module("cutlass.cute", jit=lambda function: function)
    return {
        "cutlass": _module("cutlass", cute=cute, Int32=int),
        "cutlass.cute": cute,
        "flash_attn": _module("flash_attn"),
        "flash_attn.cute": _module("flash_attn.cute"),
        "flash_attn.cute.utils": _module("flash_attn.cute.utils", scalar_to_ssa=lambda number, kind: kind(number)),
        "flash_attn.cute.block_sparsity": _module(
            "flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=SimpleNamespace
        ),
        "flash_attn.cute.interface": _module("flash_attn.cute.interface", _flash_attn_fwd=_flash_attn_fwd),
    }


def _module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def _flash_attn_fwd(
    q, k, v, *, softmax_scale, out, lse, causal=False, window_size_left=None, window_size_right=None, mask_mod=None,
    block_sparse_tensors=None, pack_gqa=None, aux_tensors=None,
):  # fmt: skip
    """[B, S, H, D] and float32 inside. With lists, only what they hold; `mask_mod` in the mask list alone."""
    B, S, H, _ = q.shape
    K, group = k.shape[1], q.shape[2] // k.shape[2]
    assert not any(tensor.requires_grad for tensor in (q, k, v))
    for tensor in (q, k, v, out):
        assert tensor.dtype in (torch.float16, torch.bfloat16)
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:3])
    row_S1, key_K = torch.arange(S)[:, None], torch.arange(K)
    for b in range(B):
        for h in range(H):
            if block_sparse_tensors is not None:
                assert pack_gqa is False
                lengths = SimpleNamespace(seqlen_q=S, seqlen_k=K)
                masked_SK = mask_mod(b, h, row_S1, key_K, lengths, aux_tensors)
                keep_SK = _seen_in_lists(block_sparse_tensors, b, h, masked_SK)
            elif causal:
                assert window_size_left is None
                keep_SK = key_K <= row_S1 + K - S
            else:
                assert window_size_right == 0
                keep_SK = (key_K <= row_S1 + K - S) & (key_K >= row_S1 + K - S - window_size_left)
            scores_SK = q[b, :, h].float() @ k[b, :, h // group].float().T * softmax_scale
            scores_SK = scores_SK.masked_fill(~keep_SK, -math.inf)
            lse[b, h] = scores_SK.logsumexp(-1)
            out[b, :, h] = (scores_SK.softmax(-1).nan_to_num(0.0) @ v[b, :, h // group].float()).to(out.dtype)
    return out, lse, None, None, None


def _seen_in_lists(tensors, b, h, masked_SK):
    """Expects of lists what flash-attn-4 checks."""
    query, key = tensors.block_size
    S, K = masked_SK.shape
    keep_SK = torch.zeros_like(masked_SK)
    for count_BHT, idx_BHTN, seen_SK in (
        (tensors.full_block_cnt, tensors.full_block_idx, torch.ones_like(masked_SK)),
        (tensors.mask_block_cnt, tensors.mask_block_idx, masked_SK),
    ):
        assert count_BHT.dtype == idx_BHTN.dtype == torch.int32
        assert count_BHT.shape == idx_BHTN.shape[:3]
        assert count_BHT.shape[2] == -(-S // query)
        assert 1 <= idx_BHTN.shape[3] <= -(-K // key)
        assert idx_BHTN.stride(3) == count_BHT.stride(2) == 1
        for t in range(count_BHT.shape[2]):
            for tile in idx_BHTN[b, h, t, : int(count_BHT[b, h, t])].tolist():
                here = (slice(t * query, (t + 1) * query), slice(tile * key, (tile + 1) * key))
                assert not keep_SK[here].any()
                keep_SK[here] = seen_SK[here]
    return keep_SK
