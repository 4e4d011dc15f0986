"""MODEL, as every command takes it: what is not there is said in one message, with what to do."""

import json

import pytest
from plans_samples import small_plan

from sparsekv.cli.arguments import Subject
from sparsekv.plans.files import write_plan


@pytest.fixture(params=["plan", "run", "eval"])
def call(request, sparsekv, tmp_path):
    """A command that takes a model, called on one."""
    arguments = {"plan": ("-o", tmp_path / "plan.yaml"), "run": ("--dense", "--prompt", "a"), "eval": ()}

    def named(model: object):
        done = sparsekv(request.param, model, *arguments[request.param])
        assert (done.code, done.out) == (2, ""), done.err
        assert "Traceback" not in done.err
        assert not (tmp_path / "plan.yaml").exists()
        return done.err

    return named


def test_an_unknown_alias_gets_suggestions(call):
    assert "llama3-8b" in call("lama3-8b")


def test_a_hub_model_without_network_gets_the_commands_that_solve_it(call):
    message = call("example/no-such-model")
    assert "hf download example/no-such-model" in message
    assert "offline" in message
    assert "hf auth login" not in message


def test_an_unsupported_architecture_is_told_which_ones_are(call, tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    message = call(tmp_path / "bert")
    assert "bert" in message
    assert "llama" in message


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("run",), "--plan"),
        (("eval",), "--plan"),
        (("verify",), "--plan"),
        (("run", "{tmp}/plan.yaml"), "--plan {tmp}/plan.yaml"),
        (("verify", "{tmp}/plan.yaml"), "--plan {tmp}/plan.yaml"),
        (("eval", "{tmp}/plan.yaml"), "--plan {tmp}/plan.yaml"),
        (("run", "--plan", "{tmp}/plan.yaml", "--prompt", "a"), "MODEL --plan FILE"),
        (("run", "--dense", "--prompt", "a"), "a MODEL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_model_or_a_plan_that_is_missing_is_asked_for(sparsekv, tmp_path, arguments, asked):
    write_plan(small_plan(), tmp_path / "plan.yaml")
    done = sparsekv(*(part.format(tmp=tmp_path) for part in arguments))
    assert (done.code, done.out) == (2, "")
    assert asked.format(tmp=tmp_path) in done.err


@pytest.mark.parametrize("name", ["", "model.gguf"])
def test_the_plan_beside_a_gguf_file_is_its_plan(tmp_path, name):
    (tmp_path / "model.gguf").touch()
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    assert Subject.named(str(tmp_path / name)).path == tmp_path / "sparsekv.yaml"


@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_plan_inside_a_models_folder_is_run_on_that_model(tmp_path, name):
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    alone = Subject.named(None, tmp_path / "sparsekv.yaml")
    assert alone.model == small_plan().model.id
    (tmp_path / name).write_text("{}")
    for place in (tmp_path, tmp_path / "sparsekv.yaml"):
        beside = Subject.named(None, place)
        assert (beside.model, beside.from_plan) == (str(tmp_path), True)
    assert Subject.named("other", tmp_path).model == "other"


@pytest.mark.parametrize("by", ["flag", "variable"])
@pytest.mark.parametrize("device", ["cuda:77", "quantum"])
def test_a_device_that_is_not_there_is_no_reason_to_ask_for_the_model(sparsekv, tmp_path, monkeypatch, by, device):
    write_plan(small_plan(), tmp_path / "plan.yaml")
    if by == "variable":
        monkeypatch.setenv("SPARSEKV_DEVICE", device)
    flags = ("--device", device) if by == "flag" else ()
    done = sparsekv("run", "--plan", tmp_path / "plan.yaml", "--prompt", "a", *flags)
    assert done.code == 2
    assert device in done.err
    assert "MODEL --plan" not in done.err


def test_a_truncated_checkpoint_is_named(sparsekv, tmp_path):
    from model_folders import save_model
    from tiny_models import tiny_model

    save_model(tiny_model(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = sparsekv("run", tmp_path, "--dense", "--prompt", "a")
    assert done.code == 2
    assert "weights" in done.err
