"""Recurrent states of a captured decode step, and what roles carry, which are read and written where they lie.

The step has tensors of its own. The cache that it serves takes them in place of its own, with what was in those, so
that nothing is copied from step to step, and steps that are not captured go on from the same tensors. A cache that
another one follows gets copies, if it still has them: it may have been reset, rewound or served by another step since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from sparsekv.runtime.hf.cache import first_of

_KINDS = ("conv_states", "recurrent_states")
_CARRIED = "carried"
_Slot = tuple[int, str, int]  # layer, kind, number


class StepStates:
    """The recurrent states of one captured step.

    Args:
        cache: of the kind that is served; all its recurrent layers have seen tokens.
    """

    def __init__(self, cache: Cache) -> None:
        self._own = {slot: torch.empty_like(state) for slot, state in _states(cache).items()}
        self.carried = {layer: own for (layer, kind, _), own in self._own.items() if kind == _CARRIED}
        self._bound: Callable[[], Cache | None] = lambda: None

    def __bool__(self) -> bool:
        """Returns whether there are any."""
        return bool(self._own)

    def serves(self, cache: Cache) -> bool:
        """Returns whether the cache has the tensors of this step."""
        return all(_states(cache).get(slot) is own for slot, own in self._own.items())

    def bind(self, cache: Cache) -> None:
        """The next step reads and writes the states of this cache."""
        if self.serves(cache):
            return
        if former := self._bound():
            held = _states(former)
            for slot, own in self._own.items():
                if held.get(slot) is own:
                    _put(former, slot, own.clone())
        found = _states(cache)
        for slot, own in self._own.items():
            own.copy_(found[slot])
            _put(cache, slot, own)
        self._bound = weakref.ref(cache)

    def layer(self, number: int) -> LinearAttentionLayer:
        """One layer of a cache of the step's own, over these tensors; as one that has seen tokens."""
        found = LinearAttentionLayer()
        for at, kind, state in self._own:
            if at != number:
                continue
            getattr(found, kind)[state] = self._own[at, kind, state]
            getattr(found, f"is_{kind}_initialized")[state] = found.has_previous_state[state] = True
        for state, tensor in found.conv_states.items():
            found.conv_kernel_size[state] = None if tensor is None else tensor.shape[-1]
        return found

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """What runs inside leaves the states as they were."""
        saved = {slot: own.clone() for slot, own in self._own.items()}
        try:
            yield
        finally:
            for slot, own in self._own.items():
                own.copy_(saved[slot])


def _states(cache: Cache) -> dict[_Slot, torch.Tensor]:
    carried = {(layer, _CARRIED, 0): tensor for layer, tensor in first_of(cache).state.carried.items()}
    return carried | {
        (at, kind, number): tensor
        for at, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionLayer)
        for kind in _KINDS
        for number, tensor in getattr(layer, kind).items()
        if tensor is not None
    }


def _put(cache: Cache, slot: _Slot, tensor: torch.Tensor) -> None:
    at, kind, number = slot
    if kind == _CARRIED:
        first_of(cache).state.carried[at] = tensor
        return
    getattr(cache.layers[at], kind)[number] = tensor
