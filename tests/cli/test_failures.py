"""What a failure looks like: one message, the right exit code, and a traceback only when asked for."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from plans_samples import small_plan
from typer.main import get_command

import sparsekv.__main__
from sparsekv.cli.main import app, main
from sparsekv.cli.output import SIGNALS, Terminated, emit_json, ending_by_signals, report
from sparsekv.plans.errors import GateError, PlanError, PlanMismatchError, UsageError
from sparsekv.plans.files import write_plan


@pytest.fixture(autouse=True)
def signals_as_found():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("expected a, found b; do c"), 2, "error: expected a"),
        (PlanError("line 3: expected a"), 2, "error: line 3: expected a"),
        (PlanMismatchError("other model"), 3, "error: other model"),
        (GateError("lost 3 points"), 1, "error: lost 3 points"),
        (OSError(errno.ENOSPC, "No space left on device", "plan.yaml"), 1, "error: plan.yaml: No space"),
        (OutOfMemoryError("CUDA out of memory"), 1, "`plan`"),
        (ZeroDivisionError("oops\nmore"), 1, "error: unexpected ZeroDivisionError: oops\nrun `sparsekv --debug plan"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_each_kind_of_failure_has_its_message_json_and_exit_code(capsys, error, code, message):
    assert report(error, "plan") == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert report(error, "plan", as_json=True) == code
    told = json.loads(capsys.readouterr().out)["error"]
    assert (told["kind"], told["exit_code"]) == ("Interrupted" if code == 130 else type(error).__name__, code)
    assert told["message"]


def test_a_failure_as_json_says_what_people_are_told(capsys):
    error = GateError("lost 3 points").with_facts(passed=False)
    error.add_note("try more")
    assert report(error, "verify", as_json=True) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: lost 3 points\ntry more\n"
    told = {"kind": "GateError", "message": "lost 3 points", "notes": ["try more"], "exit_code": 1}
    assert json.loads(captured.out) == {"passed": False, "error": told}


COMMANDS = tuple(name for name in get_command(app).commands if name != "serve")  # which hands other options on


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_a_wrong_option_as_json_too(sparsekv, command):
    done = sparsekv(command, "--no-such-option", "--json")
    assert done.code == done.data["error"]["exit_code"] == 2
    assert "--no-such-option" in done.data["error"]["message"]
    assert "Usage: sparsekv" in done.err


@pytest.mark.parametrize(("flags", "shown"), [((), False), (("--debug",), True)])
def test_a_bug_shows_its_traceback_only_with_debug(sparsekv, on_output, flags, shown):
    on_output(lambda: 1 / 0)
    done = sparsekv(*flags, "schema")
    assert done.code == 1
    assert ("Traceback" in done.err) is shown
    assert "error: unexpected ZeroDivisionError" in done.err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_inside_a_command_is_told_with_its_exit_code(sparsekv, tmp_path, on_output, number):
    write_plan(small_plan(), tmp_path / "plan.yaml")
    on_output(lambda: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        done = sparsekv("show", tmp_path / "plan.yaml", "--json")
    finally:
        signal.signal(number, before)
    assert (done.code, done.err.count("\n")) == (128 + number, 1)
    assert done.err.startswith("interrupted") if number == signal.SIGINT else number.name in done.err
    assert done.data["error"]["exit_code"] == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_while_a_file_is_written_leave_it_as_it_was_and_nothing_beside_it(
    sparsekv, tmp_path, monkeypatch, number
):
    path = tmp_path / "plan.yaml"
    write_plan(small_plan(), path)
    path.write_text(path.read_text().replace("recent: 128", "recent: 64"))
    before, unlink = path.read_text(), os.unlink
    monkeypatch.setattr(os, "fsync", lambda descriptor: signal.raise_signal(number))
    monkeypatch.setattr(os, "unlink", lambda path, **options: (signal.raise_signal(number), unlink(path, **options)))
    found = signal.signal(number, signal.SIG_DFL)
    try:
        done = sparsekv("seal", path, "--json")
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, found)
    assert (done.code, done.data["error"]["exit_code"]) == (128 + number, 128 + number)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.yaml"]
    assert path.read_text() == before


def test_whatever_comes_of_a_signal_the_signal_is_raised():
    def fails():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise OSError("consequence")

    with pytest.raises(Terminated) as ended, ending_by_signals():
        fails()
    assert (ended.value.number, repr(ended.value.__cause__)) == (signal.SIGTERM, "OSError('consequence')")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_command_line_is_read_is_told_as_well(number):
    program = f"""
import signal, sys
from sparsekv.__main__ import main

class Importing:
    def find_spec(self, name, path, target=None):
        if name == "sparsekv.cli.main":
            signal.raise_signal({int(number)})

sys.meta_path.insert(0, Importing())
main()
"""
    call = [sys.executable, "-c", program, "show", "plan.yaml", "--json"]
    by_default = partial(signal.signal, number, signal.SIG_DFL)  # under nohup it would be ignored
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, preexec_fn=by_default)
    told = json.loads(done.stdout)["error"]
    assert (done.returncode, told["exit_code"], told["kind"]) == (128 + number, 128 + number, "Interrupted")
    assert done.stderr == f"{told['message']}\n"


@pytest.mark.parametrize("run", [main, sparsekv.__main__.main])
def test_a_command_runs_in_a_thread_which_cannot_handle_signals(capsys, monkeypatch, run):
    def call():
        with contextlib.suppress(SystemExit):
            run()

    monkeypatch.setattr(sys, "argv", ["sparsekv", "schema"])
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert capsys.readouterr().out.startswith("{")


def test_an_ignored_hangup_stays_ignored(sparsekv, on_output):
    on_output(lambda: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sparsekv("schema").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("arguments", [("schema",), ("show", "plan.yaml"), ("--help",)])
def test_a_reader_that_leaves_early_is_no_error(tmp_path, arguments):
    write_plan(small_plan(), tmp_path / "plan.yaml")
    read, write = os.pipe()
    os.close(read)
    call = [sys.executable, "-m", "sparsekv", *arguments]
    done = subprocess.run(call, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141  # as what SIGPIPE ends


@pytest.mark.parametrize("arguments", [("schema",), ("--help",)])
def test_a_full_disk_behind_standard_output_is_told_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sparsekv", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left")


@pytest.mark.parametrize(("closed", "out"), [("stdout", ""), ("stderr", "{"), ("stdin", "{")])
def test_a_closed_stream_takes_nothing_and_breaks_nothing(closed, out):
    descriptor = ("stdin", "stdout", "stderr").index(closed)
    program = (
        f"import os, runpy, sys; os.close({descriptor}); os.execv(sys.executable, {[sys.executable]!r} + sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "-m", "sparsekv", "validate", "nowhere.yaml", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 2
    assert done.stdout[:1] == out
    assert "Traceback" not in done.stderr


def test_names_that_are_no_text_can_be_printed(tmp_path):
    call = [sys.executable.encode(), b"-m", b"sparsekv", b"validate", b"a\xff\xc3\xa9.yaml", b"--json"]
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            call, capture_output=True, timeout=60, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": encoding}
        )
        assert done.returncode == 2
        assert json.loads(done.stdout.decode(encoding))["error"]["message"].startswith("a\udcffé.yaml: ")


def test_json_has_no_numbers_that_json_does_not_know(capsys):
    emit_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert capsys.readouterr().out == '{\n  "a": null,\n  "b": [\n    null,\n    1.5\n  ]\n}\n'
