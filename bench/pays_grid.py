"""The rule that an engine measures, cell by cell: `auto` beside `always` and dense.

    python -m sparsekv.bench.pays_grid MODEL --plan plan.yaml -o cells.jsonl
        [--requests 1,4,16] [--lengths 2k,8k,32k,128k] [--rows 128,512,2k,8k,16k] [--decode] [--repeats 5]
    python -m sparsekv.bench.pays_grid MODEL --densities 32k:0.21,128k:0.12 -o cells.jsonl

In an environment with vLLM. Three engines take turns. A cell is so many requests of a length: either of which all but
the last rows are cached, timed up to the last first token, or that decode together, timed a step. Cells are lines of
the file as soon as they are known. Those that failed or did not fit are told, and run again by the next call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

from sparsekv.bench.hand_plans import counted_plan, dense_up_to, dummy_plan
from sparsekv.bench.harness import in_short, in_turn, parse_lengths
from sparsekv.bench.own_vllm import rule_of
from sparsekv.bench.serve import (
    ALWAYS,
    DENSE,
    SPARSE,
    Load,
    ServeBench,
    ServedModel,
    serve,
    served_engine,
    served_model,
)
from sparsekv.bench.vllm_engines import Engine, EngineEndedError
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import columns, format_length, parse_length
from sparsekv.runtime.paged.metrics import ServingStats
from sparsekv.runtime.settings import preset_vllm

WAYS = (SPARSE, ALWAYS, DENSE)
_ANSWER = 64  # tokens of a request that decodes
_SHARE = 0.3  # of the device, of each engine
_WARM_UPS = 2  # graphs of a size are captured at its second chunk
_SLOWER, _APART, _GAIN = 0.98, 1.03, 1.05


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of `length` tokens each, of which `rows` are new; 0 rows: they decode."""

    model: str
    requests: int
    length: int
    rows: int

    def __str__(self) -> str:
        what = f"{format_length(self.rows)} new rows" if self.rows else "a token"
        return f"{self.requests} x {format_length(self.length)}, {what}"


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of each way's repeats, in turn; `sparse` says whether `auto` skipped anything. `failed` says why not."""

    cell: Cell
    seconds: Mapping[str, Sequence[float]]
    sparse: bool = False
    failed: str = ""

    def gain(self, way: str) -> tuple[float, float, float]:
        """Dense time over a way's, the geometric mean over the repeats, and its 95% interval (paired, Student's t)."""
        logs = [math.log(dense / own) for dense, own in zip(self.seconds[DENSE], self.seconds[way], strict=True)]
        middle, count = statistics.fmean(logs), len(logs)
        half = float(student.ppf(0.975, count - 1)) * statistics.stdev(logs) / math.sqrt(count) if count > 1 else 0.0
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)

    @property
    def apart(self) -> float:
        """Time by `auto` over that of the faster of the other two."""
        auto, *others = (statistics.median(self.seconds[way]) for way in WAYS)
        return auto / min(others)


def read(path: Path) -> dict[Cell, Timed]:
    """The cells of a file that were run."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {cell: Timed(**line | {"cell": cell}) for line in lines for cell in [Cell(**line["cell"])]}


def cells(model: str, requests: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> Iterator[Cell]:
    for length, count, new in itertools.product(lengths, requests, rows):
        if new < length:
            yield Cell(model, count, length, new)


# --- engines ----------------------------------------------------------------------------------------------------------


def run(model: ServedModel, plan: Plan, wanted: Sequence[Cell], repeats: int, add: Callable[[Timed], None]) -> None:
    """Times cells in engines that hold them; `add` gets each."""
    longest = max(cell.length for cell in wanted) + _ANSWER + 1
    device, dtype = (torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    load = Load(longest - _ANSWER, _ANSWER, max(cell.requests for cell in wanted))
    bench = ServeBench(
        (load,), torch.device(device), dtype, step_tokens=min(16384, longest), prefix_caching=True, share=_SHARE
    )
    with ExitStack() as stack:
        engines = {way: stack.enter_context(served_engine(way, model, plan, bench)) for way in WAYS}
        print(engines[SPARSE](rule_of), flush=True)
        room = min(engine(_room) for engine in engines.values())
        for (length, count), of_past in itertools.groupby(wanted, key=lambda cell: (cell.length, cell.requests)):
            source = random.Random(length + count)
            prompts = [_tokens(source, length, model.vocabulary) for _ in range(count)]
            for cell in of_past:
                if count * (length + _ANSWER) > room:
                    add(Timed(cell, {}, failed=f"{count * length:,} tokens of {room:,} that fit each engine"))
                    continue
                try:
                    add(_time(engines, cell, prompts, source, model.vocabulary, repeats))
                except EngineEndedError:
                    raise
                except Exception as error:  # out of memory; the engine's own
                    add(Timed(cell, {}, failed=in_short(error)))


def _time(
    engines: Mapping[str, Engine],
    cell: Cell,
    pasts: Sequence[list[int]],
    source: random.Random,
    words: int,
    repeats: int,
) -> Timed:
    from sparsekv.runtime.vllm.engine_host import serving_stats

    seconds: dict[str, list[float]] = {way: [] for way in engines}
    before: ServingStats | None = None
    for number in range(_WARM_UPS + repeats):
        prompts = [past[: len(past) - cell.rows] + _tokens(source, cell.rows, words) for past in pasts]
        if number == _WARM_UPS:
            before = engines[SPARSE](serving_stats)
        for way in in_turn(engines, number):
            served = engines[way](serve, prompts, 1 if cell.rows else _ANSWER, cell.requests)
            taken = max(served.first_seconds) if cell.rows else statistics.median(served.token_seconds)
            if number >= _WARM_UPS:
                seconds[way].append(taken)
    assert before is not None, "at least one repeat"
    counted = engines[SPARSE](serving_stats).since(before)
    return Timed(cell, seconds, bool(counted.sparse_tokens if cell.rows else counted.decode_sparse))


def _tokens(source: random.Random, count: int, words: int) -> list[int]:
    return [source.randrange(1, words) for _ in range(count)]


def _room(llm: Any) -> int:
    """Tokens of an engine's cache."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks) * int(cache.block_size)


