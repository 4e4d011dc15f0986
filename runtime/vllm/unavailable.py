"""Is what vLLM finds by the name CUSTOM on devices that no backend of ours was made for yet."""

from __future__ import annotations

from typing import Any, NoReturn

from sparsekv.plans.errors import UnsupportedError


class UnavailableBackend:
    """Refuses when vLLM asks what it can do, which is when the engine starts."""

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedError, always."""
        raise UnsupportedError(
            "expected vLLM on a CPU or an NVIDIA GPU, where sparsekv runs plans, found another device; leave out "
            "--attention-backend CUSTOM there, or run the plan with `sparsekv run`"
        )
