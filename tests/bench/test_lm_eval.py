"""The model that lm-evaluation-harness runs: the package itself where it is installed, else the classes it gives."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from task_tokenizers import REFERENCE_MODEL
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.load import load_model

TEXT = "The special number for amber-falcon is 4821375.\n"
ASKED = TEXT + "What is the special number for amber-falcon in the text above? The special number for amber-falcon is"


@pytest.fixture(scope="module")
def harness():
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("lm_eval") is None:
            parts = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api.model", "lm_eval.api.registry")}
            parts["lm_eval.api.model"].TemplateLM = object
            parts["lm_eval.api.registry"].register_model = lambda name: lambda found: found
            for name, module in parts.items():
                patch.setitem(sys.modules, name, module)
        yield importlib.import_module("sparsekv.bench.lm_eval")
        sys.modules.pop("sparsekv.bench.lm_eval")


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory) -> str:
    model = load_model(REFERENCE_MODEL, device="cpu").model
    layers = tuple(range(model.config.num_hidden_layers))
    local = every_head(model, AShape(sink=tokens(4), window=tokens(16)))
    path = tmp_path_factory.mktemp("harness") / "plan.yaml"
    write_plan(plan_for(model, local, decode_plan(segment(0, layers, 16))), path)
    return str(path)


def request(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_without_the_package_the_error_says_how_it_is_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "sparsekv.bench.lm_eval", raising=False)
    with pytest.raises(UsageError, match=r"lm-evaluation-harness.*pip install"):
        importlib.import_module("sparsekv.bench.lm_eval")


def test_dense_answers_and_stops_where_the_task_says(harness) -> None:
    lm = harness.PlannedLM(str(REFERENCE_MODEL), device="cpu")
    options = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0, "until": []}
    (whole,) = lm.generate_until([request(ASKED, options)])
    assert whole.startswith(" 4821375")
    (cut,) = lm.generate_until([request(ASKED, options | {"until": ["13"]})])
    assert cut == " 482"


def test_the_right_answer_is_likelier_than_a_wrong_one_and_greedy(harness) -> None:
    lm = harness.PlannedLM(str(REFERENCE_MODEL), device="cpu")
    prompt = lm.tok_encode(ASKED)
    right, wrong = (lm.tok_encode(text, add_special_tokens=False) for text in (" 4821375", " 1111111"))
    found = lm._loglikelihood_tokens([(("", ""), prompt, right), (("", ""), prompt, wrong)])
    assert found[0][1]
    assert not found[1][1]
    assert -1 < found[0][0] < 0
    assert found[1][0] < found[0][0] - 5


def test_a_plan_is_what_answers(harness, plan_path: str) -> None:
    """One of narrow windows loses a number that stands far up."""
    far = TEXT + "x = 1\n" * 200 + ASKED.removeprefix(TEXT)
    options = {"max_gen_toks": 9}
    dense, sparse = (harness.PlannedLM(str(REFERENCE_MODEL), plan=plan, device="cpu") for plan in ("none", plan_path))
    assert dense.generate_until([request(far, options)])[0].startswith(" 4821375")
    assert not sparse.generate_until([request(far, options)])[0].startswith(" 4821375")
    pair = [(("", ""), dense.tok_encode(far), dense.tok_encode(" 4821375", add_special_tokens=False))]
    assert sparse._loglikelihood_tokens(pair)[0][0] < dense._loglikelihood_tokens(pair)[0][0] - 1


def test_what_it_does_not_do_is_refused(harness) -> None:
    with pytest.raises(UsageError, match="batch_size 1"):
        harness.PlannedLM(str(REFERENCE_MODEL), device="cpu", batch_size=4)
    lm = harness.PlannedLM(str(REFERENCE_MODEL), device="cpu")
    with pytest.raises(UnsupportedError, match="greedy"):
        lm.generate_until([request(ASKED, {"do_sample": True, "temperature": 0.7})])
    context = lm.loaded.info.context_length
    with pytest.raises(UsageError, match=f"the context of {context}, found {context}"):
        lm.generate_until([request(ASKED, {"max_gen_toks": context})])
    with pytest.raises(UnsupportedError, match="rolling"):
        lm.loglikelihood_rolling([request(ASKED)])