# --- what it comes to -------------------------------------------------------------------------------------------------


def table(timed: Sequence[Timed]) -> str:
    lines = [["cell", "dense", "auto", "always", "dense/auto", "95%", "dense/always", "auto/faster", "auto is"]]
    for one in timed:
        if one.failed:
            lines.append([str(one.cell), f"not run: {one.failed}", *[""] * 7])
            continue
        median = {way: f"{1e3 * statistics.median(one.seconds[way]):.1f} ms" for way in WAYS}
        gain, low, high = one.gain(SPARSE)
        ratios = [f"{gain:.2f}", f"{low:.2f}-{high:.2f}", f"{one.gain(ALWAYS)[0]:.2f}", f"{one.apart:.2f}"]
        times = [median[DENSE], median[SPARSE], median[ALWAYS]]
        lines.append([str(one.cell), *times, *ratios, "sparse" if one.sparse else "dense"])
    return columns(lines, right=range(1, 8))


def verdict(timed: Sequence[Timed]) -> str:
    """Cells of which `auto` is surely slower than dense, or not near the faster way; and how many gains it takes."""
    known = [one for one in timed if not one.failed]
    slower = [one for one in known if one.gain(SPARSE)[2] < _SLOWER]
    maybe = [one for one in known if one.gain(SPARSE)[1] < _SLOWER]
    apart = [one for one in known if one.apart > _APART]
    gaining = [one for one in known if one.gain(ALWAYS)[0] > _GAIN]
    taken = sum(one.sparse for one in gaining)
    return "\n".join(
        [
            f"{len(known)} cells, {len(timed) - len(known)} not run",
            f"slower than {_SLOWER}x of dense: {_listed(slower)}; interval reaches below: {_listed(maybe)}",
            f"over {_APART}x of the faster way's time: {_listed(apart)}",
            f"sparse in {taken} of {len(gaining)} cells where always gains over {_GAIN}x",
        ]
    )


def _listed(timed: Sequence[Timed]) -> str:
    return f"{len(timed)} ({'; '.join(str(one.cell) for one in timed)})" if timed else "none"


def main() -> None:
    args = _arguments()
    preset_vllm()
    known = read(args.output)
    rows = (*args.rows, 0) if args.decode else args.rows
    done = {cell for cell, timed in known.items() if not timed.failed}
    wanted = [cell for cell in cells(args.model, args.requests, args.lengths, rows) if cell not in done]
    with served_model(args.model, args.densities is not None, max(args.lengths) + _ANSWER + 1) as model:
        plan = load_plan(args.plan) if args.plan else _hand_plan(model, args.densities)
        with args.output.open("a") as file:

            def add(timed: Timed) -> None:
                file.write(json.dumps(asdict(timed)) + "\n")
                file.flush()

            if wanted:
                run(model, plan, wanted, args.repeats, add)
    timed = list(read(args.output).values())
    print(f"{table(timed)}\n{verdict(timed)}")


def _hand_plan(model: ServedModel, densities: Mapping[int, float]) -> Plan:
    lengths, tile = sorted(densities), TileShape()
    plan, _ = dummy_plan(model.info, lengths, [densities[length] for length in lengths], tile, ("vertical_slash",))
    return dense_up_to(counted_plan(plan, lengths), min(4096, lengths[0] // 4))


def _densities(text: str) -> dict[int, float]:
    return {parse_length(length): float(share) for length, share in (part.split(":") for part in text.split(","))}


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias, hub id or folder")
    plan = parser.add_mutually_exclusive_group(required=True)
    plan.add_argument("--plan", type=Path)
    plan.add_argument("--densities", type=_densities, help="of a plan made by hand, with random weights")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--requests", type=_counts, default="1,4,16")
    parser.add_argument("--lengths", type=parse_lengths, default="2k,8k,32k,128k")
    parser.add_argument("--rows", type=parse_lengths, default="128,512,2k,8k,16k")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
