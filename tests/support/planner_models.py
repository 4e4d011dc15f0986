"""Tiny models as the planner takes them, and queries and keys with attention planted in them.

Shapes: H heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tiny_models import tiny_model, tiny_tokenizer

from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.planner.fixed_test import Sizes
from sparsekv.planner.job import Job
from sparsekv.planner.options import PRESET_FAMILIES, PlanOptions, Settled
from sparsekv.planner.predict import causal_tiles
from sparsekv.planner.prices import HeadShape, Prices, StepPrices, Table
from sparsekv.planner.profile.calibration import Calibration
from sparsekv.planner.profile.search_space import CommonPrefix
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

TILE = TileShape(query=64, key=64)
QUICK = Sizes(answered=2, tried=3, cell_loss=0.95, judged=12, net_loss=0.9, long_prompts=2, long_answered=2, own=2)
SHARP = 30.0  # of unit keys: the planted position takes nearly all of the softmax


def loaded_tiny(seed: int = 0, **options: Any) -> LoadedModel:
    """A random Llama of three layers, four heads, two KV heads."""
    model = tiny_model("llama", seed=seed, **options)
    return LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/tiny"))


def loaded_hybrid(architecture: str = "qwen3_next") -> LoadedModel:
    """Full attention in layers 0, 1 and 3, a recurrent state in the others, or MLPs alone in Nemotron-H's but one."""
    kinds = [f"{kind}_attention" for kind in ("full", "full", "linear", "full", "linear")]
    if architecture == "nemotron_h":
        kinds = [*kinds[:2], "mlp", kinds[3], "moe", "linear_attention"]
    model = tiny_model(architecture, layers=len(kinds), layer_types=kinds)
    return LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/hybrid"))


def quick_options(**changes: Any) -> PlanOptions:
    """Options that plan a tiny model in a second or two, sparse at every length."""
    base = PlanOptions(
        lengths=(1024,),
        target_density=(0.7,),
        tile=TILE,
        levels=(0.8, 1.0),
        calibration_samples=1,
        tasks=("kv_retrieval",),
        verify="none",
        row_stride=2,
    )
    return base.but(**changes)


def bare_job(loaded: LoadedModel, options: Settled) -> Job:
    """A job for the stages that measure, of which nothing is checked."""
    texts = tuple(prompt.text for prompt in options.prompts)
    calibration = Calibration(loaded.tokenizer, texts, options.tasks, options.seed)
    return Job(loaded.info, options, loaded, calibration)


_LENGTHS = tuple(1 << power for power in range(6, 22))
Costs = tuple[float, float]  # of a launch, and of a token


def made_up_prices(
    *,
    dense: Costs = (0.0, 1.0),
    tiles: Costs = (0.0, 1.0),
    column: float = 1.0,
    index: Mapping[str, tuple[float, float, float]] = MappingProxyType({}),
    decode_dense: Costs = (0.0, 1e-3),
    decode_sparse: Costs = (0.0, 1e-3),
    choice: Costs = (0.0, 1e-4),
    alone: Costs | None = None,
    lengths: Sequence[int] = _LENGTHS,
    **changes: Any,
) -> Prices:
    """A device on which a tile costs a microsecond, and dense decode a nanosecond a token.

    Args:
        dense, tiles: microseconds of a launch, and of a causal tile.
        column: of single columns that come to a tile.
        index: by family: of a launch, a head's token, and a head's square of tokens.
        lengths: that were measured.
    """
    heads, causal = 4, [4.0 * causal_tiles(length, TILE) for length in lengths]

    def table(rows: Sequence[Sequence[float]], across: Sequence[float] = (1.0,)) -> Table:
        return Table.measured(across, lengths, np.maximum(rows, 1e-6))

    def step() -> StepPrices:
        own = alone or choice
        dense_us = [decode_dense[0] + decode_dense[1] * tokens for tokens in lengths]
        read = [[decode_sparse[0] + share * decode_sparse[1] * n for n in lengths] for share in (0, 1)]
        return StepPrices(
            dense=table([dense_us]),
            sparse=table(read, (0, 1)),
            chooses=table([[us + choice[0] + choice[1] * n for us, n in zip(dense_us, lengths, strict=True)]]),
            chooses_alone=table([[own[0] + own[1] * n for n in lengths]]),
        )

    def index_of(launch: float, token: float, square: float) -> Table:
        return table([[launch + h * (token * n + square * n * n) for n in lengths] for h in (1, heads)], (1, heads))

    base = Prices(
        device="made up",
        backend="cpu",
        shape=HeadShape(heads=heads, kv_heads=2, head_dim=32),
        dense=table([[dense[0] + dense[1] * work for work in causal]]),
        tiles=table([[tiles[0] + share * tiles[1] * work for work in causal] for share in (0, 1)], (0, 1)),
        columns=table([[tiles[0] + share * column * work for work in causal] for share in (0, 1)], (0, 1)),
        index={name: index_of(*index.get(name, (0.0, 0.0, 0.0))) for name in PRESET_FAMILIES},
        step=step(),
    )
    return base.model_copy(update=changes)


def dense_of(prefix: CommonPrefix, v_BGSD: torch.Tensor) -> torch.Tensor:
    """[1, H, S, D]: what the heads of a layer put out without a pattern."""
    out = dense_attention(prefix.q_BHSD, prefix.k_BGSD, v_BGSD, prefix.chunk, scale=prefix.scale)
    return out.out_BHSD


def unit_rows(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """[count, size] of length 1, nearly orthogonal."""
    rows = torch.randn(count, size, generator=generator)
    return rows / rows.norm(dim=-1, keepdim=True)


def local_head(length: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row attends to one of the 150 tokens before it; the last 260 rows to the first token (a_shape)."""
    k_SD = unit_rows(length, size, generator)
    back_S = torch.randint(1, 150, (length,), generator=generator)
    target_S = (torch.arange(length) - back_S).clamp(min=0)
    target_S[-260:] = 0
    return SHARP * k_SD[target_S], k_SD


def striped_head(length: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row attends to thirty columns and to the token 700 before it (vertical_slash)."""
    k_SD = unit_rows(length, size, generator)
    shared_D = unit_rows(1, size, generator)[0]
    columns = torch.randperm(length, generator=generator)[:30]
    k_SD[columns] = shared_D
    back_S = (torch.arange(length) - 700).clamp(min=0)
    return SHARP * (k_SD[back_S] + shared_D), k_SD


def blocky_head(
    length: int, size: int, generator: torch.Generator, tile: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a tile attend to one whole key tile before it, another one for each (block_sparse)."""
    codes = unit_rows(length // tile, size, generator)
    targets = torch.tensor([int(torch.randint(0, t + 1, (1,), generator=generator)) for t in range(length // tile)])
    return SHARP * codes[targets].repeat_interleave(tile, 0), codes.repeat_interleave(tile, 0)
