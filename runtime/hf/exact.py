"""`generate` with dense attention's own output, faster: the plan drafts tokens, dense attention checks them.

A cycle: the sparse steps of the plan draft some tokens behind the last one; their keys and values are taken back; one
dense pass runs the last token and the draft, writing the keys and values that dense decoding would have; each row is
extended by the drafts that count and the token behind them, up to where dense decoding ends it. The cache then holds
all tokens of a row but the last, as transformers leaves it.

Rows grow at different rates, and end where dense decoding ends them. Dense `generate` asks its stopping criteria once a
step, of the whole batch. A row that has stopped is padded where one of them has an `eos_token_id`; else it goes on
until all rows have stopped. Here the criteria are asked in the same order, of the same tokens, as soon as every row has
come so far; tokens beyond are cut when a row stops.

Sources of the rule by which drafts count: Leviathan et al., Fast Inference from Transformers via Speculative Decoding
(ICML 2023), algorithm 1; Zhang et al., Draft & Verify (ACL 2024) on drafts by the model itself.

Shapes: B batch, S tokens of a prompt, K drafted tokens, Q = K + 1 checked ones, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.brief import DRAFTS
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import Attachment, Phase
from sparsekv.runtime.hf.cache import first_of, fixed_rows_of, reserve, take_back
from sparsekv.runtime.hf.describe import CACHE_NAME, generate_setting
from sparsekv.runtime.hf.generate import FirstChecked
from sparsekv.runtime.hf.placement import FixedRows


class ExactLoop:
    """The loop that `generate` runs in place of transformers' own."""

    def __init__(self, meter: Callable[[], Meter], fixed_rows: Callable[[], FixedRows]) -> None:
        self._meter = meter
        self._fixed_rows = fixed_rows
        self.paces: dict[tuple[int, int], DraftLength] = defaultdict(DraftLength)  # by rows, and bits of their length
        self.judge_of: Callable[[GenerationConfig], Judge] = lambda config: Sampled() if config.do_sample else Judge()

    def taking_over(self, attached: Attachment, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("custom_generate") is not None:
            _refuse("generate's own loop", "custom_generate")
        stops = list(given.get("stopping_criteria") or ())
        model: Any = attached.model
        texts, tokenizer = generate_setting("stop_strings", given, model.generation_config), given.get("tokenizer")
        if texts is not None and tokenizer is not None:  # generate gives loops of others no tokenizer
            # a criterion of stop strings goes before the option
            if not any(type(stop) is stopping_criteria.StopStringCriteria for stop in stops):
                stops.append(stopping_criteria.StopStringCriteria(tokenizer, texts))
            given = given | {"stop_strings": None}
        loop = partial(self._generate, attached, given.get("streamer"))
        return given | {"streamer": None} | {"custom_generate": loop, "stopping_criteria": StoppingCriteriaList(stops)}

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
        _check_settings(generation_config, model_kwargs)
        cache: Cache = model_kwargs[CACHE_NAME]
        processors = Processors(logits_processor)
        stops = Stops.of(stopping_criteria, input_ids.shape[1], generation_config._pad_token_tensor)
        if (rows := input_ids.shape[0]) > 1:
            fixed = fixed_rows_of(cache, self._fixed_rows())
            fixed.refuse("one row under exact", f"{rows} rows", "generate them one by one")
            reserve(cache, stops.longest + DRAFTS[-1])  # complete rows are drafted behind, too
        if streamer is not None:
            streamer.put(input_ids.cpu())
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        scores_BV = outputs.logits[:, -1].to(torch.float32, copy=True)
        del outputs
        text, judge = Text.of(input_ids, stops, cache), self.judge_of(generation_config)
        cycles = _Cycles(attached, model, cache, text, processors, judge, streamer)
        cycles.begin(scores_BV)
        try:
            while not all(text.stopped):
                self._cycle(cycles, text)
        except BaseException:
            cycles.take_back()
            raise
        if streamer is not None:
            streamer.end()
        ids_BT = text.first(max(text.lengths))
        if not generation_config.return_dict_in_generate:
            return ids_BT
        return GenerateDecoderOnlyOutput(sequences=ids_BT, **{CACHE_NAME: cache})  # type: ignore[arg-type]

    def _cycle(self, cycles: _Cycles, text: Text) -> None:
        shortest = min(text.lengths[row] for row in text.growing())
        pace = self.paces[len(text.lengths), shortest.bit_length()]
        drafted, began = pace.next(text.stops.longest - shortest - 1), time.perf_counter()
        accepted = cycles.run(drafted)
        pace.ran(drafted, time.perf_counter() - began, accepted)
        self._meter().add_cycle(drafted * len(accepted), sum(accepted))


@dataclass(slots=True)
class _Cycles:
    attached: Attachment
    model: Any
    cache: Cache
    text: Text
    processors: Processors
    judge: Judge
    streamer: Any

    def begin(self, scores_BV: torch.Tensor) -> None:
        """Adds the token behind the prompt."""
        no_drafts_BK = self.text.ids_BT[:, :0]
        self._accept(no_drafts_BK, self.processors.behind_each(self.text, no_drafts_BK, scores_BV[:, None]))

    def run(self, drafted: int) -> list[int]:
        """Drafts so many tokens and checks them. Returns the accepted ones of each growing row. Waits for the device
        once."""
        ids_BQ = self.text.last()
        with self.attached.stepping(Phase.DECODE):
            for _ in range(drafted):
                scores_BV = self.processors.behind(self.text, ids_BQ[:, 1:], self._scores(ids_BQ[:, -1:])[:, -1])
                ids_BQ = torch.cat((ids_BQ, self.judge.draft(scores_BV)[:, None]), 1)
        if drafted:
            self.take_back()
        with self.attached.stepping(Phase.CHECK, self._new_tokens(drafted + 1)):
            scores_BQV = self._scores(ids_BQ)
        drafts_BK = ids_BQ[:, 1:]
        return self._accept(drafts_BK, self.processors.behind_each(self.text, drafts_BK, scores_BQV))

    def take_back(self) -> None:
        """Leaves all tokens of each row but the last in the cache."""
        text = self.text
        cached = [length - 1 - padding for length, padding in zip(text.lengths, text.padding, strict=True)]
        take_back(self.cache, cached, text.earlier + max(text.lengths) - 1)

    def _scores(self, ids_BQ: torch.Tensor) -> torch.Tensor:
        outputs = self.model(input_ids=ids_BQ, use_cache=True, return_dict=True, **{CACHE_NAME: self.cache})
        logits_BQV: torch.Tensor = outputs.logits
        return logits_BQV.float()

    def _new_tokens(self, checked: int) -> torch.Tensor | None:
        """[B]: new tokens of each row; complete ones have none and attend to nothing. None where no row is complete."""
        if not any(self.text.complete):
            return None
        counts = [0 if complete else checked for complete in self.text.complete]
        return on_device(counts, self.text.ids_BT.device, torch.int32)

    def _accept(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> list[int]:
        """Adds accepted drafts and the token behind them to each row, up to where its text ends."""
        verdict = self.judge.judge(drafts_BK, scores_BQV)
        behind_B1, accepted_B1 = verdict.next_B[:, None], verdict.accepted_B[:, None]
        ids_BQ = torch.cat((drafts_BK, behind_B1), 1).scatter(1, accepted_B1, behind_B1)
        on_host = torch.cat((ids_BQ, accepted_B1), 1).tolist()
        growing = self.text.growing()
        for row in growing:
            *tokens, accepted = on_host[row]
            self.text.extend(row, ids_BQ[row], tokens[: accepted + 1])
        self.text.settle(self.streamer)
        self.take_back()
        return [on_host[row][-1] for row in growing]


# --- the rule by which drafts count -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    accepted_B: torch.Tensor  # drafted tokens that count, the first ones of each row
    next_B: torch.Tensor  # the token behind them


class Judge:
    """Draws drafts, and decides which of them dense attention would have drawn: the likeliest tokens, which count as
    far as they are those of dense attention."""

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B]: the next token of a draft, from processed scores."""
        return scores_BV.argmax(-1)

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """Judges all drafts since the last verdict, by processed scores of dense attention behind each prefix."""
        likeliest_BQ = scores_BQV.argmax(-1)
        agrees_BK = likeliest_BQ[:, : drafts_BK.shape[1]] == drafts_BK
        accepted_B = agrees_BK.int().cumprod(1).sum(1)
        return Verdict(accepted_B, likeliest_BQ.gather(1, accepted_B[:, None])[:, 0])


class Sampled(Judge):
    """Rejection sampling: whatever drafts are, tokens are distributed as dense attention's."""

    def __init__(self) -> None:
        self._drawn_from: list[torch.Tensor] = []

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        p_BV = scores_BV.softmax(-1)
        self._drawn_from.append(p_BV)
        return torch.multinomial(p_BV, 1)[:, 0]

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """A draft of probability q that dense attention gives p counts with probability min(1, p / q). Behind the first
        that does not, a token is drawn from p - q where that is positive; behind the last, from p."""
        p_BQV, (_, drafted) = scores_BQV.softmax(-1), drafts_BK.shape
        nothing_BV = torch.zeros_like(p_BQV[:, 0])  # was drafted behind the last draft
        q_BQV = torch.stack((*self._drawn_from, nothing_BV), 1)
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


# --- rows, and where they end -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stops:
    """The stopping criteria of one call of `generate`, sorted by how they are asked."""

    longest: int  # tokens of a row, the prompt included
    ends: frozenset[int]
    others: StoppingCriteriaList
    pad: int | None  # fills rows that have stopped; None: they go on until all have

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, prompt: int, pad: torch.Tensor | None) -> Stops:
        """Sorts the criteria behind a prompt of so many tokens."""
        ends: set[int] = set()
        limits, others = [], StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is stopping_criteria.EosTokenCriteria:
                ends.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is stopping_criteria.MaxLengthCriteria:
                limits.append(criterion.max_length)
            else:
                others.append(criterion)
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if pads and pad is None:
            raise UsageError(
                "expected a padding token beside stopping criteria that have an eos_token_id, found none; give "
                "generate a pad_token_id"
            )
        longest = max(min(limits), prompt + 1)  # one token is generated, whatever the criteria say
        return cls(longest, frozenset(ends), others, int(pad) if pads and pad is not None else None)


