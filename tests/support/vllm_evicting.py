"""What an engine in this process does with evicting layers, checked at every step against definitions that
share nothing with the runtime: which blocks are read, what is kept of each prompt, and that freed blocks never are.

Shapes: S tokens of a prompt, K kept tokens, G KV heads, H query heads, W observed queries, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from vllm_engine import tokens_and_logprobs

from sparsekv.plans.phases import Eviction
from sparsekv.runtime.vllm.evicted_blocks import EvictingHost, PromptRows

POISON = 1e4  # of keys and values that nobody may read; finite, as kernels may multiply rows behind the end by 0
_CLOSE = 1e-5  # scores that rounding may exchange


def scheduler_of(engine: Any) -> Any:
    """Of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def free_blocks(engine: Any) -> int:
    """How many there are."""
    return int(scheduler_of(engine).kv_cache_manager.block_pool.get_num_free_blocks())


def held_blocks(engine: Any, request: str) -> list[int]:
    """How many blocks a request holds, by group."""
    managers = scheduler_of(engine).kv_cache_manager.coordinator.single_type_managers
    return [sum(not block.is_null for block in manager.req_to_blocks.get(request, ())) for manager in managers]


class Watch:
    """Checks an engine's steps inside its `with` block.

    Args:
        engine: with a plan that evicts tokens.
        rules: of its layers.
    """

    def __init__(self, engine: Any, rules: dict[int, Eviction]) -> None:
        self._engine, self._rules = engine, rules
        self._queries: dict[tuple[str, int], torch.Tensor] = {}
        self._tensors = _cache_tensors(engine)
        self.counts: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Meanwhile every step is checked."""
        from sparsekv.runtime.vllm.attention_backend import SparseBuilder

        build, observe, drop = SparseBuilder.build, EvictingHost.observe, EvictingHost._evict
        watch = self

        def checked_build(self: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = build(self, *args, **kwargs)
            if self._table is not None and self._host.evicting.requests.rows:
                watch._check_blocks(self, metadata, self._host.evicting.requests.rows)
            return metadata

        def checked_observe(self: Any, layer: Any, rows: PromptRows, new: Any, *args: Any) -> None:
            watch._record(layer.layer, rows, new)
            observe(self, layer, rows, new, *args)

        def checked_evict(self: Any, layer: Any, rows: PromptRows, observed: Any, pages: Any, *args: Any) -> None:
            before = _rows(pages[0], args[0], range(rows.prompt))
            drop(self, layer, rows, observed, pages, *args)
            watch._check_kept(layer.layer, rows, observed.scale, before, pages, args[0])

        with ExitStack() as stack:
            for owner, name, by in (
                (SparseBuilder, "build", checked_build),
                (EvictingHost, "observe", checked_observe),
                (EvictingHost, "_evict", checked_evict),
            ):
                stack.enter_context(patch.object(owner, name, by))
            yield self

    def poison(self) -> None:
        """Writes to all blocks that are free."""
        free = [block.block_id for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null]
        for tensor in self._tensors:
            tensor[free] = POISON

    @property
    def _pool(self) -> Any:
        return scheduler_of(self._engine).kv_cache_manager.block_pool

    def _check_blocks(self, builder: Any, metadata: Any, requests: list[tuple[str, int]]) -> None:
        """A step reads just the blocks that its requests hold, as the scheduler counts them."""
        scheduler = scheduler_of(self._engine)
        groups = scheduler.kv_cache_config.kv_cache_groups
        (number,) = (at for at, group in enumerate(groups) if builder.layer_names[0] in group.layer_names)
        manager, size = (
            scheduler.kv_cache_manager.coordinator.single_type_managers[number],
            builder.kv_cache_spec.block_size,
        )
        for row, (request, _) in enumerate(requests):
            blocks = manager.req_to_blocks[request]
            held = [block.block_id for block in blocks if not block.is_null]
            natural = scheduler.requests[request].num_computed_tokens  # advanced when the step was scheduled
            length = natural - (len(blocks) - len(held)) * size
            assert int(metadata.seq_lens[row]) == length, (request, natural)
            assert metadata.block_table[row][: -(-length // size)].tolist() == held[: -(-length // size)]
            assert len(held) == -(-length // size)
            self.counts["shortened rows"] += len(held) < len(blocks)
        self.counts["steps"] += 1

    def _record(self, layer: int, rows: PromptRows, new: Any) -> None:
        key = (rows.name, layer)
        q_HSD = new.q_BHWD[0].cpu()
        older = self._queries.get(key) if rows.past else None
        assert (0 if older is None else older.shape[1]) == rows.past, "rows of a prompt were not observed"
        self._queries[key] = q_HSD if older is None else torch.cat((older, q_HSD), 1)

    def _check_kept(
        self, layer: int, rows: PromptRows, scale: float, before_SGD: torch.Tensor, pages: Any, table_P: torch.Tensor
    ) -> None:
        rule, prompt, block = self._rules[layer], rows.prompt, rows.blocks.block
        freed = (prompt - rule.kept_tokens(prompt)) // block
        count, shared = prompt - freed * block, prompt % block
        places = [*range(count - shared), *range(prompt - shared, prompt)]
        after_KGD = _rows(pages[0], table_P, places)
        scores_GS = brute_scores(self._queries.pop((rows.name, layer)), before_SGD, rule, scale)
        for head in range(before_SGD.shape[1]):
            same_KS = (after_KGD[:, None, head, :6] == before_SGD[None, :, head, :6]).all(-1)
            assert same_KS.sum(1).tolist() == [1] * count
            from_K = same_KS.int().argmax(1)
            assert torch.equal(after_KGD[:, head], before_SGD[from_K, head])
            kept = from_K.tolist()
            assert kept == sorted(kept)
            _check_choice(set(kept), scores_GS[head], rule, count, prompt)
        self.counts["prompts"] += 1


class Choices:
    """What layers chose to keep of prompts: a set of (KV head, token) each, in the order of the layers."""

    def __init__(self) -> None:
        self._found: list[set[tuple[int, int]]] = []

    def add(self, rows_1gK: torch.Tensor | None) -> None:
        """Of a layer; None is everything."""
        lists = [] if rows_1gK is None else rows_1gK[0].tolist()
        self._found.append({(head, token) for head, own in enumerate(lists) for token in own})

    def taken(self) -> list[set[tuple[int, int]]]:
        """Those since the last call."""
        found, self._found = self._found, []
        return found


@contextmanager
def recorded_choices() -> Iterator[Choices]:
    """Meanwhile all choices of this process are recorded."""
    choices, choose = Choices(), EvictingHost._choose

    def recording(self: Any, *args: Any) -> torch.Tensor | None:
        rows_1gK = choose(self, *args)
        choices.add(rows_1gK)
        return rows_1gK

    with patch.object(EvictingHost, "_choose", recording):
        yield choices


def _check_choice(kept: set[int], scores_S: torch.Tensor, rule: Eviction, count: int, prompt: int) -> None:
    fixed = {*range(rule.sink or 0), *range(prompt - (rule.recent or 0), prompt)}
    assert fixed <= kept
    assert len(kept) == count
    others = [token for token in range(prompt) if token not in fixed]
    worst = min((float(scores_S[token]) for token in others if token in kept), default=float("inf"))
    best = max((float(scores_S[token]) for token in others if token not in kept), default=-float("inf"))
    assert worst >= best - _CLOSE


def brute_scores(q_HSD: torch.Tensor, k_SGD: torch.Tensor, rule: Eviction, scale: float) -> torch.Tensor:
    """[G, S]: attention of the last queries, summed over neighbours, by head or the most of any."""
    (heads, length, _), groups = q_HSD.shape, k_SGD.shape[1]
    window = min(rule.observe or 0, length)
    k_HSD = k_SGD.transpose(0, 1).repeat_interleave(heads // groups, 0)
    scores_HWS = q_HSD[:, -window:].double() @ k_HSD.double().mT * scale
    row_W, key_S = torch.arange(length - window, length), torch.arange(length)
    weights_HWS = scores_HWS.masked_fill(key_S > row_W[:, None], -torch.inf).softmax(-1)
    mean_GS = weights_HWS.unflatten(0, (groups, -1)).mean((1, 2))
    padded_GS = torch.nn.functional.pad(mean_GS, (2, 2))
    near_GS = sum(padded_GS[:, at : at + length] for at in range(5))
    assert isinstance(near_GS, torch.Tensor)
    return near_GS.amax(0, keepdim=True).expand(groups, -1) if rule.heads == "max" else near_GS


def _rows(x_NGSD: torch.Tensor, table_P: torch.Tensor, tokens: Any) -> torch.Tensor:
    """[tokens, G, D]: of a request, by their place in its table."""
    at_T, page = torch.tensor(list(tokens), device=table_P.device), x_NGSD.shape[2]
    found_TGD: torch.Tensor = x_NGSD[table_P.long()[at_T // page], :, at_T % page]
    return found_TGD.cpu()


def _cache_tensors(engine: Any) -> list[torch.Tensor]:
    """Of all layers; layers of different groups share some."""
    (found,) = engine.apply_model(
        lambda model: [module.kv_cache for module in model.modules() if hasattr(module, "kv_cache")]
    )
    return list({tensor.data_ptr(): tensor for tensor in found}.values())


@dataclass(frozen=True)
class Finished:
    """A request that was answered."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    preempted: bool


