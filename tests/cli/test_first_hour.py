"""What a new user types wrongly, and what is said before anything is loaded."""

import socket
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


@pytest.fixture
def slow_hub(monkeypatch):
    """A hub that answers only once the event is set."""
    answers = threading.Event()
    for name in ("_SECONDS", "_CONNECT_SECONDS", "_AT_ONCE"):
        monkeypatch.setattr(hub, name, 0.01)
    monkeypatch.setattr(hub, "_refusal", lambda _: "" if answers.wait(60) else "late")
    yield answers
    answers.set()


@pytest.mark.parametrize(("connects", "said"), [(True, "did not answer"), (False, "took no connection")])
def test_a_hub_that_does_not_answer_is_not_waited_for_and_login_is_not_advised(slow_hub, monkeypatch, connects, said):
    monkeypatch.setattr(hub, "_connects", lambda: connects)
    with pytest.raises(UsageError) as refused:
        hub.needs_cache(ModelSource("nobody/nothing"))
    assert said in str(refused.value)
    assert "offline" in str(refused.value)
    assert "login" not in str(refused.value)


def test_a_slow_hub_that_takes_connections_is_waited_for(slow_hub, monkeypatch):
    monkeypatch.setattr(hub, "_SECONDS", 60.0)
    monkeypatch.setattr(hub, "_connects", lambda: threading.Timer(0.1, slow_hub.set).start() or True)
    source = hub.asked(ModelSource("nobody/nothing"))
    assert not hub.needs_cache(source)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("way", ["proxy", "direct"])
def test_whether_the_hub_can_be_reached_is_asked_of_the_proxy_where_there_is_one(monkeypatch, way, listens):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        if way == "proxy":
            monkeypatch.setenv("http_proxy", address)
        monkeypatch.setattr(hub.constants, "ENDPOINT", "http://hub.invalid" if way == "proxy" else address)
        assert hub._connects() is listens
