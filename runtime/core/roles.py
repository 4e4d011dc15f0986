"""The role of a layer in decode: dense, a filter layer, a follower of one, evicting, or recurrent.

A role answers every question that hosts, stores, estimates and exports ask of a layer in decode; none of them looks at
its class. A decode method is a class of this file.

Sources: filter layers are OmniKV's (ICLR 2025, algorithm 1), whose wait layers, between a filter layer and the first
layer of its segment, are dense; eviction is SnapKV's (2024) and PyramidKV's (2024).

Shapes: B batch, H query heads, G KV heads, Q new tokens of a row, W observed queries, S cached tokens, K those
that stay cached, D head size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparsekv.kernels.backends import decode_scores
from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.keys import Scales, scaled
from sparsekv.plans.phases import Eviction
from sparsekv.runtime.core.segments import SegmentProgram, counts_of
from sparsekv.runtime.core.select import choose_tokens, rows_to_cache, scoring_for, selected_for
from sparsekv.runtime.core.state import DecodeState, Observed, Step
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.evicting import EvictingStore
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.store import Bytes, KVStore, Layout, WholeStore

Attempt = Callable[[Callable[[str], Any], torch.device], Any]
"""Calls a function of a backend's name, for tensors on that device."""


@dataclass(frozen=True, slots=True)
class Role:
    """A dense layer, and the answers of every other role where it gives none of its own."""

    attends: ClassVar[bool] = True  # has keys and values
    is_sparse: ClassVar[bool] = False  # its steps leave out cached tokens, or choose them for other layers

    @property
    def capturable(self) -> bool:
        """Whether its step runs from tensors of fixed address alone."""
        return True

    @property
    def remembers(self) -> bool:
        """Whether its steps need queries of earlier ones, and of a prompt."""
        return False

    @property
    def filters(self) -> SegmentProgram | None:
        """The segment that it chooses for."""
        return None

    @property
    def follows(self) -> Follower | None:
        return None

    @property
    def evicts(self) -> Eviction | None:
        return None

    # --- what it reads and stores -------------------------------------------------------------------------------------

    def reads(self, lengths: Sequence[int]) -> list[int]:
        """Tokens of each row in a step, without a window; one of which only the key is read counts half."""
        return list(lengths)

    def gathers(self, lengths: Sequence[int]) -> bool:
        """Whether a step at these lengths reads by `KeySource.gather` alone, and no row as a whole."""
        return False

    @property
    def dense_up_to(self) -> int:
        """The longest length such that it, and every shorter one, is attended to as a whole."""
        return 0

    @property
    def hot_reads(self) -> Reads:
        """Tokens of a long context that steps read, for the room of a hot set."""
        return Reads()

    def new_store(self) -> WholeStore | None:
        """A store of its own kind; None where the host's does."""
        return None

    def bytes(self, layout: Layout, prompt: int) -> Bytes | None:
        """The size of `new_store` behind a prompt of so many tokens."""
        return None

    def new_carried(self, device: torch.device) -> torch.Tensor | None:
        """A tensor that all rows share and that steps carry on, written in place; see `DecodeState.carried`."""
        return None

    # --- what runs ----------------------------------------------------------------------------------------------------

    def begin_prompt(self, layer: int, store: KVStore, state: DecodeState) -> None:
        """A pass over tokens of a prompt is about to run."""

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        """Queries of a prompt are about to attend."""

    def end_prompt(
        self, layer: int, store: KVStore, state: DecodeState, attempt: Attempt, scales: Scales | None = None
    ) -> None:
        """The prompt under way, if there is one, is complete; `scales` are those of keys in 8 bits."""

    def count_step(self, store: KVStore, meter: Meter) -> None:
        """Counts the next step, where `reads` depends on the store."""

    def can_step(self, state: DecodeState) -> bool:
        """Whether the layers whose results its step needs came before in the step under way."""
        return True

    @property
    def rows_key(self) -> Hashable:
        """Equal in layers with the same `sparse_lengths`; those of one class then also read as much."""
        return None

    def sparse_lengths(self, state: DecodeState, backend: str) -> torch.Tensor:
        """int32 [B]: lengths of the rows that a step does not attend to as a whole, 0 for the others."""
        return torch.zeros_like(state.lengths_B)

    def step(self, step: Step) -> torch.Tensor:
        """[B, H, Q, D]: attention of the new tokens, by the plan or, to verify a draft, to everything."""
        return step.attend_all()


DENSE = Role()


@dataclass(frozen=True, slots=True)
class Recurrent(Role):
    attends: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class _InSegment(Role):
    is_sparse: ClassVar[bool] = True

    segment: SegmentProgram

    @property
    def dense_up_to(self) -> int:
        return self.segment.whole_up_to

    @property
    def rows_key(self) -> Hashable:
        return self.segment.filter

    def sparse_lengths(self, state: DecodeState, backend: str) -> torch.Tensor:
        return state.choosing(self.segment, backend)

    @property
    def hot_reads(self) -> Reads:
        return Reads() if self.follows is None else self.segment.reads


