"""Measures which share of the tokens that a plan drafts inside vLLM is accepted, by kind of text, length and draft.

    python -m sparsekv.bench.exact_acceptance MODEL --plan plan.yaml [--lengths 8k,32k] [--samples 4] [--new 128]
        [--draft 6]

Quotations of a text and of code, a question about one of many keys, and plain text that goes on: greedy answers of
`--new` tokens, a request at a time, with a draft of the same size in every step, whether it pays or not. A line of JSON
for each kind and length: the share of drafts of which the first, the first two, ... count, and the tokens a cycle that
drafts of 1, 2, ... tokens would have had by it (a shorter draft is the beginning of a longer one). Needs vLLM with
model runner V2, as exact output does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from sparsekv.bench.vllm_engines import asking_for_ours, greedy, make_engine
from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.settings import preset_vllm

KINDS = ("quote_text", "quote_code", "kv_retrieval", "perplexity")
_BY_POSITION, _DRAFTS = "vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:spec_decode_num_drafts"


def main() -> None:
    """Prints a line for each kind and length."""
    args = _arguments()
    preset_vllm()
    llm = _engine(args)
    kit = prepare(llm.get_tokenizer(), Split.EVALUATION)
    for length in args.lengths:
        for kind in args.kinds:
            samples = (make_sample(TASKS[kind], kit, length - args.new, args.seed, at) for at in range(args.samples))
            prompts, before = [one.prompt_ids.tolist() for one in samples], counts(llm)
            for ids in prompts:
                llm.generate([{"prompt_token_ids": ids}], greedy(args.new), use_tqdm=False)
            row = {"length": format_length(length), "kind": kind, "samples": args.samples}
            print(json.dumps(row | accepted(before, counts(llm))), flush=True)


def _engine(args: argparse.Namespace) -> Any:
    own = {"plan": str(args.plan), "exact": True, "draft": args.draft, "allow_untested": True}
    llm = make_engine(
        resolve_model(args.model).path_or_id,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=max(args.lengths),
        max_num_batched_tokens=args.step,
        max_num_seqs=2,
        **({"kv_cache_memory_bytes": args.cache << 30, "gpu_memory_utilization": 0.1} if args.cache else {}),
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        disable_log_stats=False,
        kernel_config={"enable_jit_warmup": False},  # of samplers, which takes minutes
        additional_config={"sparsekv": own},
        **asking_for_ours(),
    )
    llm.llm_engine.engine_core.engine_core.scheduler.drafting.next = lambda lengths: args.draft
    return llm


def counts(llm: Any) -> list[int]:
    """Returns how many drafts there were, and how many of them had their first, second, ... token accepted."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    if _DRAFTS not in found:
        return []
    return [int(found[_DRAFTS].value), *map(int, found[_BY_POSITION].values)]


def accepted(before: Sequence[int], now: Sequence[int]) -> dict[str, Any]:
    """Returns what the drafts between two counts came to."""
    if list(now) == list(before):
        return {"drafts": 0}
    drafts, *by_position = (new - old for new, old in zip(now, before or [0] * len(now), strict=True))
    shares = [count / drafts for count in by_position]
    return {
        "drafts": drafts,
        "accepted": [round(share, 4) for share in shares],
        "tokens_a_cycle": [round(1 + more, 3) for more in accumulate(shares)],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--lengths", type=parse_lengths, default="8k,32k")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--draft", type=int, default=6)
    parser.add_argument("--step", type=int, default=8192, help="tokens that the engine computes in a step")
    parser.add_argument("--cache", type=int, help="GiB of keys and values, beside other work on a GPU; all by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.kinds) - TASKS.keys():
        parser.error(f"expected --kinds among {', '.join(TASKS)}, found {', '.join(sorted(unknown))}")
    if min(args.samples, args.draft, args.new, 1 if args.cache is None else args.cache) < 1:
        parser.error("expected --samples, --draft, --new and --cache of 1 at least, found less")
    if min(args.lengths) <= args.new:
        parser.error(f"expected --lengths above --new, {args.new}, found {min(args.lengths)}")
    return args


if __name__ == "__main__":
    main()
