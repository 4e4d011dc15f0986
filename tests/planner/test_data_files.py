"""Profile files: the same bytes, whole or not at all, refused when they are not what was written."""

import gzip
import json
import os
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse

from sparsekv.planner.profile.profile_data import Profile, check_model
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.plans.errors import PlanError, PlanMismatchError
from sparsekv.plans.files import content_digest


@pytest.fixture
def profile() -> Profile:
    entry = made_up_length(4096, np.random.default_rng(0))
    return made_up_profile(entry.model_copy(update={"reuse": made_up_reuse(np.eye(3))}))


def test_what_is_read_is_what_was_written(profile: Profile, tmp_path: Path) -> None:
    write_measured(profile, tmp_path / "p.json")
    assert read_measured(Profile, tmp_path / "p.json") == profile


def test_a_large_profile_is_compressed_to_the_same_bytes_each_time(tmp_path: Path) -> None:
    levels = tuple(0.05 * level for level in range(1, 13))
    entry = made_up_length(4096, np.random.default_rng(0), layers=24, heads=32, levels=levels)
    profile = made_up_profile(entry, model=made_up_model(24, 32))
    for name in ("a", "b"):
        write_measured(profile, tmp_path / name)
    written = (tmp_path / "a").read_bytes()
    assert written == (tmp_path / "b").read_bytes()
    assert json.loads(gzip.decompress(written))["kind"] == "sparsekv.profile"
    assert read_measured(Profile, tmp_path / "a") == profile
    (tmp_path / "a").write_bytes(written[:-30])
    with pytest.raises(PlanError, match=r"cut short|damaged"):
        read_measured(Profile, tmp_path / "a")


def test_a_profile_of_other_weights_or_another_architecture_is_refused(profile: Profile, tmp_path: Path) -> None:
    write_measured(profile, tmp_path / "p")
    for part, digest, said in (
        ("weights", "sha256:", r"other weights.*\(a float32 checkpoint in float16"),
        ("weights", "sha256-all:", "a fingerprint of another kind"),
        ("architecture", "sha256:", "other architecture"),
    ):
        prints = profile.model.fingerprint.model_copy(update={part: digest + "1" * 64})
        with pytest.raises(PlanMismatchError, match=said):
            check_model(
                read_measured(Profile, tmp_path / "p"), profile.model.model_copy(update={"fingerprint": prints})
            )


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="cut short"),
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: "[" * 100_000, id="deep"),
        pytest.param(lambda text: "[]", id="a list"),
        pytest.param(lambda text: text.replace('"seed":0', '"seed":1'), id="edited"),
        pytest.param(lambda text: text.replace('"seed":0', '"seed":0,"more":1'), id="unknown field"),
        pytest.param(lambda text: text.replace('"seed":0', '"seed":NaN'), id="not a number"),
        pytest.param(lambda text: text.replace("sparsekv.profile", "sparsekv.cost"), id="another kind"),
        pytest.param(lambda text: text.replace('"integrity"', '"extra"'), id="no digest"),
    ],
)
def test_a_damaged_profile_is_refused_by_name(profile: Profile, tmp_path: Path, damage) -> None:
    path = tmp_path / "p.json"
    write_measured(profile, path)
    changed = damage(path.read_text())
    path.write_text(changed)
    with pytest.raises(PlanError, match=r"p\.json"):
        read_measured(Profile, path)


def test_a_profile_that_says_what_a_step_reads_is_read(profile: Profile, tmp_path: Path) -> None:
    data = profile.model_dump(mode="json") | {"reads": {"matrices": 2, "parameters": 10.0}}
    (tmp_path / "p").write_text(json.dumps(data | {"integrity": content_digest(data)}))
    assert read_measured(Profile, tmp_path / "p") == profile


@pytest.mark.parametrize("version", [3, 5])
def test_a_profile_of_another_schema_is_to_be_made_again(profile: Profile, tmp_path: Path, version: int) -> None:
    path = tmp_path / "p.json"
    write_measured(profile, path)
    path.write_text(path.read_text().replace('"schema_version":4', f'"schema_version":{version}'))
    with pytest.raises(PlanError, match=r"schema 4 in .*p\.json"):
        read_measured(Profile, path)


def test_a_small_file_that_unpacks_to_more_than_a_profile_may_hold_is_refused_without_holding_it(tmp_path) -> None:
    block = zlib.compressobj(wbits=-15)
    packed = block.compress(bytes(1 << 20)) + block.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    (tmp_path / "bomb").write_bytes(gzip.compress(b"")[:10] + packed * 600)
    tracemalloc.start()
    with pytest.raises(PlanError, match="512 MiB"):
        read_measured(Profile, tmp_path / "bomb")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20


def test_a_profile_may_come_through_a_pipe(profile: Profile, tmp_path: Path) -> None:
    write_measured(profile, tmp_path / "p.json")
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:
        file.write((tmp_path / "p.json").read_bytes())
    assert read_measured(Profile, Path(f"/dev/fd/{read}")) == profile
    os.close(read)


def _put(value, *path):
    def put(data):
        *inner, last = path
        for step in inner:
            data = data[step]
        data[last] = value(data[last]) if callable(value) else value

    return put


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_put([], "lengths"), "least 1"),
        (_put(1 << 40, "lengths", 0, "length"), "lengths.0.length: "),
        (_put(1.1, "lengths", 0, "layers", 0, "tiles", 0, 0), "lengths.0.layers.0.tiles.0.0: "),
        (_put(0.0, "lengths", 0, "layers", 0, "tiles", 0, 0), "lengths.0.layers.0.tiles.0.0: "),
        (_put(1e300, "lengths", 0, "layers", 0, "damage", 0, 0), "lengths.0.layers.0.damage.0.0: "),
        (_put(-0.1, "lengths", 0, "layers", 0, "worst", 0, 0), "lengths.0.layers.0.worst.0.0: "),
        (_put(0.0, "lengths", 0, "layers", 0, "weight"), "lengths.0.layers.0.weight: "),
        (_put([], "lengths", 0, "reuse", "budgets"), "lengths.0.reuse.budgets: "),
        (_put("x" * 100_000, "dtype"), "dtype: "),
        (_put({"x" * 100_000: 1}, "versions"), "versions.xxx"),
    ],
    ids=range(10),
)
def test_a_profile_with_values_that_cannot_be_is_refused_where_they_are(
    profile: Profile, tmp_path: Path, forge, said: str
) -> None:
    data = profile.model_dump(mode="json")
    forge(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(PlanError) as refused:
        read_measured(Profile, tmp_path / "p.json")
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1000
