"""The `sparsekv` command, and `python -m sparsekv`.

Until a command begins, a signal ends the process here and now: nothing has been done that could be undone, and an
import that is interrupted fails in ways of its own. Hence the handlers come before every other import.
"""

import os
import signal
import sys

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


for _number in _SIGNALS:
    if signal.getsignal(_number) != signal.SIG_IGN:
        signal.signal(_number, _end)


def main() -> None:
    """Runs the command line and exits."""
    from sparsekv.cli.main import main as run

    try:
        run()
    finally:
        for number in _SIGNALS:  # all has been said; what is left is the end of the interpreter
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
