"""What happens when a prefill kernel breaks: the next backend computes the same, and says so once.

A backend is chosen by what it promises to run (dispatch.py). It can still run out of memory, fail to compile on this
driver, or meet another version of a library than it was written for. None of that has to end a run when another backend
computes the same mask; but a wrong output must never come of it, so what is not known to be harmless is raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from sparsekv.kernels.dispatch import backends_after
from sparsekv.kernels.index.build import BuilderName, builds_by_triton
from sparsekv.plans.errors import BackendError, SparseKVError
from sparsekv.plans.patterns import TileShape

Found = TypeVar("Found")


class BackendWarning(UserWarning):
    """A backend failed, and another one computes in its place from now on."""


class Fallback:
    """The backend in use, and what to do when it fails. One of these belongs to one engine, for as long as that lives.

    Args:
        backend: the name that `choose_backend` gave.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._failed: dict[str, str] = {}
        self._builder: BuilderName = "auto"
        self._builder_failed = ""

    @property
    def backend(self) -> str:
        """The backend that the next call runs on."""
        return self._backend

    @property
    def failed(self) -> dict[str, str]:
        """The backends that were given up, and why. They are not tried again."""
        return dict(self._failed)

    @property
    def builder_failed(self) -> str:
        """Why indices are no longer built by Triton; empty where nothing failed."""
        return self._builder_failed

    def run(self, call: Callable[[str], Found], q_BHSD: torch.Tensor, tile: TileShape | None = None) -> Found:
        """`call(backend)`, on the first backend from the present one on that gets through it.

        Args:
            call: computes everything from its inputs, so that it may be begun again: it writes to no input.
            q_BHSD: the queries, for what other backends would be given. Tensors are never moved to another device.
            tile: of the index.

        Raises:
            Exception: what the backend raised, when the input is at fault (any error of ours but a BackendError), no
                other backend takes these tensors where they are, or the device works no more.
        """
        while True:
            try:
                return call(self._backend)
            except Exception as error:
                if isinstance(error, SparseKVError) and not isinstance(error, BackendError):
                    raise
                behind = [name for name in backends_after(self._backend, q_BHSD, tile) if name not in self._failed]
                if not behind or not _alive(q_BHSD.device):
                    raise
                self._give_up(error, behind[0])
            # Only here has the failed attempt, which the error's traceback held, let go of its memory.
            if q_BHSD.is_cuda:
                torch.cuda.empty_cache()

    def build(self, call: Callable[[BuilderName], Found], device: torch.device) -> Found:
        """`call(builder)`: an index, by the builders of this device, or by torch's once those have failed.

        Raises:
            Exception: what the builder raised, when the input is at fault, torch was the builder, or the device works
                no more.
        """
        try:
            return call(self._builder)
        except Exception as error:
            of_input = isinstance(error, SparseKVError) and not isinstance(error, BackendError)
            if of_input or self._builder == "torch" or not builds_by_triton(device) or not _alive(device):
                raise
            self._builder, self._builder_failed = "torch", _told(error)
            warnings.warn(
                f"building indices by Triton failed ({self._builder_failed}); torch builds them from here on, which is "
                "slower",
                BackendWarning,
                stacklevel=3,
            )
        return call(self._builder)

    def _give_up(self, error: Exception, successor: str) -> None:
        self._failed[self._backend] = _told(error)
        warnings.warn(
            f"the {self._backend} backend failed ({self._failed[self._backend]}); {successor} computes prefill from "
            f"here on, which may be slower. Ask for it with --backend {successor} to avoid the attempt.",
            BackendWarning,
            stacklevel=4,
        )
        self._backend = successor


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _alive(device: torch.device) -> bool:
    """Whether the device still works: after a bad access every later call fails as well, and what was computed before
    it cannot be trusted. Waits for the device, once for a failure."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
