"""Option texts that mean lists, lengths, shares and budgets.

Each function raises UsageError where a text means nothing; `flag` is what the message names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import parse_length

if TYPE_CHECKING:
    from sparsekv.plans.patterns import Budget, TileShape


def names_from(text: str, flag: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise UsageError(f"{flag}: expected names separated by commas, found {text!r:.40}")
    return names


def lengths_from(text: str, flag: str) -> tuple[int, ...]:
    """Lengths such as 4k,16k, in the order given: densities may pair up with them."""
    try:
        lengths = tuple(parse_length(part) for part in text.split(","))
    except (ValueError, UsageError) as error:
        raise UsageError(f"{flag}: {error}") from error
    if len(set(lengths)) < len(lengths):
        raise UsageError(f"{flag}: expected each length once, found {text!r:.40}")
    return lengths


def layers_from(text: str, flag: str) -> tuple[int, ...]:
    """Layers such as 2,8-9."""
    from sparsekv.plans.types import parse_ids

    try:
        return parse_ids(text)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{flag}: {error}") from error


def shares_from(text: str, flag: str) -> tuple[float, ...]:
    """Shares such as 0.3 or 30%, separated by commas."""
    return tuple(_share(part, flag) for part in text.split(","))


def budget_from(text: str, flag: str) -> Budget:
    """A number of tokens (2048, 2k) or a share of the context (10%, 0.1)."""
    from sparsekv.plans.patterns import fraction, tokens

    try:
        return tokens(parse_length(text))
    except (ValueError, UsageError):
        share = _share_in(text)
    if share is None:
        raise UsageError(f"{flag}: expected tokens, such as 2048 or 2k, or a share up to 100%, found {text!r:.40}")
    return fraction(share)


def tile_from(size: str | None) -> TileShape | None:
    """A square tile; None for the default."""
    from sparsekv.plans.patterns import TileShape

    return None if size is None else TileShape.model_validate({"query": int(size), "key": int(size)})


def _share(text: str, flag: str) -> float:
    share = _share_in(text)
    if share is None:
        raise UsageError(f"{flag}: expected a share above 0 and up to 1, such as 0.3 or 30%, found {text!r:.40}")
    return share


def _share_in(text: str) -> float | None:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        return None
    return share if 0.0 < share <= 1.0 else None
