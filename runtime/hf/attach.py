"""Attaching an engine to a model, and taking it off again without a trace. The one way to do so.

While attached: the model's attention implementation is `sparsekv`; `generate` and the forwards of the model and of its
decoder go through an `Attached`, which knows where a prompt ends, gives the cache our layers, decides the phase, and
runs long inputs and captured decode steps by executors of our own. A deep copy has nothing attached.

A forward pass and `generate` may be given rows of different lengths, padded on either side, positions in a row, one
sequence a row, token by token. Anything else is refused before it gives wrong tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from threading import RLock
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
from sparsekv.plans.model import AttentionGroup
from sparsekv.runtime.architecture import architecture_of, record_of
from sparsekv.runtime.hf.attention import NAME, PACKED, Engine, Executor, Pass, Phase, check_layer, register
from sparsekv.runtime.hf.batching import Batches
from sparsekv.runtime.hf.cache import CacheProgress, begin_pass, fixed_rows_of, progress_of, sparse_cache
from sparsekv.runtime.hf.describe import (
    CACHE_NAME,
    attention_modules,
    check_one_piece,
    check_shared_keys,
    config_of,
    decoder_of,
    generate_setting,
    named,
    position_inputs,
    prompt_end,
)
from sparsekv.runtime.hf.long_inputs import Chunking, LongInputs
from sparsekv.runtime.hf.multimodal import TextInputs
from sparsekv.runtime.hf.ragged_rows import Columns, rows_of_pass, run_by_rows
from sparsekv.runtime.model_config import attention_groups, decoder_config, linear_layers, rope_switch

_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
_KEPT = "logits_to_keep"  # some decoders leave out other rows where no later layer reads them
_PATIENCE = 5.0  # seconds: a `generate` that has streamed its last token is about to return
_NO_END = -1.0  # a loop of continuous batching waits for its turn: an error would end all of its requests
_ABSENT = object()


def check_attachable(model: PreTrainedModel) -> None:
    check_runnable(model)
    architecture_of(decoder_config(model.config).model_type)
    if config_of(model)._attn_implementation in (NAME, PACKED):
        raise UsageError(
            "a plan is applied to this model already; close or suspend that handle before applying another"
        )
    attention_modules(model)
    check_shared_keys(model)


def check_runnable(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"expected a Hugging Face PreTrainedModel, found {type(model).__name__}; give load_model(...).model"
        )
    record_of(decoder_config(model.config).model_type)
    if model.training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if (model.tp_size or 1) > 1:
        raise UnsupportedError(
            f"expected a model on its own, found one split over {model.tp_size} tensor-parallel ranks; "
            f"load it without tp_plan"
        )


def attach(model: PreTrainedModel, engine: Engine, chunking: Chunking | None = None) -> Callable[[], None]:
    """Attaches `engine` and returns what undoes it, any number of times, exceptions or not."""
    check_attachable(model)
    register()
    with ExitStack() as undo:
        configs = _implementations(model)
        undo.callback(_restore_implementations, configs)
        decoder_of(model).set_attn_implementation(NAME)
        attached = Attached(model, engine, chunking or Chunking(), configs)
        undo.callback(attached.take_off)
        attached.put_on()
        undo.callback(setattr, engine, "open", False)
        return undo.pop_all().close
    raise AssertionError("unreachable")


@dataclass(slots=True)
class Prompt:
    """The prompt of the `generate` call under way: all of its pieces are prefill, those of one token too, so that how
    it is cut changes nothing. Where all of it but its last token is cached beforehand, that one is as any other
    forward pass; so is what runs over another cache, as for guidance.
    """

    end: int  # tokens that are cached once it has run
    begun: bool = False
    cache: Cache | None = None  # that of its first piece

    def phase(self, cache: Cache | None, past: int) -> Phase | None:
        """Returns the phase of a pass behind `past` cached tokens; None where it is as any other."""
        first, self.begun = not self.begun, True
        if first:
            self.cache = cache
        if cache is not self.cache or (cache is not None and past >= self.end):
            return None
        return None if first and past == self.end - 1 else Phase.PREFILL

    def ran(self, cache: Cache | None, past: int) -> bool:
        """Returns whether all of it is cached, so that `generate` has put ones behind a mask that was checked."""
        return self.begun and cache is not None and cache is self.cache and past >= self.end


class Attached:
    """An engine at work on a model, with the model's configs and their attention implementations of before."""

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        chunking: Chunking,
        configs: list[tuple[PreTrainedConfig, str | None]],
    ) -> None:
        self.decoder = decoder_of(model)
        self.under_way: Pass | None = None
        self.model = model
        self._engine = engine
        self._configs = configs
        self._text = None if self.decoder is model.base_model else TextInputs(model)
        self._attentions = attention_modules(model)
        decoder: Any = self.decoder
        shapes = {layer: group for group in attention_groups(config_of(model)) for layer in group.layers}
        layers: list[Any] = [attention.layer_idx for attention in self._attentions]
        self.shapes: Mapping[int, AttentionGroup] = {layer: shapes[layer] for layer in layers}
        self._layers = len(decoder.layers) - sum(shape.keys_of is not None for shape in self.shapes.values())
        self._linear = linear_layers(config_of(model))
        self._own: Callable[..., Any] = self.decoder.forward
        self._names = tuple(inspect.signature(self._own).parameters)
        self._executors: tuple[Executor, ...] = ()
        if "forward" not in vars(self.decoder):  # somebody else's runs whole
            self._own = partial(type(self.decoder).forward, self.decoder)
            self._executors = (LongInputs(chunking, config_of(model).model_type), *engine.executors())
        self._switch = rope_switch(config_of(model))
        self._placed: list[tuple[nn.Module, str, Any, Any]] = []  # with what was there before
        self._batches = Batches(self, engine)
        self._prompt: Prompt | None = None
        self._step: tuple[Phase, torch.Tensor | None] | None = None  # what the loop of `generate` runs, if it says so
        self._turn = RLock()
        self._depth = 0
        self._ran: list[CacheProgress] = []  # of passes that only the outermost forward has not left yet
        self._is_on = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        """Itself: a copied module that still refers to it is called outside of any pass."""
        return self

    # --- attributes of the model's modules ----------------------------------------------------------------------------

    def put_on(self) -> None:
        for attention in self._attentions:
            self._put(attention, NAME, self)
        if self.decoder is not self.model:
            self._put(self.model, "forward", self._inside(self.model.forward))
        if self._text is not None:
            forward = self._text.module.forward
            self._put(self._text.module, "forward", self._inside(forward, self._text.around(forward)))
        self._put(self.decoder, "forward", self._inside(self.decoder.forward, self._run))
        if self.model.can_generate():
            model: Any = self.model
            self._put(model, "generate", self._guarded(model.generate))
            self._put(model, "init_continuous_batching", self._batched(model.init_continuous_batching))
            if self._switch:
                self._put(self.model, "prepare_inputs_for_generation", self._prepared)
        for module in {id(module): module for module in (self.model, self.model.base_model, self.decoder)}.values():
            self._put(module, "__deepcopy__", partial(self._copied, module))

    def take_off(self) -> None:
        """Restores the modules, but for what somebody has put in front since: that calls what was there before."""
        self._batches.close()
        self._is_on = False
        for module, name, value, former in self._placed:
            _restore(module, name, value, former)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        self._placed.append((module, name, value, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        method = vars(module).pop("__deepcopy__")
        try:
            twin = deepcopy(module, memo)
        finally:
            vars(module)["__deepcopy__"] = method
        for placed, name, value, former in self._placed:
            if id(placed) in memo:  # what was there before may hold the module that was copied
                _restore(memo[id(placed)], name, value, former if former is _ABSENT else deepcopy(former, memo))
        _restore_implementations([(memo[id(config)], was) for config, was in self._configs if id(config) in memo])
        return twin

    # --- the way in ---------------------------------------------------------------------------------------------------

    def _guarded(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(generate)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return generate(*args, **kwargs)
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            check_generate(self.model.generation_config, given, self._engine)
            if self._text is not None:
                self._text.check(given)
            end, taken_over = prompt_end(given), self._engine.taking_over(self, given)
            with self._one_thread(_PATIENCE), self._during(_prompt=Prompt(end) if end else None):
                return generate(**taken_over)

        return guarded

    def _batched(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """The one door of `generate_batch` and its managers, which run the model in a thread of theirs."""

        @wraps(init)
        def batched(*args: Any, **kwargs: Any) -> Any:
            return self._batches.start(init, *args, **kwargs) if self._is_on else init(*args, **kwargs)

        return batched

    def _prepared(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """The inputs of a step of `generate`. Where the angles of a long rope change, the whole sequence, over the same
        cache: transformers' own method leaves the caller's cache for another one."""
        cache: Cache | None = kwargs.get(CACHE_NAME)
        if cache is not None and 0 < cache.get_seq_length() <= self._switch < input_ids.shape[1]:
            cache.reset()
            kwargs["next_sequence_length"] = None
        return GenerationMixin.prepare_inputs_for_generation(cast(Any, self.model), cast(Any, input_ids), **kwargs)

    def _inside(self, forward: Callable[..., Any], run: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A forward in whose midst passes run. The last one over a cache ends when the outermost forward returns: a
        failure in the head of the model leaves nothing of the pass behind."""
        run = run or forward

        @wraps(forward)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return forward(*args, **kwargs)
            with self._one_thread(0.0 if self._batches.of(kwargs) is None else _NO_END):
                self._depth += 1
                try:
                    output = run(*args, **kwargs)
                    if self._depth == 1:
                        for progress in self._ran:
                            progress.end()
                    return output
                finally:
                    self._depth -= 1
                    if not self._depth:
                        self._ran.clear()

        return inside

    @contextmanager
    def _one_thread(self, patience: float = 0.0) -> Iterator[None]:
        """Refuses other threads: statistics, captured steps and the prompt under way are the handle's."""
        if not self._turn.acquire(timeout=patience):
            raise UsageError(
                "expected one thread at a time under a handle, found another one in a forward pass or in generate; "
                "take turns (a lock around generate), or load the model once a thread"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        inputs = named(dict(zip(self._names, args, strict=False)) | kwargs)
        if (batch := self._batches.begin(inputs)) is not None:
            return self.run_own(batch, inputs)
        inputs = inputs if self._text is None else self._text.of_decoder(inputs)
        kept = inputs.pop(_KEPT, 0)
        under_way = self._begin(inputs)
        is_plain = under_way.phase is Phase.PREFILL and under_way.rows is None and isinstance(kept, int)
        if is_plain and kept and not self._engine.sees_all:
            inputs[_KEPT] = kept
        output = (self.run if under_way.rows is None else partial(run_by_rows, self))(under_way, inputs)
        if under_way.cache is not None:
            self._ran.append(progress_of(under_way.cache))
        return output

    def run(self, under_way: Pass, inputs: dict[str, Any]) -> Any:
        executor = next((candidate for candidate in self._executors if candidate.takes(self, under_way, inputs)), None)
        return self.run_own(under_way, inputs) if executor is None else executor.run(self, under_way, inputs)

    def run_own(self, under_way: Pass, inputs: dict[str, Any]) -> Any:
        with self.attending(under_way):
            return self._own(**inputs)

    @contextmanager
    def _during(self, **state: Any) -> Iterator[None]:
        """Inside it, these attributes are others."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def attending(self, under_way: Pass) -> Iterator[None]:
        with self._during(under_way=under_way):
            yield
        missing = under_way.next_layer
        if missing is not None and missing < self.decoder.config.num_hidden_layers:
            check_layer(missing, None)

    def stepping(self, phase: Phase, new_B: torch.Tensor | None = None) -> AbstractContextManager[None]:
        return self._during(_step=(phase, new_B))

    def alone(self, layer: int) -> AbstractContextManager[None]:
        """Inside it, one layer attends, called by itself and without a cache."""
        return self._during(under_way=Pass(self._engine, Phase.PREFILL, None, {layer: self.shapes[layer]}))

    def _begin(self, inputs: dict[str, Any]) -> Pass:
        """One token behind a past is a decode step, unless it is a piece of a longer prompt of `generate`."""
        tokens = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
        cache, use_cache = inputs.get(CACHE_NAME), inputs.get("use_cache")
        lengths: tuple[int, ...] = ()
        past, new = 0, 0 if tokens is None else tokens.shape[1]
        config: Any = self.decoder.config
        if cache is not None or (config.use_cache if use_cache is None else use_cache):
            cache = inputs[CACHE_NAME] = sparse_cache(cache, self._engine, self._layers, self._linear)
            progress = progress_of(cache)
            if progress in self._ran:  # the model's forward runs the decoder once more
                self._ran.remove(progress)
                progress.end()
            check_one_piece(config.model_type, cache.get_seq_length(), new)
            lengths = begin_pass(cache, config.num_hidden_layers)
            past = cache.get_seq_length()
        prompt = self._prompt
        if prompt is not None and 0 < past <= self._switch < past + new:
            raise UnsupportedError(
                f"expected the first {self._switch + 1} tokens in one piece, as the rotary angles of longer inputs are "
                f"others, found {past} cached; use a larger prefill_chunk_size"
            )
        if is_checked := prompt is None or not prompt.ran(cache, past):
            check_call(self.decoder, inputs, tokens)
        phase, new_B = self._step or (None, None)
        if phase is None and prompt is not None:
            phase = prompt.phase(cache, past)
        ends = prompt is not None and phase is Phase.PREFILL and past + new >= prompt.end
        if phase is None:
            phase = Phase.PREFILL
            if cache is not None and new == 1 and past > 0:
                phase = self._engine.step_phase(cache, lengths)
        columns = None if tokens is None else Columns(tokens, past, lengths, self._switch)
        rows = None if columns is None else rows_of_pass(inputs, columns, phase, is_checked)
        numbered = rows is not None or inputs.get("position_ids") is not None
        if columns is not None and not numbered:
            inputs |= position_inputs(config.model_type, past, new, columns.given.device)
        dense = None
        if cache is not None and columns is not None:
            more = [new] * len(columns.cached) if rows is None else [row.stop - row.start for row in rows]
            after = tuple(map(int.__add__, columns.cached, more))
            dense = self._engine.begin(cache, phase, after, columns.given.device)
        return Pass(self._engine, phase, cache, self.shapes, new_B=new_B, ends_prompt=ends, rows=rows, dense=dense)


def _restore(module: nn.Module, name: str, value: Any, former: Any) -> None:
    if vars(module).get(name) is not value:
        return
    if former is _ABSENT:
        del vars(module)[name]
    else:
        vars(module)[name] = former


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in configs:
            configs[id(config)] = config
            waiting.extend(sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None)
    return [(config, config._attn_implementation) for config in configs.values()]


def _restore_implementations(saved: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, implementation in saved:  # outer before inner: setting one sets those below it
        config._attn_implementation = implementation


_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # rows of several sequences


def check_call(decoder: Any, inputs: dict[str, Any], tokens: torch.Tensor | None) -> None:
    """Raises a clear error for a forward pass that would give wrong tokens; `rows_of_pass` does so for its mask."""
    if decoder.training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if tokens is not None and not tokens.shape[1]:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    if inputs.get("output_attentions", decoder.config.output_attentions):
        raise UnsupportedError("attention weights are never materialised here; leave output_attentions off")
    if inputs.get("is_causal", getattr(decoder.config, "is_causal", True)) is False:
        raise UnsupportedError("expected causal attention, found is_causal=False; close the handle to run an encoder")
    packed = [name for name in _PACKED if inputs.get(name) is not None]
    if packed:
        raise UnsupportedError(f"expected one sequence a row, found {packed[0]}; run packed sequences one by one")


# The cache refuses them too, but only after the prefill of what may be a very long prompt.
_ONE_BEAM = "generate with num_beams=1 and do_sample as you like"
_NO_DRAFTS = "generate without an assistant or prompt lookup"
_OWN_CACHE = "leave cache_implementation unset; a plan's decode.offload moves KV to the host"

_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "force_words_ids": (bool, "constrained beam search", _ONE_BEAM),
    "constraints": (bool, "constrained beam search", _ONE_BEAM),
    "assistant_model": (bool, "assisted generation", _NO_DRAFTS),
    "prompt_lookup_num_tokens": (bool, "prompt lookup", _NO_DRAFTS),
    "assistant_early_exit": (bool, "assisted generation", _NO_DRAFTS),
    "use_mtp": (bool, "multi-token prediction", _NO_DRAFTS),
    "penalty_alpha": (bool, "contrastive search", "leave penalty_alpha unset"),
    "dola_layers": (bool, "DoLa decoding", "leave dola_layers unset"),
    "output_attentions": (bool, "returning attention weights", "leave output_attentions off"),
    "cache_implementation": (lambda found: found != "dynamic", "another cache implementation", _OWN_CACHE),
}


def check_generate(defaults: GenerationConfig, given: dict[str, Any], engine: Engine) -> None:
    """Refuses the ways of generating that a sparse cache cannot follow, before anything runs; see also `check_cut`."""
    for name, (refused, what, instead) in _REFUSED.items():
        value = generate_setting(name, given, defaults)
        if value is not None and refused(value):
            found = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
            raise UnsupportedError(
                f"{what} cannot be right with a sparsekv plan applied yet (found {name}={found}); "
                f"{instead}, or close the handle first"
            )
    cache = named(given).get(CACHE_NAME)
    past = cache.get_seq_length() if isinstance(cache, Cache) else 0
    if not past:  # else it may be the last piece of a prompt, or a turn
        engine.check_cut(generate_setting("prefill_chunk_size", given, defaults), prompt_end(given))
    if (beams := generate_setting("num_beams", given, defaults) or 1) > 1:
        fixed_rows_of(cache, engine.fixed_rows).refuse("num_beams=1", f"num_beams={beams}", "generate with one beam")
