"""The `sparsekv` command, and `python -m sparsekv`.

Until a command begins, a signal ends the process here and now: nothing has been done that could be undone, and an
import that is interrupted fails in ways of its own. Hence `main` sets the handlers before it imports anything.
"""

import os
import signal
import sys
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: object) -> None:
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    message, code = f"{word}; nothing was written", 128 + number
    told = f'{{"kind": "Interrupted", "message": "{message}", "notes": [], "exit_code": {code}}}'
    try:
        os.write(2, f"{message}\n".encode())
        if "--json" in sys.argv:
            os.write(1, f'{{"error": {told}}}\n'.encode())
    finally:
        os._exit(code)


def main() -> None:
    """Runs the command line and exits."""
    # OpenMP reads it when torch is loaded. A thread that spins while it waits keeps a core from the one it waits for:
    # beside other work every step takes ten to fifty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main_thread = threading.current_thread() is threading.main_thread()
    handled = _SIGNALS if main_thread else ()  # no other thread can handle signals
    for number in handled:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    from sparsekv.cli.main import main as run

    try:
        run()
    finally:
        for number in handled:  # all has been said; what is left is the end of the interpreter
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
