"""Rows of different lengths in one batch. A padded batch is run as what it is: padding is neither computed nor stored
nor attended to, and the positions of a row count its own tokens.

Prefill runs row by row, each in place in the cache of all rows, so that a row is computed as if it were alone. Decode
runs all rows together.

Shapes: B batch, S columns of the pass, tokens and padding; E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache

from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.errors import PromptError, ShapeError, UnsupportedError
from sparsekv.runtime.core.state import DecodeState, Remembered
from sparsekv.runtime.hf.attention import Attachment, Pass, Phase
from sparsekv.runtime.hf.cache import (
    CacheOwner,
    CacheProgress,
    DecoderOutput,
    SparseLayer,
    attending,
    decoder_output,
    progress_of,
)
from sparsekv.runtime.hf.describe import CACHE_NAME
from sparsekv.runtime.hf.long_inputs import asks_for_more
from sparsekv.runtime.stores.device import DeviceStore, RowStore
from sparsekv.runtime.stores.store import KVStore


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a pass: tokens, and padding where the mask says so."""

    given: torch.Tensor  # ids [B, S] or embeddings [B, S, E]
    before: int  # columns that ran before, with cached tokens and padding
    lengths: tuple[int, ...]  # cached tokens of each row; none without any
    switch: int  # the most tokens of a row that rotate by short angles; 0 where all rotate alike

    @property
    def new(self) -> int:
        return self.given.shape[1]

    @property
    def cached(self) -> tuple[int, ...]:
        return self.lengths or (0,) * self.given.shape[0]


def rows_of_pass(inputs: dict[str, Any], columns: Columns, phase: Phase, is_checked: bool) -> tuple[slice, ...] | None:
    """Returns which columns of a prefill are tokens of each row, where rows have different lengths; None where they
    have not, and of a decode step, whose positions then become those of the rows.

    Args:
        is_checked: whether mask and positions are looked at, which waits for the device.

    Raises:
        PromptError: a row without a token is to decode.
        ShapeError: there are more or fewer rows than the cache has.
        UnsupportedError: the mask has another shape than the columns, there is padding between the tokens of a row or
            in a decode step, a row stands still, mask or positions do not fit to what is cached, or the rotary angles
            depend on the longest row.
    """
    positions, cached = inputs.get("position_ids"), columns.cached
    if len(cached) != len(columns.given):
        raise ShapeError(
            f"expected tokens of the {len(cached)} rows of the cache, found {len(columns.given)} rows; select or "
            "repeat the rows of the cache as those of the tokens, or start a new cache for another batch"
        )
    rows = _tokens_of_rows(inputs.get("attention_mask") if is_checked else None, columns)
    every = slice(0, columns.new)
    if set(cached) == {columns.before} and all(row == every for row in rows):
        if is_checked:
            _check_positions(positions, columns.before)
        return None
    if 0 < columns.switch < columns.before + columns.new:
        raise UnsupportedError(
            f"expected rows of equal length, as the rotary angles of more than {columns.switch} tokens are others, "
            f"found rows of different lengths; run them one at a time"
        )
    if phase is Phase.PREFILL:
        if is_checked:
            _check_row_positions(positions, rows, cached)
        _check_new(rows, cached)
        return rows
    if any(row != every for row in rows):
        raise UnsupportedError(
            "expected a new token in every row of a decode step, found padding; drop the row instead"
        )
    if 0 in cached:
        raise PromptError(f"expected a prompt in every row, found none in row {cached.index(0)}; give it some text")
    inputs["attention_mask"] = None
    device = columns.given.device
    inputs["position_ids"] = on_device(cached, device)[:, None] + torch.arange(columns.new, device=device)
    return None


