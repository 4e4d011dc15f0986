"""Rules on disk: measured once a place, and again where the file is none of ours."""

import json
import multiprocessing
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plans_samples import counts

from sparsekv.runtime.core import timed_layers
from sparsekv.runtime.core.pays import ALWAYS, Pays, Thresholds
from sparsekv.runtime.core.timed_layers import Place, RuleFile, rule_key

KEY = {"plan": "sha256:1", "device": "NVIDIA H200", "ranks": 1}
RULE = Pays(Thresholds((512, 4096), (16384, 8192)), Thresholds())


def test_the_second_start_reads_what_the_first_measured(tmp_path):
    assert RuleFile(KEY, tmp_path).read_or(lambda: (RULE, True)) == (RULE, True)
    assert RuleFile(KEY, tmp_path).read_or(lambda: (ALWAYS, True)) == (RULE, False)
    assert RuleFile(KEY | {"ranks": 2}, tmp_path).read_or(lambda: (ALWAYS, True)) == (ALWAYS, True)


@pytest.mark.parametrize(
    "other",
    [{"plan": "sha256:2"}, {"longest": 4096}, {"step": 256}, {"rows": 4}, {"computed": {1024: counts(4, 0.5)}}],
    ids=str,
)  # fmt: skip
def test_what_a_rule_depends_on_of_a_plan_and_its_sizes_is_part_of_its_place(tmp_path, other):
    place, device = Place("sha256:1", 2048, 512, 16, {1024: counts(4, 0.4)}), torch.device("cpu")
    places = place, replace(place, **other)
    keys = [rule_key(device, "cpu", torch.float32, "cpu", False, "model", **one.key) for one in places]
    assert RuleFile(keys[0], tmp_path).read_or(lambda: (RULE, True)) == (RULE, True)
    assert RuleFile(keys[1], tmp_path).read_or(lambda: (ALWAYS, True)) == (ALWAYS, True)


@pytest.mark.parametrize("part", ["model", "driver", "triton", "flash-attn-4"])
def test_the_model_the_driver_and_packages_of_kernels_are_part_of_the_key(monkeypatch, part):
    def key(model="sha256:1"):
        return rule_key(torch.device("cuda"), "H200", torch.bfloat16, "flash", False, model)

    def library(release):
        def write(buffer, size):
            buffer.value = release

        return SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlSystemGetDriverVersion=write)

    monkeypatch.setattr(timed_layers, "CDLL", lambda _: library(b"570.86"))
    monkeypatch.setattr(timed_layers, "installed_version", {"triton": "3.6.0"}.get)
    before = key()
    assert (before["driver"], before["triton"], before["flash-attn-4"]) == ("570.86", "3.6.0", "none")
    monkeypatch.setattr(timed_layers, "CDLL", lambda _: library(b"580.159" if part == "driver" else b"570.86"))
    monkeypatch.setattr(timed_layers, "installed_version", ({"triton": "3.6.0"} | {part: "4"}).get)
    after = key("sha256:2" if part == "model" else "sha256:1")
    assert {name for name in before if before[name] != after[name]} == {part}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"{}" + b" " * (1 << 17), b'{"key": 3, "rule": "always"}',
                json.dumps({"key": KEY, "rule": "sometimes"}).encode(),
                json.dumps({"key": KEY | {"device": "H100"}, "rule": "always"}).encode(),
                json.dumps({"key": KEY, "rule": 7}).encode()],
)  # fmt: skip
def test_a_file_that_is_no_rule_of_the_place_is_measured_anew(tmp_path, content):
    RuleFile(KEY, tmp_path).read_or(lambda: (RULE, True))
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    assert RuleFile(KEY, tmp_path).read_or(lambda: (RULE, True)) == (RULE, True)
    assert RuleFile(KEY, tmp_path).read_or(lambda: (ALWAYS, True)) == (RULE, False)


def test_without_a_folder_to_write_to_every_start_measures(tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert RuleFile(KEY, tmp_path / "file" / "folder").read_or(lambda: (RULE, True)) == (RULE, True)


def test_a_rule_for_which_time_did_not_suffice_is_measured_again(tmp_path):
    assert RuleFile(KEY, tmp_path).read_or(lambda: (RULE, False)) == (RULE, True)
    assert RuleFile(KEY, tmp_path).read_or(lambda: (ALWAYS, True)) == (ALWAYS, True)
    assert RuleFile(KEY, tmp_path).read_or(lambda: (RULE, True)) == (ALWAYS, False)


def _start(folder, counts):
    def measure():
        time.sleep(0.2)
        counts.put(1)
        return RULE, True

    RuleFile(KEY, folder).read_or(measure)


def test_engines_that_start_together_measure_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    starts = [context.Process(target=_start, args=(tmp_path, counts)) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    counts.get(timeout=10)
    assert counts.empty()
