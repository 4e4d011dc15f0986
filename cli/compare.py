"""`sparsekv run --compare`: the same prompt dense and sparse, side by side."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from sparsekv.cli.answers import Answer
from sparsekv.cli.output import columns, size


def comparison(dense: Answer, sparse: Answer) -> dict[str, Any]:
    """The JSON of a comparison: the keys of the sparse answer, the dense answer, and how they differ."""
    return sparse.as_data() | {
        "dense": dense.as_data(),
        "first_diverging_token": first_difference(dense, sparse),
        "prefill_speedup": round(dense.generation.prefill_seconds / sparse.generation.prefill_seconds, 3),
    }


def first_difference(dense: Answer, sparse: Answer) -> int | None:
    """Position of the first new token that is not the same; None if all are."""
    pairs = zip_longest(dense.generation.token_ids, sparse.generation.token_ids)
    return next((position for position, (one, other) in enumerate(pairs) if one != other), None)


def comparison_text(dense: Answer, sparse: Answer) -> str:
    """A comparison for people."""
    texts = [f"dense:  {dense.generation.text.strip()}", f"sparse: {sparse.generation.text.strip()}"]
    table = columns([("", "dense", "sparse"), *_rows(dense, sparse)], right=(1, 2))
    return "\n".join([*texts, "", table, "", _verdict(dense, sparse)])


def _rows(dense: Answer, sparse: Answer) -> list[tuple[str, str, str]]:
    def row(name: str, show: Any) -> tuple[str, str, str]:
        return name, show(dense), show(sparse)

    return [
        row("prompt tokens", lambda a: f"{a.generation.prompt_tokens:,}"),
        row("prefill", lambda a: f"{a.generation.prefill_seconds:.2f} s"),
        row("prefill density", lambda a: f"{a.prefill_density:.3f}"),
        row("new tokens", lambda a: f"{a.generation.new_tokens}"),
        row("decode", lambda a: a.rate),
        row("KV on the device", lambda a: size(a.kv_bytes_device)),
        row("KV on the host", lambda a: size(a.kv_bytes_host)),
    ]


def _verdict(dense: Answer, sparse: Answer) -> str:
    place = first_difference(dense, sparse)
    if place is None:
        return f"all {dense.generation.new_tokens} new tokens are the same"
    return f"the answers part at new token {place + 1} of {dense.generation.new_tokens}"