def _tokens_of_rows(mask: Any, columns: Columns) -> tuple[slice, ...]:
    cached, before, new = columns.cached, columns.before, columns.new
    if mask is not None:
        _check_mask(mask, (len(columns.given), before + new))
    if mask is None or (set(cached) == {before} and bool(mask.all())):
        return (slice(0, new),) * len(cached)
    is_token_BS = mask.expand(len(cached), -1) != 0
    marked = tuple(is_token_BS[:, :before].sum(1).tolist())
    if marked != cached:
        raise UnsupportedError(
            f"expected an attention_mask that marks the {cached} cached tokens of the rows, found {marked} marked; "
            "pass the mask of all passes over this cache, or none where no new token is padding"
        )
    return tuple(_interval(row_S) for row_S in is_token_BS[:, before:].tolist())


def _check_mask(mask: Any, shape: tuple[int, int]) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        kind = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedError(f"expected a 2D attention_mask of ones or none, found {kind}; pass no custom mask")
    if mask.shape not in {shape, (1, shape[1])}:
        raise UnsupportedError(
            f"expected an attention_mask of shape {shape}, the columns that ran over this cache before included, found "
            f"{tuple(mask.shape)}; pass the whole mask of these rows, or none where no new token is padding"
        )


def _interval(is_token_S: list[bool]) -> slice:
    count = sum(is_token_S)
    first = is_token_S.index(True) if count else 0
    if not all(is_token_S[first : first + count]):
        raise UnsupportedError(
            "expected padding before or behind the tokens of a row, found an attention_mask with a hole between them; "
            "leave the masked tokens out of the row"
        )
    return slice(first, first + count)


def _check_new(rows: Sequence[slice], cached: Sequence[int]) -> None:
    """A row is continued from its last token, which has to be in the last pass of a prompt."""
    for row, (tokens, length) in enumerate(zip(rows, cached, strict=True)):
        if length and not _count(tokens):
            raise UnsupportedError(
                f"expected new tokens in every row that has some already, found padding alone in row {row}; pad "
                "on the left where a prompt runs in pieces, and leave out rows that do not go on"
            )


def _check_positions(positions: torch.Tensor | None, past: int) -> None:
    """Positions of several tokens count up by one from what is cached. Single tokens are not asked: it costs a wait."""
    if positions is None or positions.shape[-1] < 2:
        return
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UnsupportedError(
            f"expected position_ids that count up by one from the {past} cached tokens, found others; "
            f"run packed sequences one by one, and leave prefill_chunk_size unset when a prompt goes on from a cache"
        )


def _check_row_positions(positions: torch.Tensor | None, rows: Sequence[slice], cached: Sequence[int]) -> None:
    """Positions of the tokens of a row count up by one from what it has cached; those of padding are not asked for."""
    if positions is None:
        return
    given_BS = positions.expand(len(rows), -1).tolist()
    for row, (tokens, length) in enumerate(zip(rows, cached, strict=True)):
        if given_BS[row][tokens] != list(range(length, length + _count(tokens))):
            raise UnsupportedError(
                f"expected position_ids that count the tokens of each row, from {length} on in row {row}, found "
                "others; pass none, so that they come from the attention_mask"
            )


