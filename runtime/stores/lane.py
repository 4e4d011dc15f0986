"""Where copies to the host run: behind the compute on a CUDA device, at once elsewhere.

A lane is a second queue of work. What is run on it sees everything issued before; whoever reads its results says so
and is ordered after them. Nothing waits otherwise, so a layer's attention and MLP go on while its keys and values
leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Ticket = Any
"""What `run` returns: stands for that work and all before it on the lane."""


class Lane(Protocol):
    """A queue of copies beside the compute."""

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Queues `work` behind all compute issued so far.

        Args:
            work: issues copies; may make temporaries, which live on the lane.
            reads: tensors it reads. Their memory is not given to others before it is done, whoever lets go of them;
                their contents must not be overwritten.
        """

    def order(self, ticket: Ticket) -> None:
        """Compute issued from here on comes after the work of `ticket`. The host does not wait."""

    def finish(self, ticket: Ticket) -> None:
        """Returns when the work of `ticket` is done, so that the host may look at its results."""

    def settle(self) -> None:
        """Returns when nothing is under way on the device, so that the host may write to what was read or written."""


class InlineLane:
    """No queue: work is done when `run` returns."""

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Does it."""
        work()

    def order(self, ticket: Ticket) -> None:
        """Nothing is left to wait for."""

    def finish(self, ticket: Ticket) -> None:
        """Nothing is left to wait for."""

    def settle(self) -> None:
        """Nothing is left to wait for."""


class StreamLane:
    """A CUDA stream of its own on one device. Copies of all layers share it and so follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # ahead of the compute: a short packing kernel would else wait until a long attention kernel runs dry
        self.stream = torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Queues `work` behind the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            work()
            for tensor in reads:
                tensor.record_stream(self.stream)  # freed memory is not given out again before the lane is past here
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def order(self, ticket: Ticket) -> None:
        """The current stream waits, the host does not."""
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)

    def finish(self, ticket: Ticket) -> None:
        """The host waits."""
        if ticket is not None:
            ticket.synchronize()

    def settle(self) -> None:
        """The host waits for every stream."""
        torch.cuda.synchronize(self._device)


def lane_for(device: torch.device) -> Lane:
    """The lane that copies from `device` run on."""
    return StreamLane(device) if device.type == "cuda" else InlineLane()
