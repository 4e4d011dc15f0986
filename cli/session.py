"""A loaded model, its plan, and how `run` was asked to use them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from sparsekv.cli.answers import Answer, answer
from sparsekv.cli.conversation import Conversation
from sparsekv.plans.schema import Plan
from sparsekv.runtime.apply import Handle, apply
from sparsekv.runtime.generate import Sampling
from sparsekv.runtime.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Session:
    """What does not change from turn to turn. Without a plan the model runs dense."""

    loaded: LoadedModel
    plan: Plan | None
    prefill: bool  # this phase follows the plan
    decode: bool
    backend: str
    allow_mismatch: bool
    chat: bool
    max_new_tokens: int
    chunk: int | None  # most tokens prefilled at once
    sampling: Sampling
    kv_host_layers: int | tuple[int, ...] | None = None  # in host memory; None is as the plan has it

    def conversation(self) -> Conversation:
        """A new one, about nothing yet."""
        return Conversation(self.loaded, self.max_new_tokens, self.sampling, self.chat, self.chunk)

    def applied(self) -> AbstractContextManager[Handle | None]:
        """The plan at work, for the length of a `with` block."""
        if self.plan is None:
            return nullcontext()
        return apply(
            self.loaded.model,
            self.plan,
            prefill=self.prefill,
            decode=self.decode,
            backend=self.backend,
            allow_mismatch=self.allow_mismatch,
            kv_host_layers=self.kv_host_layers,
        )

    def once(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """The answer to one prompt."""
        with self.applied() as handle:
            return answer(self.conversation(), handle, text, on_text)

    def dense_and_sparse(self, text: str) -> tuple[Answer, Answer]:
        """The answers without and with the plan, one after the other.

        On a GPU both run once before they are timed: the first run compiles kernels.
        """
        without = replace(self, plan=None)
        if self.loaded.model.device.type == "cuda":
            for session in (without, self):
                replace(session, max_new_tokens=2).once(text)
        return without.once(text), self.once(text)
