"""Index builders and scores that work on few elements at once, as they do on prompts a thousand times longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sparsekv.kernels.index import vertical_slash
from sparsekv.kernels.topk import blocks


@contextmanager
def small_blocks(elements: int = 1) -> Iterator[None]:
    """Temporaries hold about so many elements."""
    with (
        mock.patch.object(blocks, "__defaults__", (elements,)),
        mock.patch.object(vertical_slash, "BLOCK_ELEMENTS", elements),
    ):
        yield
