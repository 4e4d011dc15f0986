"""One answer, with what it took: the keys that `run --json` prints, and the line that people see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsekv.cli.conversation import Conversation
from sparsekv.cli.output import size
from sparsekv.runtime.hf.apply import Handle
from sparsekv.runtime.hf.generate import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation, how much of the attention it computed, and where its keys and values lie."""

    generation: Generation
    prefill_density: float
    kv_bytes_device: int
    kv_bytes_host: int

    def as_data(self) -> dict[str, Any]:
        """The JSON of one answer."""
        said = self.generation
        return {
            "text": said.text,
            "prompt_tokens": said.prompt_tokens,
            "new_tokens": said.new_tokens,
            "prefill_seconds": round(said.prefill_seconds, 4),
            "decode_seconds": round(said.decode_seconds, 4),
            "prefill_density": round(self.prefill_density, 4),
            "kv_bytes_device": self.kv_bytes_device,
            "kv_bytes_host": self.kv_bytes_host,
        }

    @property
    def rate(self) -> str:
        """Tokens a second of decode; the first token belongs to the prefill."""
        said = self.generation
        return f"{(said.new_tokens - 1) / said.decode_seconds:.1f}/s" if said.decode_seconds > 0 else "-"

    def as_line(self) -> str:
        """What people are told after an answer."""
        said = self.generation
        host = f" + {size(self.kv_bytes_host)} on the host" if self.kv_bytes_host else ""
        return (
            f"{said.prompt_tokens:,} tokens in {said.prefill_seconds:.2f} s at density {self.prefill_density:.2f}, "
            f"{said.new_tokens} new ({self.rate}), KV {size(self.kv_bytes_device)}{host}"
        )


def answer(
    conversation: Conversation, handle: Handle | None, text: str, on_text: Callable[[str], None] | None = None
) -> Answer:
    """Answers a turn; without a handle the model runs dense.

    Raises:
        PromptError: the prompt cannot be run.
    """
    if handle is None:
        said = conversation.ask(text, on_text)
        return Answer(said, 1.0, conversation.dense_bytes, 0)
    handle.reset_stats()
    said = conversation.ask(text, on_text)
    stats = handle.stats()
    density = 1.0 if stats.prefill_density is None else stats.prefill_density
    return Answer(said, density, stats.kv_bytes_device, stats.kv_bytes_host)
