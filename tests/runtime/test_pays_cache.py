"""Rules on disk: measured once a place, and again where the file is none of ours."""

import json
import multiprocessing
import time
from dataclasses import replace

import pytest
import torch

from sparsekv.runtime.core.pays import ALWAYS, Pays, Thresholds
from sparsekv.runtime.core.timed_layers import Place
from sparsekv.runtime.pays_cache import RuleFile, place_of

PLACE = {"plan": "sha256:1", "device": "NVIDIA H200", "ranks": 1}
RULE = Pays(Thresholds((512, 4096), (16384, 8192)), Thresholds())


def test_the_second_start_reads_what_the_first_measured(tmp_path):
    assert RuleFile(PLACE, tmp_path).read_or(lambda: RULE) == (RULE, True)
    assert RuleFile(PLACE, tmp_path).read_or(lambda: ALWAYS) == (RULE, False)
    assert RuleFile(PLACE | {"ranks": 2}, tmp_path).read_or(lambda: ALWAYS) == (ALWAYS, True)


@pytest.mark.parametrize(
    "other", [{"plan": "sha256:2"}, {"longest": 4096}, {"step": 256}, {"rows": 4}, {"shares": {1024: 0.5, 2048: 0.2}}],
    ids=str,
)  # fmt: skip
def test_what_a_rule_depends_on_of_a_plan_and_its_sizes_is_part_of_its_place(tmp_path, other):
    place, device = Place("sha256:1", 2048, 512, 16, {1024: 0.5, 2048: 0.4}), torch.device("cpu")
    keys = [place_of(device, torch.float32, "cpu", False, **one.key) for one in (place, replace(place, **other))]
    assert RuleFile(keys[0], tmp_path).read_or(lambda: RULE) == (RULE, True)
    assert RuleFile(keys[1], tmp_path).read_or(lambda: ALWAYS) == (ALWAYS, True)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"{}" + b" " * (1 << 17), b'{"place": 3, "rule": "always"}',
                json.dumps({"place": PLACE, "rule": "sometimes"}).encode(),
                json.dumps({"place": PLACE | {"device": "H100"}, "rule": "always"}).encode(),
                json.dumps({"place": PLACE, "rule": 7}).encode()],
)  # fmt: skip
def test_a_file_that_is_no_rule_of_the_place_is_measured_anew(tmp_path, content):
    RuleFile(PLACE, tmp_path).read_or(lambda: RULE)
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    assert RuleFile(PLACE, tmp_path).read_or(lambda: RULE) == (RULE, True)
    assert RuleFile(PLACE, tmp_path).read_or(lambda: ALWAYS) == (RULE, False)


def test_without_a_folder_to_write_to_every_start_measures(tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert RuleFile(PLACE, tmp_path / "file" / "folder").read_or(lambda: RULE) == (RULE, True)


def _start(folder, counts):
    def measure():
        time.sleep(0.2)
        counts.put(1)
        return RULE

    RuleFile(PLACE, folder).read_or(measure)


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
