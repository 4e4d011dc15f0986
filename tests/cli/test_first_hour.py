"""What a new user types wrongly, and what is said before anything is loaded."""

import threading
from pathlib import Path

import pytest

from sparsekv.cli.prompts import given_prompt
from sparsekv.plans.errors import UsageError
from sparsekv.runtime import hub


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tasks", "niah_singel"), "did you mean niah_single"),
        (("--preset", "minferenc"), "did you mean minference"),
        (("--backend", "trito"), "did you mean triton"),
        (("--backend", "flash", "--device", "cpu"), "cannot run on cpu"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_weights_are_read(sparsekv, tmp_path, monkeypatch, flags, said):
    monkeypatch.setattr("sparsekv.runtime.hf.load.load_model", lambda *_, **__: pytest.fail("the weights were read"))
    done = sparsekv("plan", "tiny-retriever", "-o", tmp_path / "plan.yaml", *flags)
    assert done.code == 2
    assert said in done.err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder where even root can make no file")
def test_a_plan_that_cannot_be_written_is_refused_at_once(sparsekv):
    done = sparsekv("plan", "tiny-retriever", "-o", "/proc/x.yaml")
    assert done.code == 2
    assert "can be written" in done.err


@pytest.mark.parametrize(
    ("data", "prompt"), [("a b\n", "a b"), ("a b\r\n", "a b"), ("a b\n\n", "a b\n"), ("a b", "a b")]
)
def test_the_last_newline_of_a_file_is_no_part_of_the_prompt(tmp_path, data, prompt):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data.encode())
    assert given_prompt(None, path) == prompt


def test_a_hub_that_does_not_answer_is_not_waited_for_and_login_is_not_advised(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(hub, "_SECONDS", 0.01)
    monkeypatch.setattr(hub, "_refusal", lambda _: answers.wait(60))
    try:
        with pytest.raises(UsageError) as refused:
            hub.needs_cache("nobody/nothing", None, False)
    finally:
        answers.set()
    assert "offline" in str(refused.value)
    assert "login" not in str(refused.value)
