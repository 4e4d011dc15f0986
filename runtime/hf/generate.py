"""One answer to one prompt, streamed and timed: what `run` prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
from sparsekv.plans.types import LEAST_CHUNK
from sparsekv.runtime.hf.cache import reserve
from sparsekv.runtime.hf.describe import CACHE_NAME, cache_inputs, check_one_piece, config_of
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import dtype_name, rope_switch


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of drawing the next token. A temperature below 0.01 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Generation:
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    prefill_seconds: float  # to the first new token
    decode_seconds: float  # from there to the last

    @property
    def new_tokens(self) -> int:
        """Tokens generated, the end token included."""
        return len(self.token_ids)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = True) -> tuple[int, ...]:
    """Token ids of a prompt, as one user turn of the tokenizer's chat template where it has one and `chat` is on."""
    if not text.strip():
        raise PromptError("expected a prompt, found only white space; give it some text")
    if chat and tokenizer.chat_template is not None:
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    return tuple(tokenizer(text, verbose=False)["input_ids"])


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> tuple[int, ...]:
    """Token ids of a conversation by the tokenizer's chat template, up to where the next answer starts."""
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it raises what it likes
        raise PromptError(
            f"expected a chat template that renders these messages, found one that fails ({error!s:.200}); "
            "run without it: --raw, or chat=False"
        ) from error
    return tuple(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def generate_stream(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling = GREEDY,
    chunk: int | None = None,
    cache: Cache | None = None,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[], None] | None = None,
) -> Generation:
    """Generates an answer, with or without a plan.

    Args:
        max_new_tokens: at most so many, and no more than the model's context has room for.
        chunk: prefill in pieces of so many tokens, which bounds memory; None is one piece.
        cache: holds a beginning of the prompt, or nothing yet; grows with the answer, so that a next turn goes on from
            it. A new one when None.
        on_text: called with each piece of text as it becomes final.
        on_token: called after each new token; the first ends the prefill.

    Raises:
        PromptError: the prompt is empty, leaves no room in the context for a new token, or has tokens that the model
            does not know.
        UsageError: the chunk is too small to be sensible.
        UnsupportedError: the model overflows in its dtype, or loses its state behind a past (`check_one_piece`).
    """
    new_tokens = min(max_new_tokens, room_for_answer(loaded.info.context_length, len(prompt_ids)))
    _check_vocabulary(loaded.model, prompt_ids)
    stream = _TimedStream(loaded.tokenizer, on_text, on_token)
    ids_BS = torch.tensor([list(prompt_ids)], device=loaded.model.device)
    generate: Any = loaded.model.generate
    started = time.perf_counter()
    if chunk is not None and cache is None:
        cache = DynamicCache(config=config_of(loaded.model))
    if cache is not None:
        past = cache.get_seq_length()
        check_one_piece(config_of(loaded.model).model_type, past, len(prompt_ids) - past)
        reserve(cache, len(prompt_ids) + new_tokens)
    with torch.no_grad(), _seeded(sampling.seed, ids_BS.device):
        if chunk is not None:
            assert cache is not None
            _prefill_most(loaded.model, ids_BS, cache, chunk)
        out_BS = generate(
            ids_BS,
            attention_mask=torch.ones_like(ids_BS),  # or it is guessed from what may be a padding token in the text
            max_new_tokens=new_tokens,
            streamer=stream,
            logits_processor=LogitsProcessorList([FirstChecked(loaded.model)]),
            **{CACHE_NAME: cache},
            **_options(loaded.model.generation_config, sampling),
        )
    new_ids = tuple(out_BS[0, len(prompt_ids) :].tolist())
    text = str(loaded.tokenizer.decode(list(new_ids), skip_special_tokens=True))
    first, last = stream.first or started, stream.last or started
    return Generation(text, new_ids, len(prompt_ids), first - started, last - first)


