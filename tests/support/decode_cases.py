"""Random decode problems with their answer by brute force; tokens that are not chosen are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_cases import Comparison

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.kernels.tiles import NO_TOKEN, AttentionOutput


@dataclass(frozen=True)
class DecodeCase:
    """One problem: `listed` list entries, about a tenth of them padding, and a tail."""

    name: str
    tokens: int = 300
    listed: int = 70
    tail: tuple[int, int] = (280, 300)
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    shared: bool = True
    dim: int = 64
    dtype: torch.dtype = torch.float32
    overlap: bool = False  # the list names tokens of the tail as well
    token_major: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


CASES = [
    DecodeCase("list and tail"),
    DecodeCase("a list for each KV head", shared=False, batch=2),
    DecodeCase("one list in a batch", batch=3),
    DecodeCase("empty list", listed=0),
    DecodeCase("empty tail", tail=(300, 300)),
    DecodeCase("nothing chosen", listed=0, tail=(10, 10)),
    DecodeCase("one token", listed=0, tail=(299, 300)),
    DecodeCase("list names tokens of the tail", overlap=True, tail=(200, 300)),
    DecodeCase("long tail", tail=(20, 300), listed=10),
    DecodeCase("no groups", heads=2, kv_heads=2),
    DecodeCase("groups of three", heads=6, kv_heads=2, shared=False),
    DecodeCase("groups of twenty", heads=20, kv_heads=1),
    DecodeCase("head size 128", dim=128),
    DecodeCase("head size that is no power of two", dim=40),
    DecodeCase("token-major memory", token_major=True, batch=2),
    DecodeCase("bfloat16", dtype=torch.bfloat16),
    DecodeCase("float16", dtype=torch.float16),
]
GPU_CASES = [
    *CASES,
    DecodeCase("large", tokens=40000, listed=2048, tail=(38000, 40000), heads=32, kv_heads=8, dtype=torch.bfloat16),
    DecodeCase(
        "large batch",
        tokens=9000,
        listed=1000,
        tail=(8900, 9000),
        batch=5,
        heads=32,
        kv_heads=8,
        dim=128,
        shared=False,
        dtype=torch.bfloat16,
    ),
    DecodeCase("head size 256", tokens=5000, listed=3000, tail=(4990, 5000), dim=256, dtype=torch.bfloat16),
]


@dataclass(frozen=True)
class DecodeProblem:
    """A case drawn: tensors, rows, and the mask [B, G, S] that they stand for."""

    q_BHQD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    rows: DecodeRows
    mask_BGS: torch.Tensor
    scale: float


def draw(case: DecodeCase, device: str = "cpu") -> DecodeProblem:
    """Tensors, lists and mask of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    start, stop = case.tail
    lists = 1 if case.shared else case.kv_heads
    tokens_BGN = torch.full((case.batch, lists, case.listed), NO_TOKEN)
    mask_BGS = torch.zeros((case.batch, case.kv_heads, case.tokens), dtype=torch.bool)
    mask_BGS[:, :, start:stop] = True
    free = (
        torch.arange(case.tokens) if case.overlap else torch.cat([torch.arange(start), torch.arange(stop, case.tokens)])
    )
    for b in range(case.batch):
        for g in range(lists):
            chosen = free[torch.randperm(len(free), generator=generator)[: case.listed]]
            chosen[torch.rand(len(chosen), generator=generator) < 0.1] = NO_TOKEN
            tokens_BGN[b, g] = chosen
            mask_BGS[b, slice(None) if case.shared else g, chosen[chosen >= 0]] = True
    q_BHQD = torch.randn((case.batch, case.heads, 1, case.dim), generator=generator).to(case.dtype)
    k_BGSD, v_BGSD = (_tokens(case, generator).masked_fill(~mask_BGS[..., None], float("nan")) for _ in range(2))
    rows = DecodeRows(tokens_BGN.int().to(device), start, stop)
    return DecodeProblem(
        q_BHQD.to(device), k_BGSD.to(device), v_BGSD.to(device), rows, mask_BGS.to(device), case.dim**-0.5
    )


def _tokens(case: DecodeCase, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn((case.batch, case.tokens, case.kv_heads, case.dim), generator=generator).to(case.dtype)
    return drawn.transpose(1, 2) if case.token_major else drawn.transpose(1, 2).contiguous()


def attend(problem: DecodeProblem, backend: str, want_lse: bool = True) -> AttentionOutput:
    """The problem through the public call."""
    return decode_attention(
        problem.q_BHQD,
        problem.k_BGSD,
        problem.v_BGSD,
        problem.rows,
        scale=problem.scale,
        want_lse=want_lse,
        backend=backend,
    )


def compare(found: AttentionOutput, problem: DecodeProblem) -> Comparison:
    """Output and log-sum-exp of every head against float32 attention; nothing chosen gives 0 and -inf."""
    group = problem.q_BHQD.shape[1] // problem.k_BGSD.shape[1]
    mask_BHQS = problem.mask_BGS.repeat_interleave(group, 1)[:, :, None]
    k_BHSD, v_BHSD = (x.float().nan_to_num(0.0).repeat_interleave(group, 1) for x in (problem.k_BGSD, problem.v_BGSD))
    scores_BHQS = (problem.q_BHQD.float() @ k_BHSD.mT * problem.scale).masked_fill(~mask_BHQS, float("-inf"))
    answer = torch.softmax(scores_BHQS, -1).nan_to_num(0.0) @ v_BHSD
    limit = 2e-5 if problem.q_BHQD.dtype == torch.float32 else 5e-3
    error = float((found.out_BHSD.float() - answer).norm() / answer.norm().clamp(min=1e-9))
    faults = []
    if found.out_BHSD.dtype != problem.q_BHQD.dtype or not error < limit:
        faults.append(f"relative error {error:.2e}, {found.out_BHSD.dtype}")
    lse_error = 0.0
    if found.lse_BHS is not None:
        seen_BHQ = mask_BHQS.any(-1)
        apart = (found.lse_BHS - scores_BHQS.logsumexp(-1))[seen_BHQ].abs()
        lse_error = float(apart.max()) if apart.numel() else 0.0
        if not lse_error < limit or not (found.lse_BHS[~seen_BHQ] == float("-inf")).all():
            faults.append(f"log-sum-exp off by {lse_error:.2e}, or not -inf where nothing is chosen")
    return Comparison(error, lse_error, tuple(faults))


def assert_close(found: AttentionOutput, problem: DecodeProblem) -> None:
    """Fails with what is wrong."""
    assert not compare(found, problem).faults
