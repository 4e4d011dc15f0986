"""RULER as lm-evaluation-harness has it, dense beside a plan, on a machine without that package.

    python -m sparsekv.bench.ruler_prompts MODEL plan.yaml ruler-32k.jsonl.gz -o results.jsonl

The prompts are those of `tools/build_ruler_prompts.py`; the score is the harness's: the share of the expected strings
that stand in the answer, in whatever case.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sparsekv.bench.suite import generated
from sparsekv.planner.evaluation.predictions import DENSE
from sparsekv.plans.files import load_plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the file: `tokens` are to be generated behind `prompt`, with `outputs` in them."""

    task: str
    length: int
    prompt: str
    outputs: list[str]
    tokens: int

    def score(self, answer: str) -> float:
        """The harness's `string_match_all`."""
        return sum(output.lower() in answer.lower() for output in self.outputs) / len(self.outputs)


@dataclass(frozen=True, slots=True)
class Answer:
    """A method's answer to one prompt."""

    method: str
    task: str
    index: int
    score: float
    text: str


def read_prompts(path: Path, samples: int | None = None) -> dict[str, list[Prompt]]:
    """The first prompts of every task."""
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for line in file:
            prompt = Prompt(**json.loads(line))
            if samples is None or len(prompts[prompt.task]) < samples:
                prompts[prompt.task].append(prompt)
    return prompts


def answers(loaded: LoadedModel, method: str, prompts: Sequence[Prompt], chunk: int | None) -> Iterator[Answer]:
    """Greedy answers, with whatever is applied to the model; the beginning of too long a prompt is cut off."""
    for index, prompt in enumerate(prompts):
        ids = loaded.tokenizer(prompt.prompt)["input_ids"][-(loaded.info.context_length - prompt.tokens) :]
        ids_BS = torch.tensor([ids], device=loaded.model.device)
        (text,) = generated(loaded, ids_BS, prompt.tokens, chunk)
        yield Answer(method, prompt.task, index, prompt.score(text), text)


def table(found: Iterable[Answer]) -> str:
    """Mean scores in points, and prompts on which the plan scores lower and higher than dense."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in found:
        scores[answer.task][answer.method].append(answer.score)
    rows = [f"{'task':<18}{'prompts':>8}{'dense':>8}{'plan':>8}{'lower':>8}{'higher':>8}"]
    for task, by in scores.items():
        pairs = list(zip(by[DENSE], by["plan"], strict=True))
        dense, plan = (100 * sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        lower, higher = sum(b < a for a, b in pairs), sum(b > a for a, b in pairs)
        rows.append(f"{task:<18}{len(pairs):>8}{dense:>8.1f}{plan:>8.1f}{lower:>8}{higher:>8}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs dense and a plan on every prompt; writes answers as they come, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("plan", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--samples", type=int, help="prompts of each task; all by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefill-chunk", type=int, help="tokens fed at once; by default as the plan was verified")
    options = parser.parse_args(arguments)
    plan, loaded = load_plan(options.plan), load_model(options.model, device=options.device)
    chunk = options.prefill_chunk or (plan.quality.step if plan.quality else None)
    found = []
    with options.out.open("w") as file:
        for prompts in read_prompts(options.prompts, options.samples).values():
            for method in (DENSE, "plan"):
                is_plan = method == "plan"
                with apply(loaded.model, plan, info=loaded.info, sparse="always") if is_plan else nullcontext():
                    for answer in answers(loaded, method, prompts, chunk):
                        found.append(answer)
                        print(json.dumps(asdict(answer)), file=file, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
