"""docs/agents.md: a server on a CPU and two turns, by the commands of the page. Needs curl."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
START = 240  # seconds, at most
REPORTED = 30  # seconds, at most, until counts are there


def shown(folder: Path, port: int, text: str) -> tuple[str, str]:
    """The commands that serve on a CPU, and those that ask, with a port, a folder and a prompt of a test."""
    _, serve, ask, *_ = re.findall(r"(?:^    .*\n)+", PAGE.read_text(), re.MULTILINE)
    here = {"/tmp/metrics": str(folder), "localhost:8000": f"localhost:{port}", "... a long text": text}
    for written, given in here.items():
        serve, ask = serve.replace(written, given), ask.replace(written, given)
    return f"{serve.rstrip()} --enforce-eager --port {port}", ask


@contextmanager
def served(commands: str, folder: Path, port: int, environment: Mapping[str, str]) -> Iterator[None]:
    server = subprocess.Popen(
        ["bash", "-c", commands.replace("python -m", "exec python -m")], cwd=folder, env=environment
    )
    try:
        end = time.monotonic() + START
        while time.monotonic() < end and server.poll() is None:
            try:
                with urlopen(f"http://localhost:{port}/health"):
                    break
            except URLError:
                time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_commands_of_the_page_serve_two_turns_of_which_the_second_finds_pages(
    reference: LoadedModel, plan: Plan, prompts: dict[int, list[int]], tmp_path: Path
) -> None:
    model, metrics = tmp_path / "my-model", tmp_path / "metrics"
    shutil.copytree(str(reference.model.name_or_path), model)
    write_plan(plan, model / PLAN_NAME)
    metrics.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    text = json.dumps(reference.tokenizer.decode(prompts[1500]))[1:-1].replace("'", r"'\''")
    serve, ask = shown(metrics, port, text)
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with served(serve, tmp_path, port, environment):
        end, out = time.monotonic() + REPORTED, ""
        while 'sparsekv_prompt_tokens_total{plan="sparse"}' not in out and time.monotonic() < end:
            out = subprocess.run(
                ["bash", "-ec", ask], capture_output=True, text=True, check=True, env=environment
            ).stdout
            time.sleep(1)
    counts = {name: float(count) for name, count in re.findall(r"^(\S+) ([\d.e+]+)$", out, re.MULTILINE)}
    starts = "vllm:prefix_cache_hits", 'sparsekv_prompt_tokens_total{plan="sparse"}', "sparsekv_prefill_tiles_total"
    assert [any(name.startswith(start) and counts[name] > 0 for name in counts) for start in starts] == [True] * 3, out
