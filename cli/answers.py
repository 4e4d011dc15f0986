"""Answers of a model to a prompt, with its plan applied or dense, and what each took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import Cache, DynamicCache

from sparsekv.cli.output import placed, tell
from sparsekv.planner.progress import BarProgress, Progress, StageStep
from sparsekv.plans.brief import brief, percent
from sparsekv.plans.phases import bucket_of, first_sparse
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import MAX_LENGTH, KVDtype, format_bytes
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import attending
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.hf.generate import Generation, Sampling, encode_prompt, generate_stream, room_for_answer
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.placement import OffloadMode
from sparsekv.runtime.model_config import dtype_name

# How much of a prompt is run before a comparison is timed. Kernels that are compiled are specialised on sizes that
# divide by 16, in tokens and in tiles of 128: the rest of the prompt is left out in multiples of both.
_BEGINNING = 512
_BEGINNING_COMPILED = 32768  # costs a GPU little
_ALIKE = 16 * 128
_Watch = AbstractContextManager[Callable[[], None]]
_SHOWN_FROM = 1 << 30  # bytes of host memory, a second or two


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation, how much of the attention it computed, and where its keys and values lie."""

    generation: Generation
    prefill_density: float
    kv_bytes_device: int
    kv_bytes_host: int
    decode_share: float | None = None  # of the cached tokens that were attended to; None without a step by a plan
    drafted: int = 0  # tokens, under `exact`
    accepted: int = 0
    kv_dtype: str = ""  # of keys and values in memory

    def as_data(self) -> dict[str, Any]:
        said = self.generation
        return {
            "text": said.text,
            "prompt_tokens": said.prompt_tokens,
            "new_tokens": said.new_tokens,
            "prefill_seconds": round(said.prefill_seconds, 4),
            "decode_seconds": round(said.decode_seconds, 4),
            "prefill_density": round(self.prefill_density, 4),
            "decode_share": None if self.decode_share is None else round(self.decode_share, 4),
            "kv_dtype": self.kv_dtype,
            "kv_bytes_device": self.kv_bytes_device,
            "kv_bytes_host": self.kv_bytes_host,
            "tokens_drafted": self.drafted,
            "drafts_accepted": self.accepted,
        }

    @property
    def rate(self) -> str:
        """Tokens a second of decode; the first token belongs to the prefill."""
        said = self.generation
        return f"{(said.new_tokens - 1) / said.decode_seconds:.1f}/s" if said.decode_seconds > 0 else "-"

    @property
    def is_dense(self) -> bool:
        return self.prefill_density == 1.0 and self.decode_share in (None, 1.0)

    def as_line(self) -> str:
        said = self.generation
        host = f" + {format_bytes(self.kv_bytes_host)} on the host" if self.kv_bytes_host else ""
        is_dense = self.prefill_density == 1.0
        density = "dense" if is_dense else f"{percent(self.prefill_density)} of attention computed"
        read = "" if self.decode_share in (None, 1.0) else f", {percent(self.decode_share)} of attention computed"
        drafts = f", {self.accepted} of {self.drafted} drafted tokens accepted" if self.drafted else ""
        return (
            f"{said.prompt_tokens:,} prompt tokens in {said.prefill_seconds:.2f} s, {density}; "
            f"{said.new_tokens} new ({self.rate}{read}{drafts}), KV {format_bytes(self.kv_bytes_device)}{host}"
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model and how to run it. Without a plan it runs dense."""

    loaded: LoadedModel
    plan: Plan | None = None
    prefill: bool = True  # this phase follows the plan
    decode: bool = True
    exact: bool | Literal["decode"] = False  # as of `apply`
    backend: str = "auto"
    allow_mismatch: bool = False
    chat: bool = True  # apply the chat template where there is one
    max_new_tokens: int = 256
    chunk: int | None = None  # most tokens prefilled at once
    offload: OffloadMode | None = None  # which of the layers that the plan permits go to host memory
    kv_host_layers: int | tuple[int, ...] | None = None  # in its place: these layers
    kv_dtype: KVDtype = "auto"  # as of `apply`
    sparse: str = "auto"  # likewise
    sampling: Sampling = field(default_factory=Sampling)

    def applied(self, say: bool = False) -> AbstractContextManager[Handle | None]:
        """The plan at work; it may `say` where that was measured to be faster. There is no handle where transformers
        runs what the plan sets."""
        if self.plan is None:
            return nullcontext()
        shares = self.plan.index_sharing is not None
        measures = self.sparse == "auto" and self.loaded.model.device.type != "cpu" and not shares
        with BarProgress().stage("where sparse is faster") if measures else nullcontext():
            handle = apply(
                self.loaded.model,
                self.plan,
                info=self.loaded.info,
                prefill=self.prefill,
                decode=self.decode,
                exact=self.exact,
                backend=self.backend,
                allow_mismatch=self.allow_mismatch,
                offload=self.offload,
                kv_host_layers=self.kv_host_layers,
                kv_dtype=self.kv_dtype,
                sparse=self.sparse,
            )
        if say and measures:
            tell(handle.pays.told)
        return _without_handle(handle) if shares else handle

    def tokens(self, prompt: Sequence[int]) -> int:
        return len(prompt) + min(self.max_new_tokens, room_for_answer(self.loaded.info.context_length, len(prompt)))

    def new_cache(self, handle: Handle | None, prompt: int, answer: int, at_most: int, say: bool = True) -> Cache:
        """An empty cache for a prompt and its answer; under a plan its memory is there before anything runs.

        Args:
            say: where the keys and values lie, if that was decided here.
        """
        if handle is None:
            return DynamicCache(config=config_of(self.loaded.model))
        with _pinning() as on_bytes:
            cache = handle.new_cache(
                prompt + answer, answer=answer, chunk=self.chunk, at_most=at_most, on_bytes=on_bytes
            )
        if say and self.offload == "auto" and self.plan and self.plan.decode and self.plan.decode.offload:
            tell(f"offload auto: {placed(handle.host_layers, self.loaded.info.layers)}")
        return cache

    def ask(
        self,
        text: str,
        handle: Handle | None = None,
        on_text: Callable[[str], None] | None = None,
        watch: _Watch | None = None,
    ) -> Answer:
        """Answers a prompt.

        Args:
            handle: of the plan, where one is applied.
            on_text: called with each piece of text as it is final.
            watch: entered around the generation; what it gives is called after each token.
        """
        prompt = encode_prompt(self.loaded.tokenizer, text, chat=self.chat)
        tokens = self.tokens(prompt)
        cache = self.new_cache(handle, len(prompt), tokens - len(prompt), tokens)
        if handle is not None:
            handle.reset_stats()
        with watch or nullcontext() as on_token:
            said = generate_stream(
                self.loaded,
                prompt,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                chunk=self.chunk,
                cache=cache,
                on_text=on_text,
                on_token=on_token,
            )
        return self._answer(said, handle, cache)

    def _answer(self, said: Generation, handle: Handle | None, cache: Cache) -> Answer:
        own = dtype_name(self.loaded.model.dtype)
        if handle is None:
            tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
            nbytes = sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
            return Answer(said, 1.0, nbytes, 0, kv_dtype=own)
        stats = handle.stats()
        density = 1.0 if stats.prefill_density is None else stats.prefill_density
        drafts = (stats.tokens_drafted, stats.drafts_accepted)
        stored = own if self.kv_dtype == "auto" else self.kv_dtype
        return Answer(said, density, *self._bytes_in_use(cache), stats.decode_share, *drafts, kv_dtype=stored)

    def _bytes_in_use(self, cache: Cache) -> tuple[int, int]:
        """Bytes of cached tokens on the device and on the host, without the room for those to come."""
        item, device, host = self.loaded.model.dtype.itemsize if self.kv_dtype == "auto" else 1, 0, 0
        for layer in attending(cache):
            group, store = self.loaded.info.group_of(layer.layer), layer.store
            used = 2 * sum(store.cached) * group.kv_heads * group.head_dim * item
            device, host = device + min(used, store.bytes.device), host + min(used, store.bytes.host)
        return device, host

    def dense_and_sparse(self, text: str, progress: Progress | None = None) -> tuple[Answer, Answer]:
        """The answers without and with the plan, one after the other.

        Both run a beginning of the prompt before they are timed: whatever runs first compiles kernels, starts threads
        and allocates memory. `progress` hears which of them runs, and of its prefill and tokens.
        """
        progress = progress or Progress()
        without = replace(self, plan=None)
        prompt = encode_prompt(self.loaded.tokenizer, text, chat=self.chat)
        beginning = prompt[: self.warm_up_length(len(prompt))]
        sides = {"dense": without, "sparse": self}
        for name, session in sides.items():
            with session.applied() as handle:
                cache = session.new_cache(handle, len(beginning), 2, at_most=self.tokens(prompt), say=False)
                with progress.stage(f"{name}: warm-up"):
                    generate_stream(self.loaded, beginning, max_new_tokens=2, chunk=self.chunk, cache=cache)
        most, answers = self.tokens(prompt) - len(prompt), []
        for name, session in sides.items():
            with session.applied(say=True) as handle:
                answers.append(session.ask(text, handle, watch=_watch(progress, name, most)))
        return answers[0], answers[1]

    def why_dense(self, answer: Answer) -> str:
        """Returns why nothing of an answer by the plan was sparse, or that layers shared choices or dropped tokens;
        else empty."""
        if self.plan is None or self.exact or not (self.prefill or self.decode):
            return ""
        if self.plan.reuses:
            return next(brief(self.plan))
        if self.decode and self.plan.evicting:
            prompt, layers = answer.generation.prompt_tokens, self.plan.model.layers
            count = sum(rule.kept_tokens(prompt) < prompt for rule in self.plan.evicting.values())
            return (
                f"{count} of {layers} layers kept a part of the prompt: lossy, as the plan's kv_cache says"
                if count
                else "this prompt is as short as what layers keep of one: nothing was dropped"
            )
        parts = ((self.prefill, "prefill", self.plan.prefill), (self.decode, "decode", self.plan.decode))
        starts = [
            (start, phase)
            for follows, phase, part in parts
            if follows and part and (start := first_sparse(part.lengths))
        ]
        if not starts:
            return "the plan is dense at every length: this ran dense"
        tokens, (first, phase) = answer.generation.prompt_tokens + answer.generation.new_tokens, min(starts)
        if tokens > first:
            return (
                f"nothing of this run was sparse: of prompt and answer, {tokens:,} tokens, the plan skips none"
                f"{'' if self.sparse == 'always' else ', or skipping is slower here (--sparse always)'}"
                if answer.is_dense
                else ""
            )
        return f"this prompt ran dense: by the plan {phase} is sparse from {first:,} tokens on"

    def beyond_reach(self, answer: Answer) -> str:
        """A remark where an answer is longer than the plan was made for, by the phases that follow it; else empty."""
        if self.plan is None or self.exact is True:
            return ""
        plan, prompt = self.plan, answer.generation.prompt_tokens
        tokens, reach = prompt + answer.generation.new_tokens, max(plan.planned_lengths, default=MAX_LENGTH)
        reads_less = plan.evicting or (answer.decode_share or 1.0) < 1.0
        if self.prefill and plan.prefill and bucket_of(plan.prefill.lengths, prompt).extrapolated:
            what, reach = f"this prompt, {prompt:,} tokens, is", max(one.up_to or 0 for one in plan.prefill.lengths)
        elif self.decode and not self.exact and tokens > reach and reads_less:
            what = f"prompt and answer, {tokens:,} tokens, are"
        else:
            return ""
        return f"{what} longer than the plan was made for ({reach:,}); plan again with longer --lengths to cover it"

    def warm_up_length(self, tokens: int) -> int:
        """As little of a prompt as does what all of it does; where kernels are compiled, in the same length buckets."""
        least = _BEGINNING
        if self.loaded.model.device.type != "cpu":
            bounds = [bucket.up_to for bucket in self.plan.buckets if bucket.up_to is not None] if self.plan else []
            ends = (bound for bound in bounds if bound < tokens)
            least = max(_BEGINNING_COMPILED, *(end + 1 for end in ends), 0)
        return tokens - max(0, tokens - least) // _ALIKE * _ALIKE


@contextmanager
def _without_handle(handle: Handle) -> Iterator[None]:
    with handle:
        yield


@contextmanager
def _watch(progress: Progress, name: str, most: int) -> Iterator[Callable[[], None]]:
    steps: list[StageStep] = []
    with ExitStack() as stack:
        stack.enter_context(progress.stage(f"{name}: prefill"))

        def advance() -> None:
            if not steps:
                stack.close()
                steps.append(stack.enter_context(progress.stage(f"{name}: tokens", most)))
            steps[0].advance()

        yield advance


@contextmanager
def _pinning() -> Iterator[Callable[[int, int], None]]:
    """Shows how much of a large amount of host memory is there: page-locking takes a second or so for each 2 GB."""
    with ExitStack() as stack:
        bars: list[StageStep] = []

        def show(more: int, total: int) -> None:
            if total < _SHOWN_FROM:
                return
            if not bars:
                bars.append(stack.enter_context(BarProgress().stage("host memory, GB", total / 1e9)))
            bars[0].advance(more / 1e9)

        yield show
