"""Records of a profiling run, on disk while it runs, so that an interrupted run goes on; and their means over prompts.

One JSON line a layer, appended and flushed as it is measured, under a first line that says what the run is of. A line
cut short by an interruption is dropped, and so is one that this run cannot have written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from sparsekv.planner.profile.profile_data import (
    SCORES,
    Candidate,
    LayerScores,
    LengthProfile,
    PartOfAll,
    Reuse,
    ScoreParts,
    Table,
    TokenChoice,
)
from sparsekv.plans.errors import ConflictError, PlanWarning, UsageError
from sparsekv.plans.files import write_bytes
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Pattern
from sparsekv.plans.types import Length, Natural, canonical_json, rounded

Key = tuple[int, int, int]
_PARTIAL = "sparsekv.partial"
_ONE_RUN = "wait for its end, or choose another -o or --profile-out"
_LEAST_DAMAGE = 1e-12  # of a prompt on which nothing does any
_HEADER = re.compile(rf"{re.escape(_PARTIAL)} [0-9a-f]{{64}}\n")


class LayerRecord(ScoreParts):
    """One layer over one calibration prompt."""

    length: Length
    sample: Natural
    patterns: tuple[tuple[Pattern, ...], ...] = ()
    importance: PartOfAll = 0.0
    kept: Table = ()  # [budget][filter layer]

    @property
    def key(self) -> Key:
        """Returns what a record is of."""
        return self.length, self.sample, self.layer


@dataclass(frozen=True, slots=True)
class RunShape:
    """Holds what the records of a run are of and hold.

    Attributes:
        samples: prompts of each length.
        candidates: of each length; none without the prefill phase.
        choice: of the decode statistics; None without the decode phase.
    """

    model: ModelInfo
    samples: Mapping[int, int]
    candidates: Mapping[int, Sequence[Candidate]]
    choice: TokenChoice | None

    def holds(self, record: LayerRecord) -> bool:
        """Returns whether the record is one of such a run: every slot has, for each head, a candidate, a pattern of its
        family, and scores."""
        if record.sample >= self.samples.get(record.length, 0) or record.layer >= self.model.layers:
            return False
        group, slots = self.model.group_of(record.layer), len(record.candidates)
        candidates = self.candidates[record.length] if group.kind == "full" else ()
        tables = (record.candidates, record.patterns, *(getattr(record, name) for name in SCORES))
        budgets = len(self.choice.budgets) if self.choice else 0
        return (
            bool(slots) == bool(candidates)
            and all(_is_table(table, slots, group.heads) for table in tables)
            and _is_table(record.kept, budgets, record.layer + 1)
            and all(
                position < len(candidates) and candidates[position].family == pattern.pattern
                for row, own in zip(record.candidates, record.patterns, strict=True)
                for position, pattern in zip(row, own, strict=True)
            )
        )


def _is_table(table: Sequence[Sequence[Any]], rows: int, columns: int) -> bool:
    return len(table) == rows and all(len(row) == columns for row in table)


class Records:
    """The records of a run, by what they are of; on disk too where there is a path."""

    def __init__(self, path: Path | None, run: Mapping[str, Any], shape: RunShape) -> None:
        """Takes up the records of an earlier run if it was of the same thing; otherwise starts anew.

        Args:
            path: of the partial file; None keeps records in memory only.
            run: what the run is of, as JSON data; the file of another run is renamed.
            shape: of its records; others are dropped with a warning, and measured again.

        Raises:
            UsageError: the file cannot be written.
        """
        self._path, self._shape = path, shape
        self._header = f"{_PARTIAL} {hashlib.sha256(canonical_json(dict(run))).hexdigest()}\n"
        self._found: dict[Key, LayerRecord] = {}
        if path is not None:
            self._take_up(path)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> LayerRecord:
        return self._found[key]

    def add(self, record: LayerRecord) -> None:
        """Keeps a record, in the file before all else; one that cannot be written leaves the file as it was.

        Raises:
            ConflictError: the file holds the records of another run by now.
            UsageError: it cannot be written.
        """
        if self._path is not None:
            with (
                _told(self._path, "make room, the run goes on where it stopped"),
                _whole_or_not_at_all(self._path),
                self._path.open("a+", encoding="utf-8") as file,
            ):
                self._check_own(file)
                file.write(record.model_dump_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._found[record.key] = record

    def _check_own(self, file: TextIO) -> None:
        """Where folders cannot be locked, another run may have begun in the meantime."""
        file.seek(0)
        header = file.readline(len(self._header))
        if not header:
            file.write(self._header)
        elif header != self._header:
            raise ConflictError(f"expected the records of this run in {self._path}, found those of another; {_ONE_RUN}")

    def _take_up(self, path: Path) -> None:
        with _told(path, "choose another --profile-out"):
            self._set_aside(path)
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            sound = self._sound_lines(text, path)
            if not self._found:
                path.unlink(missing_ok=True)  # the first record brings the header: no file without one to go on from
            elif sound != text:
                write_bytes(path, sound.encode())

    def _set_aside(self, path: Path) -> None:
        """Renames the file of a run with other options, for when that one is started again, and takes back our own."""
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                header, record = file.readline(len(self._header)), file.readline(1)
            if header == self._header:
                return
            if _HEADER.fullmatch(header) and record:
                aside = _aside(path, header)
                path.replace(aside)
                warnings.warn(f"a run with other options had stopped here; its profile is in {aside}", PlanWarning, 2)
        if _aside(path, self._header).exists():
            _aside(path, self._header).replace(path)

    def _sound_lines(self, text: str, path: Path) -> str:
        if not text.startswith(self._header):
            return self._header
        lines = text[len(self._header) :].split("\n")[:-1]  # the last one was cut short, or is empty
        sound = [self._header]
        for line in lines:
            with suppress(ValidationError):
                record = LayerRecord.model_validate_json(line)
                if self._shape.holds(record):
                    self._found[record.key] = record
                    sound.append(f"{line}\n")
        if damaged := len(lines) + 1 - len(sound):
            told = f"dropped {damaged} of the records in {path}, which are damaged: they are measured again"
            warnings.warn(told, PlanWarning, 2)
        return "".join(sound)


@contextmanager
def only_run(path: Path, otherwise: str = _ONE_RUN) -> Iterator[None]:
    """Keeps other runs from what is written at `path`, by a lock on a hidden file beside it that ends with the process.

    Folders that cannot be locked, as some on a network, are left to those who write.

    Args:
        otherwise: what to do where there is another run.

    Raises:
        ConflictError: another run has the lock.
    """
    lock = path.with_name(f".{path.name}.lock")
    held: BinaryIO | None = None
    try:
        held = _locked(lock)
    except BlockingIOError:
        raise ConflictError(f"expected no other run into {path}, found one that is under way; {otherwise}") from None
    except OSError:
        pass
    try:
        yield
    finally:
        if held is not None:
            with held, suppress(OSError):
                lock.unlink()


def _locked(lock: Path) -> BinaryIO:
    while True:
        file = lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                lock.unlink(missing_ok=True)
            raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # a run that ended has removed it in the meantime


def _aside(path: Path, header: str) -> Path:
    return path.with_name(f"{path.name}.{header.split()[-1][:8]}")


def left_aside(path: Path) -> list[Path]:
    """The records of runs with other options that stopped at `path` and were not taken up again."""
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}")
    return sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))


def holds_records(path: Path) -> bool:
    """Returns whether there is something in a file of records for another run to go on from."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        return bool(_HEADER.fullmatch(file.readline()) and file.readline(1))
    return False


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[None]:
    """Cuts off what was added to a file where adding to it fails; one that was not there before goes."""
    before = path.stat().st_size if path.exists() else None
    try:
        yield
    except OSError:
        with suppress(OSError):
            if before is None:
                path.unlink(missing_ok=True)
            else:
                os.truncate(path, before)
        raise


