"""The checks of the table of tests/core: sentences that hold of every row, whatever its plan and its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import cycle
from random import Random
from typing import Any

import pytest
import torch
from core_rows import ONE_PIECE, Case, Row
from emulated_graphs import emulate
from handed_over import cache_of, handed_over
from host_pages import page_on_the_host
from tiny_models import SHARED, random_tokens
from tiny_plans import plan_for
from torch_state import poisoned_memory
from transformers import DynamicCache

from sparsekv.plans.errors import ShapeError, SparseKVError, UnsupportedError, UsageError
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import Request
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore, RowStore
from sparsekv.runtime.stores.pinned import CopyStream, HostMemory
from sparsekv.runtime.stores.virtual import VirtualStore

CUT = Chunking(above=20, rows=17, output_bytes=1)  # a group of heads at a time
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OPERATIONS = [
    *((kind, name) for kind in (DeviceStore, HostStore) for name in ("append", "room", "commit", "view", "gather")),
    *((RowStore, name) for name in ("append", "room", "commit")),  # of padded rows
    (HostMemory, "take"),
    (CopyStream, "run"),
]
Patch = pytest.MonkeyPatch


def applied(case: Case, **options: Any) -> Handle:
    """The plan of a case at work, with the options of its row."""
    return apply(case.model, case.plan, **{"sparse": "always"} | case.row.options | options)


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """Greedy, without an end."""
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids)} | GREEDY | options)


# --- what is computed -------------------------------------------------------------------------------------------------


def is_brute_force(case: Case, patch: Patch) -> None:
    """Logits, counts and the rows that evicting layers hold, over a cache that grows or has room; memory that was never
    written is not read."""
    draw = Random(str(case.row))
    with applied(case) as handle, poisoned_memory():
        room = draw.choice([sum(case.row.sizes), max(1, case.row.sizes[0] - 1)])
        cache = draw.choice([DynamicCache(), handle.new_cache(room, case.row.batch)])
        case.check(case.logits(cache))
        stats = handle.stats()
        handle.reset_stats()
        again = handle.stats()
    assert (again.prefill_density, again.decode_share, again.kv_bytes_host) == (None, None, stats.kv_bytes_host)
    assert stats.kv_bytes_device == again.kv_bytes_device > 0
    _check_counts(case, stats)
    for layer in case.plan.evicting if case.row.options.get("decode", True) else ():
        assert cache.layers[layer].cached == (case.counts.kept_rows(layer),) * case.row.batch


def _check_counts(case: Case, stats: RunStats) -> None:
    """Where no layer has a window; tiles where none evicts."""
    row, counts = case.row, case.counts
    if any(group.window for group in case.plan.model.attention):
        return
    assert (stats.decode_tokens_attended, stats.decode_tokens_cached) == (counts.attended, counts.cached)
    if case.plan.prefill and row.options.get("prefill", True) and not row.evicting:
        assert stats.prefill_tiles_computed == pytest.approx(counts.tiles)
        assert stats.prefill_tiles_causal == counts.causal


def runs_in_pieces_of_rows_and_heads(case: Case, patch: Patch) -> None:
    with applied(case, chunking=CUT, backend="reference" if len(case.row.family) % 2 else "auto") as handle:
        case.check(case.logits(DynamicCache()))
        _check_counts(case, handle.stats())


def is_the_unmodified_model_where_nothing_is_left_out(case: Case, patch: Patch) -> None:
    """A plan without phases; and one whose phases are off, in pieces of rows and heads."""
    model: Any = case.model
    ids, mask = case.pieces[0], case.prompt_mask
    dense = model(ids, attention_mask=mask).logits
    off = {"prefill": False, "decode": False, "chunking": CUT}
    for plan, options in ((plan_for(case.model), {}), (case.plan, off)):
        with apply(case.model, plan, **{"sparse": "always"} | options):
            found = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(found[mask == 1], dense[mask == 1], atol=1e-3, rtol=1e-3)


def does_not_depend_on_modes(case: Case, patch: Patch) -> None:
    """Of gradients, which change between calls and copies, of a program's own default device and dtype, and of whether
    ids come as embeddings: bit for bit."""
    cache: Any = DynamicCache()
    modes = [torch.inference_mode, torch.enable_grad, torch.no_grad, lambda: torch.device("meta"), _bfloat16]
    modes = cycle(modes[2:] if case.row.recurrent else modes)  # transformers' states outlast no change of the first two
    embed = case.model.get_input_embeddings() if case.row.family != SHARED else None  # which has some for each layer
    with applied(case):
        usual = case.logits(DynamicCache()).split(case.row.sizes, 1)
        for number, (expected, mode) in enumerate(zip(usual, modes, strict=False)):
            with mode():
                out = case.run(number, cache, embed=embed if number % 2 else None)
                assert torch.equal(out.logits.detach(), expected)
                cache = deepcopy(cache)


def computes_in_the_precision_of_autocast(case: Case, patch: Patch) -> None:
    """Which goes on and off between calls and copies, and whose first dtype a cache keeps."""
    for dtype, first, options in ((torch.bfloat16, True, {}), (torch.float16, False, {"chunking": CUT})):
        cache, seen = DynamicCache(), []
        with applied(case, **options):
            for number in range(len(case.pieces)):
                with torch.autocast("cpu", dtype, enabled=(number % 2 == 0) == first):
                    seen.append(case.run(number, cache).logits.float())
                cache = deepcopy(cache)
        logits, real = torch.cat(seen, 1), case.mask.bool()
        stored = torch.uint8 if case.row.eight_bits else dtype if first else torch.float32
        assert {layer.store.keys.dtype for layer in _layers(cache)} == {stored}
        assert logits[real].isfinite().all()
        if case.row.covers and not case.row.eight_bits:  # else rounding decides what is chosen
            worst = (logits - case.expected)[real].abs().max()
            assert worst <= 8 * torch.finfo(torch.bfloat16).eps * case.expected.abs().max()


@contextmanager
def _bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# --- caches -----------------------------------------------------------------------------------------------------------


def copies_go_their_own_way(case: Case, patch: Patch) -> None:
    """The copy goes on behind other tokens of the original, then the original behind other tokens of the copy."""
    forks = dict.fromkeys((1, len(case.pieces) - 2), 0)

    def fork(number: int, cache: Any) -> Any:
        if number not in forks:
            return cache
        copied = deepcopy(cache)
        assert [one.store.bytes for one in _layers(copied)] == [one.store.bytes for one in _layers(cache)]
        here, there = (copied, cache) if number == 1 else (cache, copied)
        case.run(number, there, case.pieces[number].flip(0) % 100 + 1)
        return here

    with applied(case):
        case.check(case.logits(DynamicCache(), fork))


def _layers(cache: Any) -> list[SparseLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SparseLayer)]


class BrokenOff(BaseException):
    """As KeyboardInterrupt: nothing catches it."""


def passes_that_fail_leave_nothing(case: Case, patch: Patch) -> None:
    """In a layer, in any operation of a store or behind it, behind the last layer, or in the head."""
    draw = Random(str(case.row))

    def break_off(number: int, cache: Any) -> Any:
        before = cache.get_seq_length()
        with pytest.raises(BrokenOff), _broken(case, 3, draw, patch):
            case.run(number, cache)
        if case.row.recurrent:
            with pytest.raises(UsageError):
                case.run(number, cache)
            cache.reset()
            for earlier in range(number):
                case.run(earlier, cache)
        assert cache.get_seq_length() == before
        return cache

    with applied(case):
        case.check(case.logits(DynamicCache(), break_off))


@contextmanager
def _broken(case: Case, operations: int, draw: Random, patch: Patch) -> Iterator[None]:
    """Inside it a pass fails; three layers have so many operations of stores at least."""
    model: Any = case.model
    place = draw.choice(["layer", "decoder", "head", *["store"] * 3])
    if place == "store" and not case.row.recurrent and not case.row.evicting:
        with _broken_store(patch, draw.randint(1, operations), draw.random() < 0.5):
            yield
        return
    modules = {"decoder": model.base_model, "head": model.get_output_embeddings()}
    module = modules.get(place, draw.choice(model.base_model.layers))
    add = module.register_forward_pre_hook if place == "head" else module.register_forward_hook
    with add(_break_off):
        yield


def _break_off(*_: Any) -> None:
    raise BrokenOff


@contextmanager
def _broken_store(patch: Patch, number: int, behind: bool) -> Iterator[None]:
    """Operation `number` of the stores fails, before it has done anything or once it is done."""
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls
            if mine == number and not behind:
                raise BrokenOff
            out = real(self, *args, **kwargs)
            if mine == number:
                raise BrokenOff
            return out

        return operation

    with patch.context() as inside:
        for kind, name in OPERATIONS:
            inside.setattr(kind, name, failing(getattr(kind, name)))
        yield


def a_cache_is_had_again_once_it_is_reset(case: Case, patch: Patch) -> None:
    with applied(case) as handle:
        cache = handle.new_cache(sum(case.row.sizes), case.row.batch)
        for number in range(min(2, len(case.pieces))):
            case.run(number, cache)
        cache.reset()
        assert cache.get_seq_length() == handle.stats().kv_bytes_device + handle.stats().kv_bytes_host == 0
        case.check(case.logits(cache))


def picked_rows_go_on(case: Case, patch: Patch) -> None:
    """As in beam search: repeated, selected and in another order."""
    twice, chosen, order = torch.arange(case.row.batch).repeat_interleave(2), torch.tensor([-1, 0, 1]), [2, 0, 1]
    rows, at = twice[chosen][order], sum(case.row.sizes[:2])
    with applied(case):
        cache = DynamicCache()
        case.run(1, case.run(0, cache).past_key_values)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(chosen)
        cache.reorder_cache(torch.tensor(order))
        logits = [case.run(number, cache, rows=rows).logits for number in range(2, len(case.pieces))]
    case.check(torch.cat(logits, 1), at, rows)


def prompts_of_elsewhere_are_gone_on_from(case: Case, patch: Patch) -> None:
    """What a dense model has prefilled decodes by the plan."""
    first = case.row.sizes.index(1)
    with apply(case.model, plan_for(case.model), **case.row.eight_bits):
        cache: Any = DynamicCache()
        for number in range(first):
            case.run(number, cache)
        given = list(handed_over(cache, cache.get_seq_length()))
    with applied(case) as handle:
        cache, at = cache_of(handle, given), sum(case.row.sizes[:first])
        logits = [case.run(number, cache).logits for number in range(first, len(case.pieces))]
    case.check(torch.cat(logits, 1), at)


def memory_is_what_was_said(case: Case, patch: Patch) -> None:
    """Keys and values to the byte, once the cache is made and when it is full."""
    prompt, answer, batch = case.row.sizes[0], 8, case.row.batch
    with applied(case) as handle:
        cache = handle.new_cache(prompt + answer, batch, answer=answer)
        use = handle._memory.use(Request(prompt, answer, batch), handle._engine.placement)
        said = use.kv_device + use.hot_set, use.kv_host
        made = handle.stats()
        generate(case.model, case.pieces[0], max_new_tokens=answer, past_key_values=cache)
        ran = handle.stats()
    assert (ran.kv_bytes_device, ran.kv_bytes_host) == said
    if not case.plan.evicting:  # whose memory is had as the prompt comes
        assert (made.kv_bytes_device, made.kv_bytes_host) == said


def virtual_memory_holds_the_same(case: Case, patch: Patch) -> None:
    pool = page_on_the_host(patch)
    with applied(case) as handle:
        cache = DynamicCache()
        case.check(case.logits(cache))
        stores = [layer.store for layer in _layers(cache) if isinstance(layer.store, VirtualStore)]
        assert stores or len(case.plan.evicting) == len(cache.layers)
        assert handle.stats().kv_bytes_device >= pool.used == sum(store.bytes.device for store in stores)
    del cache, stores
    assert pool.used == 0


# --- generate ---------------------------------------------------------------------------------------------------------


def turns_of_generate_are_plain_passes(case: Case, patch: Patch) -> None:
    """Two answers, each over all that was said so far; then the very calls that they stand for."""
    model: Any = case.model
    prompt, mask, more = case.row.sizes[0], case.prompt_mask, random_tokens(case.row.batch, 9, 5)
    asked = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    with applied(case):
        one, cache = generate(model, case.pieces[0], attention_mask=mask, **asked), DynamicCache()
        first = case.run(0, cache).logits[range(case.row.batch), mask.cumsum(1).argmax(1)][:, None]
        _check_answer(model, one, [first], one.sequences[:, prompt:], cache)
        if case.row.family in ONE_PIECE:
            return
        text = torch.cat((one.sequences, more), 1)
        mask = torch.cat((mask, torch.ones_like(text[:, prompt:])), 1)
        two = generate(model, text, attention_mask=mask, past_key_values=one.past_key_values, **asked)
        first = model(text[:, -10:], past_key_values=cache).logits[:, -1:]
        _check_answer(model, two, [first], two.sequences[:, text.shape[1] :], cache)
        text = two.sequences  # of which the last token alone is not cached: a decode step
        mask = torch.cat((mask, torch.ones_like(text[:, mask.shape[1] :])), 1)
        three = generate(model, text, attention_mask=mask, past_key_values=two.past_key_values, **asked)
        first = model(text[:, -1:], past_key_values=cache).logits
        _check_answer(model, three, [first], three.sequences[:, text.shape[1] :], cache)


def prompts_of_generate_come_in_pieces(case: Case, patch: Patch) -> None:
    """The last of which has one token and is no decode step, nor is one of a later turn."""
    prompt, mask, more = case.row.sizes[0], case.prompt_mask, random_tokens(case.row.batch, 10, 5)
    asked = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}

    def check(text: torch.Tensor, mask: torch.Tensor, cache: Any, chunk: int) -> Any:
        whole, pieces = (
            generate(
                case.model, text, attention_mask=mask, past_key_values=deepcopy(cache), prefill_chunk_size=size, **asked
            )
            for size in (None, chunk)
        )
        torch.testing.assert_close(torch.cat(pieces.logits), torch.cat(whole.logits), atol=1e-3, rtol=1e-3)
        return whole

    with applied(case):
        first = check(case.pieces[0], mask, None, next(size for size in range(20, prompt) if prompt % size == 1))
        text = torch.cat((first.sequences, more), 1)
        check(text, torch.cat((mask, torch.ones_like(text[:, prompt:])), 1), first.past_key_values, 3)


def _check_answer(model: Any, out: Any, logits: list[torch.Tensor], answer: torch.Tensor, cache: Any) -> None:
    """`logits` has those of the first token."""
    logits += [model(token, past_key_values=cache).logits for token in answer[:, :-1].split(1, 1)]
    torch.testing.assert_close(torch.stack(out.logits, 1), torch.cat(logits, 1), atol=1e-4, rtol=1e-4)
    assert out.past_key_values.get_seq_length() == cache.get_seq_length()


def exact_answers_are_those_of_dense_attention(case: Case, patch: Patch) -> None:
    """Whatever is drafted, in drafts of any length."""
    lengths = iter([0, 4, 2, 10, 6, 4] * 100)
    patch.setattr(DraftLength, "next", lambda self, most: next(size for size in lengths if size <= most))
    asked = {"attention_mask": case.prompt_mask, "max_new_tokens": 14}
    eight = case.row.eight_bits
    with apply(case.model, plan_for(case.model), **eight) if eight else nullcontext():
        dense = generate(case.model, case.pieces[0], **asked)
    with applied(case, exact=True) as handle:
        assert torch.equal(generate(case.model, case.pieces[0], **asked), dense)
        assert handle.stats().tokens_drafted > 0


# --- captured steps ---------------------------------------------------------------------------------------------------


def captured_steps_are_launched_ones(case: Case, patch: Patch) -> None:
    """Over caches that take turns, one of which is a copy; each step is replayed."""
    emulate(patch)
    with applied(case, backend="triton") as handle:
        first = case.row.sizes.index(1)
        caches: list[Any] = [DynamicCache(), None]
        prompt = [case.run(number, caches[0]).logits for number in range(first)]
        caches[1], seen = deepcopy(caches[0]), [prompt, list(prompt)]
        for number in range(first, len(case.pieces)):
            for cache, logits in zip(caches, seen, strict=True):
                logits.append(case.run(number, cache).logits)
        assert (handle.steps.replayed, handle.steps.why_not) == (2 * case.row.steps, "")
        assert len(handle.steps._graphs) == 1
    for logits in seen:
        case.check(torch.cat(logits, 1))


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusals(case: Case, handle: Handle, cache: Any) -> Iterator[tuple[str, type[SparseKVError], Callable[[], Any]]]:
    """What the row does not permit: a word of the message, the error, a call."""
    model: Any = case.model
    row, ids = case.row, case.pieces[0]
    fixed = "evict" if row.evicting else "host memory" if row.in_host_memory else ""
    if fixed and not row.recurrent:
        yield fixed, UnsupportedError, lambda: cache.batch_repeat_interleave(2)
        yield fixed, UnsupportedError, lambda: cache.batch_select_indices(torch.tensor([0]))
        yield fixed, UnsupportedError, lambda: cache.reorder_cache(torch.arange(row.batch))
    if fixed:
        yield fixed, UnsupportedError, lambda: generate(model, ids, num_beams=2, max_new_tokens=2)
    if (fixed or row.recurrent) and row.batch > 1:
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        yield "recurrent" if row.recurrent else fixed, UnsupportedError, lambda: model(ids, attention_mask=mask)
    if row.evicting or row.looks_back or row.recurrent:
        yield "layer|exact", UnsupportedError, lambda: _instead(case, handle, exact=True)
    elif row.decode is None or not row.options.get("decode", True):
        yield "decode", SparseKVError, lambda: _instead(case, handle, exact=True)
    for layer in case.plan.evicting:
        yield f"found {layer}", UsageError, lambda layer=layer: _instead(case, handle, kv_host_layers=(layer,))
    if row.pads and row.side == "right":
        asked = {"attention_mask": case.prompt_mask, "prefill_chunk_size": 64, "max_new_tokens": 2}
        yield "pad on the left", UnsupportedError, lambda: generate(model, ids, **asked)
    if row.family in ONE_PIECE:
        yield "begin every pass", UnsupportedError, lambda: model(ids[:, :2], past_key_values=cache)
    if not row.recurrent:
        yield "cropping", UnsupportedError, lambda: cache.crop(-1)
        yield "new cache", ShapeError, lambda: model(random_tokens(row.batch + 1, 1), past_key_values=cache)


def _instead(case: Case, handle: Handle, **options: Any) -> None:
    """The plan applied with other options."""
    handle.suspend()
    try:
        applied(case, **options).close()
    finally:
        handle.resume()


def what_a_row_does_not_permit_is_refused(case: Case, patch: Patch) -> None:
    """And changes nothing of a cache that goes on."""
    with applied(case) as handle:
        cache, logits = DynamicCache(), []
        logits.append(case.run(0, cache).logits)
        for words, error, call in refusals(case, handle, cache):
            with pytest.raises(error, match=words):
                call()
        logits += [case.run(number, cache).logits for number in range(1, len(case.pieces))]
    case.check(torch.cat(logits, 1))


# --- which check is for which case ------------------------------------------------------------------------------------


def _is_drafted(row: Row) -> bool:
    drafts = row.decode is not None and row.options.get("decode", True)
    kept = row.evicting or row.looks_back or row.recurrent or not drafts
    return not kept and not (row.in_host_memory and row.batch > 1)


CHECKS: dict[Callable[[Case, Patch], None], Callable[[Row], bool]] = {
    is_brute_force: lambda row: True,
    runs_in_pieces_of_rows_and_heads: lambda row: True,
    is_the_unmodified_model_where_nothing_is_left_out: lambda row: True,
    does_not_depend_on_modes: lambda row: True,
    computes_in_the_precision_of_autocast: lambda row: bool(row.covers or row.patterns) and not row.recurrent,
    copies_go_their_own_way: lambda row: len(row.sizes) > 3,
    passes_that_fail_leave_nothing: lambda row: True,
    a_cache_is_had_again_once_it_is_reset: lambda row: True,
    picked_rows_go_on: lambda row: not (row.evicting or row.in_host_memory or row.recurrent) and len(row.sizes) > 2,
    prompts_of_elsewhere_are_gone_on_from: lambda row: (
        not (row.patterns or row.prefill or row.evicting or row.looks_back or row.pads)
    ),
    memory_is_what_was_said: lambda row: not row.pads and not row.recurrent,
    virtual_memory_holds_the_same: lambda row: not row.recurrent,
    turns_of_generate_are_plain_passes: lambda row: True,
    prompts_of_generate_come_in_pieces: lambda row: (
        not (row.patterns or row.prefill or row.eight_bits or row.family in ONE_PIECE)
        and not (row.pads and row.side == "right")
    ),
    exact_answers_are_those_of_dense_attention: _is_drafted,
    captured_steps_are_launched_ones: lambda row: row.captured,
    what_a_row_does_not_permit_is_refused: lambda row: True,
}