@dataclass(slots=True)
class Text:
    """The tokens of all rows so far."""

    ids_BT: torch.Tensor  # with room for the longest
    stops: Stops
    lengths: list[int]  # padding included
    padding: list[int]  # tokens of the prompt that are not cached
    complete: list[bool]  # rows that do not grow any more
    stopped: list[bool]  # rows that a criterion has stopped
    asked: int  # tokens of each row that the criteria have seen
    earlier: int  # columns that were cached before these tokens

    @classmethod
    def of(cls, ids_BS: torch.Tensor, stops: Stops, cache: Cache) -> Text:
        """Prompts that are cached, with room for answers."""
        batch, tokens = ids_BS.shape
        ids_BT = torch.cat((ids_BS, ids_BS.new_zeros((batch, stops.longest - tokens))), 1)
        padding = [tokens - length for length in first_of(cache).store.lengths]
        earlier = cache.get_seq_length() - tokens
        return cls(ids_BT, stops, [tokens] * batch, padding, [False] * batch, [False] * batch, tokens, earlier)

    def growing(self) -> list[int]:
        return [row for row, complete in enumerate(self.complete) if not complete]

    def last(self) -> torch.Tensor:
        """[B, 1]: the last token of each row."""
        rows = zip(self.ids_BT, self.lengths, strict=True)
        return torch.stack([row_T[length - 1 : length] for row_T, length in rows])

    def extend(self, row: int, ids_Q: torch.Tensor, tokens: Sequence[int]) -> None:
        """Adds tokens to a row up to one that completes it, from the device; `tokens` are the same on the host."""
        start = self.lengths[row]
        for token in tokens:
            self.lengths[row] += 1
            if token in self.stops.ends or self.lengths[row] == self.stops.longest:
                self.complete[row] = True
                break
        new = self.lengths[row] - start
        self.ids_BT[row, start : start + new] = ids_Q[:new]

    def settle(self, streamer: Any) -> None:
        """Asks the criteria of each step that all rows have come to, and streams it. Once all rows have stopped, tokens
        beyond the last step are cut."""
        while not all(self.stopped) and all(self.lengths[row] > self.asked for row in self.growing()):
            self.asked += 1
            for row, stops in enumerate(self._stops_here()):
                if stops and not self.stopped[row]:
                    self.stopped[row] = True
                    if self.stops.pad is not None:
                        self.complete[row], self.lengths[row] = True, self.asked
            if streamer is not None:
                streamer.put(self.first(self.asked)[:, -1].cpu())
        if all(self.stopped):
            self.lengths = [min(length, self.asked) for length in self.lengths]

    def first(self, tokens: int) -> torch.Tensor:
        """[B, tokens]: the first tokens of each row, padded behind its end."""
        ids_BT = self.ids_BT[:, :tokens].clone()
        for row_T, length in zip(ids_BT, self.lengths, strict=True):
            if length < tokens:
                row_T[length:] = self.stops.pad
        return ids_BT

    def _stops_here(self) -> list[bool]:
        ends = [full and length == self.asked for full, length in zip(self.complete, self.lengths, strict=True)]
        if not self.stops.others:
            return ends
        others: list[bool] = self.stops.others(self.first(self.asked), None).tolist()
        return [end or other for end, other in zip(ends, others, strict=True)]


