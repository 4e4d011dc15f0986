"""Attaching an engine to a model, and taking it off again without a trace. The one way to do so.

While attached: the model's attention implementation is `sparsekv`; a hook on the decoder checks the inputs, gives the
cache our layers, decides the phase and hands all three to the attention function as a keyword argument; long inputs and
captured decode steps run by executors of our own; and `generate` refuses what cannot be right. A deep copy has nothing
attached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
from sparsekv.runtime.hf.attention import CONTEXT, NAME, Context, Engine, Executor, Phase, register
from sparsekv.runtime.hf.cache import Progress, begin_pass, sparse_cache
from sparsekv.runtime.hf.describe import attention_modules, decoder_of
from sparsekv.runtime.hf.long_inputs import Chunking, LongInputs
from sparsekv.runtime.model_config import check_supported

# What a forward pass may be given: equally long rows without padding, positions in a row, no custom mask.


def check_inputs(inputs: dict[str, Any], tokens: torch.Tensor | None, training: bool) -> None:
    """Raises a clear error for what would give wrong tokens.

    Raises:
        UsageError: the model is in training mode.
        PromptError: there are no tokens.
        UnsupportedError: attention weights are asked for, or attention that is not causal, or packed sequences.
    """
    if training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if tokens is not None and tokens.shape[1] == 0:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    if inputs.get("output_attentions"):
        raise UnsupportedError("attention weights are never materialised here; leave output_attentions off")
    if inputs.get("is_causal") is False:
        raise UnsupportedError("expected causal attention, found is_causal=False; close the handle to run an encoder")
    packed = [name for name in _PACKED if inputs.get(name) is not None]
    if packed:
        raise UnsupportedError(f"expected one sequence a row, found {packed[0]}; run packed sequences one by one")


_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # rows of several sequences


class ChangeCheck:
    """Refuses a model that is no longer as it was when the engine was attached. Compares objects and names alone, as it
    runs before every decode step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.attentions: Sequence[nn.Module] = attention_modules(model)
        self._configs = list({id(config): config for config in (module.config for module in self.attentions)}.values())
        self._placed = _placed(decoder_of(model))

    def check(self, decoder: Any) -> None:
        """Checks that the layers are the same ones, call our attention, and lie where they did.

        A module put around a layer is fine.

        Raises:
            UsageError: they do not.
        """
        for config in (decoder.config, *self._configs):
            if config._attn_implementation != NAME:
                raise UsageError(
                    f"expected the attention implementation {NAME!r} while a plan is applied, found "
                    f"{config._attn_implementation!r:.40}; close the handle before setting another one"
                )
        if len(decoder.layers) != len(self.attentions):
            raise UsageError(
                f"{_LAYERS}, found {len(decoder.layers)} layers in place of {len(self.attentions)}{_CLOSE}"
            )
        for number, (layer, attention) in enumerate(zip(decoder.layers, self.attentions, strict=True)):
            if layer._modules.get("self_attn") is not attention and all(
                part is not attention for part in layer.modules()
            ):
                raise UsageError(f"{_LAYERS}, found another attention in layer {number}{_CLOSE}")
        if (placed := _placed(decoder)) != self._placed:
            was, found = (
                f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in (self._placed, placed)
            )
            raise UsageError(
                f"expected the model as it was ({was}) when the plan was applied, found it {found}; "
                f"close the handle before moving or converting it"
            )


_LAYERS = "expected the layers that the plan was applied to"
_CLOSE = "; close the handle before changing the model"


