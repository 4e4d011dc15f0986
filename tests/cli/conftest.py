"""The command line, called in this process."""

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from command_line import asked as asked
from command_line import sparsekv as sparsekv
from model_folders import save_model, sparse_plan
from planner_models import QUICK
from progress import CtrlC, During
from short_filler import short_filler as short_filler
from tiny_models import tiny_model

from sparsekv.planner.fixed_test import SIZES
from sparsekv.plans.files import write_plan


@pytest.fixture(scope="session", autouse=True)
def quick_tests() -> Iterator[None]:
    """A verification has two prompts a cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "small", QUICK)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without a plan, which no test writes to."""
    return save_model(tiny_model(context=2048), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same model with a plan beside it, which no test writes to."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("planned") / "tiny")
    write_plan(sparse_plan(tiny_model(context=2048)), folder / "sparsekv.yaml")
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """That folder, to be changed."""
    return shutil.copytree(folder, tmp_path / "tiny")


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts bytes on standard input, which is no terminal unless that is said."""

    def put(data: bytes, terminal: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", stream)

    return put


class _Stdout:
    """Standard output on which something happens as the command first writes to it."""

    def __init__(self, stream: TextIO, happens: Callable[[], object]) -> None:
        self._stream, self._happens = stream, [happens]

    def write(self, text: str) -> int:
        while self._happens:
            self._happens.pop()()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture
def on_output(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """What is to happen when a command first writes to standard output."""
    return lambda happens: monkeypatch.setattr(sys, "stdout", _Stdout(sys.stdout, happens))


@pytest.fixture
def ctrl_c_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """Ctrl-C after the first step of a stage, or after so many, while the context lasts."""

    @contextmanager
    def pressed(stage: str, steps: int = 1) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("sparsekv.planner.progress.BarProgress", lambda: CtrlC(stage, steps))
            yield

    return pressed


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """What is to happen, once, after the first step of a stage."""

    def set_up(stage: str, happens: Callable[[], object]) -> None:
        monkeypatch.setattr("sparsekv.planner.progress.BarProgress", lambda: During(stage, happens))

    return set_up
