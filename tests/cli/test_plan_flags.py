"""plan: options and files that cannot work together, or at all, are refused before any work."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from sparsekv.cli.plan_files import default_plan


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "plan.yaml"


@pytest.fixture
def refused(sparsekv, model, out):
    """Calls `plan` with options that are wrong, and returns the message."""

    def call(*arguments: object, out: Path | str = out, model: Path = model) -> str:
        name, out = out, Path(out)
        before = sorted(out.parent.rglob("*")) if out.parent.is_dir() else []
        done = sparsekv("plan", model, "-o", name, *arguments)
        assert (done.code, done.out) == (2, ""), done.err
        assert "Traceback" not in done.err
        assert "profile (1 of" not in done.err
        assert (sorted(out.parent.rglob("*")) if out.parent.is_dir() else []) == before
        return done.err

    return call


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--lengths", "1k,x"), "--lengths"),
        (("--device", "cpu", "--set", "device_map=auto"), "device map"),
        (("--set", "device_map=everywhere"), "--set device_map"),
        (("--set", "density=0.3"), "did you mean target_density"),
        (("--set", "lengths=4k"), "the flag --lengths"),
        (("--set", "seed=1", "--set", "seed=2"), "once"),
        (("--set", "seed"), "seed=N"),
        (("--lengths", ""), "--lengths"),
        (("--lengths", "1"), "leave the"),
        (("--set", "target_density="), "--set target_density"),
        (("--lengths", "1k,2k", "--set", "target_density=0.1,0.2,0.3"), "the 2"),
        (("--set", "calibration_samples=" + "9" * 30), "calibration_samples"),
        (("--verify", "large"), "--verify"),
        (("--set", "decode_budget=" + "9" * 5000), "--set decode_budget"),
        (("--set", "decode_budget=-3"), "--set decode_budget"),
        (("--set", "decode_budget=200%"), "up to 100%"),
        (("--set", "filter_layers=2-1"), "--set filter_layers"),
        (("--set", "filter_layers="), "--set filter_layers"),
        (("--set", "tasks="), "--set tasks"),
        (("--prompts", "/nowhere/prompts.jsonl"), "found none"),
        (("--profile", "/nowhere/a.profile"), "profile"),
        (("--profile-out", "/nowhere/a.profile"), "/nowhere"),
        (("--set", "tasks=niah_singel"), "did you mean niah_single"),
        (("--preset", "minferenc"), "did you mean minference"),
        (("--set", "backend=trito"), "did you mean triton"),
        (("--set", "backend=flash", "--device", "cpu"), "cannot run on cpu"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_any_work(refused, arguments, word):
    assert word in refused(*arguments)


@pytest.mark.parametrize("arguments", [("--lengths", "64k"), ("--set", "filter_layers=99")], ids=" ".join)
def test_what_the_description_of_a_model_rules_out_needs_no_weights(refused, model, tmp_path_factory, arguments):
    bare = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "weights" not in refused(*arguments, model=bare)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-verify", "--set", "require_verified=true"),
        ("--no-verify", "--verify", "full"),
    ],
    ids=" ".join,
)
def test_options_of_which_one_would_be_dropped_are_refused_by_name(refused, tmp_path_factory, arguments):
    unloadable = tmp_path_factory.mktemp("model")
    (unloadable / "config.json").write_text("{}")
    message = refused(*arguments, model=unloadable)
    assert [flag for flag in arguments if flag.startswith("--") and flag not in message] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--profile-out", "plan.yaml"),
        ("--profile", "plan.yaml"),
        ("--prompts", "plan.yaml"),
        ("--profile", "kept", "--profile-out", "kept"),
    ],
    ids=" ".join,
)
def test_two_files_at_one_place_are_refused(refused, out, monkeypatch, arguments):
    monkeypatch.chdir(out.parent)
    for name in ("plan.yaml", "kept"):
        Path(name).write_text("older")
    Path("link").symlink_to("kept")
    Path("nothing").mkdir()
    assert "of its own" in refused(*arguments)
    assert Path("plan.yaml").read_text() == Path("kept").read_text() == "older"


@pytest.fixture
def target(tmp_path):
    """A file that is in the way of an output, and what it holds."""

    def put(data: bytes) -> Path:
        path = tmp_path / "target"
        path.write_bytes(data)
        return path

    return put


NO_PLAN = {
    "a model's config.json": b'{"model_type": "llama"}',
    "a profile": b'{"backend":"cpu","kind":"sparsekv.profile"}',
    "a text that shows a plan": b"# Plans\nThey look like this:\nkind: sparsekv.plan\n",
    "weights": b"\x88\0\0\0" * 100,
}


@pytest.mark.parametrize("held", NO_PLAN)
def test_a_file_that_is_no_plan_is_never_overwritten_by_one(refused, target, held):
    path = target(NO_PLAN[held])
    message = refused("--lengths", "64k", out=path)  # before anything else is looked at
    assert "expected a plan" in message
    assert str(path) in message
    assert path.read_bytes() == NO_PLAN[held]


def test_a_file_that_is_no_profile_is_never_overwritten_by_one(refused, target):
    path = target(b'{"kind": "sparsekv.plan"}')
    assert "--profile-out" in refused("--profile-out", path)
    assert path.read_bytes() == b'{"kind": "sparsekv.plan"}'


def test_a_file_that_is_no_part_of_a_profile_is_never_overwritten_by_one(refused, out):
    path = out.with_name("a.partial")
    path.write_text("mine")
    assert str(path) in refused("--profile-out", out.with_name("a"))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xef\xbb\xbf# a comment\n\nkind: sparsekv.plan\nschema_version: 99\n",
        b"schema_version: 1\nkind: 'sparsekv.plan'\nmodel: {",  # cut short
        b'{"status": "verified",\n "kind": "sparsekv.plan"}',
    ],
    ids=["empty", "of another schema", "cut short", "JSON"],
)
def test_any_plan_and_an_empty_file_may_be_overwritten(refused, target, data):
    path = target(data)
    assert "64k" in refused("--lengths", "64k", "--force", out=path)
    assert ("--force" in refused("--lengths", "64k", out=path)) == bool(data)


@pytest.mark.parametrize("packed", [False, True])
def test_a_profile_may_be_overwritten_by_another_one(refused, target, packed):
    data = b'{"backend":"cpu","kind":"sparsekv.profile"}'
    assert "64k" in refused("--lengths", "64k", "--profile-out", target(gzip.compress(data) if packed else data))


def test_a_plan_goes_beside_a_model_that_lies_here_and_else_where_the_command_runs(model):
    assert default_plan(str(model)) == model / "sparsekv.yaml"
    assert default_plan("tiny-retriever") == Path("tiny-retriever.sparsekv.yaml")
    assert default_plan("Qwen/Qwen2.5-0.5B") == Path("Qwen2.5-0.5B.sparsekv.yaml")
    assert default_plan("files/small.gguf") == Path("files/sparsekv.yaml")


def test_out_must_be_a_file_in_a_folder(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what others write into the folder of the project is not asked for
    assert "folder" in refused(out=tmp_path)
    assert "folder" in refused(out="")
    assert "folder" in refused("--profile-out", "")
    assert "make it first" in refused(out=tmp_path / "none" / "plan.yaml")
    assert "too long" in refused(out=tmp_path / ("a" * 300))
    (tmp_path / "device").symlink_to("/dev/null")
    assert "regular" in refused(out=tmp_path / "device")
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in refused(out=tmp_path / "file" / "plan.yaml")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder where even root can make no file")
def test_a_plan_that_cannot_be_written_is_refused_at_once(sparsekv):
    done = sparsekv("plan", "tiny-retriever", "-o", "/proc/x.yaml")
    assert (done.code, "cannot be written" in done.err) == (2, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    assert "cannot be written" in refused(out=folder / "plan.yaml")


@pytest.mark.parametrize("data", [b"", b" \n", b"\x89PNG\0\0", b"abc\xff\xfe"], ids=repr)
def test_calibration_prompts_that_are_no_text_are_refused(refused, tmp_path_factory, data):
    for name in ("prompts.jsonl", "prompt.txt"):
        file = tmp_path_factory.mktemp("prompts") / name
        file.write_bytes(data)
        assert str(file) in refused("--prompts", file)


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\x1f\x8b\x08cut", b"[" * 100_000, b"\xff\xfe"], ids=repr)
def test_a_file_that_is_no_profile_is_named(refused, tmp_path_factory, data):
    file = tmp_path_factory.mktemp("measured") / "a"
    file.write_bytes(data)
    assert str(file) in refused("--profile", file)
