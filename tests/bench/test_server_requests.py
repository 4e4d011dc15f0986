"""Clients of a server: what they count, against a stand-in for the package `openai`."""

import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from sparsekv.bench import server_requests

ARGUMENTS = ["http://localhost/v1", "--seconds", "0.2", "--clients", "3", "--lengths", "256,512", "--samples", "4"]


class Server:
    """Answers every prompt with what `answers` gives for it; an exception is raised."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.completions = self.models = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def with_options(self, **_: object) -> Self:
        return self

    async def list(self) -> Any:
        return SimpleNamespace(data=[SimpleNamespace(id="served")])

    async def create(self, **asked: Any) -> AsyncIterator[Any]:
        assert asked["model"] == "served"
        assert asked["stream"]
        text = self.answers(tuple(asked["prompt"]))

        async def parts() -> AsyncIterator[Any]:
            for letter in text:
                yield SimpleNamespace(choices=[SimpleNamespace(text=letter)])

        return parts()


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any) -> dict[str, Any]:
    package = ModuleType("openai")
    package.AsyncOpenAI = lambda **_: Server(answers)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openai", package)
    monkeypatch.setattr(sys, "argv", ["server_requests", *ARGUMENTS])
    server_requests.main()
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], str]:
    """The answer to each prompt, which the run then uses."""
    samples = server_requests._samples(
        SimpleNamespace(model="tiny-retriever", seed=0, lengths=(256, 512), samples=4)  # type: ignore[arg-type]
    )
    monkeypatch.setattr(server_requests, "_samples", lambda _: samples)
    return {tuple(sample.prompt_ids.tolist()): sample.answer for sample in samples}


def test_right_answers_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: dict[tuple[int, ...], str]
) -> None:
    found = asked(monkeypatch, capsys, lambda prompt: right[prompt] + ".")
    assert found["finished"] > 0
    assert found["failed"] == {}
    assert found["right"] == f"{found['finished']} of {found['finished']}"


def test_wrong_answers_and_failures_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: dict[tuple[int, ...], str]
) -> None:
    wrong, broken, *_ = right

    def answer(prompt: tuple[int, ...]) -> str:
        if prompt == broken:
            raise ConnectionError("the server went away")
        return "nothing" if prompt == wrong else right[prompt]

    found = asked(monkeypatch, capsys, answer)
    assert set(found["failed"]) == {"ConnectionError: the server went away"}
    assert found["wrong"][0].startswith(f"{len(wrong)} tokens: expected")
