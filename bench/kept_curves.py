"""What layers keep of prompts, by our search and by published rules, at equal bytes: divergence and right answers.

    python -m sparsekv.bench.kept_curves tiny-retriever --length 2k --retain 0.5,0.25

The layout of `sparsekv plan --retain` is found on calibration prompts. It and the others run on the same held-out ones:
behind each prompt the answer and the text that dense goes on with are rows of one pass. An answer is right if every
token of it is the likeliest, which is when it is generated. Rules, each with as many tokens in all layers together:

- `sparsekv`: what `plan` writes: the search, or a layout settled by hand if that diverged less in calibration;
- `first layers whole`: the first three layers keep all, the others alike (as in forks of vLLM, 2024);
- `pyramid`: fewer tokens the deeper a layer is (PyramidKV, 2024);
- `evenly`: all layers alike, by our score;
- `snapkv`: all layers alike, by the attention of the last 64 queries, each KV head its own tokens (SnapKV, 2024);
- `sinks and window`: the first four tokens and the last ones (StreamingLLM, 2023);
- `random`: the first four tokens, the last 128, and any others.

Shapes: S tokens of a prompt, R rows of a text, V vocabulary; g is 1 or the number of KV heads.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparsekv.planner.evaluation.predictions import divergence
from sparsekv.planner.gates import ERROR, FINDING
from sparsekv.planner.job import Job, job_of
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.profile.calibration import CalibrationPrompt, held_out, whole_prompt
from sparsekv.planner.progress import BarProgress, Progress
from sparsekv.planner.retain_search import by_hand, retention_trials, rule_of, search_retention
from sparsekv.planner.sequential import Range, is_above
from sparsekv.planner.tasks import Split, prepare
from sparsekv.plans.patterns import tokens
from sparsekv.plans.phases import Retention
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.hf.load import load_model

OURS, DENSE, RANDOM = "sparsekv", "dense", "random"
_NAMES = {"evenly": "evenly", "behind whole first layers": "first layers whole", "as a pyramid": "pyramid"}
_SNAP = 64  # queries that SnapKV observes, and keeps the tokens of
_SINK = 4

Rules = Mapping[int, Retention]
"""Of each evicting layer."""
Prompts = Mapping[str, Sequence[CalibrationPrompt]]
"""By task."""


@dataclass(slots=True)
class Found:
    """One rule on all held-out prompts."""

    share: float  # of the bytes
    nats: list[float] = field(default_factory=list)
    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))  # by task

    def add(self, task: str, prompt: CalibrationPrompt, dense_1RV: torch.Tensor, found_1RV: torch.Tensor) -> None:
        """One prompt."""
        answer = prompt.ids[prompt.answer_start :]
        picked_R = found_1RV[0].argmax(-1).tolist()
        self.nats.append(float(divergence(dense_1RV, found_1RV)))
        self.right[task].append(picked_R[: len(answer)] == answer.tolist())


def rules_at(job: Job, progress: Progress | None = None) -> dict[str, Rules]:
    """The rules at `retain` of the bytes; of `random` what is kept without a choice counts."""
    layers, options, length = job.model.full_layers, job.options, job.options.lengths[-1]
    assert options.retain is not None, "asked for below"
    ours, told = search_retention(job, progress)
    (progress or Progress()).say("\n".join(told))
    layouts = {_NAMES[name]: layout for name, layout in by_hand(layers, options.retain, length).items()}
    even, kept = rule_of((0,), layouts["evenly"][layers[0]]), round(options.retain * length)
    snap = {"keep": tokens(kept - _SNAP), "sink": 0, "recent": _SNAP, "observe": _SNAP, "heads": "per_kv_head"}
    alike = {"snapkv": snap, "sinks and window": {"keep": tokens(0), "recent": kept - _SINK}, RANDOM: {}}
    return {
        OURS: {layer: rule for rule in ours if rule.is_lossy for layer in rule.layers},
        **{name: {layer: rule_of((layer,), share) for layer, share in own.items()} for name, own in layouts.items()},
        **{name: dict.fromkeys(layers, even.model_copy(update=changes)) for name, changes in alike.items()},
    }


def held_out_prompts(job: Job, samples: int) -> Prompts:
    """So many of each task of the job."""
    kit, length = prepare(job.subject.tokenizer, Split.EVALUATION), job.options.lengths[-1]
    drawn = {task: held_out(kit, task, length, samples, job.options.seed) for task in job.options.tasks}
    return {task: [whole_prompt(sample) for sample in own] for task, own in drawn.items()}


def measured(
    job: Job, prompts: Prompts, rules: Mapping[str, Rules], progress: Progress | None = None
) -> dict[str, Found]:
    """Every rule, and dense, on the same prompts."""
    layers, length = job.model.full_layers, job.options.lengths[-1]
    found = {DENSE: Found(1.0), **{name: Found(kept_share(own, layers, length)) for name, own in rules.items()}}
    draws = torch.Generator().manual_seed(job.options.seed)
    with (
        retention_trials(job.subject) as trials,
        (progress or Progress()).stage("held out", total=sum(map(len, prompts.values()))) as step,
    ):
        for task, prompt in ((task, prompt) for task, own in prompts.items() for prompt in own):
            prefix = trials.observed(prompt, job.options, len(prompt.ids) - prompt.answer_start)
            found[DENSE].add(task, prompt, prefix.dense_1RV, prefix.dense_1RV)
            for name, own in rules.items():
                kept_gS = {layer: trials.kept(prefix, layer, rule) for layer, rule in own.items()}
                if name == RANDOM:
                    kept_gS = {layer: shuffled(kept, own[layer], draws) for layer, kept in kept_gS.items()}
                found[name].add(task, prompt, prefix.dense_1RV, trials.log_probabilities(prefix, kept_gS))
            step.advance()
    return found


def shuffled(kept_gS: torch.Tensor, rule: Retention, draws: torch.Generator) -> torch.Tensor:
    """As many tokens between sinks and recent ones, but any."""
    sink, end = rule.sink or 0, kept_gS.shape[1] - (rule.recent or 0)
    order_S = torch.randperm(end - sink, generator=draws).to(kept_gS.device) + sink
    found_gS = kept_gS.clone()
    found_gS[:, sink:end] = kept_gS[:, order_S]
    return found_gS


def kept_share(rules: Rules, layers: Sequence[int], length: int) -> float:
    """Of the bytes of these layers."""
    return float(np.mean([rules[layer].kept_tokens(length) / length if layer in rules else 1.0 for layer in layers]))


def lines(found: Mapping[str, Found], length: int) -> Iterator[str]:
    """A table in Markdown; accuracy is of the tasks that dense solves, and a star says that a drop of it is shown."""
    dense = found[DENSE].right
    solved = [task for task, right in dense.items() if task != "perplexity" and np.mean(right) >= Gate().solved]
    yield f"| at {format_length(length)} | bytes | nats | lost / won of {sum(len(dense[one]) for one in solved)} | " + (
        " | ".join(solved) + " |"
    )
    yield "|---" * (4 + len(solved)) + "|"
    for name, own in found.items():
        pairs = [pair for task in solved for pair in zip(dense[task], own.right[task], strict=True)]
        lost, won = (sum(pair == changed for pair in pairs) for changed in ((True, False), (False, True)))
        tasks = " | ".join(
            f"{100 * np.mean(own.right[task]):.0f}%{'*' * drop_shown(dense[task], own.right[task])}" for task in solved
        )
        yield f"| {name} | {own.share:.3f} | {np.mean(own.nats):.3g} | {lost} / {won} | {tasks} |"


def drop_shown(before: Sequence[bool], after: Sequence[bool]) -> bool:
    """Whether right answers were lost, by the paired test of the gates."""
    rounds = [[float(was) - float(is_now)] for was, is_now in zip(before, after, strict=True)]
    return is_above(rounds, FINDING, Range(-1.0, 1.0, 0.0, 0.1), ERROR)


def main() -> None:
    """Prints a table for each share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=parse_lengths, default=(2048,))
    parser.add_argument("--retain", type=lambda text: tuple(map(float, text.split(","))), default=(0.5, 0.25))
    parser.add_argument("--samples", type=int, default=5, help="prompts of the search")
    parser.add_argument("--held-out", type=int, default=4, help="prompts of each task")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    loaded, progress = load_model(args.model, device=args.device), BarProgress()
    for retain in args.retain:
        options = PlanOptions(lengths=args.length, samples=args.samples, retain=retain, verify_samples=0)
        job = job_of(loaded, options, progress=progress)
        found = measured(job, held_out_prompts(job, args.held_out), rules_at(job, progress), progress)
        print(*lines(found, args.length[-1]), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
