"""Other tools' files: recognised by content, read into plans, written from them, and refused where they do not fit."""

import json
import random
import re
import struct

import pytest
import torch
from plans_samples import full_plan, model_info, sharing_plan

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.errors import PlanError, PlanMismatchError, SparseKVError
from sparsekv.plans.files import dump_plan, parse_plan
from sparsekv.plans.interop import READERS, WRITERS, plan_of, recognised
from sparsekv.plans.interop.source import Source
from sparsekv.plans.patterns import AShape, BlockSparse, VerticalSlash, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    IndexSharing,
    Segment,
)
from sparsekv.plans.schema import Plan

LAYERS, HEADS, KV_HEADS, CONTEXT = 6, 4, 2, 65536
MODEL = model_info(layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, context_length=CONTEXT)
ENTRIES = (
    ["vertical_and_slash", 30, 800, 0.5],
    ["vertical_and_slash", 10, 20, 0.5],
    ["stream_llm", 100, 700, 0.5],
    ["block_sparse", 55, 0, 0.5],
)
BEST = [{str(head): ENTRIES[(layer + head) % 4] for head in range(HEADS)} for layer in range(LAYERS)]
LINES = [{str(head): ["vertical_and_slash", 30, 800, 0.5] for head in range(HEADS)}] * LAYERS


def of_all(name: str, size: int) -> bytes:
    """Settings of every head."""
    return json.dumps([{str(head): [name, size, 2, 0.5] for head in range(HEADS)}] * LAYERS).encode()


def array(rows: list[list[int]], descr: str = "<i4", shape: str | None = None) -> bytes:
    """A .npy file."""
    shape = shape or f"({len(rows)}, {len(rows[0])})"
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    numbers = [number for row in rows for number in row]
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack(f"<{len(numbers)}i", *numbers)


MAPS = array([[0, 1], [0, 0], [1, 0], [0, 1], [0, 1], [1, 1]])
FILES = {
    "minference": Source("best_pattern.json", json.dumps(BEST).encode()),
    "qwen-1m": Source("sparse_attention_config.json", json.dumps(LINES).encode()),
    "kascade": Source("model_layers_0_3.npy", MAPS),
    "filter-layers": Source("omnikv.json", b'{"do_select_layers": "1,3", "num_of_selected_tokens": 512}'),
    "indexcache": Source("pattern.txt", b"FFSFSS\n"),
}


def imported(source: Source, kind: str | None = None) -> Plan:
    plan, notes = plan_of(source, recognised(source, kind), MODEL)
    assert notes
    assert plan.status == "imported"
    return parse_plan(dump_plan(plan))


@pytest.mark.parametrize("kind", READERS)
def test_a_file_is_recognised_by_its_content_and_makes_a_plan(kind: str) -> None:
    assert recognised(FILES[kind]) == kind
    assert kind in imported(FILES[kind]).provenance.source


def test_minferences_settings_are_its_patterns_with_its_least_numbers_of_lines() -> None:
    bucket = imported(FILES["minference"]).prefill.bucket(CONTEXT)
    lines, few, window, blocks = bucket.patterns(0, HEADS)
    assert isinstance(lines, VerticalSlash)
    assert isinstance(few, VerticalSlash)
    assert (lines.vertical, lines.slash, lines.last_q) == (tokens(30), tokens(800), 64)
    assert (few.vertical, few.slash) == (tokens(30), tokens(50))
    assert lines.max_tiles.resolve(CONTEXT) == CONTEXT
    assert window == AShape(sink=tokens(100), window=tokens(700))
    assert blocks == BlockSparse(keep=tokens(6400))


