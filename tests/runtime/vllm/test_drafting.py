"""Which steps of an engine draft: by what cycles took and gave, at such rows and lengths."""

import random
from collections.abc import Mapping

import pytest

from sparsekv.runtime.vllm.exact_engine import Drafted, Drafting, Step

MANY = 4


class Engine:
    """Steps of some requests, whose cycles take what they are told to."""

    def __init__(self, dense: float, draft: float, agreement: float, dense_up_to: int = 0) -> None:
        self.said: list[str] = []
        self.published: list[dict[str, tuple[int, int]]] = []
        self.drafting = Drafting(MANY, dense_up_to, self.said.append, self._publish)
        self.dense, self.draft, self.agreement = dense, draft, agreement
        self.now, self.source = 0.0, random.Random(1)

    def _publish(self, new: Mapping[str, Drafted]) -> None:
        self.published.append({length: (one.drafted, one.accepted) for length, one in new.items()})

    def run(self, lengths: Mapping[str, int], steps: int, ahead: int = 1) -> list[int]:
        """The draft of each step; `ahead`: steps that are scheduled before one is over."""
        lengths, asked, sizes, tokens = dict(lengths), [0] * ahead, [], 0
        for _ in range(steps):
            size = asked.pop(0)
            asked.append(self.drafting.next(lengths))
            accepted = {one: self._agreed(size) for one in lengths}
            self.now += self.dense + size * self.draft
            rows = dict.fromkeys(lengths, size + 1)
            drafts = dict.fromkeys(lengths, size) if size else {}
            self.drafting.ran(Step(rows, drafts, accepted, dict(lengths)), self.now)
            lengths = {one: length + accepted[one] + 1 for one, length in lengths.items()}
            tokens += sum(accepted.values()) + len(lengths)
            sizes.append(size)
        return sizes

    def _agreed(self, size: int) -> int:
        agrees = [self.source.random() < self.agreement for _ in range(size)]
        return next((at for at, one in enumerate(agrees) if not one), size)


@pytest.mark.parametrize("ahead", [1, 2])
def test_it_drafts_where_that_is_faster(ahead: int) -> None:
    engine = Engine(dense=23.0, draft=8.0, agreement=0.975)
    sizes = engine.run({"a": 40_000, "b": 50_000}, 200, ahead)
    assert sizes[0] == 0, "a dense step is timed first"
    assert sizes[20:] == [MANY] * 180
    assert not any("do not pay" in line for line in engine.said)


@pytest.mark.parametrize("ahead", [1, 2])
def test_it_stops_where_acceptance_makes_it_slower_and_says_so_once(ahead: int) -> None:
    engine = Engine(dense=10.0, draft=5.0, agreement=0.4)
    sizes = engine.run({"a": 70_000}, 1500, ahead)
    assert sum(map(bool, sizes)) <= 12, "tried again rarely"
    assert sum(map(bool, sizes[600:])) >= 1, "tried again"
    (line,) = (line for line in engine.said if "do not pay" in line)
    assert "1 or more rows of 64k or more" in line


def test_lengths_and_rows_are_judged_apart() -> None:
    engine = Engine(dense=10.0, draft=9.0, agreement=0.5)
    engine.run({"a": 70_000}, 40)
    engine.draft, engine.agreement = 1.0, 0.99
    assert engine.run({"a": 300_000}, 40)[20:] == [MANY] * 20
    assert engine.run({str(row): 70_000 for row in range(8)}, 40)[20:] == [MANY] * 20


def test_lengths_that_the_plan_decodes_dense_never_draft() -> None:
    engine = Engine(dense=10.0, draft=0.1, agreement=1.0, dense_up_to=8192)
    assert engine.run({"a": 3000, "b": 12_000}, 50) == [0] * 50


def test_steps_with_prompts_or_other_requests_are_not_timed() -> None:
    engine = Engine(dense=10.0, draft=1.0, agreement=1.0)
    for number in range(40):
        lengths = {"a": 40_000, f"prompt {number}": 500}
        assert engine.drafting.next(lengths) == 0
        engine.drafting.ran(Step({"a": 1, f"prompt {number}": 500}, {}, {}, lengths), float(number))
        engine.drafting.ran(Step({"a": 1}, {}, {}, {"a": 40_000}), number + 0.5)
    assert engine.drafting.next({"a": 40_000}) == 0, "no cycle was timed yet"


def test_counts_are_told_and_published_by_length() -> None:
    engine = Engine(dense=1.0, draft=0.1, agreement=0.9)
    engine.run({"short": 300, "long": 5000}, 60)
    counts = engine.drafting.counts
    assert set(counts) == {"1k", "4k"}
    told = {length: [sum(part[length][at] for part in engine.published) for at in (0, 1)] for length in counts}
    for length, one in counts.items():
        assert 0 < told[length][1] <= one.accepted <= one.drafted
    assert any(line.startswith("drafted tokens that count: ") for line in engine.said)
