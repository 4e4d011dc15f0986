"""How long inputs are cut."""

import pytest

from sparsekv.runtime.hf.long_inputs import Chunking


@pytest.mark.parametrize(("batch", "length", "rows"), [(1, 100, 17), (3, 100, 17), (5, 100, 3), (1, 34, 17), (1, 2, 9)])
def test_pieces_cover_every_token_once_in_order(batch, length, rows):
    pieces = list(Chunking(above=0, rows=rows).pieces(batch, length))
    assert [t for piece in pieces for t in range(piece.start, piece.stop)] == list(range(length))
    assert all(batch * (piece.stop - piece.start) <= max(rows, batch) for piece in pieces)
