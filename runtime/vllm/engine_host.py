"""Starts the plan of an engine of vLLM: what its layers compute, by the file and the engine's model; reads and cuts
vLLM's metadata of a step (`CommonAttentionMetadata`), which tells of its requests and rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekv.kernels.keys import Softmax
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import load_plan
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.state import Gather, Observed
from sparsekv.runtime.engine_plan import EngineModel, Wanted, start
from sparsekv.runtime.paged.metrics import ServingStats
from sparsekv.runtime.paged.plan_host import PlanHost
from sparsekv.runtime.vllm.evicted_blocks import EvictingHost
from sparsekv.runtime.vllm.settings import EngineFacts, EngineOptions, host_of, warn_of_release

_ALLOW_MISMATCH = '--additional-config \'{"sparsekv": {"allow_mismatch": true}}\''
_MOST_PROGRAM_US = 200.0  # more may be what a first step loads in each layer, and would leave chunks dense that gain


class EngineHost(PlanHost):
    """A plan at work in one worker, of which layers may evict tokens."""

    evicting: EvictingHost | None = None  # where layers do
    measures = False  # where the plan is faster, before anything is captured
    dense_graphs = False  # whether those are there
    decodes_dense = False  # whether nothing chooses in the step at hand
    passed: list[tuple[float, float]]  # when attention of the layers began and ended in steps without a cache

    @property
    def engine(self) -> Any:
        from sparsekv.runtime.vllm import internals  # which imports this file

        return internals

    @property
    def program_us(self) -> float:  # type: ignore[override]
        """In a step that is not captured; 0 where none was seen."""
        gaps = (1e6 * (begun - ended) for (_, ended), (begun, _) in pairwise(self.passed))
        return min(_MOST_PROGRAM_US, min(gaps, default=0.0))

    def count_decoded(self, tokens: int) -> None:
        """Counts the tokens of a step in which nothing chooses."""
        self.counters.decode_dense += 0 if self.decode is None else tokens
        self.decodes_dense = True

    def warm_up(self, layer: LayerProgram, q_THD: torch.Tensor, softmax: Softmax, scale: float) -> None:
        """See `PlanHost`. An evicting layer also chooses."""
        if (rule := layer.role.evicts) is not None and self.evicting:
            keys = self.scratch.zeros(layer.kv_heads, q_THD.shape[-1], self.longest)
            q_1HWD = q_THD[-(rule.observe or 0) :].transpose(0, 1)[None]
            self.evicting.warm_up(layer, Observed(q_1HWD, scale, softmax), keys)
        super().warm_up(layer, q_THD, softmax, scale)


def start_host(
    path: Path, options: EngineOptions, facts: EngineFacts, model: EngineModel, gather: Gather | None = None
) -> EngineHost:
    """The plan of an engine that starts. Raises UnsupportedError, which names all that this host cannot run."""
    plan = load_plan(path)
    if not options.decode:
        plan = plan.model_copy(update={"decode": None, "kv_cache": None})
    if options.exact is True:
        plan = plan.model_copy(update={"prefill": None})
    able = host_of(facts, plan, options)
    wanted = Wanted(able, options.backend, options.allow_mismatch, _ALLOW_MISMATCH, facts.drafted)
    host = start(EngineHost, plan, path, model, wanted, gather)
    warn_of_release(facts, options)
    host.measures, host.passed = options.pays is None, []
    host.pays = options.pays or host.program.hint
    if plan.evicting:
        ranks = gather if model.rank.count > 1 else None
        host.evicting = EvictingHost(host.backend, host.fallback, host.scratch.copy, model.rows, ranks)
    return host


def serving_stats(llm: Any) -> ServingStats:
    """The counts of a `vllm.LLM`'s engine that runs a plan. With the engine in another process (the default of vLLM),
    set VLLM_ALLOW_INSECURE_SERIALIZATION=1: vLLM sends the function that reads them there."""
    stats: ServingStats | None = llm.apply_model(_read)[0]
    if stats is None:
        raise UsageError(
            "expected an engine that runs a plan, found one without; give it a plan, or a model with one, and on a GPU "
            'attention_config={"backend": "FLASH_ATTN"} where vLLM chose another'
        )
    return stats


def reset_stats(llm: Any) -> None:
    llm.apply_model(_reset)


def plan_host(model: Any) -> EngineHost | None:
    hosts = (getattr(getattr(module, "impl", None), "plan_host", None) for module in model.modules())
    return next((host for host in hosts if host is not None), None)


def _read(model: Any) -> ServingStats | None:
    host = plan_host(model)
    return None if host is None else host.counters.read()


def _reset(model: Any) -> None:
    if (host := plan_host(model)) is not None:
        host.counters.reset()


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
    """The first row of each request of a step and the end of the last, their lengths, and which are still prompts;
    known to the host."""
    starts, bound, unfinished = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound, common.is_prefilling
    lengths = (common.seq_lens if bound is None else bound).tolist()  # exact without speculative decoding
    prompts = [] if unfinished is None else unfinished.tolist()
    return starts.tolist(), lengths, prompts + [False] * (len(lengths) - len(prompts))


def decoded_dense(host: EngineHost, common: Any, graph_rows: int) -> int | None:
    """The tokens that a step decodes where none of them may choose; None of any other step. A small model's device
    waits for this: a few lengths are counted in a list in a sixth of the time that arrays take."""
    bound, prompts = common.seq_lens_cpu_upper_bound, common.is_prefilling
    if bound is None or host.drafts or host.decoded > 1:
        return None
    alone, lengths = common.max_query_len <= 1, bound.tolist()
    if not alone or (prompts is not None and True in prompts.tolist()):
        decoded_B = np.diff(common.query_start_loc_cpu.numpy()) == 1
        if prompts is not None:
            decoded_B[: len(prompts)] &= ~prompts.numpy()
        lengths = bound.numpy()[decoded_B].tolist()
    if host.decode is not None:
        captured = alone and common.num_reqs <= graph_rows
        least = host.pays.of_decode(captured).at(common.num_reqs)
        reads_lengths = captured and bool(host.pays.decode.rows) and not host.dense_graphs
        may = least is not None and max(lengths, default=0) >= least
        if reads_lengths or (may and host.decode.chooses(lengths, least)):
            return None
    return len(lengths) - lengths.count(0) - lengths.count(1)  # those are of steps that the engine makes up


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
    """Returns whether all rows of a step attend causally and to text alone: not to later tokens of an image, nor to a
    prompt beyond a window."""
    others = getattr(common, "mm_req_doc_ranges", None), getattr(common, "rswa_prefix_lens", None)
    return common.causal is True and not any(other is not None and len(other) for other in others)


def with_tables(common: Any, lengths_B: torch.Tensor, cpu_lengths_B: torch.Tensor, table_BP: torch.Tensor) -> Any:
    return common.replace(
        seq_lens=lengths_B,
        seq_lens_cpu_upper_bound=cpu_lengths_B,
        block_table_tensor=table_BP,
        **{name: None for name in derived_fields(common)},
    )
