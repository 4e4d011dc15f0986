"""A second question behind an answer, and long texts: measured is what a user gets of evicting layers."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared import compare
from tiny_plans import decode_plan, drops, every_head, plan_for, segment

from sparsekv.planner.evaluation import PlanMode
from sparsekv.planner.tasks import Sample, Turn
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import ALWAYS, NEVER
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel

PROMPT = 300
NARROW = AShape(sink=tokens(64), window=tokens(64))
SPARSE = decode_plan(segment(0, (1, 2), 8))
RULES = {"segments": (SPARSE, ()), "dropped tokens": (None, (drops((1, 2), 24, generated=3),))}


def conversations(count: int = 2, sizes: tuple[int, int] = (60, 140)) -> list[Sample]:
    """Of no task: a prompt, twice a reply of five tokens and a prompt of a size, an answer of four."""
    rng = np.random.default_rng(3)

    def drawn(tokens: int) -> Any:
        return rng.integers(1, 90, tokens, np.int32)

    turns = [(drawn(PROMPT), drawn(4), *(Turn(drawn(5), drawn(size)) for size in sizes)) for _ in range(count)]
    return [Sample(prompt, answer, "", "own", PROMPT + 214, tuple(later)) for prompt, answer, *later in turns]


def by_hand(loaded: LoadedModel, sample: Sample, chunk: int | None, plan: Plan | None, **phases: bool) -> torch.Tensor:
    """[A + 1, V]: the prompts in pieces, all between and behind them token by token."""
    model: Any = loaded.model
    cache, rows = None, []

    def ran(ids: Any, sizes: list[int]) -> None:
        nonlocal cache
        for piece in torch.tensor(ids[None].astype(np.int64)).split(sizes, 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[:, -1:])

    def prompt(ids: Any) -> None:
        ran(ids, piece_sizes(len(ids), chunk) if chunk else [len(ids)])

    applied = nullcontext() if plan is None else apply(model, plan, sparse="always", **phases)
    with applied as handle, torch.no_grad():
        prompt(sample.prompt_ids)
        for turn in sample.later:
            ran(turn.reply_ids, [1] * len(turn.reply_ids))
            if handle is not None:
                handle._engine.pays = NEVER if len(turn.prompt_ids) == 60 else ALWAYS
            prompt(turn.prompt_ids)
            if handle is not None:
                handle._engine.pays = ALWAYS
        ran(sample.answer_ids, [1] * len(sample.answer_ids))
    return torch.cat(rows[-len(sample.answer_ids) - 1 :], 1)[0].float().log_softmax(-1)


@pytest.mark.parametrize("chunk", [128])
@pytest.mark.parametrize(("rule", "sizes"), [("segments", (140, 60)), ("dropped tokens", (60, 140))])
def test_the_turns_of_a_conversation_run_as_a_users_do(
    loaded: LoadedModel, rule: str, sizes: tuple[int, int], chunk: int | None
) -> None:
    """The shorter later prompt is dense behind what the plan made, and the longer one sparse, whichever comes last."""
    decode, dropped = RULES[rule]
    plan = plan_for(loaded.model, every_head(loaded.model, NARROW), decode, *dropped)
    modes = {phase: PlanMode(plan, phase) for phase in ("prefill", "decode", "both")}
    samples = conversations(sizes=sizes)
    found = compare(loaded, modes, samples, batch=2, chunk=chunk)
    for place, sample in enumerate(samples):
        p = by_hand(loaded, sample, chunk, None)
        for phase in modes:
            q = by_hand(loaded, sample, chunk, plan, prefill=phase != "decode", decode=phase != "prefill")
            outcome = found[phase].outcomes[place]
            assert outcome.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
            assert outcome.kl > 1e-4


# --- long texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["another", "as dense goes on"])
def test_a_long_text_is_read_beside_the_answer_and_changes_nothing_of_it(loaded: LoadedModel, answer: str) -> None:
    """Where dense gives the answer, both are one text."""
    plan = plan_for(loaded.model, None, None, *RULES["dropped tokens"][1])
    sample = replace(conversations(1)[0], later=())
    text_1G = loaded.model.generate(
        torch.tensor(sample.prompt_ids[None].astype(np.int64)), max_new_tokens=40, do_sample=False, eos_token_id=None
    )[:, PROMPT:]
    if answer == "as dense goes on":
        sample = replace(sample, answer_ids=text_1G[0, :4].numpy().astype(np.int32))
    modes = {"decode": PlanMode(plan, "decode")}
    (long,) = compare(loaded, modes, [sample], text=40)["decode"].outcomes
    (short,) = compare(loaded, modes, [sample])["decode"].outcomes
    assert replace(long, text=None) == replace(short, kl=pytest.approx(short.kl, rel=1e-4))
    told = replace(sample, answer_ids=text_1G[0, :39].numpy().astype(np.int32))
    p, q = by_hand(loaded, told, None, None)[1:], by_hand(loaded, told, None, plan)[1:]
    assert long.text.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert (long.text.agreed, long.text.scored) == (int((p.argmax(-1) == q.argmax(-1)).sum()), 39)
