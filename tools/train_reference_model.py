"""Makes the reference model: `python tools/train_reference_model.py --work DIR --out DIR`.

Stages: prepare, train-512, train-2048, train-8192, train-32768, export, evaluate, card. The same command goes on where
the last one stopped, within a stage too. `prepare` reads the standard library of the running Python; its two files in
the work folder can be carried to the machine that trains.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import source_tree
import torch

source_tree.make_importable()

from reference_model.card import write_card  # noqa: E402
from reference_model.corpus import standard_library  # noqa: E402
from reference_model.evaluate import evaluate  # noqa: E402
from reference_model.export import export  # noqa: E402
from reference_model.loop import Run, probe, train  # noqa: E402
from reference_model.prepare import is_prepared, prepare  # noqa: E402
from reference_model.recipe import Recipe, Stage, smoke  # noqa: E402


def main() -> int:
    """Runs the stages that are left."""
    parser = _parser()
    options = parser.parse_args()
    recipe, run = _recipe(options), _run(options)
    if options.stage and options.stage not in _names(recipe):
        parser.error(f"--stage: expected {', '.join(_names(recipe))}, found {options.stage!r}")
    _choose_attention(options.sdpa)
    if not is_prepared(run.work):
        prepare(recipe, options.stdlib, run.work)
    if options.probe_steps:
        probe(recipe, run, options.probe_steps)
        return 0
    done = _stages(recipe, run, options.out, options.stage)
    print("done" if done else "stopped: run the same command again to go on")
    return 0


def _names(recipe: Recipe) -> list[str]:
    return ["prepare", *(stage.name for stage in recipe.stages), "export", "evaluate", "card"]


def _stages(recipe: Recipe, run: Run, out: Path, until: str | None) -> bool:
    """Runs stages up to and including `until`; returns whether the deadline left time for all of them."""
    names = [stage.name for stage in recipe.stages]
    if until == "prepare":
        return True
    if until not in ("export", "evaluate", "card"):
        last = names.index(until) if until else len(names) - 1
        if not train(recipe, run, last):
            return False
    if until in names:
        return True
    if until in (None, "export"):
        export(recipe, run.work, out)
    if until in (None, "evaluate") and not evaluate(recipe, out, run.device, run.deadline):
        return False
    if until in (None, "card"):
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
    add("--steps", help="steps of each length, such as 500,1200,1150,430; default: the recipe's")
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
    recipe = replace(Recipe(), seed=options.seed)
    if options.smoke:
        recipe = smoke(recipe)
    if options.steps:
        steps = [int(number) for number in options.steps.split(",")]
        stages = zip(recipe.stages, steps, strict=True)
        recipe = replace(recipe, stages=tuple(Stage(stage.length, count) for stage, count in stages))
    if options.micro_tokens:
        recipe = replace(recipe, micro_tokens=options.micro_tokens)
    return replace(recipe, eval_samples=options.eval_samples) if options.eval_samples else recipe


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
