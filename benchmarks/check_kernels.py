"""Checks every attention kernel on this machine against the float32 oracle, then times it beside the dense kernels.

    python benchmarks/check_kernels.py                  # on a GPU: correctness, then the timing tables
    python benchmarks/check_kernels.py --json out.json  # the same, and every number in a file
    python benchmarks/check_kernels.py --sweep          # also times other block sizes
    python benchmarks/check_kernels.py --only goals     # one part
    compute-sanitizer python benchmarks/check_kernels.py --quick    # small shapes, every kernel variant once
    python benchmarks/check_kernels.py --device cpu --tiny          # tries this script itself, in the interpreter

Needs the installed package and this repository's tests/support (the problems and their oracle). Exit status 1 when a
kernel is wrong. What the times mean is said in kernel_timing.py.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import decode_cases
from flash_goals import Goal, print_goals, reach
from flash_timing import time_columns, time_dense_heads, time_orders, time_parts
from kernel_checks import LARGE, TINY, VARIANTS, Check, check_columns, check_decode, check_index, check_prefill
from kernel_timing import SMALL_TILE, TILE, Shape, Timing, print_timings, time_decode, time_launches, time_prefill

PARTS = ("checks", "tables", "flash", "columns", "orders", "goals")


def print_check(check: Check) -> None:
    """One line."""
    verdict = "ok" if not check.faults else "WRONG: " + "; ".join(check.faults)
    print(f"{check.kernel:16} {check.case:42} {check.error:9.1e} {check.lse_error:9.1e}  {verdict}", flush=True)


def check_everything(options: argparse.Namespace, device: str) -> list[Check]:
    """Every case that the options ask for, printed as it is known."""
    print(f"\n{'kernel':16} {'case':42} {'error':>9} {'lse':>9}")
    checks = []
    for check in _checks(options, device):
        checks.append(check)
        print_check(check)
    return checks


def _checks(options: argparse.Namespace, device: str) -> Iterator[Check]:
    for case in TINY if options.tiny else VARIANTS if options.quick else VARIANTS + LARGE:
        yield from check_prefill(case, device)
        # flash-attn-4, behind which that pass runs, takes halves; the interpreter takes anything.
        if case.columns and (options.tiny or case.dtype != torch.float32):
            yield check_columns(case, device)
    decode = decode_cases.CASES if options.tiny or options.quick else decode_cases.GPU_CASES
    for decode_case in decode[:2] if options.tiny else decode:
        yield check_decode(decode_case, device)
    for tile, window in ((TILE, None),) if options.tiny else ((TILE, None), (TILE, 200), (SMALL_TILE, None)):
        yield check_index(tile, window, device)


def time_everything(options: argparse.Namespace, device: str) -> dict[str, list[Timing]]:
    """The timing tables that the options ask for."""
    tables: dict[str, list[Timing]] = {}
    if options.quick:
        return tables
    if options.tiny:
        shape = Shape(256, 2, 1, 64, torch.float32)
        tables = {"prefill": time_prefill(shape, device, [(0.5, 8), (1.0, 0)])}
        tables["decode"] = time_decode(shape, device, [32])
        tables["flash, its parts"] = time_parts(shape, device) + time_dense_heads(shape, device)
        tables["single columns"] = time_columns(shape, device, 8)
        tables["order of tiles"] = time_orders(shape, device, 1, (1,))
        return tables | ({"launches": time_launches(shape, device)} if options.sweep else {})
    if "tables" in options.only:
        tables |= time_backends(device)
    if "flash" in options.only:
        long, short = (32768, 131072), (4096, 8192, 16384, 32768)
        tables["flash, its parts"] = [timing for tokens in long for timing in time_parts(Shape(tokens), device)]
        tables["flash, dense heads"] = [
            timing for tokens in short for timing in time_dense_heads(Shape(tokens), device)
        ]
    if "columns" in options.only:
        tables["single columns"] = [
            timing for tokens in (32768, 131072) for timing in time_columns(Shape(tokens), device)
        ]
    if "orders" in options.only:
        tables["order of tiles"] = [
            timing for whole in (16, 32) for timing in time_orders(Shape(131072), device, whole)
        ]
    if options.sweep:
        tables["block sizes, size 128"] = time_launches(Shape(32768), device)
        tables["block sizes, size 64"] = time_launches(Shape(32768, dim=64), device)
    return tables


def time_backends(device: str) -> dict[str, list[Timing]]:
    """Dense and Triton, at several densities."""
    mixes = [(0.02, 0), (0.05, 0), (0.05, 1000), (0.05, 3000), (0.1, 0), (0.2, 0), (0.4, 0), (1.0, 0)]
    tables = {
        f"prefill, {tokens} tokens, 32/8 heads, size 128": time_prefill(Shape(tokens), device, mixes)
        for tokens in (8192, 32768, 131072)
    }
    small = Shape(32768, 4, 2, 64)
    tables["prefill, 4/2 heads, size 64"] = time_prefill(small, device, [(0.1, 0), (0.1, 500), (0.3, 0)])
    tables["decode, 32/8 heads, size 128"] = [
        timing for tokens in (32768, 131072) for timing in time_decode(Shape(tokens), device, [512, 2048, 8192])
    ]
    return tables


def reach_everything(options: argparse.Namespace, device: str) -> list[Goal]:
    """The table of goals, at the lengths that the options ask for."""
    if options.quick or "goals" not in options.only:
        return []
    if options.tiny:
        return reach(Shape(256, 2, 1, 64, torch.float32), device, (1,), 8)
    return [goal for tokens in (32768, 131072) for goal in reach(Shape(tokens), device)]


def main() -> int:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes, every kernel variant once, no timing")
    parser.add_argument("--tiny", action="store_true", help="next to nothing: tries this script")
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts only")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    device = options.device
    if device == "cpu" and not options.tiny:
        parser.error("the interpreter is far too slow for this: add --tiny")
    at = torch.cuda.get_device_name() if device != "cpu" else "interpreter"
    print(f"{at}, torch {torch.__version__}, Python {platform.python_version()}")

    checks = check_everything(options, device) if "checks" in options.only else []
    tables = time_everything(options, device)
    for title, timings in tables.items():
        print_timings(title, timings)
    goals = reach_everything(options, device)
    print_goals("goals", goals)

    wrong = [check for check in checks if check.faults]
    print(f"\n{len(checks) - len(wrong)} of {len(checks)} checks right")
    if options.json:
        record = {
            "device": at,
            "torch": torch.__version__,
            "checks": [asdict(check) for check in checks],
            "timings": {title: [asdict(timing) for timing in timings] for title, timings in tables.items()},
            "goals": [asdict(goal) | {"reached": goal.reached} for goal in goals],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
