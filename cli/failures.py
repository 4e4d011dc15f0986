"""What a failure looks like to the user: one message on standard error and an exit code.

0 done, 1 a check or gate failed (or something broke), 2 usage, 3 plan and model do not match, 130 interrupted.
Notes added to an exception (`error.add_note(...)`) are printed below its message: what was kept, what to try.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TextIO

from sparsekv.cli.output import tell
from sparsekv.plans.errors import SparseKVError

FAILED = 1
INTERRUPTED = 130


def report(error: BaseException, command: str) -> int:
    """Prints what went wrong in `command` and returns the exit code."""
    if isinstance(error, BrokenPipeError):
        _stop_writing()
        return FAILED
    tell(_message(error, command))
    for note in getattr(error, "__notes__", ()):
        tell(note)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, SparseKVError) else FAILED


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


def _message(error: BaseException, command: str) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted" if hasattr(error, "__notes__") else "interrupted; nothing was written"
    if isinstance(error, SparseKVError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"error: {place}{error.strerror}"
    # Named, not imported: torch must stay out of the commands that do not need it.
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"error: out of memory during `{command}`; try a shorter prompt or length, or a smaller dtype"
    first_line = (str(error).splitlines() or [""])[0]
    hint = f"run `sparsekv --debug {command} ...` for the traceback"
    return f"error: unexpected {type(error).__name__}: {first_line}\n{hint}"


def _stop_writing() -> None:
    """Lets the interpreter flush into nowhere: the reader of our output has left."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
