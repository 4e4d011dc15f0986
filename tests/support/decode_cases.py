"""Random decode problems with their answer by brute force; tokens that are not attended to are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_cases import Comparison
from brute_force import capped

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.keys import FLOAT8, PLAIN, KeyView, Scales, Softmax
from sparsekv.kernels.tiles import AttentionOutput


@dataclass(frozen=True)
class DecodeCase:
    """One problem: a batch of rows of these lengths, and how many tokens are chosen in each (ALL: everything)."""

    name: str
    lengths: tuple[int, ...] = (300,)
    chosen: tuple[int, ...] | None = (70,)  # None is no selection at all
    listed: int = 80  # room in the lists
    sink: int = 4
    recent: int = 20
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2
    shared: bool = True
    skipped: bool = False  # negative entries among the chosen
    dim: int = 64
    dtype: torch.dtype = torch.float32
    page: int = 0  # tokens of a page; 0 is contiguous
    interleaved: bool = False  # token-major, K and V of a token side by side, as vLLM has them
    cap: float = 0.0
    learned_sinks: bool = False
    float8: str = ""  # what is in e4m3: "kv" or "qkv"
    seed: int = 0

    def __str__(self) -> str:
        return self.name


CASES = [
    DecodeCase("sinks, chosen and recent"),
    DecodeCase("a list for each KV head", (300, 200), (70, 5), shared=False),
    DecodeCase("ragged lengths and counts", (300, 41, 130), (70, 0, 80)),
    DecodeCase("rows that attend to everything beside sparse ones", (300, 41, 20), (70, ALL, ALL)),
    DecodeCase("dense", (300, 7, 1), None),
    DecodeCase("a row without tokens", (0, 30), None),
    DecodeCase("nothing chosen", chosen=(0,), listed=0),
    DecodeCase("only recent tokens", chosen=(0,), listed=0, sink=0, recent=1),
    DecodeCase("skipped entries", skipped=True),
    DecodeCase("a window over a selection", (300, 60), (70, ALL), window=50),
    DecodeCase("a window, dense", (300, 60), None, window=100),
    DecodeCase("no groups", heads=2, kv_heads=2),
    DecodeCase("groups of three", heads=6, kv_heads=2, shared=False),
    DecodeCase("groups of twenty", heads=20, kv_heads=1),
    DecodeCase("head size 128", dim=128),
    DecodeCase("head size that is no power of two", dim=40),
    DecodeCase("head size 512, ragged", (300, 41), (70, ALL), dim=512, heads=8),
    DecodeCase("head size 512, pages, dense", (90, 41), None, dim=512, page=16, interleaved=True),
    DecodeCase("head size 320", (90,), (20,), dim=320),
    DecodeCase("token-major memory", (300, 250), (70, 3), interleaved=True),
    DecodeCase("bfloat16", dtype=torch.bfloat16),
    DecodeCase("float16", dtype=torch.float16),
    *(DecodeCase(f"pages of {page}", (300, 41), (70, ALL), page=page, seed=page) for page in (16, 32, 256, 272)),
    DecodeCase("pages, dense, interleaved", (300, 16, 17), None, page=16, interleaved=True, dtype=torch.bfloat16),
    DecodeCase("a soft cap", (300, 41), (70, ALL), cap=1.5),
    DecodeCase("a soft cap, dense, pages", (300, 41), None, cap=1.5, page=32, dtype=torch.bfloat16),
    DecodeCase("learned sinks", (300, 41), (70, ALL), learned_sinks=True),
    DecodeCase("learned sinks, dense, a window", (300, 41), None, learned_sinks=True, window=128, heads=8),
    DecodeCase("pages, a list for each KV head, a window", (300, 90), (70, 9), page=32, shared=False, window=120),
    DecodeCase("8 bits", (300, 41), (70, ALL), float8="kv"),
    DecodeCase("8 bits, dense, head size 40", (300, 0), None, float8="kv", dtype=torch.float16, dim=40),
    DecodeCase("8 bits, a list for each KV head", (300, 90), (70, 9), shared=False, float8="kv", heads=8, kv_heads=8),
    DecodeCase("8 bits, a soft cap and learned sinks", cap=1.5, learned_sinks=True, float8="kv", dtype=torch.bfloat16),
    DecodeCase(
        "8 bits, queries too, interleaved pages", (300, 41), (70, ALL), float8="qkv", dtype=torch.bfloat16, page=16,
        interleaved=True, heads=16, kv_heads=1, dim=128,
    ),
    DecodeCase(
        "8 bits, queries too, a window, head size 256", (300, 41), None, float8="qkv", dtype=torch.bfloat16, page=32,
        window=100, heads=6, dim=256,
    ),
    DecodeCase(
        "8 bits, queries too, pages, head size 512", (300, 41), (70, ALL), float8="qkv", dtype=torch.bfloat16, page=16,
        interleaved=True, heads=8, dim=512,
    ),
]  # fmt: skip
GPU_CASES = [
    *CASES,
    DecodeCase("large", (40000,), (2048,), 2048, recent=128, heads=32, kv_heads=8, dtype=torch.bfloat16),
    DecodeCase(
        "large batch", (9000, 8500, 300, 8999, 4000), (1000, 7, ALL, 1024, 1024), 1024, recent=128, heads=32,
        kv_heads=8, dim=128, shared=False, dtype=torch.bfloat16, page=16, interleaved=True,
    ),
    DecodeCase("large, dense", (40000, 100), None, heads=32, kv_heads=8, dtype=torch.bfloat16),
    *(DecodeCase(f"head size {dim}", (5000,), (3000,), 3000, dim=dim, dtype=torch.bfloat16) for dim in (256, 512)),
    DecodeCase("head size 512, large, pages", (9000, 41), None, heads=32, kv_heads=4, dim=512, dtype=torch.bfloat16,
        page=16, interleaved=True),
    *(
        DecodeCase(
            f"large, 8 bits, {heads} heads of {dim}", (9000, 300, 4000), (1000, ALL, 2048), 2048, heads=heads,
            kv_heads=kv_heads, dim=dim, float8=float8, page=page, interleaved=bool(page), dtype=torch.bfloat16,
            recent=128,
        )
        for (heads, kv_heads, dim), (float8, page) in zip(
            ((32, 8, 128), (16, 1, 64), (8, 8, 256), (32, 2, 96), (32, 4, 512), (8, 2, 512)),
            (("qkv", 16), ("kv", 0), ("kv", 32), ("qkv", 16), ("kv", 0), ("qkv", 16)),
            strict=True,
        )
    ),
]  # fmt: skip


@dataclass(frozen=True)
class DecodeProblem:
    """A case drawn: tensors, selection, and the mask [B, H, 1, S] that they stand for."""

    case: DecodeCase
    q_BHQD: torch.Tensor
    keys: KeyView
    selection: Selection | None
    mask_BH1S: torch.Tensor
    scale: float


def draw(case: DecodeCase, device: str = "cpu") -> DecodeProblem:
    """Tensors, lists and mask of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    selection = None if case.chosen is None else _selection(case, generator)
    q_BHQD = torch.randn((len(case.lengths), case.heads, 1, case.dim), generator=generator).to(case.dtype)
    keys = _keys(case, generator)
    mask_BH1S = _mask(keys, selection, case.heads, case.window)
    sinks_H = torch.randn(case.heads, generator=generator) * 3 if case.learned_sinks else None
    keys = replace(keys, softmax=Softmax(case.cap, sinks_H) if case.cap or case.learned_sinks else PLAIN)
    problem = DecodeProblem(case, q_BHQD, keys, selection, mask_BH1S, case.dim**-0.5)
    poison(problem)
    return moved(in_8_bits(problem, generator) if case.float8 else problem, device)