def drive(watch: Watch, engine: Any, draw: Random, count: int) -> list[Finished]:
    """Random requests, some of them aborted: those that finished.

    Args:
        watch: at work.
        engine: that it watches.
        draw: of everything.
        count: requests.
    """
    from vllm import SamplingParams

    asked: dict[str, list[int]] = {}
    done: list[Finished] = []
    preempted: set[str] = set()
    inside = engine.llm_engine
    while len(asked) < count or inside.has_unfinished_requests():
        while len(asked) < count and draw.random() < 0.8:
            name = f"request-{len(asked)}"
            asked[name] = [draw.randrange(1, 60) for _ in range(random_length(draw))]
            tokens = draw.choice([1, draw.randint(2, 30), draw.randint(30, 160)])
            greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
            inside.add_request(name, {"prompt_token_ids": asked[name]}, greedy)
        if draw.random() < 0.02:
            inside.abort_request([draw.choice([*asked, "nobody"])])
        for output in inside.step():
            if output.finished:
                name = output.request_id
                done.append(Finished(asked[name], *tokens_and_logprobs(output), name in preempted))
        running = scheduler_of(engine).requests.values()
        preempted |= {request.request_id.rpartition("-")[0] for request in running if request.num_preemptions}
        watch.poison()
    return done


def random_length(draw: Random) -> int:
    """Tokens of a prompt."""
    return draw.choice([draw.randint(1, 40), draw.randint(40, 300), draw.choice([128, 129, 256, 257, 160, 161])])
