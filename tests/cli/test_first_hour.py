"""What a new user types wrongly, and what is said before anything is loaded."""

import threading
from pathlib import Path

import pytest

from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.errors import UsageError
from sparsekv.runtime import hub


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--set", "tasks=niah_singel"), "did you mean niah_single"),
        (("--preset", "minferenc"), "did you mean minference"),
        (("--set", "backend=trito"), "did you mean triton"),
        (("--set", "backend=flash", "--device", "cpu"), "cannot run on cpu"),
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
    assert "cannot be written" in done.err


@pytest.mark.parametrize("answers", [True, False])
def test_a_slow_hub_is_waited_for_and_one_that_does_not_answer_is_not(monkeypatch, answers):
    answered, seconds = threading.Event(), 60.0 if answers else 0.01
    monkeypatch.setattr(hub, "_SECONDS", seconds)
    monkeypatch.setattr(hub, "_refusal", lambda _: "" if answered.wait(60) else "late")
    if answers:
        threading.Timer(0.1, answered.set).start()
        assert not hub.needs_cache(hub.asked(ModelSource("nobody/nothing")))
        return
    with pytest.raises(UsageError, match="offline: the hub did not answer") as refused:
        hub.needs_cache(ModelSource("nobody/nothing"))
    answered.set()
    assert "login" not in str(refused.value)
