"""What a failure looks like: one message, the right exit code, and a traceback only when asked for."""

import errno
import os
import subprocess
import sys

import pytest

from sparsekv.cli import schema
from sparsekv.cli.failures import report
from sparsekv.cli.output import emit_json, size
from sparsekv.plans.errors import GateError, PlanError, PlanMismatchError, UsageError


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("expected a, found b; do c"), 2, "error: expected a, found b; do c"),
        (PlanError("line 3: expected a"), 2, "error: line 3: expected a"),
        (PlanMismatchError("other model"), 3, "error: other model"),
        (GateError("lost 3 points"), 1, "error: lost 3 points"),
        (OSError(errno.ENOSPC, "No space left on device", "plan.yaml"), 1, "error: plan.yaml: No space left on device"),
        (OutOfMemoryError("CUDA out of memory"), 1, "error: out of memory during `plan`"),
        (ZeroDivisionError("oops\nmore"), 1, "error: unexpected ZeroDivisionError: oops\nrun `sparsekv --debug plan"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written"),
    ],
)
def test_each_kind_of_failure_has_its_message_and_exit_code(capsys, error, code, message):
    assert report(error, "plan") == code
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.out == ""


def test_an_interrupt_says_what_was_kept(capsys):
    stop = KeyboardInterrupt()
    stop.add_note("kept 3 of 8 layers in plan.profile")
    assert report(stop, "plan") == 130
    assert capsys.readouterr().err == "interrupted\nkept 3 of 8 layers in plan.profile\n"


@pytest.mark.parametrize(("flags", "shown"), [((), False), (("--debug",), True)])
def test_a_bug_shows_its_traceback_only_with_debug(sparsekv, monkeypatch, flags, shown):
    monkeypatch.setattr(schema, "emit_json", lambda data: 1 / 0)
    done = sparsekv(*flags, "schema")
    assert done.code == 1
    assert ("Traceback" in done.err) is shown
    assert "error: unexpected ZeroDivisionError" in done.err


def test_ctrl_c_inside_a_command_ends_with_130(sparsekv, monkeypatch):
    def interrupted(data: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "emit_json", interrupted)
    done = sparsekv("schema")
    assert (done.code, done.err) == (130, "interrupted; nothing was written\n")


@pytest.mark.parametrize("arguments", [("plann",), ("show", "--nope"), ("validate",), ("run", "--max-new-tokens", "0")])
def test_wrong_usage_exits_with_2_and_says_how_it_is_meant(sparsekv, arguments):
    done = sparsekv(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Usage: sparsekv" in done.err


def test_a_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "sparsekv", "schema"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert done.stderr == ""


def test_json_has_no_numbers_that_json_does_not_know(capsys):
    emit_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert capsys.readouterr().out == '{\n  "a": null,\n  "b": [\n    null,\n    1.5\n  ]\n}\n'


def test_sizes_read_well():
    assert [size(n) for n in (0, 999, 1000, 12_345_678, 137 * 10**9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12.3 MB",
        "137.0 GB",
    ]


def test_progress_never_reaches_standard_output(capsys):
    from sparsekv.cli.output import tell

    tell("working")
    assert capsys.readouterr() == ("", "working\n")
