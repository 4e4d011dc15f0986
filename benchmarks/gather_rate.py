"""What fetching random tokens from pinned memory takes, for several shapes of the kernel's launch.

`python benchmarks/gather_rate.py`, on a GPU. The first line is what decode steps run with; 2,048 and 200 tokens of an
8B model (8 KV heads of size 128, bfloat16: 4 KB a token), drawn from 4 GiB.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch

from sparsekv.bench.link import link_rate
from sparsekv.runtime.stores.pinned import HostMemory


def main() -> None:
    """Prints a line for each launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4, help="pinned memory to draw from")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    options = parser.parse_args()
    device = torch.device("cuda")
    heads, size, batch = 8, 128, options.batch
    tokens = (options.gib << 30) // (batch * 2 * heads * size * 2)
    block = HostMemory().take(options.gib << 30, device)
    host_CBPGD = block.view((tokens, batch, 2, heads, size), torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; registered here: {block.registered}")
    print("programs  at once   GB/s of 2,048   us of 200")
    launches = [(None, None), *product((16, 32, 64, 128, 256), (1, 2, 4, 8))]
    for programs, at_once in launches:
        rate = link_rate(host_CBPGD, device, programs=programs, at_once=at_once)
        print(f"{programs or '-':>8} {at_once or '-':>8} {rate.gbytes_per_second:>15.2f} {rate.few_us:>11.1f}")


if __name__ == "__main__":
    main()
