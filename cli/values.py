"""Option texts that mean lists, lengths, shares and budgets.

Each function raises UsageError where a text means nothing; `flag` is what the message names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv.plans.errors import UsageError
from sparsekv.plans.lengths import parse_length, parse_lengths

if TYPE_CHECKING:
    from sparsekv.plans.budget import Budget
    from sparsekv.plans.patterns import TileShape


def names_from(text: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def lengths_from(text: str, flag: str) -> tuple[int, ...]:
    """Lengths such as 4k,16k, ascending."""
    try:
        return parse_lengths(text)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{flag}: {error}") from error


def layers_from(text: str, flag: str) -> tuple[int, ...]:
    """Layers such as 2,8-9."""
    from sparsekv.plans.layers import parse_ids

    try:
        return parse_ids(text)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{flag}: {error}") from error


def shares_from(text: str, flag: str) -> tuple[float, ...]:
    """Shares such as 0.3 or 30%, separated by commas."""
    return tuple(_share(part, flag) for part in text.split(","))


def budget_from(text: str, flag: str) -> Budget:
    """A number of tokens (2048, 2k) or a share of the context (10%, 0.1)."""
    from sparsekv.plans.budget import fraction, tokens

    try:
        return tokens(parse_length(text))
    except (ValueError, UsageError):
        return fraction(_share(text, flag))


def tile_from(size: str | None) -> TileShape | None:
    """A square tile; None for the default."""
    from sparsekv.plans.patterns import TileShape

    return None if size is None else TileShape.model_validate({"query": int(size), "key": int(size)})


def _share(text: str, flag: str) -> float:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = float("nan")
    if not 0.0 < share <= 1.0:
        raise UsageError(f"{flag}: expected a share above 0 and up to 1, such as 0.3 or 30%, found {text!r:.40}")
    return share
