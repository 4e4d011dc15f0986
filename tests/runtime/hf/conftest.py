"""What is observed of long inputs."""

import pytest

from sparsekv.runtime.hf import long_inputs


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of each layer that ran in pieces (the comparison before the first one included)."""
    seen: list[int] = []
    real = long_inputs.forward_in_pieces

    def counted(layer, model_type, given, engine, pieces, into):
        seen.append(len(pieces))
        return real(layer, model_type, given, engine, pieces, into)

    monkeypatch.setattr(long_inputs, "forward_in_pieces", counted)
    return seen
