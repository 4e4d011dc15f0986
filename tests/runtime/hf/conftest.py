"""The usual model, and what is observed of long inputs."""

import pytest
from tiny_models import tiny_model

from sparsekv.runtime.hf import long_inputs


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of each layer that ran in pieces."""
    seen: list[int] = []
    real = long_inputs.forward_in_pieces

    def counted(layer, architecture, given, pieces, into):
        seen.append(len(pieces))
        return real(layer, architecture, given, pieces, into)

    monkeypatch.setattr(long_inputs, "forward_in_pieces", counted)
    return seen
