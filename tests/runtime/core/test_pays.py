"""The rule of where sparse attention is faster, from times that are given."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.core.pays import (
    ALWAYS,
    EVERYWHERE,
    NEVER,
    Pays,
    Thresholds,
    contexts,
    measure,
    measure_each,
    parse,
)

LENGTHS = contexts(2048, 131072)
SIZES = (128, 512, 2048, 8192, 16384)
SMALL = st.lists(st.tuples(st.integers(1, 1 << 17), st.integers(0, 1 << 20)), max_size=6)


def thresholds(pairs):
    rows = sorted({rows for rows, _ in pairs})
    tokens = sorted((tokens for _, tokens in pairs), reverse=True)[: len(rows)]
    return Thresholds(tuple(rows), tuple(tokens))


def gain_of(rows, tokens, noise=0.0, rng=random):
    """An index of 30 us and 0.05 us a key; attention at 0.2 of the tiles."""
    work = 2e-3 * rows * tokens / 128
    return (1 + noise * rng.uniform(-1, 1)) * (10 + work) / (40 + 0.02 * tokens + 0.2 * work)


def test_contexts_are_powers_of_the_root_of_two():
    assert contexts(1024, 4096) == (1024, 1449, 2048, 2897, 4096)
    assert contexts(1000, 1100) == (1024,)
    assert contexts(1025, 1100) == ()


def test_the_threshold_is_the_first_context_that_gains_and_more_rows_never_raise_it():
    rule = measure(SIZES, LENGTHS, gain_of)
    assert rule.rows
    assert list(rule.tokens) == sorted(rule.tokens, reverse=True)
    for rows, tokens in zip(rule.rows, rule.tokens, strict=True):
        shorter = [length for length in LENGTHS if rows <= length < tokens]
        assert gain_of(rows, max(rows, tokens)) >= 1.0
        assert all(gain_of(rows, length) < 1.0 for length in shorter)


@pytest.mark.parametrize("seed", range(40))
def test_from_the_threshold_on_sparse_is_faster_in_every_bucket(seed):
    """In each, from a length of its own on; other patterns may be slower again behind its end."""
    source = random.Random(seed)
    bounds = sorted(source.sample(LENGTHS[:-1], 3))
    from_B = [source.choice((0, *LENGTHS)) for _ in range(4)]

    def is_faster(tokens):
        return tokens >= from_B[sum(tokens > bound for bound in bounds)]

    rule = measure((512,), LENGTHS, lambda rows, tokens: 2.0 if is_faster(tokens) else 0.5, bounds=bounds)
    slower = [tokens for tokens in LENGTHS if not is_faster(tokens)]
    assert rule.at(512) == next((tokens for tokens in LENGTHS if tokens > max(slower, default=0)), None)


@pytest.mark.parametrize("seed", range(40))
def test_where_time_runs_out_before_later_buckets_are_confirmed_every_size_has_its_threshold(seed):
    """As long as without buckets, of which each costs as much as all sizes together."""
    source, asked = random.Random(seed), []
    bounds, late = sorted(source.sample(LENGTHS[2:-1], 3)), source.random() < 0.5

    def gain(rows, tokens):
        asked.append((rows, tokens))
        return gain_of(rows, tokens)

    wanted, most = measure(SIZES, LENGTHS, gain), len(asked)
    asked.clear()
    clock = (lambda: most - len(asked)) if late else None
    assert measure(SIZES, LENGTHS, gain, bounds=bounds, until=clock) == wanted
    assert len(asked) == len(set(asked))  # none twice
    assert (len(asked) == most) == late


@pytest.mark.parametrize("seed", range(40))
def test_every_size_is_sparse_where_it_is_faster_at_all_longer_contexts(seed):
    """More rows gain in each bucket from a context on that is no longer; the clock is read before each measurement."""
    source, asked, read = random.Random(seed), [], []
    bounds = sorted(source.sample(LENGTHS[:-1], 2))
    from_BS = [sorted((source.choice((0, 0, *LENGTHS)) for _ in SIZES), reverse=True) for _ in range(3)]

    def is_faster(rows, tokens):
        return tokens >= from_BS[sum(tokens > bound for bound in bounds)][SIZES.index(rows)]

    def gain(rows, tokens):
        asked.append((rows, tokens))
        assert len(asked) == len(read)
        return 2.0 if is_faster(rows, tokens) else 0.5

    rule = measure(SIZES, LENGTHS, gain, bounds=bounds, until=lambda: read.append(None) or 1.0)
    assert len(asked) == len(set(asked))
    for size in SIZES:
        slower = [tokens for tokens in LENGTHS if tokens >= size and not is_faster(size, tokens)]
        for tokens in LENGTHS[sum(tokens < size for tokens in LENGTHS) :]:
            assert rule.pays(size, tokens) == (tokens > max(slower, default=0))


@pytest.mark.parametrize("seed", range(60))
def test_chunks_are_sparse_where_that_is_faster_in_each_bucket(seed):
    """Whatever the buckets before and behind are; some have no context to choose from, and a plan is dense there."""
    source, asked = random.Random(seed), []
    bounds = sorted(source.sample(LENGTHS[:-1], 3))
    dense = source.sample(range(4), source.randrange(2))
    lengths = [tokens for tokens in LENGTHS if sum(tokens > bound for bound in bounds) not in dense]
    from_BS = [sorted((source.choice((0, 0, 1 << 20, *LENGTHS)) for _ in SIZES), reverse=True) for _ in range(4)]

    def is_faster(rows, tokens):
        asked.append((rows, tokens))
        return tokens >= from_BS[sum(tokens > bound for bound in bounds)][SIZES.index(rows)]

    rule = measure_each(SIZES, lengths, lambda *at: 2.0 if is_faster(*at) else 0.5, bounds=bounds)
    assert len(asked) == len(set(asked))
    assert parse(f"prefill={rule} decode=never").prefill == rule
    for size in SIZES:
        for tokens in (tokens for tokens in lengths if tokens >= size):
            assert rule.pays(size, tokens) == is_faster(size, tokens)


@pytest.mark.parametrize("seed", range(60))
def test_a_bucket_that_cannot_be_measured_goes_on_with_the_one_before_it(seed):
    """The first, without one before it, is dense; where none can be measured the hint says."""
    source = random.Random(seed)
    bounds = (8192, 32768)
    within = [[n for n in LENGTHS if sum(n > bound for bound in bounds) == bucket] for bucket in range(3)]
    from_B = [source.choice((0, 1 << 20, math.nan, *lengths)) for lengths in within]
    hint = Thresholds((100,), (source.choice(LENGTHS),))

    def gain(rows, tokens):
        first = from_B[sum(tokens > bound for bound in bounds)]
        return math.nan if math.isnan(first) else 2.0 if tokens >= first else 0.5

    rule = measure_each((512,), LENGTHS, gain, bounds=bounds, hint=hint)
    if all(map(math.isnan, from_B)):
        assert rule == Thresholds((512,), hint.tokens)
        return
    wanted = []
    for tokens in LENGTHS:
        bucket = sum(tokens > bound for bound in bounds)
        known = [first for first in from_B[: bucket + 1] if not math.isnan(first)]
        wanted.append(bool(known) and tokens >= known[-1])
    assert [rule.pays(512, tokens) for tokens in LENGTHS] == wanted


@pytest.mark.parametrize("seed", range(60))
def test_what_was_measured_holds_wherever_time_ran_out_or_a_size_has_no_memory(seed):
    """Buckets that time does not reach go on with the last one that was measured."""
    source = random.Random(seed)
    bounds, most, lost = (8192, 32768), source.randrange(1, 40), source.sample(SIZES, source.randrange(3))
    within = [[n for n in LENGTHS if sum(n > bound for bound in bounds) == bucket] for bucket in range(3)]
    from_BS = [sorted((source.choice((0, 1 << 20, *at)) for _ in SIZES), reverse=True) for at in within]
    times = {}

    def gain(rows, tokens):
        first = from_BS[sum(tokens > bound for bound in bounds)][SIZES.index(rows)]
        times[rows, tokens] = math.nan if rows in lost else 2.0 if tokens >= first else 0.5
        return times[rows, tokens]

    rule = measure_each(SIZES, LENGTHS, gain, bounds=bounds, until=lambda: most - len(times), hint=Thresholds())
    assert len(times) <= most
    wrong = [(rows, tokens) for (rows, tokens), of in times.items() if of == 0.5 and rule.pays(rows, tokens)]
    assert wrong == []
    begun = [any((rows, n) in times and rows not in lost for rows in SIZES for n in at) for at in within]
    if begun[0] and not begun[1]:
        for size in SIZES:
            last = rule.pays(size, within[0][-1])
            assert all(rule.pays(size, tokens) == last for tokens in (*within[1], *within[2]) if tokens >= size)


def test_a_size_that_has_no_memory_is_sparse_where_smaller_ones_are():
    rule = measure_each(
        (512, 8192), LENGTHS, lambda rows, n: math.nan if rows == 8192 else float(n >= 30_000), bounds=(8192,)
    )
    assert rule == Thresholds((512,), (32768,))


def test_one_threshold_stands_for_buckets_that_go_on_from_it():
    rule = measure_each((512,), LENGTHS, lambda rows, tokens: tokens >= LENGTHS[3], bounds=(LENGTHS[5], LENGTHS[8]))
    assert rule == Thresholds((512,), (LENGTHS[3],))


@pytest.mark.parametrize("seed", range(5))
def test_twenty_noisy_measurements_give_each_size_at_most_two_neighbouring_thresholds(seed):
    rng = random.Random(seed)
    rules = [measure(SIZES, LENGTHS, lambda r, t: gain_of(r, t, 0.03, rng)) for _ in range(20)]
    for size in SIZES:
        places = {LENGTHS.index(context) if (context := rule.at(size)) else len(LENGTHS) for rule in rules}
        assert max(places) - min(places) <= 1


def test_where_nothing_gains_every_step_is_dense():
    assert measure(SIZES, LENGTHS, lambda rows, tokens: 0.99) == Thresholds()
    assert not NEVER.prefill.pays(1 << 20, 1 << 20)


def test_contexts_that_cannot_be_measured_are_dense_and_sizes_that_cannot_at_any_as_hinted():
    measured = measure((512,), LENGTHS, lambda rows, tokens: 2.0 if tokens >= LENGTHS[2] else math.nan)
    assert measured.at(512) == LENGTHS[2]
    hinted = measure((128, 512), LENGTHS, lambda rows, tokens: math.nan, hint=Thresholds((200,), (0,)))
    assert (hinted.at(128), hinted.at(512)) == (None, 0)


def test_long_contexts_are_timed_where_short_ones_do_not_gain():
    asked = []
    measure((128,), LENGTHS, lambda rows, tokens: asked.append(tokens) or 2.0)
    assert asked == [min(length for length in LENGTHS if length >= 128)]


def test_sizes_that_time_did_not_reach_are_dense():
    left = iter([1.0, 1.0, 0.0])
    rule = measure(SIZES, LENGTHS, lambda rows, tokens: 2.0, until=lambda: next(left))
    assert rule.at(16384) == rule.at(8192) == 8192
    assert rule.at(8191) is None


def test_a_step_between_two_sizes_has_the_longer_context():
    rule = Thresholds((512, 4096), (18000, 9000))
    assert (rule.at(511), rule.at(4095), rule.at(4096), rule.at(1 << 20)) == (None, 18000, 9000, 9000)
    assert rule.pays(600, 18000)
    assert not rule.pays(600, 17999)


@given(SMALL, SMALL, st.none() | SMALL)
def test_a_rule_is_read_as_it_was_written(prefill, decode, mixed):
    behind = replace(thresholds(decode), until=1 << 21, behind=thresholds(prefill))
    rule = Pays(
        replace(thresholds(prefill), until=1 << 20, behind=behind),
        thresholds(decode),
        None if mixed is None else thresholds(mixed),
    )
    assert parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["", "sometimes", "prefill=8kx1", "prefill=8k decode=never", "prefill=8kx4,9kx8 decode=never",
             "prefill=8kx4,7kx2 decode=never", "prefill=-1x4 decode=never", "prefill=8kx4:16k decode=never",
             "prefill=8kx4/20kx8 decode=never", "prefill=23kx512:16k/never decode=never",
             "prefill=8kx4:16k/9kx4:12k/20kx4 decode=never",
             "prefill=never decode=8kx4:16k/20kx8"],
)  # fmt: skip
def test_a_rule_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="expected always, never, or thresholds"):
        parse(text)


def test_decode_beside_prompts_has_thresholds_of_its_own():
    rule = parse("prefill=never decode=16kx1,8kx4 mixed=64kx4")
    assert [rule.of_decode(captured).at(rows) for rows in (1, 4) for captured in (True, False)] == [
        16384,
        None,
        8192,
        65536,
    ]
    assert rule.told.endswith("from 16k tokens x 1, 8k tokens x 4; sparse decode beside prompts from 64k tokens x 4")
    assert ALWAYS.of_decode(False).at(1) == 0


def test_a_step_is_sparse_from_where_as_many_of_its_requests_as_a_size_counts_are_so_long():
    source, rule = random.Random(0), Thresholds((1, 3, 8), (40_000, 16_000, 5_000))
    seen = set()
    for _ in range(300):
        lengths = [source.choice((100, 6_000, 20_000, 50_000)) for _ in range(source.randrange(1, 12))]
        sizes = zip(rule.rows, rule.tokens, strict=True)
        least = [tokens for rows, tokens in sizes if sum(length >= tokens for length in lengths) >= rows]
        assert rule.least(lengths) == (least[-1] if least else None)
        seen.add(rule.least(lengths))
        alike = rule.least([lengths[0]] * len(lengths))
        assert alike == (rule.at(len(lengths)) if rule.pays(len(lengths), lengths[0]) else None)
    assert seen == {None, *rule.tokens}
    assert (Thresholds().least([9]), EVERYWHERE.least([9]), EVERYWHERE.least([])) == (None, 0, None)


def test_always_and_never_are_words():
    assert (parse("always"), parse("never")) == (ALWAYS, NEVER)
    assert parse("prefill=18kx512 decode=never").told == (
        "sparse prefill from 18k tokens in chunks of 512 rows or more; decode is dense at every length"
    )
    assert parse("prefill=11kx512:16k/23kx8k decode=never").told.startswith(
        "sparse prefill from 11k tokens in chunks of 512 rows or more to 16k tokens, "
        "from 23k tokens in chunks of 8192 rows or more; "
    )
    unlike = "prefill=never:8k/11kx512:16k/never decode=never"
    assert parse(unlike).told.startswith("sparse prefill from 11k tokens in chunks of 512 rows or more to 16k tokens; ")
    assert parse("prefill=never:8k/never decode=never").told.startswith("prefill is dense at every length; ")
