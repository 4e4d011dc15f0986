"""The command line, called in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import typer

from sparsekv.cli.main import main
from sparsekv.cli.output import report
from sparsekv.planner.flags import Options


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def sparsekv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `sparsekv ARGUMENTS` and returns its exit code, standard output and standard error."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Calls a command with options that only programs give: `asked(run, Model, name=value)`."""

    def call(run: Callable[[Any], None], model: type[Options], /, **options: Any) -> Outcome:
        capsys.readouterr()
        code = 0
        try:
            run(model(**options))
        except typer.Exit as left:
            code = left.exit_code
        except BaseException as error:
            code = report(error, "bench", options.get("as_json", False))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
