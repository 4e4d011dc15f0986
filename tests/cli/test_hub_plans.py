"""Plans that travel with a model: sparsekv.yaml in a hub repository, from the hub and from the local cache of it."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from model_folders import save_model, sparse_plan
from plans_samples import small_plan
from tiny_models import tiny_model

from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import dump_plan, write_plan
from sparsekv.runtime import hub

COMMIT = "0123456789abcdef" * 2 + "01234567"
PROGRAM = """
import contextlib, io, json, sys
from sparsekv.cli.main import main
for call in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(call)
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
print(json.dumps("torch" in sys.modules))
"""


class _Hub(BaseHTTPRequestHandler):
    """example/planned has a plan, example/several two of other names, example/bare none, and nothing else is there."""

    plan = dump_plan(small_plan()).encode()
    several = ("a.sparsekv.yaml", "b.sparsekv.yaml", "values.yaml")

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        known = any(name in self.path for name in ("example/planned", "example/bare", "example/several"))
        files = [f"/example/several/resolve/{COMMIT}/{name}" for name in self.several]
        has_file = self.path in ("/example/planned/resolve/main/sparsekv.yaml", *files)
        asks = self.path.startswith("/api/models/") and known
        self.send_response(200 if has_file or asks else 404)
        listed = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.several]
        facts = {"id": "example/several", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.several]}
        told = listed if "/tree/" in self.path else facts if "/several/revision" in self.path else {}
        content = self.plan if has_file else json.dumps(told).encode()
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"a-plan"', "Content-Length": str(len(content))}
        if not (has_file or asks):
            headers["X-Error-Code"] = "EntryNotFound" if known else "RepoNotFound"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def calls(cache: Path, *commands: tuple[str, ...], **environment: str) -> list[tuple[int, str, str]]:
    """What each command ends with, in one process of its own: the hub client reads its settings as it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *outcomes, uses_torch = map(json.loads, done.stdout.splitlines())
    assert uses_torch is False
    return outcomes


def test_a_plan_comes_from_the_hub_and_then_from_the_cache_and_trouble_is_named(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1"}
    try:
        planned, bare, unknown = calls(
            tmp_path,
            ("validate", "example/planned"),
            ("run", "example/bare", "--prompt", "a"),
            ("show", "example/unknown"),
            HF_HUB_OFFLINE="0",
            **where,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert (planned[0], planned[2]) == (0, "")
    assert planned[1].startswith("example/planned: valid")
    assert bare[0] == 2
    assert "sparsekv plan example/bare" in bare[2]
    assert unknown[0] == 2
    assert "no such" in unknown[2]

    again, other = calls(
        tmp_path, ("validate", "example/planned"), ("show", "example/other"), HF_HUB_OFFLINE="0", **where
    )
    assert again == planned  # the hub is gone, the cache is not
    assert other[0] == 2
    assert "ConnectError" in other[2]


def test_several_plans_of_a_repository_come_from_the_hub_and_then_from_the_cache(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = "from sparsekv.cli.arguments import plans_place as at; from pathlib import Path; "
    program += "print(*(at(Path(name)) for name in ('example/several', 'example/planned', 'example/unknown')))"
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    own = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": "1", **where}

    def places() -> list[str]:
        done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    try:
        several, planned, unknown = places()
    finally:
        server.shutdown()
        server.server_close()
    assert (planned, unknown) == ("example/planned", "example/unknown")
    assert sorted(path.name for path in Path(several).iterdir()) == ["a.sparsekv.yaml", "b.sparsekv.yaml"]
    assert places() == [several, "example/planned", "example/unknown"]  # the hub is gone, the cache is not


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The local cache of the hub, with example/tiny and its plan, and example/bare without one."""
    cache, model = tmp_path_factory.mktemp("hub"), tiny_model(context=2048)
    for name in ("tiny", "bare", "several"):
        repository = cache / f"models--example--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        save_model(model, repository / "snapshots" / COMMIT)
    several = cache / "models--example--several" / "snapshots" / COMMIT
    write_plan(small_plan(), several / "other.sparsekv.yaml")
    plan, edited = sparse_plan(model), several / "edited.sparsekv.yaml"
    write_plan(plan, several / "mine.sparsekv.yaml")
    write_plan(plan, edited)
    edited.write_text(edited.read_text().replace("tokens: 64", "tokens: 128", 1))
    write_plan(sparse_plan(model), cache / "models--example--tiny" / "snapshots" / COMMIT / "sparsekv.yaml")
    return cache


@pytest.fixture(autouse=True)
def offline(cache, monkeypatch):
    """The process runs offline, see the top conftest; the cache is what HF_HUB_CACHE had set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def test_a_cached_model_whose_plan_is_not_at_hand_is_still_measured_dense(sparsekv, monkeypatch):
    ran = []
    monkeypatch.setattr("sparsekv.bench.suite.run_suite", lambda loaded, modes, *_, **__: ran.append(modes))
    done = sparsekv("run", "example/bare", "--prompt", "a")
    assert done.code == 2
    assert "HF_HUB_OFFLINE" in done.err
    assert "--plan FILE" in done.err
    assert "dense is measured alone" in sparsekv("eval", "example/bare", "--length", "1k", "--samples", 1).err
    assert ran == [{}]


@pytest.mark.parametrize("command", ["show", "validate"])
def test_a_folder_or_a_repository_stands_for_its_plan(sparsekv, tmp_path, cache, command):
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    assert sparsekv(command, tmp_path).code == 0
    assert sparsekv(command, "example/tiny").code == 0
    done = sparsekv(command, "example/bare")
    assert done.code == 2
    assert "sparsekv plan example/bare" in done.err
    assert sparsekv("diff", "example/tiny", cache / "models--example--tiny" / "snapshots" / COMMIT).code == 0


def test_of_several_plans_in_a_repository_the_one_that_fits_is_taken_and_a_changed_one_is_not(sparsekv):
    call = ("example/tiny", "--plan", "example/several", "--device", "cpu")
    done = sparsekv("run", *call, "--prompt", "What is it? " * 60, "--max-new-tokens", 1, "--json")
    assert done.code == 0, done.err
    assert "mine.sparsekv.yaml (unverified, " in done.err
    assert "left out: " in done.err
    assert done.data["prefill_density"] < 1
    done = sparsekv("verify", *call, "--write")
    assert (done.code, "repository" in done.err) == (2, True)


def test_publish_to_a_hub_model_uploads_the_file_as_it_is(sparsekv, tmp_path, monkeypatch):
    plan, sent = tmp_path / "plan.yaml", []
    write_plan(sparse_plan(tiny_model(context=2048)), plan)
    monkeypatch.setattr("sparsekv.runtime.hub.upload_plan", lambda *found: sent.append(found) or "https://hub/commit/1")
    assert sparsekv("publish", plan, "example/tiny", "--dry-run", "--json").data["to"] == "example/tiny"
    assert sent == []
    done = sparsekv("publish", plan, "example/tiny", "--create-pr", "--json")
    assert done.code == 0, done.err
    assert (done.data["to"], done.data["written"]) == ("https://hub/commit/1", True)
    ((source, data, create_pr),) = sent
    assert (source.path_or_id, data, create_pr) == ("example/tiny", plan.read_bytes(), True)


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
