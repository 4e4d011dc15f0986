"""`generate` with dense attention's own output, faster: the plan drafts tokens, dense attention checks them.

A cycle: the sparse steps of the plan draft some tokens behind the last one; their keys and values are taken back; one
dense pass runs the last token and the draft, writing the keys and values that dense decoding would have; each row is
extended by what counts of its draft and the token behind it, up to where dense decoding ends it (text_rows.py). The
cache then holds all tokens of a row but the last, as transformers leaves it.

Sources of what counts of a draft: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML
2023), algorithm 1; Zhang et al., Draft & Verify (ACL 2024) on drafts by the model itself.

Shapes: B batch, K drafted tokens, Q = K + 1 checked ones, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.runtime.core.draft_length import DraftLength
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import Attachment, Phase
from sparsekv.runtime.hf.cache import first_of, fixed_rows_of, reserve, take_back
from sparsekv.runtime.hf.describe import CACHE_NAME
from sparsekv.runtime.hf.placement import FixedRows
from sparsekv.runtime.hf.text_rows import Processors, Stops, Text

_ASKED = ("output_scores", "output_logits", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The drafted tokens that a check accepts, and the token that follows them."""

    accepted_B: torch.Tensor  # drafted tokens that count, the first ones of each row
    next_B: torch.Tensor  # the token behind them


class Judge(Protocol):
    """Draws drafts, and decides which of them dense attention would have drawn."""

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B]: the next token of a draft, from processed scores."""

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """Returns the verdict of all drafts since the last verdict, by the processed scores of dense attention behind
        each prefix."""


class Greedy:
    """The likeliest token: drafts count as far as they are those of dense attention."""

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        return scores_BV.argmax(-1)

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """The longest agreeing prefix, and the likeliest token behind it."""
        likeliest_BQ = scores_BQV.argmax(-1)
        agrees_BK = likeliest_BQ[:, : drafts_BK.shape[1]] == drafts_BK
        accepted_B = agrees_BK.int().cumprod(1).sum(1)
        return Verdict(accepted_B, likeliest_BQ.gather(1, accepted_B[:, None])[:, 0])


class Sampled:
    """Rejection sampling: whatever drafts are, tokens are distributed as dense attention's."""

    def __init__(self) -> None:
        self._drawn_from: list[torch.Tensor] = []

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        p_BV = scores_BV.softmax(-1)
        self._drawn_from.append(p_BV)
        return torch.multinomial(p_BV, 1)[:, 0]

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """A draft of probability q that dense attention gives p counts with probability min(1, p / q); behind the first
        that does not, a token is drawn from what p has more than q; behind the last, from p."""
        p_BQV, (_, drafted) = scores_BQV.softmax(-1), drafts_BK.shape
        q_BQV = torch.zeros_like(p_BQV)  # nothing was drafted behind the last draft
        for number, drawn_BV in enumerate(self._drawn_from):
            q_BQV[:, number] = drawn_BV
        self._drawn_from.clear()
        p_BK, q_BK = (x[:, :drafted].gather(2, drafts_BK[:, :, None])[:, :, 0] for x in (p_BQV, q_BQV))
        counts_BK = torch.rand_like(p_BK) * q_BK < p_BK
        accepted_B = counts_BK.int().cumprod(1).sum(1)
        row_B = torch.arange(len(accepted_B), device=accepted_B.device)
        p_BV, q_BV = p_BQV[row_B, accepted_B], q_BQV[row_B, accepted_B]
        left_BV = (p_BV - q_BV).clamp(min=0)
        # Rounding may leave nothing of two equal distributions.
        left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)
        return Verdict(accepted_B, torch.multinomial(left_BV, 1)[:, 0])


