"""Says what a layer is in decode: dense, a filter layer, a follower of one, evicting, or recurrent.

A role holds what runs: the begin and the end of a prompt, and the step. What is read and cached at a length is said by
the plan's `Segment` and `Retention`.

Sources: filter layers are OmniKV's (ICLR 2025, algorithm 1), whose wait layers, between a filter layer and the first
layer of its segment, are dense; eviction is SnapKV's (2024) and PyramidKV's (2024).

Shapes: B batch, H query heads, G KV heads, Q new tokens of a row, W observed queries, S cached tokens, K those
that stay cached, D head size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparsekv.kernels.backends import decode_attention, decode_scores
from sparsekv.kernels.decode.selection import Scoring, Selection, choose
from sparsekv.kernels.keys import KeyView, Scales, scaled
from sparsekv.plans.phases import Retention
from sparsekv.runtime.core.eviction_scores import SCORES
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.core.select import choose_tokens, scoring_for, selected_for
from sparsekv.runtime.core.state import DecodeState, Observed
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.evicting import EvictingStore
from sparsekv.runtime.stores.store import KeySource, KVStore

Attempt = Callable[[Callable[[str], Any], torch.device], Any]
"""Calls a function of a backend's name, for tensors on that device."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A decode step of one layer; see `core.decode.decode`."""

    layer: int
    window: int | None  # the layer's own sliding window
    q_BHQD: torch.Tensor
    source: KeySource
    state: DecodeState
    scale: float
    backend: str
    verifies: bool = False
    new_B: torch.Tensor | None = None
    out_BHQD: torch.Tensor | None = None

    @property
    def lengths_B(self) -> torch.Tensor:  # noqa: N802
        """int32 [B] on the device of the layer, which others may not be on."""
        return self.state.lengths_B.to(self.q_BHQD.device)

    def attend(
        self, keys: KeyView, selection: Selection | None = None, *, window: int | None, scoring: Scoring | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, H, Q, D] over the keys, and the scores where they are asked for."""
        new_B = None if self.new_B is None else self.new_B.to(self.q_BHQD.device)
        found = decode_attention(
            self.q_BHQD, keys, selection, scoring=scoring, window=window, new_B=new_B, scale=self.scale,
            backend=self.backend, out=self.out_BHQD,
        )  # fmt: skip
        return found.out_BHSD, found.scores_gT

    def attend_all(self) -> torch.Tensor:
        """[B, H, Q, D] over everything that is cached."""
        return self.attend(self.source.view(self.lengths_B), window=self.window)[0]


@dataclass(frozen=True, slots=True)
class Role:
    """A layer that attends to everything, and to which a prompt means nothing more."""

    @property
    def choice(self) -> SegmentProgram | None:
        """The segment whose chosen tokens the layer attends to; None where it attends to everything that it has."""
        return None

    def begin_prompt(self, layer: int, store: KVStore, state: DecodeState) -> None:
        """A pass over tokens of a prompt is about to run."""

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        """Queries of a prompt are about to attend."""

    def end_prompt(
        self, layer: int, store: KVStore, state: DecodeState, attempt: Attempt, scales: Scales | None = None
    ) -> None:
        """The prompt under way, if there is one, is complete; `scales` are those of keys in 8 bits."""

    def count_step(self, store: KVStore, meter: Meter) -> None:
        """Counts what the next step attends to, where that depends on the store."""

    def step(self, step: Step) -> torch.Tensor:
        """[B, H, Q, D]: attention of the new tokens, by the plan or, to verify a draft, to everything."""
        return step.attend_all()


@dataclass(frozen=True, slots=True)
class Dense(Role):
    """A layer that attends to everything."""


DENSE = Dense()


@dataclass(frozen=True, slots=True)
class Recurrent(Role):
    """A layer with a recurrent state, which has neither keys nor steps here."""


@dataclass(frozen=True, slots=True)
class Follower(Role):
    """A layer that attends to what its filter layer chose.

    Attributes:
        segment: that it belongs to.
        kv_map: for each KV head, the filter layer's KV head whose choice it takes; its own number's where None.
    """

    segment: SegmentProgram
    kv_map: tuple[int, ...] | None = None

    @property
    def choice(self) -> SegmentProgram:
        """The segment."""
        return self.segment

    @property
    def lists(self) -> int:
        """Lists of chosen tokens that it attends to."""
        return self.segment.lists if self.kv_map is None else len(self.kv_map)

    def slots_key(self, layer: int) -> int:
        """The layer whose number stands for the choice: followers of an equal one share a hot set's slots."""
        return self.segment.filter if self.kv_map is None else layer

    def step(self, step: Step) -> torch.Tensor:
        """See `Role.step`."""
        device = step.q_BHQD.device
        selection = None if step.verifies else selected_for(self.segment, self.kv_map, step.state, device)
        if selection is None:
            return step.attend_all()
        slots = step.state.slots(self.slots_key(step.layer), device)
        keys, found, window = step.source.gather(selection, step.lengths_B, step.window, slots)
        return step.attend(keys, found, window=window)[0]


