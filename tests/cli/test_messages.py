"""What commands print: each block of tests/data/messages.txt is a command, its exit code and its output, to the letter.

To add a command, or to change what one says, edit its line `$ ...` there and run
`WRITE_MESSAGES=1 python -m pytest tests/cli/test_messages.py`, which writes the rest. `{9*30}` is thirty nines.
Variables stand before a command, and `< FILE` behind it. JSON is one line, and the working folder is HERE.
"""

import codecs
import gzip
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import Outcome
from golden import Golden
from model_folders import sparse_plan
from plans_samples import full_plan, small_plan
from tiny_models import tiny_model

from sparsekv.plans.files import dump_plan, write_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the messages of a machine without a GPU")

MESSAGES = Golden(Path(__file__).parents[1] / "data" / "messages.txt")
SMALL, FULL = (dump_plan(plan) for plan in (small_plan(), full_plan()))
PROMPT = json.dumps({"prompt": "ab " * 300, "answer": "c d"})

# Files that commands meet, by their names in the working folder.
FILES = {
    "empty.yaml": "",
    "blank.txt": " \n\t",
    "picture": b"\x89PNG\0\0",
    "latin": b"abc\xff\xfe",
    "llama.json": '{"model_type": "llama"}',
    "list.json": "[]",
    "notes.txt": "# Plans\nThey look like this:\nkind: sparsekv.plan\n",
    "profile.json": '{"backend":"cpu","kind":"sparsekv.profile"}',
    "packed.profile": gzip.compress(b'{"backend":"cpu","kind":"sparsekv.profile"}'),
    "broken.profile": b"\x1f\x8b\x08cut",
    "mine.partial": "mine",
    "bert/config.json": '{"model_type": "bert"}',
    "full.yaml": FULL,
    "more.yaml": FULL.replace("keep: {fraction: 0.06}", "keep: {fraction: 0.07}"),
    "small.yaml": SMALL,
    "imported.yaml": dump_plan(small_plan(status="imported", decode=None)),
    "dense.yaml": dump_plan(small_plan(prefill=None, decode=None)),
    "an edited.yaml": SMALL.replace("tokens: 1024", "tokens: 2048"),
    "cut.yaml": SMALL[: len(SMALL) // 2],
    "newer.yaml": SMALL.replace("schema_version: 1", "schema_version: 2"),
    "comment.yaml": b"\xef\xbb\xbf# a comment\n\nkind: sparsekv.plan\nschema_version: 99\n",
    "one line.yaml": '{"status": "verified",\n "kind": "sparsekv.plan"}',
    "overlap.yaml": SMALL.replace("layer: 3,", "layer: 2,"),
    "huge.yaml": SMALL + "# " + "x" * (9 << 20),
    "bomb.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "object.yaml": "kind: !!python/object/apply:os.system [echo]\n",
    "control.yaml": "kind: \x1b[31mred\n",
    "surrogate.yaml": 'kind: "\\ud800"\n',
    "cut.jsonl": f"{PROMPT}\nnot json\n",
    "list.jsonl": f"{PROMPT}\n[1]\n",
    "number.jsonl": f'{PROMPT}\n{{"prompt": 3}}\n',
    "unasked.jsonl": f'{PROMPT}\n{{"answer": "x"}}\n',
    "label.jsonl": f'{PROMPT}\n{{"prompt": "x", "label": "y"}}\n',
    "surrogate.jsonl": f'{PROMPT}\n{{"prompt": "x \\ud800"}}\n',
    "unanswered.jsonl": f'{PROMPT}\n{{"prompt": "a"}}\n',
    "task.jsonl": f'{PROMPT}\n{{"prompt": "a", "answer": "b", "task": 3}}\n',
    "whole.jsonl": f'{PROMPT}\n{{"prompt": "a", "answer": {"1" * 5000}}}\n',
    "long.jsonl": f"{PROMPT}\n{json.dumps({'prompt': 'a ' * 2000, 'answer': 'b'})}\n",
    "answer.jsonl": f"{PROMPT}\n{json.dumps({'prompt': 'a', 'answer': 'b' * 100})}\n",
}


@pytest.fixture(scope="module")
def place(folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder: a model with its plan, one without, one without weights, plans, and files that are none."""
    place = tmp_path_factory.mktemp("messages")
    shutil.copytree(folder, place / "planned")
    shutil.copytree(model, place / "plain")
    shutil.copytree(model, place / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text("{}")
    shutil.copytree(model, place / "truncated")
    (place / "truncated" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    write_plan(sparse_plan(tiny_model(layers=4, context=2048)), place / "four.yaml")
    (place / "folder").mkdir()
    (place / "link.profile").symlink_to("profile.json")
    for name, data in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return place


def words(line: str) -> list[str]:
    line = re.sub(r"\{(.)\*(\d+)\}", lambda part: part[1] * int(part[2]), line)
    return [codecs.decode(word, "unicode_escape") if "\\" in word else word for word in shlex.split(line)]


@pytest.fixture
def said(
    sparsekv: Callable[..., Outcome], stdin: Callable[..., None], place: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Runs a command of the file in the working folder, and returns its block."""
    monkeypatch.chdir(place)

    def run(line: str) -> str:
        given = words(line)
        while re.match("[A-Z_]+=", given[0]):
            monkeypatch.setenv(*given.pop(0).split("=", 1))
        if "<" in given:
            stdin(Path(given.pop()).read_bytes())
            given.remove("<")
        done = sparsekv(*given)
        out = json.dumps(done.data) if done.out.startswith("{") else done.out
        parts = (f"exit {done.code}", *out.splitlines(), *done.err.splitlines())
        return "\n".join(part.rstrip() for part in parts).replace(str(place), "HERE").strip("\n")

    return run


@pytest.mark.parametrize("line", MESSAGES.blocks)
def test_a_command_says_what_it_said_and_writes_nothing(said: Callable[[str], str], place: Path, line: str) -> None:
    before = sorted(place.rglob("*"))
    block = said(line)
    assert "Traceback" not in block
    assert sorted(place.rglob("*")) == before
    MESSAGES.check(line, block)
