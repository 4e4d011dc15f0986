"""Rows of docs/benchmarks.md and docs/lab/peers.md from files of `sparsekv compare`, of one run in parts too:
`python tools/build_methods_table.py FILE ...`.

Scores, differences and divergences are means over tasks, which weigh alike however many samples each has. A difference
is paired: of the samples that both methods have. Intervals are of a bootstrap within tasks. Methods that lack tasks of
dense come last. Where dense has other scores on equal samples, a task had other prompts: leave out the older records.

Shapes: N samples of a task, W values of a sample, X draws.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sparsekv.bench.compare_file import DENSE_NAME, CompareFile, CompareRun, Held, Sampled, Searched, shown
from sparsekv.plans.types import format_length

Values = npt.NDArray[np.float64]
Samples = dict[tuple[str, int], Sampled]
_DRAWS = 10_000
HEADER = ("", "prompts a task", "share", "score", "minus dense, 95%", "plan minus it, 95%", "divergence, 95%")


def merged(files: Sequence[CompareFile]) -> CompareFile:
    """One file with the records of all; of equal keys that of the first file counts.

    Raises:
        SystemExit: a file is of another run, or of other prompts.
    """
    whole = CompareFile(files[0].settings)
    for file in files:
        if told := "; ".join(file.settings.differences(dict(whole.settings))):
            raise SystemExit(f"expected the run of {files[0].path} in {file.path}, found another: {told}")
        for kind in (Searched, Held, Sampled):
            known = whole.all(kind)
            if kind is Sampled and (others := sorted(other_prompts(known, file.all(kind)))):
                raise SystemExit(
                    f"expected the prompts of files before {file.path}, found others of {', '.join(others)}"
                )
            whole.add(*(record for key, record in file.all(kind).items() if key not in known))
    return whole


def other_prompts(known: Mapping[Hashable, Sampled], more: Mapping[Hashable, Sampled]) -> set[str]:
    """The tasks whose wording has changed between two files: dense has other scores on equal samples."""
    both = (key for key in known.keys() & more.keys() if known[key].method == DENSE_NAME[0])
    return {more[key].task for key in both if known[key].score != more[key].score}


def mean_and_draws(tasks: Sequence[Values]) -> tuple[Values, Values]:
    """The means over tasks [W] of samples [N, W] of each, and those [X, W] of samples that are drawn again."""
    rng = np.random.default_rng(0)
    drawn = [task_NW[rng.integers(len(task_NW), size=(_DRAWS, len(task_NW)))].mean(1) for task_NW in tasks]
    return np.mean([task_NW.mean(0) for task_NW in tasks], 0), np.mean(drawn, 0)


def by_task(*samples: Samples, kl: bool = False) -> list[Values]:
    """Scores in percent, or divergences, of the samples that all methods have: [N, W] of each task."""
    both = [key for key in samples[0] if all(key in other for other in samples)]
    rows = {key: [some[key].kl if kl else 100.0 * some[key].score for some in samples] for key in both}
    return [np.array([rows[key] for key in both if key[0] == task]) for task in dict(both)]


def with_interval(mean: float, draws_X: Values, form: str) -> str:
    return " ".join((form, f"[{form}, {form}]")).format(mean, *np.quantile(draws_X, (0.025, 0.975)))


def difference(one: Samples, other: Samples) -> str:
    """The score of other minus that of one."""
    mean_W, draws_XW = mean_and_draws(by_task(one, other))
    return with_interval(mean_W[1] - mean_W[0], draws_XW[:, 1] - draws_XW[:, 0], "{:+.1f}")


def samples_of(file: CompareFile, length: int, at: str) -> dict[str, Samples]:
    methods: dict[str, Samples] = {}
    for one in file.all(Sampled).values():
        if one.length == length and one.at in (at, DENSE_NAME[1]):
            methods.setdefault(one.method, {})[one.task, one.number] = one
    return methods


def lines(file: CompareFile, length: int, at: str) -> Iterator[tuple[str, ...]]:
    """A table of all methods, dense first, then by tasks and score; and behind it ratios of divergences."""
    methods = samples_of(file, length, at)
    dense, reference = methods.pop(DENSE_NAME[0]), file.settings.reference
    scores = {name: float(mean_and_draws(by_task(some))[0][0]) for name, some in methods.items()}
    tasks = {name: len(by_task(some)) for name, some in methods.items()}
    yield HEADER
    yield ("---",) * len(HEADER)
    ordered = sorted(methods.items(), key=lambda item: (-tasks[item[0]], -scores[item[0]]))
    for name, some in [(DENSE_NAME[0], dense), *ordered]:
        counts = [len(task_NW) for task_NW in by_task(some)]
        shares: dict[str, list[float]] = {}
        for one in some.values():
            if one.share is not None:
                shares.setdefault(one.task, []).append(one.share)
        mean_W, draws_XW = mean_and_draws(by_task(some, kl=True))
        yield (
            shown(file, name),
            f"{min(counts)} to {max(counts)}" + (f", {len(counts)} tasks" if len(counts) < len(by_task(dense)) else ""),
            f"{np.mean([np.mean(each) for each in shares.values()]):.3f}" if shares else "",
            f"{scores[name] if name in scores else mean_and_draws(by_task(dense))[0][0]:.1f}",
            difference(dense, some) if name != DENSE_NAME[0] else "",
            difference(some, methods[reference]) if name not in (DENSE_NAME[0], reference) else "",
            with_interval(mean_W[0], draws_XW[:, 0], "{:.4f}"),
        )
    for name, some in methods.items():
        if name != reference:
            mean_W, draws_XW = mean_and_draws(by_task(methods[reference], some, kl=True))
            ratio = with_interval(mean_W[0] / mean_W[1], draws_XW[:, 0] / draws_XW[:, 1], "{:.3f}")
            yield (f"divergence of {reference} over that of {shown(file, name)}", ratio)


def lines_of_tasks(file: CompareFile, length: int, at: str) -> Iterator[tuple[str, ...]]:
    """A table of the reference's score by task, and minus that of each other method on the prompts of both."""
    methods = samples_of(file, length, at)
    ours = methods.pop(file.settings.reference)
    yield ("", "prompts", "score", *(f"minus {shown(file, name)}" for name in methods))
    yield ("---",) * (3 + len(methods))
    for task in dict.fromkeys(task for task, _ in ours):
        both = {key: one for key, one in ours.items() if key[0] == task}
        cells = []
        for some in methods.values():
            count = sum(key in some for key in both)
            told = difference(some, both) if count else ""
            cells.append(told + (f", {count} prompts" if 0 < count < len(both) else ""))
        yield (f"`{task}`", str(len(both)), f"{mean_and_draws(by_task(both))[0][0]:.1f}", *cells)


def main() -> None:
    file = merged([CompareFile.read(CompareRun, Path(path)) for path in sys.argv[1:]])
    sampled = {one.length for one in file.all(Sampled).values()}
    if not sampled:
        raise SystemExit("expected samples, found settings alone; repeat the command of `sparsekv compare`")
    for length, at in dict.fromkeys((one.length, one.at) for one in file.all(Held).values() if one.length in sampled):
        print(f"\n{format_length(length)}, {file.settings.phase}, held to {at}\n")
        for line in (*lines(file, length, at), (), *lines_of_tasks(file, length, at)):
            print(f"| {' | '.join(line)} |" if line else "")


if __name__ == "__main__":
    main()