@contextmanager
def _told(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def length_means(
    length: int,
    prompt_tokens: Sequence[int],
    candidates: Sequence[Candidate],
    choice: TokenChoice | None,
    records: Sequence[Sequence[LayerRecord]],
) -> LengthProfile:
    """The profile of one length: means over its calibration prompts.

    Args:
        prompt_tokens: tokens of each calibration prompt.
        candidates: what was scored; empty without the prefill phase.
        choice: of the decode statistics; None without the decode phase.
        records: [layer][prompt].
    """
    numbers: dict[Pattern, int] = {}
    searched = [samples for samples in records if samples[0].patterns]
    weights = _prompt_weights(searched) if searched else ()
    layers = tuple(_layer_means(samples, weights, numbers) for samples in searched)
    return LengthProfile(
        length=length,
        prompt_tokens=tuple(prompt_tokens),
        prompt_weights=weights,
        candidates=tuple(candidates) if layers else (),
        patterns=tuple(numbers),
        layers=layers,
        reuse=_reuse_means(choice, records) if choice else None,
    )


def _prompt_weights(records: Sequence[Sequence[LayerRecord]]) -> tuple[float, ...]:
    """Returns what the damage on each prompt counts, geometric mean 1: less where all of it is larger, by the square
    root.

    Damage differs by orders of magnitude between prompts, with how sure the model is of its answer: without weights the
    least sure prompt alone would decide.
    """
    medians = [[np.median(sample.damage, 0).sum() for sample in samples] for samples in records]
    logs = 0.5 * np.log(np.maximum(np.sum(medians, 0), _LEAST_DAMAGE))
    return tuple(rounded(float(weight)) for weight in np.exp(logs.mean() - logs))


def _layer_means(samples: Sequence[LayerRecord], weights: Sequence[float], numbers: dict[Pattern, int]) -> LayerScores:
    patterns = tuple(tuple(numbers.setdefault(one, len(numbers)) for one in row) for row in samples[0].patterns)
    damage_PSH = np.array([sample.damage for sample in samples]) * np.array(weights)[:, None, None]
    first = samples[0]
    return LayerScores(
        layer=first.layer,
        candidates=first.candidates,
        patterns=patterns,
        damage=as_table(damage_PSH.mean(0)),
        worst=as_table(damage_PSH.max(0)),
        tiles=as_table(np.mean([sample.tiles for sample in samples], 0)),
        columns=as_table(np.mean([sample.columns for sample in samples], 0)),
    )


def _reuse_means(choice: TokenChoice, records: Sequence[Sequence[LayerRecord]]) -> Reuse:
    kept_JBI = [np.mean([sample.kept for sample in samples], 0) for samples in records]
    return Reuse(
        **dict(choice),
        importance=tuple(float(np.mean([sample.importance for sample in samples])) for samples in records),
        kept=tuple(as_table(kept_BI[b] for kept_BI in kept_JBI) for b in range(len(choice.budgets))),
    )


def as_table(rows: Iterable[npt.NDArray[np.float64]]) -> Table:
    """Rows of numbers as files hold them."""
    return tuple(tuple(map(float, row)) for row in rows)
