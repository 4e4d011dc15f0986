"""Other tools' files: recognised by content, read into plans, written from them, and refused where they do not fit."""

import json
import random
import struct
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from plans_samples import full_plan, model_info, sharing_plan, small_plan
from pydantic import ValidationError

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.errors import PlanError, PlanMismatchError, SparseKVError, UnsupportedError
from sparsekv.plans.files import dump_plan, parse_plan
from sparsekv.plans.interop import READERS, WRITERS, plan_of, recognised
from sparsekv.plans.interop.source import Source
from sparsekv.plans.patterns import PATTERNS, AShape, BlockSparse, Dense, Registered, TileShape, VerticalSlash, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    HeadGroup,
    IndexSharing,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.schema import Plan, to_data
from sparsekv.plans.types import Part

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
    "modelopt": Source("config.json", b""),
}


def imported(source: Source, kind: str | None = None) -> Plan:
    plan, notes = plan_of(source, recognised(source, kind), MODEL)
    assert notes or kind == "modelopt"
    assert plan.status == "imported"
    return parse_plan(dump_plan(plan))


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "modelopt"])
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


@pytest.mark.parametrize(
    ("config", "letters"),
    [
        ({"index_topk_pattern": "FSSFFSSS", "indexer_types": ["full", "shared"] * 4}, "FSFSFSFS"),
        ({"index_topk_pattern": "FSSFFSSS", "indexer_types": None}, "FSSFFSSS"),
        ({"indexer_types": ["full", *["shared"] * 7]}, "FSSSSSSS"),
        ({"index_topk_pattern": "FSSFFSSS", "indexer_types": ["full", ["shared"]] * 4}, ""),
    ],
)
def test_a_config_with_kinds_of_indexers_is_read_by_them_as_engines_do(config: dict[str, Any], letters: str) -> None:
    file = Source("config.json", json.dumps(config).encode())
    if not letters:
        with pytest.raises(PlanError, match='JSON with "indexer_types" or an "index_topk_pattern"'):
            recognised(file)
        return
    again, _ = plan_of(file, recognised(file), sharing_plan().model)
    assert again.index_sharing == IndexSharing(pattern=letters)


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


def test_a_plan_whose_longest_prompts_run_dense_is_refused_where_patterns_are_all_there_is() -> None:
    plan = imported(FILES["minference"])
    dense = plan.prefill.model_copy(update={"lengths": (PrefillBucket(up_to=None, dense=True),)})
    with pytest.raises(PlanError, match="found it dense there"):
        WRITERS["modelopt"](plan.model_copy(update={"prefill": dense}))


# Fields that no change of their own leaves valid: what a group or a bucket is, and the other unit of a size.
UNCHANGED = {
    "decode.lengths.dense",
    "decode.lengths.segments.filter",
    "decode.offload.hot.fraction",
    "kv_cache.keep.fraction",
    "kv_cache.layers",
    "kv_cache.score",
    "prefill.lengths.dense",
    "prefill.lengths.heads.layer",
    "prefill.lengths.heads.pattern.budget.fraction",
    "prefill.lengths.heads.pattern.keep.tokens",
    "prefill.lengths.heads.pattern.pattern",
    "prefill.lengths.heads.pattern.sink.fraction",
    "prefill.lengths.heads.pattern.slash.fraction",
    "prefill.lengths.heads.pattern.vertical.tokens",
    "prefill.lengths.heads.pattern.window.fraction",
    "prefill.lengths.same_as",
}


def changed_value(value: Any, kind: Any) -> Any:
    """Another value for a field; None where there is none to be had."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 64 if isinstance(value, int) or value > 1 else value / 2
    others = [one for one in get_args(kind) for one in (get_args(one) or (one,)) if isinstance(one, str)]
    if isinstance(value, str):
        return next((one for one in others if one != value), None if get_args(kind) else f"{value}x")
    return value[:-1] if isinstance(value, tuple) and len(value) > 1 else None


def changes(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """The part with one field changed after the other, at any depth, unchecked."""
    for name, info in type(part).model_fields.items():
        value, here = getattr(part, name), f"{path}.{name}" if path else name
        is_list = isinstance(value, tuple) and bool(value) and isinstance(value[0], Part)
        for at, one in enumerate(value if is_list else (value,)):
            found = changes(one, here) if isinstance(one, Part) else ((here, changed_value(one, info.annotation)),)
            for place, other in found:
                if other is not None:
                    parts = (*value[:at], other, *value[at + 1 :]) if is_list else other
                    yield place, part.model_copy(update={name: parts})


@pytest.mark.parametrize("to", [name for name in WRITERS if name != "index-topk"])  # which holds no phase
def test_no_field_of_the_schema_is_lost_in_silence(to: str) -> None:
    """Changed, it changes the file, or a line of what is lost names it; another model is another file."""
    compared = set()
    timed = [kind.timed(8192) for kind in PATTERNS.values() if kind not in (Dense, Registered)]
    timed.append(Registered(name="mine", budget=tokens(512)))
    groups = tuple(HeadGroup(layer=layer, heads=(0,), pattern=pattern) for layer, pattern in enumerate(timed))
    searched = PrefillPlan(tile=TileShape(), lengths=(PrefillBucket(up_to=None, heads=groups),))
    for plan in (full_plan(), small_plan(kv_cache=full_plan().kv_cache), small_plan(prefill=searched)):
        try:
            written = WRITERS[to](plan)
        except PlanError:  # this format holds nothing of this plan
            continue
        for path, other in changes(plan):
            if path.partition(".")[0] in ("kind", "schema_version", "model", "integrity"):
                continue
            try:
                again = WRITERS[to](Plan.model_validate(to_data(other)))
            except (SparseKVError, ValidationError):  # the change contradicts another field
                continue
            compared.add(path)
            told = [place for line in (*written.lost, *again.lost) for place in line.split("`")[1::2]]
            named = any(path == place or path.startswith(f"{place}.") for place in told)
            assert named or again.data != written.data, path
    assert sorted(leaves(Plan) - compared - UNCHANGED) == []


def leaves(kind: Any, path: str = "") -> set[str]:
    """Every field below one of the schema, of a plan those that say what is computed."""
    if not (isinstance(kind, type) and issubclass(kind, Part)):
        found = set().union(*(leaves(one, path) for one in get_args(kind)))
        return found - {path} or {path}
    names = kind.model_fields if path else ("prefill", "decode", "kv_cache")
    return set().union(
        *(leaves(kind.model_fields[name].annotation, f"{path}.{name}" if path else name) for name in names)
    )


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
        (Source("config.json", b'{"config_groups": {"a": {"sparse_algo": "softmax_skip"}}}'), UnsupportedError, "skip"),
        (Source("config.json", b'{"config_groups": {"a": {"sparse_algo": []}}}'), UnsupportedError, "algorithm"),
        (Source("a.json", b'{"do_select_layers": "1", "num_wait_load_layers": 1000000}'), PlanMismatchError, "below 6"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(source: Source, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        plan_of(source, recognised(source), MODEL)


def test_changed_files_are_used_or_refused() -> None:
    modelopt = Source("config.json", WRITERS["modelopt"](imported(FILES["minference"])).data)
    source, files = random.Random(0), [*(FILES[kind] for kind in READERS if kind != "modelopt"), modelopt]
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
