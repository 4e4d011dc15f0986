"""What share of a plan's drafts count on a real model, and whether exact output is dense attention's own.

    python -m sparsekv.bench.acceptance MODEL --plan plan.yaml [--lengths 16k,32k] [--samples 4] [--new 128]
        [--dtype float32] [--device cuda] [--draft 6]

Greedy continuations of held-out quotations, retrieval tasks and plain text, by `exact` and by this runtime dense, an
end token ignored. Drafts are as long as pays, or always of --draft tokens. Where two texts part, `gap` is how far apart
dense attention has the logits of the two tokens: texts may differ where that is rounding. `ms` is of a token, the first
ones included, which capture the steps. Prints a line of JSON a length.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsekv.planner.tasks import TASKS, Split, make_samples, prepare
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.drafts import DraftLength
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import device_name

_TASKS = ("quote_text", "quote_code", "niah_multikey", "perplexity")


@dataclass(frozen=True, slots=True)
class Found:
    """Of one length; `gaps` of the texts that differ from dense attention's."""

    length: int
    texts: int
    equal: int
    gaps: tuple[float, ...]
    drafted: int
    acceptance: float | None
    dense_ms: float
    exact_ms: float


class Always(DraftLength):
    """Drafts of one length, whether they pay or not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def next(self, most: int) -> int:
        """The length, or what there is room for."""
        return max(size for size in DRAFTS if size <= min(most, self._size))


def accepted(
    loaded: LoadedModel, plan: Plan, prompts: list[torch.Tensor], length: int, new: int, draft: int | None = None
) -> Found:
    """Continues each prompt both ways."""
    model: Any = loaded.model

    def continued(ids_1S: torch.Tensor) -> Any:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        mask = torch.ones_like(ids_1S)
        return model.generate(ids_1S, attention_mask=mask, max_new_tokens=new, **options)

    with apply(model, plan, prefill=False, decode=False):
        began = time.perf_counter()
        dense = [continued(ids_1S).sequences[0].tolist() for ids_1S in prompts]
        dense_seconds = time.perf_counter() - began
    with apply(model, plan, exact=True) as handle:
        assert handle.loop is not None
        if draft is not None:
            handle.loop.paces = defaultdict(lambda: Always(draft))
        began = time.perf_counter()
        exact = [continued(ids_1S).sequences[0].tolist() for ids_1S in prompts]
        exact_seconds, stats = time.perf_counter() - began, handle.stats()
    gaps = tuple(_gap(loaded, *both) for both in zip(dense, exact, strict=True) if both[0] != both[1])
    tokens = new * len(prompts)
    return Found(
        length, len(prompts), len(prompts) - len(gaps), gaps, stats.tokens_drafted, stats.acceptance,
        dense_seconds / tokens * 1e3, exact_seconds / tokens * 1e3,
    )  # fmt: skip


def _gap(loaded: LoadedModel, dense: list[int], exact: list[int]) -> float:
    """Between the logits of the first two tokens that differ, by the unmodified model."""
    at = next(number for number, (a, b) in enumerate(zip(dense, exact, strict=True)) if a != b)
    ids_1S = torch.tensor([dense[:at]], device=loaded.model.device)
    with torch.no_grad():
        logits_V = loaded.model(ids_1S, logits_to_keep=1).logits[0, -1].float()
    return float(logits_V[dense[at]] - logits_V[exact[at]])


def main() -> None:
    """See the top of this file."""
    args = _arguments()
    loaded, plan = load_model(args.model, device=args.device, dtype=args.dtype), load_plan(args.plan)
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    for length in args.lengths:
        samples = [s for name in _TASKS for s in make_samples(TASKS[name], kit, length, args.seed, args.samples)]
        prompts = [torch.tensor([s.prompt_ids.tolist()], device=loaded.model.device) for s in samples]
        found = accepted(loaded, plan, prompts, length, args.new, args.draft)
        print(json.dumps({"device": device_name(loaded.model.device), "dtype": args.dtype} | asdict(found)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--lengths", type=parse_lengths, default=(16384, 32768))
    parser.add_argument("--samples", type=int, default=4, help="prompts a task")
    parser.add_argument("--new", type=int, default=128, help="tokens of a continuation")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draft", type=int, help="tokens of every draft")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
