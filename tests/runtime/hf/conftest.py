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
    real = long_inputs._CutLayer.forward

    def counted(cut, into):
        seen.append(len(cut.pieces))
        return real(cut, into)

    monkeypatch.setattr(long_inputs._CutLayer, "forward", counted)
    return seen
