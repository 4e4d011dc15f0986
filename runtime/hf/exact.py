"""`generate` with dense attention's own output, faster: the plan drafts tokens, dense attention checks them.

A cycle: the sparse steps of the plan draft some tokens behind the last one; their keys and values are taken back; one
dense pass runs the last token and the draft, writing the keys and values that dense decoding would have; each row keeps
what counts of its draft and the token behind it (drafts.py). The cache then holds all tokens of a row but the last, as
transformers leaves it.

Shapes: B batch, K drafted tokens, Q = K + 1 checked ones, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import Attachment, Phase
from sparsekv.runtime.hf.cache import CACHE_NAME, FixedRows, first_of, fixed_rows_of, reserve, take_back
from sparsekv.runtime.hf.drafts import DraftLength, Greedy, Judge, Sampled
from sparsekv.runtime.hf.generate import FirstChecked

# Functions of the scores alone: all rows and positions at once.
_OF_SCORES = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization",
)  # fmt: skip
# Functions of the scores and the text before them: row by row, position by position.
_OF_TEXT = (
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)  # fmt: skip
_ASKED = ("output_scores", "output_logits", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Processors:
    """What transformers does to scores before a token is drawn.

    Raises:
        UnsupportedError: one of them may depend on more than the scores and the text before them.
    """

    given: LogitsProcessorList

    def __post_init__(self) -> None:
        known = {getattr(logits_process, name, None) for name in (*_OF_SCORES, *_OF_TEXT)} | {FirstChecked}
        unknown = [type(one).__name__ for one in self.given if type(one) not in known]
        if unknown:
            raise UnsupportedError(
                f"expected logits processors that are functions of the scores and the text before them, found "
                f"{unknown[0]}; leave it out, or generate without exact"
            )

    @property
    def read_text(self) -> bool:
        """Whether one of them looks at the text."""
        return any(type(one).__name__ in _OF_TEXT for one in self.given)

    def at(self, text: Text, drafted: int, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B, V]: the scores behind each row's text and its first drafted tokens."""
        if not self.read_text:
            return self._apply(text.ids_BT[:, :1], scores_BV)
        rows = [
            self._apply(text.ids_BT[row : row + 1, : length + drafted], scores_BV[row : row + 1])
            for row, length in enumerate(text.lengths)
        ]
        return torch.cat(rows)

    def behind_each(self, text: Text, scores_BQV: torch.Tensor) -> torch.Tensor:
        """[B, Q, V]: the scores behind each row's text and none, one, two, ... drafted tokens."""
        if not self.read_text:
            flat = self._apply(text.ids_BT[:1, :1].expand(scores_BQV.shape[0] * scores_BQV.shape[1], 1),
                               scores_BQV.flatten(0, 1))  # fmt: skip
            return flat.view_as(scores_BQV)
        return torch.stack([self.at(text, number, scores) for number, scores in enumerate(scores_BQV.unbind(1))], 1)

    def _apply(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.given(ids, scores)  # type: ignore[arg-type]
        return found


@dataclass(slots=True)
class Stops:
    """When a text ends."""

    longest: int
    ends: frozenset[int]
    others: tuple[Any, ...]  # asked behind every token

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> Stops:
        """As transformers' criteria have it."""
        ends: set[int] = set()
        others = []
        for one in criteria:
            if isinstance(one, stopping_criteria.EosTokenCriteria):
                ends.update(one.eos_token_id.flatten().tolist())
            elif not isinstance(one, stopping_criteria.MaxLengthCriteria):
                others.append(one)
        assert criteria.max_length is not None, "generate always has one"
        return cls(criteria.max_length, frozenset(ends), tuple(others))

    def __call__(self, ids_1T: torch.Tensor, newest: int) -> bool:
        """Whether a text that ends with this token is complete."""
        if ids_1T.shape[1] >= self.longest or newest in self.ends:
            return True
        return any(bool(one(ids_1T, None)[0]) for one in self.others)


@dataclass(slots=True)
class Text:
    """The tokens of all rows so far."""

    ids_BT: torch.Tensor  # with room for the longest; drafts stand behind the end of a row
    lengths: list[int]  # padding included
    padding: list[int]  # tokens of the prompt that are not cached
    finished: list[bool]
    earlier: int = 0  # columns that were cached before these tokens

    @classmethod
    def of(cls, ids_BS: torch.Tensor, longest: int) -> Text:
        """Prompts with room for answers."""
        batch, tokens = ids_BS.shape
        ids_BT = ids_BS.new_zeros((batch, longest + DRAFTS[-1]))  # rows that are finished are drafted behind, too
        ids_BT[:, :tokens] = ids_BS
        return cls(ids_BT, [tokens] * batch, [0] * batch, [False] * batch)

    @property
    def cached(self) -> list[int]:
        """Tokens of each row that the cache has: all but the last."""
        return [length - 1 - padding for length, padding in zip(self.lengths, self.padding, strict=True)]

    @property
    def columns(self) -> int:
        """Columns of the cache: all but the last of the longest text."""
        return self.earlier + max(self.lengths) - 1

    def newest(self) -> torch.Tensor:
        """[B, 1]: the last token of each row."""
        return self._at(0, 1)

    def with_drafts(self, drafted: int) -> torch.Tensor:
        """[B, Q]: the last token of each row and its draft."""
        return self._at(0, drafted + 1)

    def put(self, ids_B: torch.Tensor, drafted: int) -> None:
        """Writes a token of each row behind so many drafted ones."""
        if len(set(self.lengths)) == 1:
            self.ids_BT[:, self.lengths[0] + drafted] = ids_B
            return
        for row, length in enumerate(self.lengths):
            self.ids_BT[row, length + drafted] = ids_B[row]

    def _at(self, first: int, tokens: int) -> torch.Tensor:
        begins = [length - 1 + first for length in self.lengths]
        return torch.stack([row[at : at + tokens] for row, at in zip(self.ids_BT, begins, strict=True)])

    def padded(self, pad: int) -> torch.Tensor:
        """[B, T]: the texts, filled up to the longest."""
        found_BT = self.ids_BT[:, : max(self.lengths)].clone()
        for row, length in zip(found_BT, self.lengths, strict=True):
            row[length:] = pad
        return found_BT


class ExactLoop:
    """What `generate` runs in place of transformers' loop.

    Args:
        meter: counts drafts and checks.
        fixed_rows: the layers of caches to come whose rows all have one length.
    """

    def __init__(self, meter: Callable[[], Meter], fixed_rows: Callable[[], FixedRows]) -> None:
        self._meter = meter
        self._fixed_rows = fixed_rows
        self.paces: dict[tuple[int, int], DraftLength] = defaultdict(
            DraftLength
        )  # by rows, and powers of two of tokens
        self.judge_of: Callable[[GenerationConfig], Judge] = lambda config: Sampled() if config.do_sample else Greedy()

    def taking_over(self, attached: Attachment, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` with which it runs this loop.

        Raises:
            UnsupportedError: it is asked for another loop.
        """
        given = dict(zip(list(inspect.signature(GenerationMixin.generate).parameters)[1:], args, strict=False)) | kwargs
        if given.get("custom_generate") is not None:
            _refuse("generate's own loop", "custom_generate")
        streamer = given.pop("streamer", None)
        stops = list(given.get("stopping_criteria") or ())
        model: Any = attached.model
        texts = _setting(given, model.generation_config, "stop_strings")
        if texts is not None and given.get("tokenizer") is not None:  # generate gives loops of others no tokenizer
            stops.append(stopping_criteria.StopStringCriteria(given.pop("tokenizer"), texts))
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
        """As transformers' own `_sample`."""
        check_settings(generation_config, model_kwargs, input_ids.shape[0], streamer)
        if (rows := input_ids.shape[0]) > 1:
            fixed = fixed_rows_of(model_kwargs.get(CACHE_NAME), self._fixed_rows())
            fixed.refuse("one row under exact", f"{rows} rows", "generate them one by one")
        if streamer is not None:
            streamer.put(input_ids.cpu())
        processors, stops = Processors(logits_processor), Stops.of(stopping_criteria)
        text, judge = Text.of(input_ids, stops.longest), self.judge_of(generation_config)
        cache: Cache = model_kwargs[CACHE_NAME]
        if input_ids.shape[0] > 1:
            reserve(cache, stops.longest + DRAFTS[-1])  # rows that are finished are drafted behind, too
        found = model._prefill(input_ids, generation_config, model_kwargs)
        scores_BV = found.logits[:, -1].to(torch.float32, copy=True)
        first = judge.judge(input_ids[:, :0], processors.at(text, 0, scores_BV)[:, None])
        del found
        text.padding = [input_ids.shape[1] - length for length in first_of(cache).store.lengths]
        text.earlier = cache.get_seq_length() - input_ids.shape[1]
        cycles = _Cycles(attached, model, cache, text, processors, judge, stops, streamer)
        cycles.keep(0, first.accepted_B, first.next_B)
        try:
            while not all(text.finished):
                self._cycle(cycles, text)
        except BaseException:
            take_back(cache, text.cached, text.columns)
            raise
        if streamer is not None:
            streamer.end()
        pad: torch.Tensor | None = generation_config._pad_token_tensor
        ids_BT = text.padded(0 if pad is None else int(pad))
        if not generation_config.return_dict_in_generate:
            return ids_BT
        return GenerateDecoderOnlyOutput(sequences=ids_BT, **{CACHE_NAME: cache})  # type: ignore[arg-type]

    def _cycle(self, cycles: _Cycles, text: Text) -> None:
        running = [row for row, finished in enumerate(text.finished) if not finished]
        rows, shortest = len(text.lengths), min(text.lengths[row] for row in running)
        pace = self.paces[rows, shortest.bit_length()]
        drafted, began = pace.next(cycles.stops.longest - shortest - 1), time.perf_counter()
        accepted = cycles.run(drafted)
        counts = [accepted[row] for row in running]
        pace.ran(drafted, time.perf_counter() - began, counts)
        self._meter().add_cycle(drafted * len(counts), sum(counts))


@dataclass(slots=True)
class _Cycles:
    """Drafts and checks of one call of `generate`."""

    attached: Attachment
    model: Any
    cache: Cache
    text: Text
    processors: Processors
    judge: Judge
    stops: Stops
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
        return self.keep(drafted, verdict.accepted_B, verdict.next_B)

    def _scores(self, ids_BQ: torch.Tensor) -> torch.Tensor:
        """float32 [B, Q, V]."""
        found = self.model(input_ids=ids_BQ, use_cache=True, return_dict=True, **{CACHE_NAME: self.cache})
        logits_BQV: torch.Tensor = found.logits
        return logits_BQV.float()

    def _counts(self, new: int) -> torch.Tensor | None:
        """Rows that are finished attend to nothing; None where none is."""
        if not any(self.text.finished):
            return None
        counts = [0 if finished else new for finished in self.text.finished]
        return on_device(counts, self.text.ids_BT.device, torch.int32)

    def keep(self, drafted: int, accepted_B: torch.Tensor, next_B: torch.Tensor) -> list[int]:
        """Adds what counts to each row, up to where its text ends; the cache keeps all but the last token."""
        drafts_BK = self.text.with_drafts(drafted)[:, 1:]
        found = torch.cat((drafts_BK, next_B[:, None], accepted_B[:, None]), 1).tolist()
        for row, (*tokens, following, accepted) in enumerate(found):
            if not self.text.finished[row]:
                self.text.ids_BT[row, self.text.lengths[row] + accepted] = next_B[row]  # drafts that count are there
                self._extend(row, [*tokens[:accepted], following])
        take_back(self.cache, self.text.cached, self.text.columns)
        return [accepted for *_, accepted in found]

    def _extend(self, row: int, tokens: Iterable[int]) -> None:
        text = self.text
        for token in tokens:
            text.lengths[row] += 1
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.stops(text.ids_BT[row : row + 1, : text.lengths[row]], token):
                text.finished[row] = True
                return


def check_settings(config: GenerationConfig, given: dict[str, Any], rows: int, streamer: Any) -> None:
    """Refuses what the loop does not give.

    Raises:
        UnsupportedError: scores or hidden states of steps are asked for, no cache, or a stream of several rows.
    """
    for name in _ASKED:
        if getattr(config, name, None):
            _refuse("tokens alone", name)
    if config.num_beams and config.num_beams > 1:
        _refuse("one beam", f"num_beams={config.num_beams}")
    if not config.use_cache or given.get(CACHE_NAME) is None:
        _refuse("a cache", "use_cache=False")
    if given.get("inputs_embeds") is not None:
        _refuse("token ids", "inputs_embeds")
    if streamer is not None and rows > 1:
        _refuse("one row beside a streamer", f"{rows}")


def _setting(given: dict[str, Any], defaults: GenerationConfig, name: str) -> Any:
    if name in given:
        return given[name]
    own = getattr(given.get("generation_config"), name, None)
    return own if own is not None else getattr(defaults, name, None)


def _refuse(expected: str, found: str) -> NoReturn:
    raise UnsupportedError(f"expected {expected} under exact, found {found}; leave it out, or generate without exact")
