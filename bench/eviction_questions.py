"""KV cache eviction when questions are not known: several questions over one context (SCBench, arXiv 2412.10319).

    python -m sparsekv.bench.eviction_questions MODEL --length 2k --retain 0.5 --contexts 4 --questions 3 --search 2

A context is prefilled and evicted before any of its questions is seen; each question is then asked by itself over what
is left. Beside every rule with all layers alike are layouts of the planner's search (retain_search.py), by damage on
contexts of the calibration split: of the answer where the question was part of the prompt, as `plan --retain` has it,
and of answers to questions that come afterwards. Printed are, of the same questions, the divergence over the answer and
which answers, of those that were right, are lost and won.

Shapes: S tokens of a context, R rows of a question and its answer, V vocabulary; g is 1 or the KV heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from transformers import DynamicCache

from sparsekv.bench.eviction_rules import EvictionRule, ObservedPrompt, PromptObserver
from sparsekv.planner.decode_trials import Prefix
from sparsekv.planner.evaluation.predictions import Prefilled, divergence, prefill
from sparsekv.planner.profile.calibration import Calibration
from sparsekv.planner.retain_search import (
    Layout,
    RetentionTrials,
    allocated,
    by_hand,
    damage_beside,
    rule_of,
)
from sparsekv.planner.tasks import TASKS, Kit, Split, Task, prepare
from sparsekv.planner.tasks.documents import ChatFrame, DocumentRequest, Draws
from sparsekv.planner.tasks.ruler_suite import RULER_SUITE
from sparsekv.planner.tasks.samples import generator
from sparsekv.plans.types import parse_length
from sparsekv.runtime.hf.cache import reserve, states_of
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

_TASKS: Mapping[str, Task] = {
    "kv_retrieval": TASKS["kv_retrieval"],
    "niah_multikey_1": RULER_SUITE["niah_multikey_1"].task,
    "niah_multikey_2": RULER_SUITE["niah_multikey_2"].task,
}
_ROOM = 96  # tokens for a question and its answer, beside the context


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A context, and questions with their answers."""

    context_1S: torch.Tensor
    questions: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, kit: Kit, task: Task, length: int, count: int, seed: int, device: torch.device) -> Asked:
        """A document of a task, in the frame of a chat where the kit has one."""
        frame = kit.chat or ChatFrame(kit.encoder.bos_ids, (), ())
        request = DocumentRequest(length - _ROOM, queries=count, answer_room=task.longest_answer(kit.encoder, length))
        found = task.document(kit, request, Draws(generator(kit.split, task.name, length, seed, 0)))

        def ids(*parts: Any) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.asarray(p, np.int64) for p in parts]))[None].to(device)

        def asked(query: Any) -> tuple[torch.Tensor, torch.Tensor]:
            cut = len(query.question_ids) - query.cue
            return ids(query.question_ids[:cut], frame.after_ids, query.question_ids[cut:]), ids(query.answer_ids)

        return cls(ids(frame.before_ids, found.context_ids), tuple(map(asked, found.queries)))


class QuestionTrials(RetentionTrials):
    """Trials whose prompts may also be watched for rules of others."""

    seen: PromptObserver | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        """See `RetentionTrials`."""
        if self.seen is not None and call.chunk.longest <= self._until:
            self.seen(call)
        return super().attend(call)

    @torch.no_grad()
    def evicted(self, asked: Asked) -> tuple[ObservedPrompt, list[Prefix]]:
        """The context, observed, and each question over it, as dense reads it."""
        model: Any = self._loaded.model
        self.seen, self._observed = PromptObserver.of(model, ("expected_attention",)), {}
        cache, self._until = DynamicCache(), asked.context_1S.shape[1]
        reserve(cache, self._until + _ROOM)
        prompts = Prefilled(prefill(model, asked.context_1S, None, cache=cache).logits_BKV, cache)
        self._until = 0
        states = states_of(cache)
        prefixes = []
        for question_1Q, answer_1A in asked.questions:
            rows_1R = torch.cat((question_1Q, answer_1A[:, :-1]), 1)
            plain = Prefix(cache, states, rows_1R, torch.empty(0))
            prefixes.append(Prefix(cache, states, rows_1R, self.log_probabilities(plain, {})))
        return ObservedPrompt(prompts, self.seen), prefixes


@dataclass(slots=True)
class Tally:
    """Holds how the answers of dense change under a rule."""

    kl: list[float]
    lost: int = 0
    won: int = 0

    def add(self, prefix: Prefix, found_1RV: torch.Tensor, answer_1A: torch.Tensor) -> None:
        """Counts one question."""
        rows = slice(-answer_1A.shape[1], None)
        self.kl.append(float(divergence(prefix.dense_1RV[:, rows], found_1RV[:, rows])))
        dense, own = (
            bool((log_1RV[:, rows].argmax(-1) == answer_1A).all()) for log_1RV in (prefix.dense_1RV, found_1RV)
        )
        self.lost, self.won = self.lost + (dense and not own), self.won + (own and not dense)


Kept = Callable[[QuestionTrials, ObservedPrompt, Prefix], dict[int, torch.Tensor]]
"""The masks [g, S] of the layers that evict."""


def by_layout(layout: Layout, trials: QuestionTrials, seen: ObservedPrompt, prefix: Prefix) -> dict[int, torch.Tensor]:
    """A layout with the score of plans."""
    return {layer: trials.kept(prefix, layer, rule_of((layer,), share)) for layer, share in layout.items()}


