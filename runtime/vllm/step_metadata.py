"""Reads and cuts vLLM's metadata of a step (`CommonAttentionMetadata`), which tells of its requests and rows."""

from __future__ import annotations

from typing import Any

import torch

READ = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs", "max_query_len"),
    *("num_actual_tokens", "block_table_tensor", "slot_mapping", "positions", "is_prefilling", "causal"),
)
"""Fields of a step's metadata that every release has."""
# Fields of a step's metadata with an entry a request, as far as a release has them, and with one a row.
_BY_REQUEST = (
    *("seq_lens", "seq_lens_cpu_upper_bound", "is_prefilling", "block_table_tensor"),
    *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
)
_BY_ROW = ("slot_mapping", "positions")
# What of a step's metadata is computed from the rest of it, as far as a release has it.
_DERIVED = (
    *("req_idx", "_seq_lens_cpu", "_num_computed_tokens_cpu"),
    *("_num_computed_tokens_cache", "_token_to_req_indices_cache"),
)

KNOWN = frozenset(
    (
        *(*READ, *_BY_REQUEST, *_BY_ROW, *_DERIVED, "max_seq_len", "logits_indices_padded", "num_logits_indices"),
        *("max_logits_per_req", "encoder_seq_lens", "encoder_seq_lens_cpu", "dcp_local_seq_lens_cpu"),
        "mm_req_doc_ranges",
    )
)
"""Fields that this version knows what to do with: another one may say of rows what sparse attention does not do."""


def requests_of(common: Any) -> tuple[list[int], list[int], list[bool]]:
    """Returns the requests of a step, without asking the device: the first row of each request and the end of the last,
    their lengths, and which are still prompts."""
    starts, bound, unfinished = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound, common.is_prefilling
    lengths = (common.seq_lens if bound is None else bound).tolist()  # exact without speculative decoding
    prompts = [] if unfinished is None else unfinished.tolist()
    return starts.tolist(), lengths, prompts + [False] * (len(lengths) - len(prompts))


def part_of(common: Any, first: int, end: int) -> Any:
    """The requests from `first` to before `end` as if they were all of a step."""
    requests, bounds = slice(first, end), slice(first, end + 1)
    starts = common.query_start_loc_cpu[bounds]
    rows = slice(int(starts[0]), int(starts[-1]))
    counts = starts[1:] - starts[:-1]
    return common.replace(
        query_start_loc=common.query_start_loc[bounds] - rows.start,
        query_start_loc_cpu=starts - rows.start,
        num_reqs=end - first,
        num_actual_tokens=rows.stop - rows.start,
        max_query_len=int(counts.max()),
        **{name: _cut(common, name, requests) for name in _BY_REQUEST if hasattr(common, name)},
        **{name: _cut(common, name, rows) for name in _BY_ROW},
        **{name: None for name in derived_fields(common)},
    )


def derived_fields(common: Any) -> list[str]:
    """The fields of a step's metadata that vLLM computes from the others."""
    return [name for name in _DERIVED if hasattr(common, name)]


def _cut(common: Any, name: str, part: slice) -> torch.Tensor | None:
    whole: torch.Tensor | None = getattr(common, name)
    return None if whole is None else whole[part]


def is_plain(common: Any) -> bool:
    """Returns whether all rows of a step attend causally and to text alone: not to later tokens of an image, as a
    prefix does that sees itself whole, and to no prompt beyond a window."""
    others = (getattr(common, name, None) for name in ("mm_req_doc_ranges", "rswa_prefix_lens"))
    return common.causal is True and not any(other is not None and len(other) for other in others)


def with_tables(common: Any, lengths_B: torch.Tensor, cpu_lengths_B: torch.Tensor, table_BP: torch.Tensor) -> Any:
    return common.replace(
        seq_lens=lengths_B,
        seq_lens_cpu_upper_bound=cpu_lengths_B,
        block_table_tensor=table_BP,
        **{name: None for name in derived_fields(common)},
    )
