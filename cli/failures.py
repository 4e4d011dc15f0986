"""What a failure looks like to the user: one message on standard error, an exit code, and with --json an object too.

0 done, 1 a check or gate failed (or something broke), 2 usage, 3 plan and model do not match, 130 interrupted.
Notes added to an exception (`error.add_note(...)`) are printed below its message: what was kept, what to try.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from sparsekv.cli.output import emit_json, tell
from sparsekv.plans.errors import SparseKVError

FAILED = 1
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """What is told of an error, the same to people and to programs."""

    kind: str
    message: str
    exit_code: int
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # found out before it failed
    said_as: str = "error: "  # in front of the message

    @classmethod
    def of(cls, error: BaseException, command: str) -> Failure:
        """What `error` means in `command`."""
        notes = tuple(getattr(error, "__notes__", ()))
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted" if notes else "interrupted; nothing was written"
            return cls("Interrupted", message, INTERRUPTED, notes, said_as="")
        if isinstance(error, SparseKVError):
            return cls(type(error).__name__, str(error), error.exit_code, notes, error.facts)
        kind = type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            place = f"{error.filename}: " if error.filename is not None else ""
            return cls(kind, f"{place}{error.strerror}", FAILED, notes)
        # Named, not imported: torch must stay out of the commands that do not need it.
        if kind == "OutOfMemoryError" or isinstance(error, MemoryError):
            message = f"out of memory during `{command}`; try a shorter prompt or length, or a smaller dtype"
            return cls(kind, message, FAILED, notes)
        first_line = (str(error).splitlines() or [""])[0]
        hint = f"run `sparsekv --debug {command} ...` for the traceback"
        return cls(kind, f"unexpected {kind}: {first_line}", FAILED, (*notes, hint))

    def as_data(self) -> dict[str, Any]:
        """The JSON object: `error`, and beside it what had been found out."""
        told = {"kind": self.kind, "message": self.message, "notes": list(self.notes), "exit_code": self.exit_code}
        return {**self.facts, "error": told}


def report(error: BaseException, command: str, as_json: bool = False) -> int:
    """Tells what went wrong in `command`, with `as_json` on standard output too, and returns the exit code."""
    if isinstance(error, BrokenPipeError):
        _stop_writing()
        return FAILED
    failure = Failure.of(error, command)
    for line in (f"{failure.said_as}{failure.message}", *failure.notes):
        tell(line)
    try:
        if as_json:
            emit_json(failure.as_data())
        sys.stdout.flush()
    except OSError:  # standard output itself is what failed
        _stop_writing()
    return failure.exit_code


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Takes the place of `warnings.showwarning`: our own warnings are for users, not about a line of code."""
    if category.__module__.startswith("sparsekv."):
        tell(f"warning: {message}")
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _stop_writing() -> None:
    """Lets the interpreter flush into nowhere: nothing more can be written to our output."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