class ExactLoop:
    """The loop that `generate` runs in place of transformers' own."""

    def __init__(self, meter: Callable[[], Meter], fixed_rows: Callable[[], FixedRows]) -> None:
        self._meter = meter
        self._fixed_rows = fixed_rows
        self.paces: dict[tuple[int, int], DraftLength] = defaultdict(
            DraftLength
        )  # by rows, and powers of two of tokens
        self.judge_of: Callable[[GenerationConfig], Judge] = lambda config: Sampled() if config.do_sample else Greedy()

    def taking_over(self, attached: Attachment, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip(list(inspect.signature(GenerationMixin.generate).parameters)[1:], args, strict=False)) | kwargs
        if given.get("custom_generate") is not None:
            _refuse("generate's own loop", "custom_generate")
        streamer = given.pop("streamer", None)
        stops = list(given.get("stopping_criteria") or ())
        model: Any = attached.model
        texts, tokenizer = _setting(given, model.generation_config, "stop_strings"), given.get("tokenizer")
        if texts is not None and tokenizer is not None:  # generate gives loops of others no tokenizer
            if not any(type(one) is stopping_criteria.StopStringCriteria for one in stops):  # it goes before the option
                stops.append(stopping_criteria.StopStringCriteria(tokenizer, texts))
            given |= {"stop_strings": None}
        loop = partial(self._generate, attached, streamer)
        return given | {"custom_generate": loop, "stopping_criteria": StoppingCriteriaList(stops)}

    def _generate(
        self,
        attached: Attachment,
        streamer: Any,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Generates tokens, with the arguments and the result of transformers' own `_sample`."""
        check_settings(generation_config, model_kwargs)
        if (rows := input_ids.shape[0]) > 1:
            fixed = fixed_rows_of(model_kwargs.get(CACHE_NAME), self._fixed_rows())
            fixed.refuse("one row under exact", f"{rows} rows", "generate them one by one")
        processors = Processors(logits_processor)
        stops = Stops.of(stopping_criteria, input_ids.shape[1], generation_config._pad_token_tensor)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        text, judge = Text.of(input_ids, stops), self.judge_of(generation_config)
        cache: Cache = model_kwargs[CACHE_NAME]
        if input_ids.shape[0] > 1:
            reserve(cache, stops.longest + DRAFTS[-1])  # complete rows are drafted behind, too
        found = model._prefill(input_ids, generation_config, model_kwargs)
        scores_BV = found.logits[:, -1].to(torch.float32, copy=True)
        first = judge.judge(input_ids[:, :0], processors.at(text, 0, scores_BV)[:, None])
        del found
        text.padding = [input_ids.shape[1] - length for length in first_of(cache).store.lengths]
        text.earlier = cache.get_seq_length() - input_ids.shape[1]
        cycles = _Cycles(attached, model, cache, text, processors, judge, streamer)
        try:
            cycles.accept(0, first.accepted_B, first.next_B)
            while not all(text.stopped):
                self._cycle(cycles, text)
        except BaseException:
            take_back(cache, text.cached, text.columns)
            raise
        if streamer is not None:
            streamer.end()
        ids_BT = text.first(max(text.lengths))
        if not generation_config.return_dict_in_generate:
            return ids_BT
        return GenerateDecoderOnlyOutput(sequences=ids_BT, **{CACHE_NAME: cache})  # type: ignore[arg-type]

    def _cycle(self, cycles: _Cycles, text: Text) -> None:
        growing = text.growing()
        rows, shortest = len(text.lengths), min(text.lengths[row] for row in growing)
        pace = self.paces[rows, shortest.bit_length()]
        drafted, began = pace.next(text.stops.longest - shortest - 1), time.perf_counter()
        accepted = cycles.run(drafted)
        counts = [accepted[row] for row in growing]
        pace.ran(drafted, time.perf_counter() - began, counts)
        self._meter().add_cycle(drafted * len(counts), sum(counts))


@dataclass(slots=True)
class _Cycles:
    attached: Attachment
    model: Any
    cache: Cache
    text: Text
    processors: Processors
    judge: Judge
    streamer: Any

    def run(self, drafted: int) -> list[int]:
        """Drafts so many tokens and checks them; how many of them counted in each row. Waits for the device once."""
        with self.attached.stepping(Phase.DECODE):
            for number in range(drafted):
                newest_B1 = self.text.with_drafts(number)[:, -1:]
                scores_BV = self.processors.at(self.text, number, self._scores(newest_B1)[:, -1])
                self.text.put(self.judge.draft(scores_BV), number)
        if drafted:
            take_back(self.cache, self.text.cached, self.text.columns)
        ids_BQ = self.text.with_drafts(drafted)
        with self.attached.stepping(Phase.CHECK, self._counts(drafted + 1)):
            scores_BQV = self.processors.behind_each(self.text, self._scores(ids_BQ))
        verdict = self.judge.judge(ids_BQ[:, 1:], scores_BQV)
        return self.accept(drafted, verdict.accepted_B, verdict.next_B)

    def _scores(self, ids_BQ: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=ids_BQ, use_cache=True, return_dict=True, **{CACHE_NAME: self.cache})
        logits_BQV: torch.Tensor = found.logits
        return logits_BQV.float()

    def _counts(self, new: int) -> torch.Tensor | None:
        """[B]: new tokens of each row; complete ones have none and attend to nothing. None where no row is complete."""
        if not any(self.text.complete):
            return None
        counts = [0 if complete else new for complete in self.text.complete]
        return on_device(counts, self.text.ids_BT.device, torch.int32)

    def accept(self, drafted: int, accepted_B: torch.Tensor, next_B: torch.Tensor) -> list[int]:
        """Adds accepted drafts and the token behind them to each row, up to where its text ends; its last token is not
        cached. Returns how many drafts of each row the check accepted."""
        drafts_BK = self.text.with_drafts(drafted)[:, 1:]
        found = torch.cat((drafts_BK, next_B[:, None], accepted_B[:, None]), 1).tolist()
        for row in self.text.growing():
            *tokens, following, accepted = found[row]
            self.text.ids_BT[row, self.text.lengths[row] + accepted] = next_B[row]  # drafts that count are there
            self.text.extend(row, [*tokens[:accepted], following])
        self.text.settle(self.streamer)
        take_back(self.cache, self.text.cached, self.text.columns)
        return [accepted for *_, accepted in found]


def check_settings(config: GenerationConfig, given: dict[str, Any]) -> None:
    """Refuses what the loop does not give."""
    for name in _ASKED:
        if getattr(config, name, None):
            _refuse("tokens alone", name)
    if config.num_beams and config.num_beams > 1:
        _refuse("one beam", f"num_beams={config.num_beams}")
    if not config.use_cache or given.get(CACHE_NAME) is None:
        _refuse("a cache", "use_cache=False")
    if given.get("inputs_embeds") is not None:
        _refuse("token ids", "inputs_embeds")


def _setting(given: dict[str, Any], defaults: GenerationConfig, name: str) -> Any:
    if name in given:
        return given[name]
    own = getattr(given.get("generation_config"), name, None)
    return own if own is not None else getattr(defaults, name, None)


def _refuse(expected: str, found: str) -> NoReturn:
    raise UnsupportedError(f"expected {expected} under exact, found {found}; leave it out, or generate without exact")
