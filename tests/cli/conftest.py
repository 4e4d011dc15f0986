"""The command line, called in this process."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sparsekv.cli.main import main


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


@pytest.fixture(autouse=True, scope="session")
def _short_filler() -> Iterator[None]:
    """A tenth of the filler text: encoding it by single characters takes seconds."""
    from sparsekv.planner.tasks import samples

    whole = samples.load_filler_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "load_filler_text", lambda split: whole(split)[:100_000])
        yield


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input, which is no terminal."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put
