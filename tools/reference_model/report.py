"""What a run says while it trains: one line on the terminal and one JSON object in `log.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from reference_model.batches import FIRST_ANSWER, TEXT
from reference_model.recipe import Recipe
from reference_model.training import Totals

LOG_EVERY = 20


class Meter:
    """Collects the steps between two log lines. The device is read once a line, not once a step."""

    def __init__(self, log: Path | None, recipe: Recipe) -> None:
        self._log, self._tokens, self._tasks = log, recipe.tokens_per_step, tuple(recipe.shares)
        self._clear()

    def _clear(self) -> None:
        self._totals: Totals | None = None
        self._steps = 0
        self._waited = 0.0
        self._began = time.perf_counter()

    def add(self, totals: Totals, waited: float) -> None:
        """One step, `waited` seconds of it spent on data that was not there yet."""
        self._totals = totals if self._totals is None else self._totals + totals
        self._steps += 1
        self._waited += waited

    def flush(self, stage: str, step: int, elapsed: float) -> None:
        """Prints and logs the steps since the last call; `elapsed` is the training time of the whole run."""
        if self._totals is None:
            return
        losses = _by_kind(self._totals, self._tasks)  # waits for the device, so that the time below is true
        seconds = (time.perf_counter() - self._began) / self._steps
        waited = self._waited / self._steps / seconds
        record = {"stage": stage, "step": step, "elapsed": round(elapsed, 1), "seconds_per_step": round(seconds, 4)}
        record |= {"tokens_per_second": round(self._tokens / seconds), "data_wait": round(waited, 3)} | losses
        print(_line(record), flush=True)
        if self._log:
            with self._log.open("a") as file:
                file.write(json.dumps(record) + "\n")
        self._clear()


def _by_kind(totals: Totals, tasks: tuple[str, ...]) -> dict[str, Any]:
    losses, rights, counts = (sums.tolist() for sums in (totals.loss_K, totals.right_K, totals.count_K))
    kinds = {"text": TEXT} | {name: FIRST_ANSWER + i for i, name in enumerate(tasks)}
    return {
        name: {"loss": round(losses[kind] / counts[kind], 3), "accuracy": round(rights[kind] / counts[kind], 4)}
        for name, kind in kinds.items()
        if counts[kind]
    }


def _line(record: dict[str, Any]) -> str:
    kinds = " ".join(
        f"{name} {value['loss']:.2f}/{100 * value['accuracy']:.0f}%"
        for name, value in record.items()
        if isinstance(value, dict)
    )
    return (
        f"{record['stage']} step {record['step']} at {record['elapsed']:.0f} s: "
        f"{record['seconds_per_step']:.3f} s/step, {record['tokens_per_second'] / 1e6:.2f} Mtok/s, "
        f"waiting {100 * record['data_wait']:.0f}% | {kinds}"
    )
