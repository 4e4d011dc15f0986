"""The output of a command: data on standard output, all messages, failures included, on standard error.

Exit codes: 0 done, 1 a check or gate failed (or something broke), 2 usage, 3 plan and model do not match, 128 + n
ended by signal n (130 for Ctrl-C, 141 where the reader of a pipe has left). With --json a failure is one JSON object on
standard output too. Notes added to an exception (`error.add_note(...)`) are printed below its message: what was saved,
what to try.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from sparsekv.plans.errors import SparseKVError

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED = 1


def prepare_streams() -> None:
    """Opens closed standard streams on nothing, and lets standard output escape what its encoding cannot express."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: file names need not be text


# What does more to a terminal than print: all control characters but tab and line end, and what turns text around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """`text` as it can be shown: names of files and what else comes from outside may hold anything."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def tell(message: str) -> None:
    """Prints a message on standard error."""
    print(escaped(message), file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Writes data, on standard output."""
    print(escaped(text))


_COLOURS = {"verified": "green", "unverified": "yellow", "imported": "yellow"}


def emit_verdict(lines: Sequence[str], status: str) -> None:
    """Writes lines of `verdict` as data; a terminal shows the status in the first one in its colour."""
    first, *others = map(escaped, lines)
    place, told, more = first.rpartition(status)
    typer.echo(place + typer.style(told, fg=_COLOURS[status], bold=True) + more)
    typer.echo("\n".join(others))


def emit_json(data: Any) -> None:
    """Writes data as JSON; numbers that JSON does not know become null."""
    narrow = "utf" not in (sys.stdout.encoding or "").lower()
    text = json.dumps(_finite(data), indent=2, ensure_ascii=narrow, allow_nan=False)
    print(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# --- tables -----------------------------------------------------------------------------------------------------------


def placed(host_layers: Collection[int], layers: int) -> str:
    from sparsekv.plans.types import format_ids

    if not host_layers:
        return f"keys and values of all {layers} layers on the device"
    moved = f"{len(host_layers)} of {layers} layers ({format_ids(host_layers)})"
    return f"keys and values of {moved} in host memory, of the others on the device"


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Prints tables and texts of plans/show.py, no wider than text for people is."""
    from rich.console import Console

    from sparsekv.plans.brief import WIDTH

    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if sys.stdout.isatty() else WIDTH
    for part in parts:
        console.print(part)


# --- failures ---------------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """A signal that asks the command to end, such as SIGTERM; handled like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME = 1.0  # seconds within which signals count as one


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a command: none outside the main thread, which alone can handle them."""
    return SIGNALS if threading.current_thread() is threading.main_thread() else ()


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise `Terminated` inside, and are ignored from its end on, so that what is said then
    is said whole. Those that were ignored before stay ignored.

    Signals shortly after the first are ignored too: `timeout` sends each one twice, and temporary files are being
    removed. Whatever comes out of it, the first signal is what is raised.
    """
    received: list[tuple[int, float]] = []

    def end(number: int, frame: object) -> None:
        if received and time.monotonic() - received[-1][1] < _SAME:
            return
        received.append((number, time.monotonic()))
        raise Terminated(number)

    handled = [number for number in handled_signals() if signal.getsignal(number) != signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, end)
        yield
    except BaseException as error:
        if not received or (isinstance(error, Terminated) and error.number == received[0][0]):
            raise
        stop = Terminated(received[0][0])
        for note in getattr(error, "__notes__", ()):
            stop.add_note(note)
        raise stop from error
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)


_READER_LEFT = 141  # as of other programs that write to `| head`, which SIGPIPE ends


def report(error: BaseException, command: str, as_json: bool = False) -> int:
    """Tells what went wrong in `command`, with `as_json` on standard output too, and returns the exit code."""
    if isinstance(error, BrokenPipeError):
        _stop_writing(sys.stdout)
        return _READER_LEFT
    notes = list(getattr(error, "__notes__", ()))
    kind, message, exit_code = _meaning(error, command, notes)
    said_as = "" if isinstance(error, KeyboardInterrupt) else "error: "
    try:
        tell("\n".join((said_as + message, *notes)))
    except OSError:  # the terminal has gone
        _stop_writing(sys.stderr)
    try:
        if as_json:
            facts = error.facts if isinstance(error, SparseKVError) else {}
            emit_json({**facts, "error": failure_data(kind, message, exit_code, notes)})
        sys.stdout.flush()
    except OSError:  # standard output itself is what failed
        _stop_writing(sys.stdout)
    return exit_code


def failure_data(kind: str, message: str, exit_code: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    return {"kind": kind, "message": message, "notes": list(notes), "exit_code": exit_code}


# Of torch on a CPU, and of the loader of its libraries, which have no exceptions of their own for it.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "failed to map segment")


def _meaning(error: BaseException, command: str, notes: list[str]) -> tuple[str, str, int]:
    """Kind, message and exit code of `error`; what it takes to find a bug is added to `notes`."""
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Terminated) else signal.SIGINT
        word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        return "Interrupted", word if notes else f"{word}; nothing was written", 128 + number
    if isinstance(error, SparseKVError):
        return kind, str(error), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        return kind, f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror, FAILED
    # Named, not imported: torch must stay out of the commands that do not need it.
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError) or any(word in str(error) for word in _NO_MEMORY):
        return kind, f"out of memory during `{command}`; try a shorter prompt or length, or a smaller dtype", FAILED
    notes.append(f"run `sparsekv --debug {command} ...` for the traceback")
    return kind, f"unexpected {kind}: {(str(error).splitlines() or [''])[0]:.300}", FAILED


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replaces `warnings.showwarning`: our own warnings are for users, not about a line of code."""
    if category.__module__.startswith("sparsekv."):
        tell(f"warning: {message}")
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _stop_writing(stream: TextIO) -> None:
    """Lets the interpreter flush a stream into nowhere: nothing more can be written to it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        setattr(sys, "stderr" if stream is sys.stderr else "stdout", open(os.devnull, "w"))  # noqa: SIM115
