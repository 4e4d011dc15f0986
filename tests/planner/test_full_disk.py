"""A disk that is full at any byte: whole files or the files before, and messages that name them."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_profiles import made_up_length, made_up_profile
from plans_samples import small_plan

from sparsekv.planner.profile.resume import LayerRecord, records_at
from sparsekv.planner.records import write_measured
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import write_bytes, write_plan

PROFILE = made_up_profile(made_up_length(8192, np.random.default_rng(0)))


def record(path: Path) -> None:
    records_at(path, {"seed": 0}).add(LayerRecord(length=64, sample=0, layer=3))


WRITERS: dict[str, Callable[[Path], None]] = {
    "plan": lambda path: write_plan(small_plan(), path),
    "profile": lambda path: write_measured(PROFILE, path),
    "report": lambda path: write_bytes(path, b"<html>" * 100),
    "partial": record,
}


@contextmanager
def full_after(count: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("sizes")
    for name, write in WRITERS.items():
        write(folder / name)
    return {name: (folder / name).stat().st_size for name in WRITERS}


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(WRITERS)), share=st.floats(0.0, 0.999), is_there=st.booleans())
def test_a_file_is_whole_or_as_it_was(name: str, share: float, is_there: bool, sizes, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("disk") / name
    if is_there:
        WRITERS[name](path)
    before = path.read_bytes() if is_there else None
    limit = int(share * sizes[name])
    if name == "partial" and before:  # which grows by a line
        limit = len(before) + int(share * len(before.splitlines()[-1]))
    with full_after(limit), pytest.raises(UsageError, match=str(path)):
        WRITERS[name](path)
    assert (path.read_bytes() if path.exists() else None) == before
    assert list(path.parent.iterdir()) == ([path] if is_there else [])