def run_by_rows(attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> DecoderOutput:
    """The output of the decoder's own forward, of rows of different lengths run one by one. The output of a row is 0
    before its tokens, and behind them that of its last one, from which the next token follows."""
    assert under_way.rows is not None
    if asks_for_more(attached.decoder, inputs):
        raise UnsupportedError(
            "expected rows of equal length where more is asked of the model than logits and a cache, found rows of "
            "different lengths; run them one at a time"
        )
    name = "input_ids" if inputs.get("input_ids") is not None else "inputs_embeds"
    given, whole = inputs[name], under_way.cache
    batch, columns = given.shape[:2]
    caches = [None] * batch if whole is None else [_cache_of_row(whole, row, batch) for row in range(batch)]
    lengths = [0 if cache is None else cache.get_seq_length() for cache in caches]
    hidden_BSE: torch.Tensor | None = None
    counts = map(_count, under_way.rows)
    ends = {row: lengths[row] + count for row, count in enumerate(counts) if count}
    for row in sorted(ends, key=lambda row: -ends[row]):  # the longest makes room for all
        tokens, cache = under_way.rows[row], caches[row]
        positions_1S = torch.arange(lengths[row], lengths[row] + _count(tokens), device=given.device)[None]
        of_row = {"attention_mask": None, "position_ids": positions_1S, CACHE_NAME: cache}
        alone = Pass(under_way.engine, under_way.phase, cache, under_way.shapes)
        hidden_SE = attached.run(alone, inputs | of_row | {name: given[row : row + 1, tokens]}).last_hidden_state[0]
        if hidden_BSE is None:
            hidden_BSE = hidden_SE.new_zeros((batch, columns, hidden_SE.shape[1]))
        hidden_BSE[row, tokens] = hidden_SE
        hidden_BSE[row, tokens.stop :] = hidden_SE[-1]
    if hidden_BSE is None:
        raise PromptError("expected at least one token, found padding alone; leave it out")
    if whole is not None:
        _give_back(whole, [cache for cache in caches if cache is not None], columns)
    return decoder_output(hidden_BSE, whole)


def _count(tokens: slice) -> int:
    return tokens.stop - tokens.start  # type: ignore[no-any-return]


class _RowOwner(CacheOwner):
    """Owns the cache of one row: its stores are rows of those of all, whose scales it shares."""

    def __init__(self, whole: Sequence[SparseLayer], row: int, batch: int) -> None:
        super().__init__()
        self._whole, self._row, self._batch = whole, row, batch

    def new_store(self, layer: int) -> KVStore:
        store = self._whole[layer].store
        assert isinstance(store, DeviceStore), "no layer has fixed rows"
        return RowStore(store, self._row, self._batch)

    def new_state(self) -> DecodeState:
        """With the row of the queries that all rows remember."""
        first = self._whole[0]
        state = first.owner.new_state()
        before = first.state.remembered  # layers that observe are refused by their stores
        mine = {layer: q_BHWD[self._row : self._row + 1] for layer, q_BHWD in before.queries.items()}
        state.remembered = before._replace(queries=mine)
        return state


def _cache_of_row(cache: Cache, row: int, batch: int) -> Cache:
    whole = attending(cache)
    if len(whole) < len(cache.layers):
        raise UnsupportedError(
            "expected rows of equal length in a model some of whose layers have a recurrent state, found rows of "
            "different lengths; run them one at a time"
        )
    whole[0].fixed_rows.refuse(
        "rows of equal length", "rows of different lengths", "run prompts of one length together or one by one"
    )
    owner = _RowOwner(whole, row, batch)
    progress, alone = CacheProgress(owner.new_state()), DynamicCache()
    layers = [SparseLayer(owner, layer.layer, progress) for layer in whole]
    for mine, layer in zip(layers, whole, strict=True):
        mine.dtype, mine.float8 = layer.dtype, layer.float8
    alone.layers = [*layers]
    return alone


def _give_back(cache: Cache, rows: Sequence[Cache], columns: int) -> None:
    """What the rows have learned is of all, once they ran so many columns."""
    progress, whole = progress_of(cache), attending(cache)
    for layer, *mine in zip(whole, *(row.layers for row in rows), strict=True):
        layer.is_initialized = True
        layer.dtype = next(entry.dtype for entry in mine if entry.dtype is not None)
        layer.needs_grad |= any(entry.needs_grad for entry in mine)
    remembered = [progress_of(row).state.remembered.queries for row in rows]
    first = next(filter(None, remembered), {})
    queries = {
        layer: torch.cat([of_row.get(layer, torch.zeros_like(q_1HWD)) for of_row in remembered])
        for layer, q_1HWD in first.items()
    }
    progress.state.remembered = Remembered(queries, {}, progress.state.carried)
    for layer in whole:
        layer.set_columns(layer.get_seq_length() + columns)
