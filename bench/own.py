"""`sparsekv bench own`: a model by its own plan beside dense, in transformers and in vLLM.

The plan is executed as hosts do by default: sparse where it is measured to be faster. Prompts are of the planner's
tasks, at each planned length, of texts that neither calibration nor the test has. The half in vLLM runs in another
environment (`own_vllm`); halves and figures that are in the file are not measured again.
"""

from __future__ import annotations

import gc
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sparsekv.bench.decode import TOKEN, token_rows
from sparsekv.bench.harness import Row, free_memory, program
from sparsekv.bench.own_file import OwnFigure, OwnFile, lengths_of, measured
from sparsekv.bench.own_vllm import OwnPrompts, OwnRequest, OwnTurns, named
from sparsekv.bench.prefill import PrefillBench, bench_prefill
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.token_runs import DecodeBench, DecodeRuns
from sparsekv.planner.progress import Progress
from sparsekv.planner.tasks import QUOTE_TASKS, TASKS, Kit, Split, make_sample, prepare
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import device_name, dtype_name

_STEP = 8192  # tokens of an engine's step, where the plan was tested on whole prompts
_POLL = 0.5  # seconds
_LAST = 3  # lines of a log that tell why a process ended


@dataclass(frozen=True, slots=True)
class OwnBench:
    """Repeats, requests and turns of a measurement.

    Attributes:
        answer: tokens, of requests to vLLM.
        at_once: requests of an engine at a time, and agents.
        context: tokens of an agent's first prompt; half of the longest planned length where that is less.
        turn_tokens: of the turns behind it, again and again, as long as the longest planned length has room.
        quantization: of weights, as vLLM names it.
        sparse: where the plan is executed; "never" tells how far both sides are apart without it.
    """

    repeats: int = 5
    session_repeats: int = 5
    answer: int = 64
    at_once: tuple[int, ...] = (1, 8)
    context: int = 60 << 10
    turns: int = 20
    turn_tokens: tuple[int, ...] = (256, 1024, 2048, 4096)
    turn_answer: int = 200
    backend: str = "auto"
    seed: int = 0
    quantization: str | None = None
    sparse: str = "auto"


# --- prompts ----------------------------------------------------------------------------------------------------------


def prompt_of(kit: Kit, length: int, index: int, seed: int) -> tuple[int, ...]:
    """A held-out prompt that leaves room for its answer, of prose and code in turn."""
    task = TASKS[QUOTE_TASKS[index % len(QUOTE_TASKS)]]
    return tuple(int(token) for token in make_sample(task, kit, length, seed, index).prompt_ids)


def loads_of(kit: Kit, plan: Plan, bench: OwnBench) -> tuple[OwnPrompts, ...]:
    """Requests at each planned length, as many together as are to be at once."""
    return tuple(
        OwnPrompts(
            length=length,
            answer=bench.answer,
            prompts=tuple(prompt_of(kit, length - bench.answer, index, bench.seed) for index in range(many)),
        )
        for length in lengths_of(plan)
        for many in bench.at_once
    )


