"""Clients of a running server (`vllm serve`), by the OpenAI API: streaming, many at once, for a while.

    python -m sparsekv.bench.server_requests http://localhost:8000/v1 [--model tiny-retriever] [--seconds 300]
        [--clients 32] [--lengths 2k,128k] [--judged 32k] [--samples 200]

Needs the package `openai`, and the model's tokenizer here. The prompts are retrieval tasks of lengths that are spread
evenly on a logarithmic scale; answers to prompts of up to --judged tokens, what the model can do, are judged by what
stands before their end. Waits until the server is up, and prints one line of JSON: requests, failures by their message,
right answers, and the median time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_sample, matches, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.types import parse_length, parse_lengths
from sparsekv.runtime.hf.load import load_tokenizer

NEW = 48  # tokens of an answer
_TRIES = 30  # of finding the server, some seconds apart


@dataclass
class Answers:
    """Holds what came back."""

    finished: int = 0
    judged: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)


def main() -> None:
    """Asks for a while, and prints what came back."""
    args = _arguments()
    samples = _samples(args)
    print(json.dumps(asyncio.run(_ask_all(args, samples))), flush=True)


def _samples(args: argparse.Namespace) -> list[Sample]:
    kit, source = prepare(load_tokenizer(resolve_model(args.model)), Split.EVALUATION), random.Random(args.seed)
    low, high = args.lengths
    lengths = [round(low * (high / low) ** (number / max(args.samples - 1, 1))) for number in range(args.samples)]
    return [
        make_sample(TASKS[source.choice(RETRIEVAL_TASKS)], kit, length, args.seed, number)
        for number, length in enumerate(lengths)
    ]


async def _ask_all(args: argparse.Namespace, samples: list[Sample]) -> dict[str, Any]:
    from openai import AsyncOpenAI

    answers = Answers()
    async with AsyncOpenAI(base_url=args.url, api_key="none", max_retries=0, timeout=600.0) as client:
        name = (await client.with_options(max_retries=_TRIES).models.list()).data[0].id
        start = time.perf_counter()

        async def ask_on(seed: int) -> None:
            source = random.Random(f"{args.seed} {seed}")
            while time.perf_counter() - start < args.seconds:
                await _ask(client, name, source.choice(samples), args.judged, answers)

        await asyncio.gather(*(ask_on(number) for number in range(args.clients)))
    return {
        "finished": answers.finished,
        "failed": answers.failed,
        "right": f"{answers.judged - len(answers.wrong)} of {answers.judged}",
        "wrong": answers.wrong[:10],
        "first_token_s": round(statistics.median(answers.first_s or [0.0]), 3),
        "seconds": round(time.perf_counter() - start, 1),
    }


async def _ask(client: Any, name: str, sample: Sample, judged: int, answers: Answers) -> None:
    start, text, first = time.perf_counter(), "", 0.0
    try:
        stream = await client.completions.create(
            model=name, prompt=sample.prompt_ids.tolist(), max_tokens=NEW, temperature=0.0, stream=True
        )
        async for part in stream:
            first = first or time.perf_counter()
            text += part.choices[0].text
    except Exception as error:  # whatever a client of this package meets is the finding
        answers.failed[f"{type(error).__name__}: {error}"[:200]] += 1
        return
    answers.finished += 1
    answers.first_s.append(first - start)
    if len(sample.prompt_ids) <= judged:
        answers.judged += 1
        if not matches(text, sample.answer):
            answers.wrong.append(f"{len(sample.prompt_ids)} tokens: expected {sample.answer!r}, found {text[:60]!r}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://localhost:8000/v1")
    parser.add_argument("--model", default="tiny-retriever", help="whose tokenizer makes the prompts")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=32, help="that wait for an answer at a time")
    parser.add_argument("--lengths", type=parse_lengths, default="2k,128k", help="shortest and longest prompt")
    parser.add_argument("--judged", type=parse_length, default="32k", help="longest prompt whose answer is judged")
    parser.add_argument("--samples", type=int, default=200, help="different prompts")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
