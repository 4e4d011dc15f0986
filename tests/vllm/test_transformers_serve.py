"""`transformers serve` by a plan beside the model, asked by the `openai` client; vLLM brings what both need."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import torch
from model_folders import save_model
from tiny_models import tiny_model
from tiny_plans import decode_plan, drops, plan_for, segment
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.serving import planned

TEXT = "where tokens are chosen, most of a long text is not read: " * 3
SETTINGS = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model()
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), folder / "sparsekv.yaml")
    return folder


@pytest.fixture(autouse=True)
def without_device_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads models without accelerate, which the server asks to place them."""

    def load(manager: ModelManager, name: str, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(name.partition("@")[0], dtype="float32")

    monkeypatch.setattr(ModelManager, "_load_model", load)


@pytest.fixture
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with planned():
        server = Serve(str(folder), continuous_batching=True, cb_num_blocks=16, port=port, non_blocking=True)
    try:
        until = time.monotonic() + 60
        while not _answers(port):
            assert time.monotonic() < until
            time.sleep(0.05)
        with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.kill_server()


def _answers(port: int) -> bool:
    try:
        return bool(urlopen(f"http://localhost:{port}/health").status == 200)
    except OSError:
        return False


def test_an_answer_is_that_of_the_plan(folder: Path, client: openai.OpenAI) -> None:
    given = client.completions.create(model=str(folder), prompt=TEXT, **SETTINGS).choices[0].text
    parts = client.completions.create(model=str(folder), prompt=TEXT, stream=True, **SETTINGS)
    assert "".join(part.choices[0].text for part in parts if part.choices) == given
    model, tokenizer = tiny_model(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    dense = tokenizer.decode(model.generate(ids, **how)[0, ids.shape[1] :])
    with torch.no_grad(), apply(model, folder / "sparsekv.yaml", sparse="always"):
        sparse = tokenizer.decode(model.generate(ids, **how)[0, ids.shape[1] :])
    assert given == sparse != dense


def test_a_plan_that_batches_cannot_follow_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    model = tiny_model()
    folder = save_model(model, tmp_path / "tiny")
    write_plan(plan_for(model, None, None, drops((1,), 8)), folder / "sparsekv.yaml")
    with planned(), pytest.raises(UnsupportedError, match="evict"):
        Serve(str(folder), continuous_batching=True, non_blocking=True)


def test_a_model_without_a_plan_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    with planned(), pytest.raises(UsageError, match="beside"):
        Serve(str(save_model(tiny_model(), tmp_path / "bare")), non_blocking=True)
