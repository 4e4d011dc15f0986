"""Rows of benchmarks from files of `sparsekv compare`: tasks weigh alike, intervals are within tasks."""

import numpy as np
import pytest
from build_methods_table import lines, lines_of_tasks, mean_and_draws, merged

from sparsekv.bench.compare_file import CompareFile, CompareRun, Held, Sampled

HELD = {"at": "0.3", "length": 4096}


def file_of(seed: int = 0, **settings) -> CompareFile:
    run = {"model": "m", "architecture": "sha256-2:" + "0" * 64 + ":" + "0" * 16, "weights": None, "dtype": "bfloat16"}
    run |= {"seed": 0, "versions": {}, "phase": "prefill", "suite": "ruler", "reference": "sparsekv", "samples": 9}
    return CompareFile(CompareRun(**run | {"device": "cpu", "backend": "auto"} | settings))


def test_intervals_are_as_wide_as_those_of_a_mean_of_task_means() -> None:
    rng = np.random.default_rng(1)
    tasks = [rng.normal(3.0 * place, 1.0 + place, (count, 1)) for place, count in enumerate((12, 30, 60))]
    mean_W, draws_XW = mean_and_draws(tasks)
    assert mean_W[0] == pytest.approx(sum(float(task.mean()) for task in tasks) / 3)
    deviation = sum(float(task.var()) / len(task) for task in tasks) ** 0.5 / 3
    assert draws_XW.std() == pytest.approx(deviation, rel=0.05)


def test_tasks_weigh_alike_and_differences_are_of_the_prompts_of_both() -> None:
    rng, parts = np.random.default_rng(2), [file_of(), file_of()]
    scores: dict[tuple[str, str, int], float] = {}
    for place, (task, count) in enumerate((("vt", 3), ("cwe", 8))):
        file = parts[place]
        for method in ("sparsekv", "stem"):
            file.add(Held(method=method, target=0.3, **HELD))
        for number in range(count):
            for method, at in (("dense", "1"), ("sparsekv", "0.3"), *([("stem", "0.3")] if number < 3 else [])):
                score = scores[method, task, number] = float(rng.random())
                drawn = {"task": task, "number": number, "score": score, "kl": 0.5 if method == "stem" else 0.25}
                file.add(Sampled(method=method, at=at, length=4096, share=0.3, **drawn))
    table = {line[0]: line for line in lines(merged(parts), 4096, "0.3")}

    def mean(*methods: str, most: int) -> float:
        each = [
            [
                scores[methods[-1], task, n] - (scores[methods[0], task, n] if len(methods) > 1 else 0.0)
                for n in range(c)
            ]
            for task, c in (("vt", 3), ("cwe", most))
        ]
        return 100.0 * sum(map(np.mean, each)) / 2

    assert table["dense"][1:4] == ("3 to 8", "0.300", f"{mean('dense', most=8):.1f}")
    assert table["sparsekv"][4].startswith(f"{mean('dense', 'sparsekv', most=8):+.1f} [")
    assert table["Stem without values"][5].startswith(f"{mean('stem', 'sparsekv', most=3):+.1f} [")
    assert table["divergence of sparsekv over that of Stem without values"][1] == "0.500 [0.500, 0.500]"

    head, _, *tasks = lines_of_tasks(merged(parts), 4096, "0.3")
    assert head[3:] == ("minus dense", "minus Stem without values")
    for (task, count), line in zip((("vt", 3), ("cwe", 8)), tasks, strict=True):
        ours = [100.0 * scores["sparsekv", task, n] for n in range(count)]
        assert line[:3] == (f"`{task}`", str(count), f"{np.mean(ours):.1f}")
        for method, most, cell in (("dense", count, line[3]), ("stem", 3, line[4])):
            less = np.mean([ours[n] - 100.0 * scores[method, task, n] for n in range(most)])
            assert cell.startswith(f"{less:+.1f} [")
            assert cell.endswith(", 3 prompts") == (most < count)


def test_methods_that_lack_tasks_come_last_and_say_so() -> None:
    file = file_of()
    for method, at in (("dense", "1"), ("sparsekv", "0.3"), ("stem", "0.3")):
        file.add(*([Held(method=method, target=0.3, **HELD)] if method != "dense" else []))
        for task in ("vt", "cwe")[: 1 if method == "stem" else 2]:
            score = 1.0 if method == "stem" else 0.5
            file.add(Sampled(method=method, at=at, length=4096, task=task, number=0, score=score, kl=0.1))
    assert [line[:2] for line in list(lines(file, 4096, "0.3"))[2:5]] == [
        ("dense", "1 to 1"),
        ("sparsekv", "1 to 1"),
        ("Stem without values", "1 to 1, 1 tasks"),
    ]


def test_tasks_with_another_wording_are_not_joined() -> None:
    parts = [file_of(), file_of()]
    for file, score in zip(parts, (0.25, 0.5), strict=True):
        for task in ("vt", "cwe"):
            for method, at in (("dense", "1"), ("sparsekv", "0.3")):
                drawn = {"score": score if task == "vt" else 0.5, "kl": score}
                file.add(Sampled(method=method, at=at, length=4096, task=task, number=3, **drawn))
    with pytest.raises(SystemExit, match=r"found others of vt$"):
        merged(parts)
    assert len(merged([parts[0], parts[0]]).all(Sampled)) == 4


def test_files_of_other_runs_are_refused() -> None:
    with pytest.raises(SystemExit, match="device: gpu there, cpu here"):
        merged([file_of(), file_of(device="gpu")])
