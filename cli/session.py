"""A loaded model, its plan, and how `run` was asked to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from sparsekv.cli.answers import Answer, answer
from sparsekv.cli.conversation import Conversation
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.generate import Sampling, encode_prompt, generate_stream
from sparsekv.runtime.hf.load import LoadedModel

# How much of a prompt is run before a comparison is timed. Kernels that are compiled are specialised on sizes that
# divide by 16, in tokens and in tiles of 128: the rest of the prompt is left out in multiples of both.
_BEGINNING = 512
_BEGINNING_COMPILED = 32768  # costs a GPU little
_ALIKE = 16 * 128


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

        Both run a beginning of the prompt before they are timed: whatever runs first compiles kernels, starts threads
        and takes its memory.
        """
        without = replace(self, plan=None)
        prompt = encode_prompt(self.loaded.tokenizer, text, chat=self.chat)
        beginning = prompt[: self._warm_up_length(len(prompt))]
        for session in (without, self):
            with session.applied():
                generate_stream(self.loaded, beginning, max_new_tokens=2, chunk=self.chunk)
        return without.once(text), self.once(text)

    def _warm_up_length(self, tokens: int) -> int:
        """As little of a prompt as does what all of it does; where kernels are compiled, in the same length buckets."""
        least = _BEGINNING
        if self.loaded.model.device.type != "cpu":
            ends = (bucket.up_to for bucket in self._buckets() if bucket.up_to is not None and bucket.up_to < tokens)
            least = max(_BEGINNING_COMPILED, *(end + 1 for end in ends), 0)
        return tokens - max(0, tokens - least) // _ALIKE * _ALIKE

    def _buckets(self) -> Iterator[PrefillBucket | DecodeBucket]:
        for phase in (self.plan.prefill, self.plan.decode) if self.plan else ():
            yield from phase.lengths if phase else ()
