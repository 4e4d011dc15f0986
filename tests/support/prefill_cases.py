"""The problems every prefill backend must solve: one list for the CPU, the interpreter and the GPU."""

from dataclasses import replace

import torch
from attention_cases import Case

from sparsekv.plans.patterns import TileShape

SMALL_TILE, TILE = TileShape(query=64, key=64), TileShape(query=128, key=128)

CASES = [
    Case("one tile", lengths=(64,), heads=1),
    Case("less than a tile", lengths=(19,), columns=3),
    Case("ragged end", lengths=(201,), columns=40),
    Case("128 tiles", lengths=(300,), tile=TILE, columns=33),
    Case("wide tiles", lengths=(300,), tile=TileShape(query=64, key=128), columns=5),
    Case("tall tiles", lengths=(300,), tile=TileShape(query=128, key=64), columns=5),
    Case("head size 128", lengths=(150,), dim=128, columns=20),
    Case("head size that is no power of two", lengths=(150,), dim=40, columns=20),
    Case("no tiles, only columns", lengths=(190,), share=0.0, columns=70),
    Case("every tile", lengths=(190,), share=1.0, columns=9),
    Case("rows that see nothing", lengths=(190,), share=0.05),
    Case("groups of four", lengths=(130,), heads=8, kv_heads=2, columns=20),
    Case("groups of three", lengths=(130,), heads=3, kv_heads=1),
    Case("a KV head each", lengths=(130,), heads=2, kv_heads=2, columns=20),
    Case("dense heads between sparse ones", lengths=(200,), heads=3, dense_heads=(1,), columns=20),
    Case("all heads dense", lengths=(200,), dense_heads=(0, 1)),
    Case("aligned past", past=(128,), lengths=(260,), columns=40),
    Case("unaligned past", past=(77,), lengths=(260,), columns=40, dense_heads=(0,)),
    Case("unaligned past, 128 tiles", past=(77,), lengths=(260,), tile=TILE, columns=40),
    Case("one row on a long past", past=(250,), lengths=(251,), columns=40),
    Case("batch rows of other lengths", past=(0, 70, 5), lengths=(130, 110, 5), columns=20, spare_rows=3),
    Case("memory behind the keys", lengths=(140,), spare_keys=60, columns=20),
    Case("token-major memory", lengths=(140,), heads=4, kv_heads=2, token_major=True, columns=20),
    Case("window within a tile", lengths=(200,), window=30, columns=40),
    Case("window over tiles", lengths=(330,), window=150, share=0.8, columns=40, dense_heads=(1,)),
    Case("window, unaligned past", past=(90,), lengths=(333,), window=140, share=0.8, dense_heads=(0,)),
    Case("window longer than the prompt", lengths=(130,), window=1000, columns=20),
    Case("bfloat16", lengths=(200,), dtype=torch.bfloat16, columns=40),
    Case("float16", lengths=(200,), dtype=torch.float16, columns=40),
    Case("a soft cap", past=(77,), lengths=(260,), columns=40, dense_heads=(0,), cap=1.5),
    Case("a soft cap, whole prompt, window", lengths=(200,), window=90, columns=40, dense_heads=(1,), cap=1.5),
    Case("learned sinks", lengths=(200,), heads=4, columns=40, dense_heads=(1,), learned_sinks=True),
    Case("head size 512", past=(77,), lengths=(200,), dim=512, columns=40, dense_heads=(0,)),
    Case("head size 512, other lengths, window", (0, 70), (90, 110), 4, 2, dim=512, window=60, columns=9, spare_rows=3),
    Case("head size 320", lengths=(90,), dim=320, columns=20),
]

_LARGE = [
    Case("large", lengths=(4096,), heads=8, kv_heads=2, tile=TILE, share=0.3, columns=300, dtype=torch.bfloat16),
    Case("large, 64 tiles", lengths=(4096,), heads=4, kv_heads=1, share=0.3, columns=300, dtype=torch.bfloat16),
    Case(
        "large, ragged batch",
        past=(0, 1111, 512),
        lengths=(3000, 4001, 777),
        heads=4,
        kv_heads=2,
        tile=TILE,
        share=0.2,
        columns=500,
        dense_heads=(2,),
        dtype=torch.bfloat16,
        spare_keys=100,
    ),
    Case(
        "large window",
        lengths=(4000,),
        tile=TILE,
        window=1500,
        share=0.6,
        columns=200,
        dense_heads=(1,),
        dtype=torch.bfloat16,
    ),
]

# What a GPU runs: everything above in half precision, some in float32 (slow to compile), and a few thousand tokens.
GPU_CASES = [
    *CASES[1:4],
    Case("float32 window, dense head, past", past=(90,), lengths=(333,), window=140, columns=9, dense_heads=(0,)),
    *(replace(case, name=f"{case.name}, bf16", dtype=torch.bfloat16) for case in CASES if case.name != "bfloat16"),
    *(replace(case, name=f"{case.name}, size {dim}", dim=dim) for case in _LARGE for dim in (64, 96, 128, 256, 512)),
    *(replace(case, name=f"{case.name}, fp16", dtype=torch.float16) for case in _LARGE),
]
