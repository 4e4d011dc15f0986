"""The training loop over stages: resumable within a stage, and timed without keeping anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from reference_model import checkpoint
from reference_model.batches import Batch, batches, micro_batches_per_step
from reference_model.checkpoint import Position
from reference_model.network import Retriever
from reference_model.optimizer import Optimizers, rate_factor
from reference_model.recipe import Recipe, Stage
from reference_model.report import LOG_EVERY, Meter
from reference_model.training import accumulate, compile_model


@dataclass(frozen=True, slots=True)
class Run:
    """How a command runs, as opposed to what it computes.

    Attributes:
        work: folder of tokens, tokenizer, checkpoint and log.
        device: where to train.
        workers: background processes that make rows; 0 makes them in this one.
        compiled: whether to compile.
        checkpoint_every: steps.
        deadline: `time.monotonic()` at which to stop cleanly.
    """

    work: Path
    device: torch.device
    workers: int
    compiled: bool
    checkpoint_every: int
    deadline: float


def build(recipe: Recipe, run: Run) -> tuple[Retriever, Optimizers]:
    """A freshly initialised model on the device, and its optimizers."""
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model = Retriever(recipe.shape).to(run.device)
    if run.compiled:
        compile_model(model)
    return model, Optimizers.of(model, recipe)


def train(recipe: Recipe, run: Run, last_stage: int) -> bool:
    """Trains up to and including stage number `last_stage`; returns whether that was reached before the deadline."""
    model, optimizers = build(recipe, run)
    position = checkpoint.load(run.work, model, optimizers)
    while position.stage <= last_stage:
        position = _train_stage(recipe, run, model, optimizers, position)
        if time.monotonic() >= run.deadline:
            return position.stage > last_stage
    return True


def _train_stage(recipe: Recipe, run: Run, model: Retriever, optimizers: Optimizers, start: Position) -> Position:
    """Goes on to the end of the stage or to the deadline, and saves."""
    stage = recipe.stages[start.stage]
    before = sum(earlier.steps for earlier in recipe.stages[: start.stage])
    end = recipe.seconds_through(start.stage)
    began = time.perf_counter() - start.seconds
    meter = Meter(run.work / "log.jsonl", recipe)
    position = start
    for step, (micro_batches, waited) in enumerate(_steps(recipe, run, stage, start.step), start.step):
        factor = rate_factor(recipe, before + step, time.perf_counter() - began)
        meter.add(accumulate(model, micro_batches, run.device), waited)
        optimizers.step(factor)
        if end is not None and run.device.type == "cuda":
            torch.cuda.synchronize()  # steps that are only queued would count as done
        position = Position(start.stage, step + 1, time.perf_counter() - began)
        if (step + 1) % LOG_EVERY == 0:
            meter.flush(stage.name, step + 1, position.seconds)
        if (step + 1) % run.checkpoint_every == 0 and step + 1 < stage.steps:
            checkpoint.save(run.work, model, optimizers, position)
        if _is_over(stage, end, position) or time.monotonic() >= run.deadline:
            break
    meter.flush(stage.name, position.step, position.seconds)
    if _is_over(stage, end, position):
        position = Position(start.stage + 1, 0, time.perf_counter() - began)
    checkpoint.save(run.work, model, optimizers, position)
    return position


def _is_over(stage: Stage, end: float | None, position: Position) -> bool:
    return position.step >= stage.steps or (end is not None and position.seconds >= end)


def _steps(recipe: Recipe, run: Run, stage: Stage, first: int) -> Iterator[tuple[list[Batch], float]]:
    """The micro-batches of each step from `first` on, and the seconds waited for them."""
    source = iter(batches(recipe, stage, run.work, first, stage.steps, run.workers))
    per_step = micro_batches_per_step(recipe, stage.length)
    for _ in range(first, stage.steps):
        began = time.perf_counter()
        micro_batches = list(islice(source, per_step))
        yield micro_batches, time.perf_counter() - began


def probe(recipe: Recipe, run: Run, steps: int) -> None:
    """Runs some steps of every length, prints their times, and writes nothing."""
    model, optimizers = build(recipe, run)
    for stage in recipe.stages:
        meter = Meter(None, recipe)
        warm = Stage(stage.length, steps + 2)
        began = time.perf_counter()
        for step, (micro_batches, waited) in enumerate(_steps(recipe, run, warm, 0), start=-1):
            meter.add(accumulate(model, micro_batches, run.device), waited)
            optimizers.step(1.0)
            if step in (0, steps):  # the first two steps compile
                meter.flush(f"{stage.name}{' warm-up' if step == 0 else ''}", step, time.perf_counter() - began)
    if run.device.type == "cuda":
        print(f"peak device memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
