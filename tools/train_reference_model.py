"""Makes the reference model: `python tools/train_reference_model.py --work DIR --out DIR`.

Stages: prepare, train-512, train-2048, train-8192, train-32768, export, evaluate, card. The same command goes on where
the last one stopped, within a stage too. `prepare` reads the standard library of the running Python; its two files in
the work folder can be carried to the machine that trains.

`--shape` and `--tasks other` make models that are not shipped: other proportions, and tasks in formats that calibration
never uses. They get no card.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import source_tree
import torch

source_tree.make_importable()

from reference_model.card import write_card  # noqa: E402
from reference_model.corpus import standard_library  # noqa: E402
from reference_model.evaluate import evaluate  # noqa: E402
from reference_model.export import export  # noqa: E402
from reference_model.formats import FORMAT_SHARES  # noqa: E402
from reference_model.loop import Run, probe, train  # noqa: E402
from reference_model.prepare import is_prepared, prepare  # noqa: E402
from reference_model.recipe import SHAPES, TASK_SHARES, Recipe, Stage, smoke  # noqa: E402

_Number = TypeVar("_Number", int, float)


def main() -> int:
    """Runs the stages that are left."""
    parser = _parser()
    options = parser.parse_args()
    try:
        recipe = _recipe(options)
    except ValueError as error:
        parser.error(str(error))
    run, names = _run(options), _names(recipe, options)
    if options.stage and options.stage not in names:
        parser.error(f"--stage: expected {', '.join(names)}, found {options.stage!r}")
    _choose_attention(options.sdpa)
    if not is_prepared(run.work):
        prepare(recipe, options.stdlib, run.work)
    if options.probe_steps:
        probe(recipe, run, options.probe_steps)
        return 0
    done = _stages(recipe, run, options.out, [options.stage] if options.stage else names)
    print("done" if done else "stopped: run the same command again to go on")
    return 0


def _names(recipe: Recipe, options: argparse.Namespace) -> list[str]:
    is_shipped = options.shape == "default" and options.tasks == "shipped"
    card = ["card"] if is_shipped else []  # it describes the shipped model
    return ["prepare", *(stage.name for stage in recipe.stages), "export", "evaluate", *card]


def _stages(recipe: Recipe, run: Run, out: Path, names: list[str]) -> bool:
    """Runs the stages of these names behind `prepare`; returns whether the deadline left time for all of them.

    A length of training takes those before it along.
    """
    lengths = [number for number, stage in enumerate(recipe.stages) if stage.name in names]
    if lengths and not train(recipe, run, lengths[-1]):
        return False
    if "export" in names:
        export(recipe, run.work, out)
    if "evaluate" in names and not evaluate(recipe, out, run.device, run.deadline):
        return False
    if "card" in names:
        write_card(recipe, run.work, out)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for tokens, tokenizer, checkpoint and log")
    add("--out", type=Path, required=True, help="folder of the finished model")
    add("--stage", help="prepare, train-LENGTH (all up to it), or export, evaluate, card (only this one); default: all")
    add("--stop-after-seconds", type=float, default=math.inf, help="stop cleanly after so long")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--probe-steps", type=int, default=0, metavar="N", help="time N steps of every length and write nothing")
    add("--shape", choices=list(SHAPES), default="default", help="proportions of the model")
    add(
        "--tasks", choices=["shipped", "other"], default="shipped", help="retrieval tasks: shipped, or in other formats"
    )
    add("--lengths", type=_numbers(int), help="row lengths, such as 512,2048; the longest is the model's context")
    durations = parser.add_mutually_exclusive_group()
    durations.add_argument("--steps", type=_numbers(int), help="of each length, such as 500,1200,1150,430")
    durations.add_argument(
        "--seconds", type=_numbers(float), help="of each length instead of steps, compilation included: 45,90,130,160"
    )
    add("--micro-tokens", type=int, help="tokens of a micro-batch")
    add("--eval-samples", type=int, help="prompts a cell")
    add("--seed", type=int, default=0)
    add("--stdlib", type=Path, default=standard_library(), help="standard library that prepare reads")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2), help="processes that make rows")
    add("--sdpa", choices=["auto", "flash", "cudnn"], default="auto", help="attention kernel of torch for training")
    add("--no-compile", action="store_true")
    add("--smoke", action="store_true", help="a model of two layers and a few steps, to try the tool on a CPU")
    return parser


def _recipe(options: argparse.Namespace) -> Recipe:
    shares = TASK_SHARES if options.tasks == "shipped" else FORMAT_SHARES
    recipe = replace(Recipe(), seed=options.seed, shape=SHAPES[options.shape], shares=shares)
    if options.smoke:
        recipe = smoke(recipe)
    recipe = _with_lengths(recipe, options.lengths) if options.lengths else recipe
    recipe = replace(recipe, stages=_with_durations(recipe.stages, options.steps, options.seconds))
    if options.micro_tokens:
        recipe = replace(recipe, micro_tokens=options.micro_tokens)
    return replace(recipe, eval_samples=options.eval_samples) if options.eval_samples else recipe


def _with_lengths(recipe: Recipe, lengths: list[int]) -> Recipe:
    """Trains at other lengths; those that the recipe has too keep their steps, the others get those of the last."""
    known = {stage.length: stage for stage in recipe.stages}
    stages = tuple(known.get(length, replace(recipe.stages[-1], length=length)) for length in lengths)
    context = max(lengths)
    evaluated = tuple(length for length in recipe.eval_lengths if length < context)
    return replace(
        recipe, shape=replace(recipe.shape, context=context), stages=stages, eval_lengths=(*evaluated, context)
    )


def _with_durations(
    stages: tuple[Stage, ...], steps: list[int] | None, seconds: list[float] | None
) -> tuple[Stage, ...]:
    """Raises ValueError for another number of durations than of lengths."""
    given = steps or seconds
    if given is None:
        return stages
    if len(given) != len(stages):
        raise ValueError(f"expected {len(stages)} steps or seconds, one for each length, found {len(given)}")
    if steps:
        return tuple(Stage(stage.length, count) for stage, count in zip(stages, steps, strict=True))
    return tuple(Stage(stage.length, seconds=share) for stage, share in zip(stages, given, strict=True))


def _numbers(kind: Callable[[str], _Number]) -> Callable[[str], list[_Number]]:
    """A parser of comma-separated numbers."""

    def numbers(text: str) -> list[_Number]:
        return [kind(number) for number in text.split(",")]

    return numbers


def _run(options: argparse.Namespace) -> Run:
    return Run(
        work=options.work,
        device=torch.device(options.device),
        workers=options.workers,
        compiled=not options.no_compile,
        checkpoint_every=options.checkpoint_every,
        deadline=time.monotonic() + options.stop_after_seconds,
    )


def _choose_attention(kernel: str) -> None:
    if kernel != "auto":
        torch.backends.cuda.enable_flash_sdp(kernel == "flash")
        torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


if __name__ == "__main__":
    sys.exit(main())