@dataclass(frozen=True, slots=True)
class Follower(_InSegment):
    """A layer that attends to the choice of its filter layer.

    Attributes:
        kv_map: for each KV head, the filter layer's KV head whose choice it takes; its own number's where None.
    """

    kv_map: tuple[int, ...] | None = None

    @property
    def follows(self) -> Follower:
        return self

    @property
    def lists(self) -> int:
        return self.segment.lists if self.kv_map is None else len(self.kv_map)

    def reads(self, lengths: Sequence[int]) -> list[int]:
        return _attended(self.segment, lengths, scores=False)

    def gathers(self, lengths: Sequence[int]) -> bool:
        return ALL not in counts_of(self.segment, lengths)

    def can_step(self, state: DecodeState) -> bool:
        return state.has_chosen(self.segment)

    def slots_key(self, layer: int) -> int:
        """The layer whose number stands for the choice: followers of an equal one share a hot set's slots."""
        return self.segment.filter if self.kv_map is None else layer

    def step(self, step: Step) -> torch.Tensor:
        device = step.q_BHQD.device
        selection = None if step.verifies else selected_for(self.segment, self.kv_map, step.state, device)
        if selection is None:
            return step.attend_all()
        return step.attend_to(selection, step.state.slots(self.slots_key(step.layer), device))


@dataclass(frozen=True, slots=True)
class Filter(_InSegment):
    """A layer that chooses tokens for its segment."""

    itself: Follower | None = None  # how it attends to its own choice; None where it attends to everything

    @property
    def capturable(self) -> bool:
        return not self.remembers

    @property
    def remembers(self) -> bool:
        return self.segment.queries > 1

    @property
    def filters(self) -> SegmentProgram:
        return self.segment

    @property
    def follows(self) -> Follower | None:
        return self.itself

    def reads(self, lengths: Sequence[int]) -> list[int]:
        return list(lengths) if self.itself is None else _attended(self.segment, lengths, scores=True)

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        state.remember(self.segment, new.q_BHWD)

    def step(self, step: Step) -> torch.Tensor:
        step.state.remember_step(self.segment, step.q_BHQD)
        if step.verifies:
            return step.attend_all()
        if self.itself is not None:
            self.choose(step)
            return self.itself.step(step)
        keys = step.source.view(step.lengths_B)
        if self._chooses_nothing(step.state):
            return step.attend(keys, window=None)[0]
        scoring = scoring_for(self.segment, keys, step.state, step.backend)
        in_passing = scoring if self.segment.queries == 1 else None
        out_BHQD, scores_gT = step.attend(keys, window=None, scoring=in_passing)
        choose_tokens(self.segment, step, keys, scoring, scores_gT)
        return out_BHQD

    def choose(self, step: Step) -> None:
        """Chooses before it attends to anything: only keys are read."""
        if self._chooses_nothing(step.state):
            return
        keys = step.source.view(step.lengths_B)
        scoring, scores_gT = scoring_for(self.segment, keys, step.state, step.backend), None
        if self.segment.queries == 1:
            scores_gT = decode_scores(step.q_BHQD, keys, scoring, scale=step.scale, backend=step.backend)
        choose_tokens(self.segment, step, keys, scoring, scores_gT)

    def _chooses_nothing(self, state: DecodeState) -> bool:
        """Returns whether the host knows that no row chooses in this step; the followers are then told so."""
        if not self.segment.all_whole(state.lengths):
            return False
        state.choose(self.segment, None)
        return True


def _attended(segment: SegmentProgram, lengths: Sequence[int], scores: bool) -> list[int]:
    chosen = zip(lengths, counts_of(segment, lengths), strict=True)
    return [length if count == ALL else segment.read_tokens(length, scores) for length, count in chosen]


@dataclass(frozen=True, slots=True)
class Evicting(Role):
    """A layer that evicts tokens of the prompt once it is complete, by its rule, and then the oldest generated ones. It
    attends to all cached tokens."""

    rule: Eviction

    @property
    def evicts(self) -> Eviction:
        return self.rule

    def new_store(self) -> EvictingStore:
        return EvictingStore(self.rule.generated or 1)

    def bytes(self, layout: Layout, prompt: int) -> Bytes:
        return Bytes(layout.bytes(self.rule.cached_tokens(prompt)))

    def begin_prompt(self, layer: int, store: KVStore, state: DecodeState) -> None:
        """Generated tokens are put in their order, and queries of the prompt before are forgotten."""
        evicting = _own(store)
        evicting.begin_prompt()
        if not evicting.prompt_tokens:
            state.observed(layer)

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        state.observe(layer, new, self.rule.observe or 0)

    def end_prompt(
        self, layer: int, store: KVStore, state: DecodeState, attempt: Attempt, scales: Scales | None = None
    ) -> None:
        evicting, observed = _own(store), state.observed(layer)
        if not evicting.prompt_tokens:
            return evicting.resume()
        assert observed is not None, "the prompt was observed"
        k_BGSD, v_BGSD = (x_BGSD[:, :, : evicting.rows] for x_BGSD in evicting.tensors)
        if scales is not None:
            k_BGSD = scaled(k_BGSD, scales.k_G, scales.dtype)
            v_BGSD = v_BGSD if self.rule.is_built_in else scaled(v_BGSD, scales.v_G, scales.dtype)

        def call(backend: str) -> torch.Tensor | None:
            return rows_to_cache(self.rule, evicting.length, observed, k_BGSD, v_BGSD, layer=layer, backend=backend)

        return evicting.evict(attempt(call, k_BGSD.device))

    def count_step(self, store: KVStore, meter: Meter) -> None:
        evicting = _own(store)
        rows = len(evicting.lengths)
        meter.add_decode(rows * evicting.rows_after(1), rows * (evicting.length + 1))


def _own(store: KVStore) -> EvictingStore:
    assert isinstance(store, EvictingStore), "hosts give an evicting layer its own kind"
    return store
