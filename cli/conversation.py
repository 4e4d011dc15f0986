"""A conversation with a model: several turns over one cache, so that each turn only prefills what is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import Cache, DynamicCache

from sparsekv.runtime.hf.generate import Generation, Sampling, encode_prompt, generate_stream
from sparsekv.runtime.hf.load import LoadedModel


@dataclass(slots=True)
class Conversation:
    """What was said so far: as messages for the chat template, as tokens, and as the cache that holds them."""

    loaded: LoadedModel
    max_new_tokens: int
    sampling: Sampling
    chat: bool  # apply the chat template where there is one
    chunk: int | None = None  # most tokens prefilled at once
    messages: list[dict[str, str]] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    cache: Cache = field(default_factory=DynamicCache)

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Generation:
        """Answers the next turn.

        Raises:
            PromptError: the turn is empty, or the conversation no longer fits the model's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._prompt(messages)
        if prompt[: len(self.token_ids)] != self.token_ids:
            self.cache = DynamicCache()  # the template has rewritten earlier turns
        answer = generate_stream(
            self.loaded,
            prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            chunk=self.chunk,
            cache=self.cache,
            on_text=on_text,
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.token_ids = prompt + answer.token_ids
        return answer

    def _prompt(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        tokenizer, text = self.loaded.tokenizer, messages[-1]["content"]
        if len(messages) == 1:
            return encode_prompt(tokenizer, text, chat=self.chat)
        if self.chat and tokenizer.chat_template is not None:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
        return self.token_ids + tuple(tokenizer(f"\n{text}", add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def dense_bytes(self) -> int:
        """Bytes of the keys and values in the cache, where no plan is applied."""
        tensors = (getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values"))
        return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