def in_8_bits(problem: DecodeProblem, generator: torch.Generator) -> DecodeProblem:
    """The same tensors in e4m3, by scales that no two KV heads share."""
    case, keys = problem.case, problem.keys
    k_G, v_G, q_G = torch.rand((3, case.kv_heads), generator=generator) * 0.1 + 0.01
    k, v = (
        _with_strides(x / scale_G[:, None, None], "cpu", FLOAT8, x) for x, scale_G in ((keys.k, k_G), (keys.v, v_G))
    )
    q_BHQD, of_q = problem.q_BHQD, None
    if "q" in case.float8:
        group_H = q_G.repeat_interleave(case.heads // case.kv_heads)
        q_BHQD, of_q = (q_BHQD / group_H[:, None, None]).to(FLOAT8), q_G
    return replace(problem, q_BHQD=q_BHQD, keys=replace(keys, k=k, v=v, scales=Scales(k_G, v_G, case.dtype, of_q)))


def _mask(keys: KeyView, selection: Selection | None, heads: int, window: int | None = None) -> torch.Tensor:
    """Which tokens the newest query of each row sees, straight from the definition in decode/selection.py.

    Returns:
        bool [B, H, 1, S] for `heads` query heads, S being the capacity of the keys.
    """
    mask_BHS = torch.zeros((keys.batch, heads, keys.capacity), dtype=torch.bool, device=keys.k.device)
    for b, length in enumerate(keys.lengths_B.tolist()):
        count = ALL if selection is None else int(selection.counts_B[b])
        for h in range(heads):
            if selection is None or count == ALL:
                mask_BHS[b, h, :length] = True
                continue
            lists = selection.chosen_BgN.shape[1]
            chosen = selection.chosen_BgN[b, h * lists // heads, :count].tolist()
            mask_BHS[b, h, : selection.sink] = True
            mask_BHS[b, h, [token for token in chosen if token >= 0]] = True
            mask_BHS[b, h, length - selection.recent : length] = True
        if window is not None:
            mask_BHS[b, :, : max(0, length - window)] = False
    return mask_BHS[:, :, None]


def _selection(case: DecodeCase, generator: torch.Generator) -> Selection:
    assert case.chosen is not None
    lists = 1 if case.shared else case.kv_heads
    chosen_BgN = torch.full((len(case.lengths), lists, case.listed), 12345, dtype=torch.int32)  # unused: anything
    for b, (length, count) in enumerate(zip(case.lengths, case.chosen, strict=True)):
        for g in range(lists if count > 0 else 0):
            free = length - case.recent - case.sink
            drawn = torch.randperm(free, generator=generator)[:count].sort().values + case.sink
            if case.skipped:
                drawn[torch.rand(count, generator=generator) < 0.3] = -1
            chosen_BgN[b, g, :count] = drawn.int()
    return Selection(chosen_BgN, torch.tensor(case.chosen, dtype=torch.int32), case.sink, case.recent)


def _keys(case: DecodeCase, generator: torch.Generator) -> KeyView:
    batch, most, lengths_B = len(case.lengths), max(case.lengths), torch.tensor(case.lengths, dtype=torch.int32)
    if not case.page:
        return KeyView(*_rows(case, batch, most, generator), lengths_B)
    pages = -(-most // case.page)
    used = batch * pages
    table_BP = torch.randperm(used + 3, generator=generator)[:used].int().view(batch, pages)
    for b, length in enumerate(case.lengths):
        table_BP[b, -(-length // case.page) :] = 10**6  # beyond a row's length: anything
    return KeyView(*_rows(case, used + 3, case.page, generator), lengths_B, table_BP)


def _rows(case: DecodeCase, rows: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [rows, G, tokens, D] of the case's memory order."""
    if not case.interleaved:
        shape = (rows, case.kv_heads, tokens, case.dim)
        k, v = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2))
        return k, v
    whole = torch.randn((rows, tokens, case.kv_heads, 2 * case.dim), generator=generator).to(case.dtype)
    k, v = whole.transpose(1, 2).split(case.dim, dim=3)
    return k, v


def poison(problem: DecodeProblem) -> None:
    """Tokens that no head of a KV head sees become NaN, in memory that no row owns too."""
    case, keys = problem.case, problem.keys
    seen_BGS = problem.mask_BH1S[:, :, 0].unflatten(1, (case.kv_heads, -1)).any(2)
    unseen = torch.ones(keys.k.shape[:3], dtype=torch.bool)
    for b, length in enumerate(case.lengths):
        for token in range(length):
            row = b if keys.table_BP is None else int(keys.table_BP[b, token // case.page])
            unseen[row, :, token if keys.table_BP is None else token % case.page] = ~seen_BGS[b, :, token]
    for tensor in (keys.k, keys.v):
        tensor.masked_fill_(unseen[..., None], float("nan"))


def moved(problem: DecodeProblem, device: str) -> DecodeProblem:
    """The problem on another device, strides kept."""
    keys, selection = problem.keys, problem.selection
    if device == "cpu":
        return problem
    there = lambda x: None if x is None else x.to(device)  # noqa: E731
    k, v = (_with_strides(x, device) for x in (keys.k, keys.v))
    if selection is not None:
        selection = replace(selection, chosen_BgN=there(selection.chosen_BgN), counts_B=there(selection.counts_B))
    softmax = replace(keys.softmax, sinks_H=there(keys.softmax.sinks_H)) if keys.softmax is not PLAIN else PLAIN
    if (scales := keys.scales) is not None:
        scales = Scales(there(scales.k_G), there(scales.v_G), scales.dtype, there(scales.q_G))
    keys = KeyView(k, v, there(keys.lengths_B), there(keys.table_BP), softmax=softmax, scales=scales)
    return replace(
        problem, q_BHQD=there(problem.q_BHQD), keys=keys, selection=selection, mask_BH1S=there(problem.mask_BH1S)
    )


def _with_strides(
    x: torch.Tensor, device: str, dtype: torch.dtype | None = None, like: torch.Tensor | None = None
) -> torch.Tensor:
    strides = (x if like is None else like).stride()
    copied = torch.empty_strided(x.shape, strides, dtype=dtype or x.dtype, device=device)
    return copied.copy_(x)


def attend(problem: DecodeProblem, backend: str) -> AttentionOutput:
    """The problem through the public call."""
    return decode_attention(
        problem.q_BHQD,
        problem.keys,
        problem.selection,
        scale=problem.scale,
        window=problem.case.window,
        backend=backend,
    )


def compare(found: AttentionOutput, problem: DecodeProblem) -> Comparison:
    """The output of every head against float32 attention; a row without tokens gives 0."""
    group, mask_BH1S = problem.case.heads // problem.case.kv_heads, problem.mask_BH1S
    keys, q_BHQD = problem.keys, problem.q_BHQD.float()
    if keys.scales is not None:
        keys = replace(keys, scales=replace(keys.scales, dtype=torch.float32))
        if keys.scales.q_G is not None:
            q_BHQD *= keys.scales.q_G.repeat_interleave(group)[:, None, None]
    k_BGSD, v_BGSD = keys.contiguous(keys.capacity)
    k_BHSD, v_BHSD = (x.float().nan_to_num(0.0).repeat_interleave(group, 1) for x in (k_BGSD, v_BGSD))
    scores_BH1S = capped(q_BHQD @ k_BHSD.mT * problem.scale, problem.case.cap)
    scores_BH1S = with_sinks(scores_BH1S.masked_fill(~mask_BH1S, float("-inf")), problem)
    answer = torch.softmax(scores_BH1S, -1)[..., : k_BHSD.shape[2]].nan_to_num(0.0) @ v_BHSD
    limit = 2e-5 if problem.case.dtype == torch.float32 else 5e-3
    error = float((found.out_BHSD.float() - answer).norm() / answer.norm().clamp(min=1e-9))
    faults = []
    if found.out_BHSD.dtype != problem.case.dtype or not error < limit:
        faults.append(f"relative error {error:.2e}, {found.out_BHSD.dtype}")
    return Comparison(error, 0.0, tuple(faults))


def with_sinks(scores_BHQS: torch.Tensor, problem: DecodeProblem) -> torch.Tensor:
    """With one more score a head, where it has a learned sink."""
    sinks_H = problem.keys.softmax.sinks_H
    return (
        scores_BHQS
        if sinks_H is None
        else torch.cat((scores_BHQS, sinks_H.float()[:, None, None].expand(*scores_BHQS.shape[:3], 1)), -1)
    )


def assert_close(found: AttentionOutput, problem: DecodeProblem) -> None:
    """Fails with what is wrong."""
    assert not compare(found, problem).faults