# --- logits processors ------------------------------------------------------------------------------------------------

# Classes of transformers, and the option of `generate` that creates each. Any other class is refused.
READ_SCORES = {  # alone: all rows and positions may be processed at once
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "TopHLogitsWarper": "top_h",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "LogitNormalization": "renormalize_logits",
}
READ_TEXT = {  # the scores and the tokens before them
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}
READ_MORE = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}


class Processors:
    """The processors of one call of `generate`."""

    def __init__(self, given: LogitsProcessorList) -> None:
        self._given = given
        self._read_text = False
        for processor in given:
            kind = type(processor)
            name = kind.__name__ if kind is getattr(logits_process, kind.__name__, None) else ""
            self._read_text |= name in READ_TEXT
            if kind is not FirstChecked and name not in READ_SCORES and name not in READ_TEXT:
                raise UnsupportedError(
                    f"expected logits processors that are functions of the scores and the text before them, found "
                    f"{kind.__name__} ({READ_MORE.get(name, 'logits_processor')}); leave it out, or generate without "
                    "exact"
                )

    def behind(self, text: Text, drafts_BK: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B, V]: the scores behind each row's text and its draft so far; of complete rows, any.

        A processor may hold something of each row, such as its padding: it is always given the whole batch, once for
        each length that a row has."""
        if not self._read_text:
            return self._apply(text.ids_BT[:, :1], scores_BV)
        processed_BV = scores_BV.clone()
        for length in {text.lengths[row] for row in text.growing()}:
            ids_BT = torch.cat((text.ids_BT[:, :length], drafts_BK), 1)
            for row, of_length_V in enumerate(self._apply(ids_BT, scores_BV)):
                if text.lengths[row] == length:
                    processed_BV[row] = of_length_V
        return processed_BV

    def behind_each(self, text: Text, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> torch.Tensor:
        """[B, Q, V]: the scores behind each row's text and none, one, two, ... drafted tokens."""
        if not self._read_text:
            flat = scores_BQV.flatten(0, 1)
            return self._apply(text.ids_BT[:1, :1].expand(len(flat), 1), flat).view_as(scores_BQV)
        scores = scores_BQV.unbind(1)
        return torch.stack([self.behind(text, drafts_BK[:, :count], each) for count, each in enumerate(scores)], 1)

    def _apply(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        processed_BV: torch.Tensor = self._given(ids_BT, scores_BV)  # type: ignore[arg-type]
        return processed_BV


# --- refusals ---------------------------------------------------------------------------------------------------------


def _check_settings(config: GenerationConfig, given: dict[str, Any]) -> None:
    for name in ("output_scores", "output_logits", "output_hidden_states"):
        if getattr(config, name, None):
            _refuse("tokens alone", name)
    if config.num_beams and config.num_beams > 1:
        _refuse("one beam", f"num_beams={config.num_beams}")
    if not config.use_cache or given.get(CACHE_NAME) is None:
        _refuse("a cache", "use_cache=False")
    if given.get("inputs_embeds") is not None:
        _refuse("token ids", "inputs_embeds")


def _refuse(expected: str, given: str) -> NoReturn:
    raise UnsupportedError(f"expected {expected} under exact, found {given}; leave it out, or generate without exact")