def _prefill_most(model: PreTrainedModel, ids_BS: torch.Tensor, cache: Cache, chunk: int) -> None:
    """Fills the cache in pieces until one piece is left. (Not by generate's own prefill_chunk_size, which in some
    versions of transformers passes the cached tokens again.)
    """
    switch = rope_switch(config_of(model))
    if cache.get_seq_length() <= switch < ids_BS.shape[1]:
        cache.reset()  # other angles
    start = cache.get_seq_length()
    sizes = piece_sizes(ids_BS.shape[1] - start, chunk, 0 if start else switch)
    if len(sizes) > 1:
        check_one_piece(config_of(model).model_type, start + sizes[0], sizes[1])
    for size in sizes[:-1]:
        piece = ids_BS[:, start : start + size]
        model(piece, logits_to_keep=1, **cache_inputs(model, cache, piece))
        start += size


def piece_sizes(tokens: int, chunk: int, switch: int = 0) -> list[int]:
    """Tokens of each piece of a chunked prefill; the last one has two or more, as one alone would be a decode step.
    Where more than `switch` tokens rotate by other angles, the first piece has as many."""
    if chunk < LEAST_CHUNK:
        raise UsageError(f"expected a chunk of at least {LEAST_CHUNK} tokens, found {chunk}; thousands are sensible")
    first = switch + 1 if tokens > switch else 0
    if tokens < first + 2:
        return [tokens]
    sizes: list[int] = []
    while tokens > chunk:
        sizes.append(min(chunk if sizes else max(chunk, first), tokens - 2))
        tokens -= sizes[-1]
    return [*sizes, tokens]


def room_for_answer(context: int, prompt_tokens: int) -> int:
    if prompt_tokens == 0:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    if prompt_tokens >= context:
        raise PromptError(
            f"expected a prompt below the model's context of {context} tokens, found {prompt_tokens}; "
            f"shorten it or choose a model with a longer context"
        )
    return context - prompt_tokens


def _check_vocabulary(model: PreTrainedModel, prompt_ids: Sequence[int]) -> None:
    embedding: Any = model.get_input_embeddings()
    known, last = embedding.weight.shape[0], max(prompt_ids)
    if last >= known:
        raise PromptError(
            f"expected tokens below {known}, the model's vocabulary, found {last}; use the tokenizer of this model"
        )


# Settings of a checkpoint's generation_config.json that are not one sequence, token by token, and their replacements.
_PLAIN = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "dola_layers": None,
    "cache_implementation": None,
    "prefill_chunk_size": None,
}


# Logits over a temperature below this leave float32; one token has all of the probability long before.
_COLDEST = 0.01


def _options(config: GenerationConfig, sampling: Sampling) -> dict[str, Any]:
    """Options of `generate` over those of the checkpoint."""
    options: dict[str, Any] = {name: value for name, value in _PLAIN.items() if getattr(config, name, None) is not None}
    if config.pad_token_id is None and (ends := config.eos_token_id) is not None:
        # nothing is padded, but transformers would warn
        options["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    if sampling.temperature < _COLDEST:
        return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}  # the latter is no limit
    return options | {"do_sample": True} | drawn


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Leaves the caller's random state as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def check_numbers(model: PreTrainedModel, what: str, *results: torch.Tensor) -> None:
    """Refuses results of a forward pass that overflowed. Waits for the device."""
    if any(bool(values.isnan().any()) for values in results):
        raise UnsupportedError(
            f"expected numbers as {what}, found NaN: this model overflows in {dtype_name(model.dtype)}, or its weights "
            "are damaged; try another --dtype, float32 or bfloat16"
        )


class FirstChecked(LogitsProcessor):
    """Checks the logits of the first new token; those of later ones would have to be waited for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._checked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._checked:
            check_numbers(self._model, "logits", scores)
            self._checked = True
        return scores


class _TimedStream(TextStreamer):
    """Text as it becomes final, and the times of the first and the last token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None] | None,
        on_token: Callable[[], None] | None,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text, self._on_token = on_text, on_token
        self.first: float | None = None
        self.last: float | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called by generate with the prompt and then with each token, already on the host."""
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            if self._on_token is not None:
                self._on_token()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._on_text is not None and text:
            self._on_text(text)
