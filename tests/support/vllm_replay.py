"""What an engine of vLLM computed step by step, and the same steps in the transformers host.

Keys and values are put where the engine had them, page by page: so a replay follows cuts, preemptions, prefix hits and
evictions without knowing of requests. A page that nothing was written to is full of NaN.

Shapes: T rows of a request in a step, V tokens of the vocabulary, L layers, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, pairwise
from typing import Any
from unittest.mock import patch

import torch
from handed_over import cache_of, handed_over
from transformers import DynamicCache
from vllm_engine import Oracle

PAGE = 128  # tokens
TOLERANCE = 1e-3  # of logits; float32 leaves 3e-5
ROUNDING = 1e-5  # of inputs, relative
RETRIES = 8  # of a row that differs


@dataclass(frozen=True)
class Rows:
    """One request's rows in a step."""

    tokens_T: torch.Tensor
    past: int
    pages: tuple[int, ...]  # of the request up to these rows
    prompt: bool  # not yet whole
    sparse: bool  # where the plan is, by the engine's rule
    logits_V: torch.Tensor | None  # behind the last row, as the engine computed them; None where it did not

    @property
    def length(self) -> int:
        """Tokens of the request, these included."""
        return self.past + len(self.tokens_T)

    def part(self, first: int, end: int) -> Rows:
        """Some of these rows, as if in a step of their own."""
        pages, logits_V = self.pages[: -(-(self.past + end) // PAGE)], self.logits_V
        if end < len(self.tokens_T):
            logits_V = None
        return replace(self, tokens_T=self.tokens_T[first:end], past=self.past + first, pages=pages, logits_V=logits_V)


def plan_host_of(engine: Any) -> Any:
    """What the layers of an engine share; None without a plan."""
    (host,) = engine.apply_model(lambda model: model.model.layers[0].self_attn.attn.impl.plan_host)
    return host


@contextmanager
def recorded(engine: Any) -> Iterator[list[Rows]]:
    """What the engine computes meanwhile, with the rows and pages that its metadata builder is given."""
    from sparsekv.runtime.vllm.attention_backend import SparseBuilder
    from sparsekv.runtime.vllm.engine_host import requests_of

    host, (model,) = plan_host_of(engine), engine.apply_model(lambda model: model)
    build, compute_logits = SparseBuilder.build, model.compute_logits
    found: list[Rows] = []
    steps: list[tuple[list[int], list[int], list[bool], torch.Tensor]] = []
    inputs: list[torch.Tensor] = []

    def recording_build(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        if self._host is host:
            steps.append((*requests_of(common), common.block_table_tensor.clone()))
        return build(self, common_prefix_len, common, fast_build)

    def recording_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute_logits(hidden)
        if steps:  # else of prompt log-probabilities, which come after those of the last rows
            (starts, lengths, prompts, table), tokens = steps.pop(), inputs.pop()
            by_row = iter(logits.clone())
            split = _split(host, tokens, starts, lengths, prompts, table)
            step = [replace(rows, logits_V=next(by_row)) for rows in split]
            assert next(by_row, None) is None
            # A prefix hit may be on a page that another request of the same step writes: that one has a shorter past.
            found.extend(sorted(step, key=lambda rows: rows.past))
        return logits

    def record_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[:] = [kwargs["input_ids"].clone().long()]

    with ExitStack() as stack:
        stack.enter_context(patch.object(SparseBuilder, "build", recording_build))
        stack.enter_context(patch.object(model, "compute_logits", recording_logits))
        stack.callback(model.register_forward_pre_hook(record_input, with_kwargs=True).remove)
        yield found


def _split(
    host: Any, tokens: torch.Tensor, starts: list[int], lengths: list[int], prompts: list[bool], table: torch.Tensor
) -> Iterator[Rows]:
    """The rows of each request of a step; each row that decodes by itself, as each has logits."""
    counts = [end - first for first, end in pairwise(starts)]
    decodes = [0 < count <= host.queries and not prompt for count, prompt in zip(counts, prompts, strict=True)]
    least_decoded = host.pays.of_decode(captured=False).least(compress(lengths, decodes))
    for number, count in enumerate(counts):
        length = lengths[number]
        least = least_decoded if decodes[number] else host.pays.prefill.at(count)
        of_request_T = tokens[starts[number] : starts[number + 1]]
        is_sparse = least is not None and length >= least
        rows = Rows(of_request_T, length - count, _used(table[number], length), prompts[number], is_sparse, None)
        if count:
            yield from [rows.part(at, at + 1) for at in range(count)] if decodes[number] else [rows]


def _used(pages_P: torch.Tensor, length: int) -> tuple[int, ...]:
    return tuple(pages_P[: -(-length // PAGE)].tolist())


class _Pages:
    """Keys and values by page."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._shape = (config.num_hidden_layers, 2, config.num_key_value_heads, PAGE, config.head_dim)
        self._pages: dict[int, torch.Tensor] = defaultdict(self._empty)

    def _empty(self) -> torch.Tensor:
        return torch.full(self._shape, torch.nan)

    def before(self, rows: Rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer that the rows find, [1, G, S, D] each."""
        found_L2GSD = torch.cat([self._pages[page] for page in rows.pages], 3)[..., : rows.past, :]
        return [(k_GSD[None], v_GSD[None]) for k_GSD, v_GSD in found_L2GSD]

    def write(self, rows: Rows, layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The rows' own, of all that the request has now."""
        new_L2GTD = torch.stack([torch.cat(both) for both in layers])[..., rows.past :, :]
        for at, row in zip(range(rows.past, rows.length), new_L2GTD.unbind(3), strict=True):
            self._pages[rows.pages[at // PAGE]][..., at % PAGE, :] = row


@torch.no_grad()
def assert_replayed(oracle: Oracle, recording: Sequence[Rows]) -> None:
    """Every row that the engine computed has the logits of the transformers host, within float32's reach.

    Scores that are equal but for rounding may be chosen from in either order: a row that differs is computed again from
    inputs with other rounding, and one of the results has to be the engine's."""
    pages, source = _Pages(oracle.model), torch.Generator().manual_seed(0)
    with oracle.applied() as handle:
        for number, rows in enumerate(recording):
            model = oracle.model if rows.sparse else oracle.dense.model
            new_cache = DynamicCache if handle is None or not rows.sparse else partial(cache_of, handle)
            for noise in (0.0, *[ROUNDING] * RETRIES):
                rounded = partial(_rounded, noise=noise, source=source)
                embedded_1TE = rounded(model.get_input_embeddings()(rows.tokens_T[None]))
                past = pages.before(rows) if rows.past else []
                cache = new_cache([(rounded(k), rounded(v)) for k, v in past]) if past else None
                out = model(inputs_embeds=embedded_1TE, past_key_values=cache, use_cache=True, logits_to_keep=1)
                apart = 0.0 if rows.logits_V is None else float((rows.logits_V - out.logits[0, -1]).abs().max())
                if apart < TOLERANCE:
                    break
            else:
                raise AssertionError(f"row {number} of {len(recording)}, {rows.past} to {rows.length}: {apart=}")
            pages.write(rows, handed_over(out.past_key_values, rows.length))


def _rounded(x: torch.Tensor, noise: float, source: torch.Generator) -> torch.Tensor:
    return x * (1 + noise * torch.randn(x.shape, generator=source)) if noise else x