def turns_of(kit: Kit, plan: Plan, bench: OwnBench) -> tuple[OwnTurns, ...]:
    """Sessions of agents, each with a text of its own, cut into turns."""
    longest = max(lengths_of(plan))
    sizes = list(_sizes(min(bench.context, longest // 2), longest, bench))
    texts = [prompt_of(kit, longest, index, bench.seed + 1) for index in range(max(bench.at_once))]
    agents = [tuple(_cut(text, sizes)) for text in texts]
    own = {"answer": bench.turn_answer, "repeats": bench.session_repeats}
    return tuple(OwnTurns(agents=tuple(agents[:many]), **own) for many in bench.at_once)


def _sizes(context: int, longest: int, bench: OwnBench) -> Iterator[int]:
    yield context
    room = longest - context - bench.turn_answer
    for size in islice(cycle(bench.turn_tokens), bench.turns):
        room -= size + bench.turn_answer
        if room < 0:
            return
        yield size


def _cut(text: tuple[int, ...], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    at = 0
    for size in sizes:
        yield text[at : at + size]
        at += size


# --- in transformers --------------------------------------------------------------------------------------------------


def in_transformers(loaded: LoadedModel, plan: Plan, bench: OwnBench, file: OwnFile, progress: Progress) -> None:
    """Times a prompt and a token at each planned length that the file has not."""
    subject = BenchModel(loaded.model, loaded.info, loaded.info.id, "loaded")
    kit, done = prepare(loaded.tokenizer, Split.EVALUATION), measured(file)
    for length in lengths_of(plan):
        prompt, token = (OwnFigure(half="transformers", name=name, length=length) for name in ("prompt", "token"))
        if prompt.key not in done:
            file.add(_filled(prompt, _prompt_row(subject, plan, length, kit, bench, progress), loaded))
        if token.key not in done:
            file.add(_token_figure(token, subject, plan, bench, progress, loaded))


def _prompt_row(subject: BenchModel, plan: Plan, length: int, kit: Kit, bench: OwnBench, progress: Progress) -> Row:
    how = PrefillBench(
        (length,),
        bench.repeats,
        chunk=plan.quality.step if plan.quality else None,
        backend=bench.backend,
        sparse=bench.sparse,
        prompts={length: prompt_of(kit, length, 0, bench.seed)},
    )
    (row,) = bench_prefill(subject, plan, "its own", how, progress)
    return row


def _token_figure(
    figure: OwnFigure, subject: BenchModel, plan: Plan, bench: OwnBench, progress: Progress, loaded: LoadedModel
) -> OwnFigure:
    if plan.decode is None or not plan.is_sparse_at(figure.length, "decode"):
        if plan.evicting:
            return figure.model_copy(update={"note": "eviction is timed in vLLM alone"})
        return figure.model_copy(update={"share": 1.0, "note": "decode is dense by the plan"})
    how = DecodeBench(
        (figure.length,), repeats=bench.repeats, backend=bench.backend, seed=bench.seed, sparse=bench.sparse
    )
    row = Row(name=TOKEN, length=figure.length, device="", dtype="", own={"batch": 1})
    with progress.stage("decode", total=1) as step:
        step.advance(0, note=f"{format_length(figure.length)} tokens")
        (row,) = token_rows(row, DecodeRuns(subject, {"plan": plan}, how))
    free_memory(loaded.model.device)
    return _filled(figure, row, loaded)


def _filled(figure: OwnFigure, row: Row, loaded: LoadedModel) -> OwnFigure:
    from transformers import __version__

    model, data = loaded.model, row.data()
    dense, plan = (tuple(data.get(name) or ()) for name in ("dense_runs_ms", "sparse_runs_ms"))
    found: dict[str, Any] = {"dense": dense, "plan": plan, "share": row.density, "note": row.note}
    if not (dense and plan):
        found = {"failed": row.note or "nothing ran"}
    found |= {"way": data["dense_kernel"] or "", "ways": tuple(data["dense_peers_ms"])}
    found["device"] = device_name(model.device)
    found["host"] = f"transformers {__version__}, torch {torch.__version__}, {dtype_name(model.dtype)}, {program()}"
    return OwnFigure.model_validate(figure.model_dump() | found)


# --- in vLLM ----------------------------------------------------------------------------------------------------------


def request_of(
    model: str, plan: Plan, tokenizer: Any, device: torch.device, dtype: str, bench: OwnBench, file: OwnFile
) -> OwnRequest:
    """All figures in vLLM that the file has not, as a request that names no plan file yet."""
    kit, done = prepare(tokenizer, Split.EVALUATION), measured(file)

    def is_left(load: OwnPrompts | OwnTurns) -> bool:
        return not {figure.key for figure in named(load)} <= done

    return OwnRequest(
        model=model,
        plan="",
        device=device.type,
        dtype=dtype,
        backend=bench.backend,
        longest=max(lengths_of(plan)),
        step_tokens=(plan.quality.step if plan.quality else None) or _STEP,
        repeats=bench.repeats,
        quantization=bench.quantization,
        sparse=bench.sparse,
        prompts=tuple(filter(is_left, loads_of(kit, plan, bench))),
        turns=tuple(filter(is_left, turns_of(kit, plan, bench))),
    )


def in_vllm(python: Path, request: OwnRequest, plan: Plan, file: OwnFile, log: Path, progress: Progress) -> None:
    """Runs a request in another environment, and takes its figures as they come; without a result each has failed."""
    left = {figure.key: figure for load in request.loads for figure in named(load)}
    if not left:
        return
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as name, progress.stage("vLLM", total=len(left)) as step:
        folder = Path(name)
        write_plan(plan, folder / "plan.yaml")
        request = request.model_copy(update={"plan": str(folder / "plan.yaml")})
        (folder / "request.json").write_text(request.model_dump_json())
        (results := folder / "figures.jsonl").touch()
        command = [str(python), "-m", "sparsekv.bench.own_vllm", str(folder / "request.json"), str(results)]
        with log.open("wb") as told, results.open("rb") as figures:
            process = subprocess.Popen(command, stdout=told, stderr=told)
            try:
                while left and process.poll() is None:
                    time.sleep(_POLL)
                    step.advance(_take(figures, file, left), note=f"its log: {log}")
                code = process.wait()
            finally:
                process.kill()
            _take(figures, file, left)
    why = f"its process ended with code {code}: {_end_of(log)}"
    file.add(*(figure.model_copy(update={"failed": why}) for figure in left.values()))


def _take(figures: BinaryIO, file: OwnFile, left: dict[Any, OwnFigure]) -> int:
    """Adds whole lines to the file; returns how many."""
    count = 0
    while (line := figures.readline()).endswith(b"\n"):
        figure = OwnFigure.model_validate_json(line)
        file.add(figure)
        left.pop(figure.key, None)
        count += 1
    figures.seek(-len(line), SEEK_CUR)
    return count


def _end_of(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST:])[-300:] or "it said nothing"