def test_its_lines_are_those_that_the_published_rule_takes_of_equal_scores() -> None:
    """The heaviest columns and diagonals of the softmax of the last 64 queries, by brute force."""
    length, columns, diagonals, tile = 640, 40, 60, imported(FILES["minference"]).prefill.tile
    entry = {"0": ["vertical_and_slash", columns, diagonals, 1.0]}
    one = model_info(layers=1, heads=1, kv_heads=1)
    plan, _ = plan_of(Source("best.json", json.dumps([entry]).encode()), "minference", one)
    patterns = plan.prefill.bucket(length).patterns(0, 1)
    q_BHSD, k_BHSD = torch.randn(2, 1, 1, length, 16, generator=torch.Generator().manual_seed(0)) * 2
    scores_QK = q_BHSD[0, 0, -64:].double() @ k_BHSD[0, 0].double().T / 4
    age_QK = torch.arange(length - 64, length)[:, None] - torch.arange(length)
    weights_QK = scores_QK.masked_fill(age_QK < 0, -torch.inf).softmax(-1)
    best = set(weights_QK.sum(0).topk(columns).indices.tolist())
    by_age = torch.zeros(length, dtype=torch.float64).index_add_(0, age_QK.clamp(min=0).flatten(), weights_QK.flatten())
    ages = by_age.topk(diagonals).indices.tolist()
    chunk = Chunk.uniform(1, 0, length)
    index = build_index(patterns, q_BHSD, k_BHSD, chunk, tile, scale=0.25, builder="torch")
    for row in range(length // 64):
        rows = range(64 * row, 64 * row + 64)
        touched = {(i - age) // 64 for i in rows for age in ages if i >= age} | {0, row, max(row - 1, 0)}
        found = set(index.tiles_BHTW[0, 0, row, : index.counts_BHT[0, 0, row]].tolist()) - {NO_TILE}
        assert found == touched
        single = {column for column in best if column < rows[-1] + 1 and column // 64 not in touched}
        words = index.live_BHTN[0, 0, row].tolist()
        live = {at for at in range(index.columns_BHC.shape[2]) if words[at // 32] >> at % 32 & 1}
        assert {int(index.columns_BHC[0, 0, at]) for at in live} == single


def test_kascades_anchors_choose_by_head_for_the_layers_up_to_the_next() -> None:
    segments = imported(FILES["kascade"]).decode.bucket(CONTEXT).segments
    assert [(one.filter, one.layers) for one in segments] == [(0, (1, 2)), (3, (4, 5))]
    assert segments[0].heads == {1: (0, 0), 2: (1, 0)}
    assert segments[0].budget.resolve(CONTEXT) == 6554
    unnamed = imported(Source("maps.npy", MAPS))  # layer 4 maps to itself, too
    assert [one.filter for one in unnamed.decode.bucket(CONTEXT).segments] == [0, 4]


@pytest.mark.parametrize(
    ("data", "expected", "budget"),
    [
        ({"do_select_layers": "1,3", "num_of_selected_tokens": 512}, [(1, (2,)), (3, (4, 5))], 512),
        ({"do_select_layers": [1, 3], "num_wait_load_layers": 1}, [(3, (5,))], 6554),
        ({"full_attention_layers": "0,1,3", "decode_keep_tokens": 700}, [(1, (2,)), (3, (4, 5))], 700),
        ({"full_attention_layers": "0", "decode_keep_tokens": 0.25}, [(0, (1, 2, 3, 4, 5))], 16384),
        ({"index_topk_pattern": "FFSFSS", "index_topk": 99}, [(1, (2,)), (3, (4, 5))], 99),
        ({"index_topk_pattern": "FFSFSS"}, [(1, (2,)), (3, (4, 5))], 6554),
    ],
)
def test_lists_of_layers_are_segments(data: object, expected: object, budget: int) -> None:
    segments = imported(Source("list.json", json.dumps(data).encode())).decode.bucket(CONTEXT).segments
    assert [(one.filter, one.layers) for one in segments] == expected
    assert {one.budget.resolve(CONTEXT) for one in segments} == {budget}


def test_an_exported_pattern_of_indexers_comes_back_as_it_was() -> None:
    plan = sharing_plan()
    file = Source("line.json", WRITERS["index-topk"](plan).data)
    again, notes = plan_of(file, recognised(file), plan.model)
    assert (again.index_sharing, again.decode, notes) == (IndexSharing(pattern="FSSFFSSS"), None, ())


@pytest.mark.parametrize("to", ["sparseengine", "indexcache"])
def test_a_layer_that_another_one_chooses_for_once_exported_is_told(to: str) -> None:
    source, changed = random.Random(0), 0
    budget = DecodeBudget(tokens=2048)
    for _ in range(200):
        layers, segments, free = 10, [], 0
        while free < layers - 1:
            own = list(range(free + 1, min(free + 1 + source.randint(1, 4), layers)))
            own = [layer for layer in own if source.random() < 0.9] or own
            segments.append(Segment(filter=free, layers=tuple(own), budget=budget, sink=4, recent=128))
            free = own[-1] + source.choice((1, 1, 1, 2))
        info = model_info(layers=layers, heads=HEADS, kv_heads=KV_HEADS, context_length=CONTEXT)
        bucket = DecodeBucket(up_to=None, segments=tuple(segments))
        written = WRITERS[to](Plan(status="unverified", model=info, decode=DecodePlan(lengths=(bucket,))))
        again = plan_of(file := Source("a.json", written.data), recognised(file), info)[0].decode.lengths[0].segments
        asked = {layer: one.filter for one in segments for layer in one.layers}
        differs = asked != {layer: one.filter for one in again for layer in one.layers}
        assert differs == any("segments.filter`" in line for line in written.lost)
        changed += differs
    assert 20 < changed < 180


@pytest.mark.parametrize("name", ["a\nb.json", "\udcff.json", "a\x00.json"])
def test_a_name_that_cannot_be_shown_is_written_without_what_cannot(name: str) -> None:
    plan, _ = plan_of(Source(name, FILES["minference"].data), "minference", MODEL)
    assert "?" in plan.provenance.source


@pytest.mark.parametrize(("kind", "to"), [("minference", "minference"), ("filter-layers", "sparseengine")])
def test_what_was_imported_is_exported_as_it_was(kind: str, to: str) -> None:
    plan = imported(FILES[kind])
    again = imported(Source("again.json", WRITERS[to](plan).data))
    if kind == "minference":
        assert again.prefill == plan.prefill
    else:
        layers = [(one.filter, one.layers, one.budget) for one in again.decode.bucket(CONTEXT).segments]
        assert layers == [(one.filter, one.layers, one.budget) for one in plan.decode.bucket(CONTEXT).segments]


def test_what_a_format_leaves_out_is_told() -> None:
    full = full_plan()
    lines = {to: " ".join(WRITERS[to](full).lost) for to in ("minference", "sparseengine", "indexcache")}
    for to, other in (("minference", "decode"), ("sparseengine", "prefill"), ("indexcache", "prefill")):
        assert {f"`{other}`", "`quality`"} <= set(re.findall("`[^`]*`", lines[to])), to
    own = "decode.lengths.segments."
    for name in (*(f"{own}{field}" for field in ("sink", "selector", "heads", "scope", "budget")), "decode.offload"):
        assert f"`{name}`" in lines["indexcache"], name
    assert "`prefill.lengths.heads.pattern.max_tiles`" in lines["minference"]


@pytest.mark.parametrize(
    ("source", "error", "word"),
    [
        (Source("a.json", b"[]"), PlanError, "kascade"),
        (Source("a.json", b"{" * 100_000), PlanError, "minference"),
        (Source("a.json", json.dumps(BEST[:3]).encode()), PlanMismatchError, "6 layers"),
        (Source("a.json", json.dumps([{"0": ENTRIES[0]}] * 6).encode()), PlanMismatchError, "heads 0 to 3"),
        (Source("a.json", of_all("tri_mix", 1)), PlanError, "tri_mix"),
        (Source("a.json", of_all("stream_llm", -1)), PlanError, "-1"),
        (Source("a.npy", array([[0, 1]] * 5)), PlanMismatchError, "6 layers"),
        (Source("a.npy", array([[0, 1]] * 6, shape="(1 << 40, 1)")), PlanError, "npy"),
        (Source("a.npy", array([[0, 1]] * 6, descr="|O")), PlanError, "npy"),
        (Source("a.npy", array([[1, 1]] * 6)), PlanError, "anchor layers"),
        (Source("a.json", b'{"do_select_layers": "3,1"}'), PlanError, "ascending"),
        (Source("a.json", b'{"do_select_layers": "9"}'), PlanMismatchError, "below 6"),
        (Source("a.txt", b"SFFFFF"), PlanError, "first layer"),
        (Source("a.txt", b"FFFF"), PlanMismatchError, "6 layers"),
        (Source("a.json", b'{"do_select_layers": "1", "num_wait_load_layers": 1000000}'), PlanMismatchError, "below 6"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(source: Source, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        plan_of(source, recognised(source), MODEL)


def test_changed_files_are_used_or_refused() -> None:
    source, files = random.Random(0), list(FILES.values())
    for number in range(600):
        file = files[number % len(files)]
        data = bytearray(file.data)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 3)] = source.choice(
                [b"", b"0", b"-1", b"1e99", b'"', b"null", b"[", b"}", bytes([source.randrange(256)]), b"9" * 30]
            )
        changed = Source(file.name, bytes(data))
        try:
            plan, _ = plan_of(changed, recognised(changed), MODEL)
        except SparseKVError:
            continue
        assert parse_plan(dump_plan(plan)).status == "imported"
