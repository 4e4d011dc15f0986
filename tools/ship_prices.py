"""Measures the prices that ship (planner/data), for plans made where there is no GPU.

`python tools/ship_prices.py OUT`, on the GPU whose prices are to ship, where nothing else runs: a minute or two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sparsekv.planner.measure_prices import measure_prices
from sparsekv.planner.options import KNOWN_FAMILIES
from sparsekv.planner.prices import HeadShape
from sparsekv.plans.patterns import TileShape

SHAPES = ((32, 8, 128), (14, 2, 64), (9, 3, 64))
LENGTHS = (32768, 131072)


def main(out: Path) -> None:
    """Writes the tables of all head shapes."""
    found = []
    for heads, kv_heads, head_dim in SHAPES:
        shape = HeadShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        how = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "tile": TileShape()}
        prices = measure_prices(shape, LENGTHS, families=KNOWN_FAMILIES, **how)
        print(f"{shape!r}: {prices.device}, {prices.backend}", flush=True)
        found.append(prices.model_dump(mode="json"))
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