def by_rule(
    rule: EvictionRule, layout: Layout, trials: QuestionTrials, seen: ObservedPrompt, prefix: Prefix
) -> dict[int, torch.Tensor]:
    """A layout with the score of others; as many tokens as a plan's rule keeps."""
    kept = {layer: rule_of((layer,), share).kept_tokens(seen.past) / seen.past for layer, share in layout.items()}
    return {layer: seen.kept(layer, rule, share)[0] for layer, share in kept.items()}


def main() -> None:
    """Prints a table in Markdown."""
    args = _arguments()
    loaded = load_model(args.model, device=args.device)
    info, device = loaded.info, loaded.model.device
    layers = info.full_layers
    evenly = by_hand(layers, args.retain, args.length)["evenly"]
    with _opened(loaded) as trials:
        kept: dict[str, Kept] = {"our score, evenly": partial(by_layout, evenly)}
        for rule in get_args(EvictionRule):
            kept[f"{rule}, evenly"] = partial(by_rule, rule, evenly)
        if args.search:
            layouts = {
                "questions known": _searched(partial(_known, trials, loaded, args), layers, args),
                "questions unknown": _searched(partial(_unknown, trials, loaded, args), layers, args),
            }
            for name, layout in layouts.items():
                kept[f"our score, {name}"] = partial(by_layout, layout)
                kept |= {f"{rule}, {name}": partial(by_rule, rule, layout) for rule in get_args(EvictionRule)}
        tallies = {name: Tally([]) for name in kept}
        kit = prepare(loaded.tokenizer, Split.EVALUATION)
        for task in _TASKS.values():
            for seed in range(args.contexts):
                asked = Asked.of(kit, task, args.length, args.questions, seed, device)
                seen, prefixes = trials.evicted(asked)
                for (name, tally), (prefix, (_, answer_1A)) in _pairs(tallies, prefixes, asked):
                    tally.add(prefix, trials.log_probabilities(prefix, kept[name](trials, seen, prefix)), answer_1A)
                print(f"{task.name}, context {seed + 1} of {args.contexts}", flush=True)
    print(f"\n| {args.model}, {args.retain:g} of the bytes at {args.length} | divergence | lost / won |\n|---|---|---|")
    for name, tally in sorted(tallies.items(), key=lambda item: float(np.mean(item[1].kl))):
        print(f"| {name} | {np.mean(tally.kl):.4f} | {tally.lost} / {tally.won} of {len(tally.kl)} |")


def _pairs(tallies: Mapping[str, Tally], prefixes: Sequence[Prefix], asked: Asked) -> Iterator[tuple[Any, Any]]:
    return ((item, pair) for item in tallies.items() for pair in zip(prefixes, asked.questions, strict=True))


def _searched(
    mean: Callable[[Sequence[Layout]], np.ndarray], layers: Sequence[int], args: argparse.Namespace
) -> Layout:
    """As the planner: by damage of single layers, then beside the others."""
    options: Any = SimpleNamespace(retain=args.retain)
    alone = allocated(layers, damage_beside({}, layers, mean), options, args.length)
    return allocated(layers, damage_beside(alone, layers, mean), options, args.length)


def _known(
    trials: QuestionTrials, loaded: LoadedModel, args: argparse.Namespace, layouts: Sequence[Layout]
) -> np.ndarray:
    options: Any = SimpleNamespace(prefill_chunk=None)
    made = Calibration(loaded.tokenizer, (), ("quote_text", "kv_retrieval", "niah_multikey"), 0)
    trials.seen = None
    prompts = made.prompts(args.length, args.search * 3)
    found: np.ndarray = np.mean([trials.damages(prompt, layouts, options) for prompt in prompts], 0)
    return found


def _unknown(
    trials: QuestionTrials, loaded: LoadedModel, args: argparse.Namespace, layouts: Sequence[Layout]
) -> np.ndarray:
    kit, each = prepare(loaded.tokenizer, Split.CALIBRATION), []
    for task in _TASKS.values():
        for seed in range(args.search):
            asked = Asked.of(kit, task, args.length, args.questions, seed, loaded.model.device)
            seen, prefixes = trials.evicted(asked)
            masks: dict[tuple[int, float], torch.Tensor] = {}
            for prefix, (_, answer_1A) in zip(prefixes, asked.questions, strict=True):
                rows, own = slice(-answer_1A.shape[1], None), []
                for layout in layouts:
                    for one in layout.items():
                        if one not in masks:
                            masks |= {one: by_layout(dict([one]), trials, seen, prefix)[one[0]]}
                    mine = {layer: masks[layer, share] for layer, share in layout.items()}
                    log_1RV = trials.log_probabilities(prefix, mine)
                    own.append(float(divergence(prefix.dense_1RV[:, rows], log_1RV[:, rows])))
                each.append(own)
    found: np.ndarray = np.mean(each, 0)
    return found


@contextmanager
def _opened(loaded: LoadedModel) -> Iterator[QuestionTrials]:
    trials = QuestionTrials(loaded)
    with capture_attention(loaded.model, trials.attend):
        yield trials


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=parse_length, default=2048)
    parser.add_argument("--retain", type=float, default=0.5)
    parser.add_argument("--contexts", type=int, default=4, help="held-out ones of each task")
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--search", type=int, default=2, help="calibration contexts of each task; 0 searches nothing")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