def _placed(decoder: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    first = next(decoder.parameters())
    return first.dtype, first.device


class MaskCheck:
    """Refuses padding and custom masks. On a GPU the mask of a decode step is looked at one step later: asking for it
    at once would wait for the device in every step."""

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None  # pinned: whether the last decode step's mask was all ones
        self._copied: torch.cuda.Event | None = None

    def check(self, mask: Any, length: int, *, waits: bool) -> None:
        """Checks this mask, now if `waits` or on a CPU, and the last one that was not waited for.

        Args:
            mask: as given to the model.
            length: cached tokens and new ones.
            waits: whether the device may be waited for.

        Raises:
            UnsupportedError: it is no 2D mask of so many tokens, or one of them has padding.
        """
        if self._copied is not None and self._flag is not None and (waits or self._copied.query()):
            self._copied.synchronize()
            self._copied = None
            _refuse_padding(bool(self._flag), "the step before")
        if mask is None:
            return
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            found = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedError(f"expected a 2D attention_mask of ones or none, found {found}; pass no custom mask")
        if mask.shape[1] < length:
            raise UnsupportedError(
                f"expected an attention_mask of all {length} tokens, cached ones included, found one of "
                f"{mask.shape[1]}; pass the whole mask or none"
            )
        if waits or not mask.is_cuda:
            _refuse_padding(bool(mask.all()), "this call")
        elif self._copied is None:
            with torch.inference_mode(False):  # else it could not be written to under torch.no_grad()
                self._flag = (
                    torch.ones((), dtype=torch.bool, pin_memory=True, device="cpu")
                    if self._flag is None
                    else self._flag
                )
            self._flag.copy_(mask.all(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()


def _refuse_padding(ones: bool, where: str) -> None:
    if not ones:
        raise UnsupportedError(
            f"expected rows of equal length, found padding in the attention_mask of {where}; "
            "run prompts of different lengths one at a time, or group those of equal length"
        )


def check_positions(positions: Any, past: int) -> None:
    """Positions of several tokens count up by one from what is cached. Single tokens are not asked: it costs a wait.

    Raises:
        UnsupportedError: they do not.
    """
    if positions is None or positions.shape[-1] < 2:
        return
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UnsupportedError(
            f"expected position_ids that count up by one from the {past} cached tokens, found others; "
            f"run packed sequences one by one, and leave prefill_chunk_size unset when a prompt goes on from a cache"
        )


# Refuses the ways of generating that a sparse cache cannot follow, before anything runs.
#
# The cache refuses them too, but only after the prefill of what may be a very long prompt.

_ONE_BEAM = "generate with num_beams=1 and do_sample as you like"
_NO_DRAFTS = "generate without an assistant or prompt lookup"
_OWN_CACHE = "leave cache_implementation unset; a plan's decode.offload moves KV to the host"

_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "num_beams": (lambda found: found > 1, "beam search", _ONE_BEAM),
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


@dataclass(slots=True)
class Prompt:
    """The prompt of the `generate` call under way.

    Where all of it but its last token is cached beforehand, that one is a decode step, as in any other forward pass. Of
    any other prompt all pieces are prefill, those of one token too: how it is cut changes nothing. What runs once the
    prompt has ended is no piece of it, though it may have fewer tokens: guidance has a second cache.
    """

    tokens: int = 0  # that are cached once it has run; 0 outside `generate`
    begun: bool = False  # whether a piece of it has run
    under_way: bool = False  # whether the next forward pass is a piece of it

    def begin(self, tokens: int) -> None:
        """A prompt that ends at so many cached tokens is about to run; 0 for none."""
        self.tokens, self.begun, self.under_way = tokens, False, tokens > 0

    def run(self, past: int, new: int) -> bool:
        """Counts a forward pass of `new` tokens behind `past` cached ones; whether it has to be prefill."""
        last_alone = not self.begun and past == self.tokens - 1
        prefill = self.under_way and not last_alone
        self.begun, self.under_way = True, self.under_way and past + new < self.tokens
        return prefill


def guarded(model: PreTrainedModel, prompt: Prompt, turn: RLock) -> Callable[..., Any]:
    """The model's `generate` behind the checks; tells the hook how long its prompt is.

    Raises, when the result is called:
        UnsupportedError: the arguments ask for beams, drafts, or a cache of another kind.
    """
    generate: Any = model.generate

    @wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        for name, (refused, what, instead) in _REFUSED.items():
            found = _setting(name, kwargs, config, model.generation_config)
            if found is not None and refused(found):
                raise UnsupportedError(
                    f"{what} cannot be right with a sparsekv plan applied yet (found {name}={_brief(found)}); "
                    f"{instead}, or close the handle first"
                )
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        with _own_turn(turn, _PATIENCE):
            prompt.begin(_prompt_end(ids, kwargs.get("attention_mask"), kwargs.get("past_key_values")))
            try:
                return generate(*args, **kwargs)
            finally:
                prompt.begin(0)

    return checked


def _setting(name: str, kwargs: dict[str, Any], config: GenerationConfig | None, defaults: GenerationConfig) -> Any:
    if name in kwargs:  # None as well: it goes over the settings of the model
        return kwargs[name]
    given = getattr(config, name, None)
    return given if given is not None else getattr(defaults, name, None)


def _prompt_end(ids: Any, mask: Any, cache: Any) -> int:
    """How many tokens are cached once `generate` has run a prompt; 0 where it has no ids."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 0
    tokens = ids.shape[1]
    # transformers takes the ids for those behind the cached ones alone where the mask has another length
    only_new = isinstance(mask, torch.Tensor) and mask.shape[-1] != tokens and isinstance(cache, Cache)
    return cache.get_seq_length() + tokens if only_new else tokens


def _brief(found: Any) -> str:
    return repr(found) if isinstance(found, (bool, int, float, str)) else type(found).__name__


def check_attachable(model: PreTrainedModel) -> None:
    """Raises a clear error when nothing can be attached to `model`.

    Raises:
        UsageError: not a Hugging Face model, in training mode, or something is attached already.
        UnsupportedError: an architecture that is not supported, layers that are not transformers' own, or a model
            split by tensor parallelism.
    """
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"expected a Hugging Face PreTrainedModel, found {type(model).__name__}; load it with load_model"
        )
    check_supported(model.config.model_type)
    if model.config._attn_implementation == NAME:
        raise UsageError(
            "a plan is applied to this model already; close or suspend that handle before applying another"
        )
    if model.training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if (model.tp_size or 1) > 1:
        raise UnsupportedError(
            f"expected a model on its own, found one split over {model.tp_size} tensor-parallel ranks; "
            f"load it without tp_plan"
        )
    attention_modules(model)


def attach(
    model: PreTrainedModel, engine: Engine, chunking: Chunking | None = None, change: ChangeCheck | None = None
) -> Callable[[], None]:
    """Attaches `engine` and returns what undoes it, any number of times, exceptions or not.

    Args:
        chunking: how long inputs are cut, where not as usual.
        change: knows the model as it has to be; as it is now when None.

    Raises:
        UsageError, UnsupportedError: see `check_attachable` and `ChangeCheck.check`.
    """
    check_attachable(model)
    change = change or ChangeCheck(model)
    register()
    with ExitStack() as undo:
        implementations = _implementations(model)
        undo.callback(_restore_implementations, implementations)
        model.set_attn_implementation(NAME)
        decoder = decoder_of(model)
        change.check(decoder)
        prompt, turn, passes = Prompt(), RLock(), _Passes()
        prepare = _decoder_hook(engine, decoder, change, prompt, turn, passes)
        hook = decoder.register_forward_pre_hook(prepare, with_kwargs=True)
        undo.callback(hook.remove)
        shadows = _Shadows()
        undo.callback(shadows.remove, model)
        undo.callback(shadows.remove, decoder)
        executors: tuple[Executor, ...] = ()
        if "forward" not in vars(decoder):  # somebody else's stays, and runs whole
            executors = (LongInputs(engine, chunking or Chunking(), model.config.model_type), *engine.executors())
        for module in {id(module): module for module in (model, decoder)}.values():
            here = executors if module is decoder else ()
            shadows.put(module, "forward", _forward(module, here, turn, passes))
        if model.can_generate():
            shadows.put(model, "generate", guarded(model, prompt, turn))
        for module in {id(module): module for module in (model, decoder)}.values():
            shadows.put(module, "__deepcopy__", _copier(module, shadows, hook.id, implementations))
        undo.callback(setattr, engine, "open", False)
        return undo.pop_all().close
    raise AssertionError("unreachable")


class _Passes:
    """The forward passes under way. They end when the outermost module that was called returns: what fails in the head
    of the model leaves nothing of the pass behind either."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun: list[Progress] = []

    def begun(self, progress: Progress) -> None:
        """A pass over a cache has begun, about to be `inside`."""
        self._begun.append(progress)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """One of the modules runs."""
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                for progress in self._begun:
                    progress.end()
        finally:
            self._depth -= 1
            if not self._depth:
                self._begun.clear()


def _forward(module: nn.Module, executors: Sequence[Executor], turn: RLock, passes: _Passes) -> Callable[..., Any]:
    former = vars(module).get("forward")

    @wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _own_turn(turn), passes.inside():
            if not args and kwargs.get(CONTEXT) is not None:  # else the attention function says what is wrong
                for executor in executors:
                    if executor.takes(module, kwargs):
                        return executor.run(module, kwargs)
            return type(module).forward(module, *args, **kwargs) if former is None else former(*args, **kwargs)

    return forward


_PATIENCE = 5.0  # seconds: a `generate` that has streamed its last token is about to return


@contextmanager
def _own_turn(turn: RLock, patience: float = 0.0) -> Iterator[None]:
    """One thread at a time: statistics, captured steps and the prompt under way are the handle's.

    Raises:
        UsageError: another thread is at it.
    """
    if not turn.acquire(timeout=patience):
        raise UsageError(
            "expected one thread at a time under a handle, found another one in a forward pass or in generate; "
            "take turns (a lock around generate), or load the model once a thread"
        )
    try:
        yield
    finally:
        turn.release()


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


def _decoder_hook(
    engine: Engine, decoder: PreTrainedModel, change: ChangeCheck, prompt: Prompt, turn: RLock, passes: _Passes
) -> Callable[..., Any]:
    """Decides the phase of a forward pass: one token behind a past is a decode step, unless it is a piece of a longer
    prompt of `generate`."""
    names, mask = tuple(inspect.signature(decoder.forward).parameters), MaskCheck()

    def prepare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        with _own_turn(turn):  # another thread is refused before it changes anything
            change.check(module)
        inputs = dict(zip(names, args, strict=False)) | kwargs
        config: Any = module.config
        tokens = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
        defaults = {"output_attentions": config.output_attentions, "is_causal": getattr(config, "is_causal", True)}
        check_inputs(defaults | inputs, tokens, module.training)
        new = 0 if tokens is None else tokens.shape[1]
        cache, use_cache = inputs.get("past_key_values"), inputs.get("use_cache")
        if cache is not None or (config.use_cache if use_cache is None else use_cache):
            cache = inputs["past_key_values"] = sparse_cache(cache, engine, len(change.attentions))
            passes.begun(begin_pass(cache, config.num_hidden_layers))
        past = 0 if cache is None else cache.get_seq_length()
        if past < prompt.tokens or not prompt.tokens:  # else `generate` has put ones behind a mask that was checked
            mask.check(inputs.get("attention_mask"), past + new, waits=new != 1 or prompt.under_way)
        check_positions(inputs.get("position_ids"), past)
        in_prompt, phase = prompt.run(past, new), Phase.PREFILL
        if cache is not None and tokens is not None and new == 1 and past >= 1 and not in_prompt:
            phase = Phase.DECODE
            engine.begin_step(cache, (past + 1,) * tokens.shape[0], tokens.device)
        inputs[CONTEXT] = Context(engine, cache, phase)
        return (), inputs

    return prepare


class _Shadows:
    """Attributes of single objects, in front of the methods of their classes."""

    def __init__(self) -> None:
        self._placed: list[tuple[str, Callable[..., Any], Any]] = []  # with what was there before

    def put(self, thing: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Puts one there."""
        self._placed.append((name, function, vars(thing).get(name)))
        vars(thing)[name] = function

    def remove(self, thing: nn.Module) -> None:
        """Takes those off that the object, or a copy of it, has; not where somebody has put another one in front."""
        attributes = vars(thing)
        for name, function, former in self._placed:
            if attributes.get(name) is not function:
                continue
            if former is None:
                del attributes[name]
            else:
                attributes[name] = former


def _copier(
    module: nn.Module, shadows: _Shadows, hook: int, implementations: list[tuple[PreTrainedConfig, str | None]]
) -> Callable[[dict[int, Any]], nn.Module]:
    """`__deepcopy__` of an attached module: a copy has nothing attached and is dense. Everything attached is bound to
    the original, whose weights the copy would run."""

    def copied(memo: dict[int, Any]) -> nn.Module:
        own = vars(module).pop("__deepcopy__")
        try:
            twin = deepcopy(module, memo)
        finally:
            vars(module)["__deepcopy__"] = own
        shadows.remove(twin)
        for hooks in (twin._forward_pre_hooks, twin._forward_pre_hooks_with_kwargs):
            hooks.pop(hook, None)
        twins = [(memo[id(config)], former) for config, former in implementations if id(config) in memo]
        _restore_implementations(twins)
        return twin

    return copied