@dataclass(frozen=True, slots=True)
class Filter(Role):
    """A layer that chooses tokens for its segment.

    Attributes:
        segment: that it chooses for.
        itself: how it attends to its own choice; None where it attends to everything.
    """

    segment: SegmentProgram
    itself: Follower | None = None

    @property
    def choice(self) -> SegmentProgram | None:
        """The segment, where the layer is in it."""
        return None if self.itself is None else self.segment

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        """Remembers the newest queries, where the selector looks at older ones."""
        state.remember(self.segment, new.q_BHWD)

    def step(self, step: Step) -> torch.Tensor:
        """See `Role.step`."""
        if step.verifies:
            return step.attend_all()
        step.state.remember_step(self.segment, step.q_BHQD)
        if self.itself is not None:
            self.choose(step)
            return self.itself.step(step)
        keys = step.source.view(step.lengths_B)
        if self._chooses_nothing(step.state):
            return step.attend(keys, window=None)[0]
        scoring = scoring_for(self.segment, keys, step.state, step.backend)
        in_passing = scoring if self.segment.queries == 1 else None
        out_BHQD, scores_gT = step.attend(keys, window=None, scoring=in_passing)
        self._choose(step, keys, scoring, scores_gT)
        return out_BHQD

    def choose(self, step: Step) -> None:
        """Chooses before it attends to anything: only keys are read."""
        if self._chooses_nothing(step.state):
            return
        keys = step.source.view(step.lengths_B)
        scoring, scores_gT = scoring_for(self.segment, keys, step.state, step.backend), None
        if self.segment.queries == 1:
            scores_gT = decode_scores(step.q_BHQD, keys, scoring, scale=step.scale, backend=step.backend)
        self._choose(step, keys, scoring, scores_gT)

    def _choose(self, step: Step, keys: KeyView, scoring: Scoring, scores_gT: torch.Tensor | None) -> None:
        choose_tokens(
            self.segment, step.q_BHQD, keys, step.state, scoring, scores_gT, scale=step.scale, backend=step.backend
        )

    def _chooses_nothing(self, state: DecodeState) -> bool:
        """Returns whether the host knows that no row chooses in this step; the followers are then told so."""
        if not self.segment.all_whole(state.lengths):
            return False
        state.choose(self.segment, None)
        return True


@dataclass(frozen=True, slots=True)
class Evicting(Role):
    """A layer that evicts what its rule does not keep of a prompt once that is complete, and the oldest of the tokens
    generated behind it. It attends to everything that is cached."""

    rule: Retention

    @property
    def observed(self) -> int:
        """Queries at the end of a prompt whose attention is the score."""
        return self.rule.observe or 0

    def begin_prompt(self, layer: int, store: KVStore, state: DecodeState) -> None:
        """Generated tokens are put in their order, and queries of the prompt before are forgotten."""
        own = _own(store)
        own.begin_prompt()
        if not own.prompt_tokens:
            state.observed(layer)

    def observe(self, layer: int, new: Observed, state: DecodeState) -> None:
        """Remembers the newest queries of the prompt."""
        state.observe(layer, new, self.observed)

    def end_prompt(
        self, layer: int, store: KVStore, state: DecodeState, attempt: Attempt, scales: Scales | None = None
    ) -> None:
        """Evicts what the rule does not keep."""
        own, observed = _own(store), state.observed(layer)
        if not own.prompt_tokens:
            return own.resume()
        assert observed is not None, "a prompt that was prefilled elsewhere is refused"
        k_BGSD = own.tensors[0][:, :, : own.rows]
        if scales is not None:
            k_BGSD = scaled(k_BGSD, scales.k_G, scales.dtype)

        def call(backend: str) -> torch.Tensor | None:
            return rows_to_cache(self.rule, own.length, observed, k_BGSD, backend=backend)

        return own.evict(attempt(call, k_BGSD.device))

    def count_step(self, store: KVStore, meter: Meter) -> None:
        """Counts the cached tokens of all."""
        own = _own(store)
        rows = len(own.lengths)
        meter.add_decode(rows * own.rows_after(1), rows * (own.length + 1))


def _own(store: KVStore) -> EvictingStore:
    assert isinstance(store, EvictingStore), "hosts give an evicting layer its own kind"
    return store


def rows_to_cache(
    rule: Retention, length: int, observed: Observed, k_BGSD: torch.Tensor, *, backend: str,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The rows in memory that stay cached where the others are evicted.

    Args:
        rule: of an evicting layer.
        length: tokens so far, evicted ones included.
        observed: the last queries of the prompt, which end where the keys do.
        k_BGSD: keys of all rows in memory.
        backend: of decode; "reference" is torch on any device.
        gather: gives the tensors of all ranks whose heads choose together, [ranks, ...].

    Returns:
        int64 [B, g, K] ascending; None where all stay.
    """
    (batch, _, cached, _), device = k_BGSD.shape, k_BGSD.device
    sink, recent, chosen = rule.sink or 0, rule.recent or 0, rule.chosen_tokens(length)
    if rule.kept_tokens(length) >= cached:
        return None
    score = SCORES[rule.score or ""]
    scores_BgS = score(observed.before(None, cached), k_BGSD, together=rule.heads == "max", backend=backend)
    if rule.heads == "max" and gather is not None:
        scores_BgS = gather(scores_BgS).amax(0)
    starts_B = torch.arange(batch, dtype=torch.int32, device=device) * cached
    lengths_B, counts_B = (torch.full_like(starts_B, count) for count in (cached, chosen))
    chosen_BgN = choose(
        scores_BgS.transpose(0, 1).flatten(1).contiguous(),
        Scoring(starts_B, batch * cached, scores_BgS.shape[1]),
        lengths_B,
        counts_B,
        capacity=cached,
        most=chosen,
        sink=sink,
        recent=recent,
        backend=backend,
    )
    row_S = torch.arange(cached, device=device).expand(*scores_BgS.shape)
    # where scores are no numbers fewer are chosen
    return torch.cat((row_S[..., :sink], chosen_BgN.long().clamp(min=0), row_S[..., cached - recent :]), 2)
