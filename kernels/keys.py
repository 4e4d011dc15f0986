"""Where the keys and values of a layer lie, for kernels that read them by logical token position, and its softmax.

Keys and values may be stored in 8 bits (e4m3): what they stand for is each number times the scale of its KV head.

Shapes: B batch, H query heads, G KV heads, S tokens in memory (of a softmax: queries), K keys, D head size, N pages in
memory, T tokens of a page, P pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.tiles import check_alike, check_qkv
from sparsekv.plans.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The parameters of a layer's softmax besides its scores.

    Attributes:
        cap: scores are cap * tanh(scaled score / cap); 0 where they are the scaled scores (Gemma-2).
        sinks_H: a learned logit of each query head, which takes part in the softmax of all its queries and gives no
            value (gpt-oss).
    """

    cap: float = 0.0
    sinks_H: torch.Tensor | None = None

    def kept(self, lse_BHS: torch.Tensor) -> torch.Tensor:
        """The share of the weights that sinks leave to keys with this log-sum-exp, float32 [B, H, S]."""
        assert self.sinks_H is not None
        return torch.sigmoid(lse_BHS - self.sinks_H.float()[:, None])

    def weights(self, scores_BHSK: torch.Tensor, heads: slice) -> torch.Tensor:
        """Returns the weights of capped scores of these query heads, -inf where hidden; not those of the sinks."""
        weights_BHSK = scores_BHSK.softmax(-1)
        if self.sinks_H is None:
            return weights_BHSK
        return weights_BHSK * self.heads(heads).kept(scores_BHSK.logsumexp(-1))[..., None]

    def heads(self, queries: slice) -> Softmax:
        return self if self.sinks_H is None else Softmax(self.cap, self.sinks_H[queries])


def capped_(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scaled scores under a soft cap, in place."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


PLAIN = Softmax()


MOST_QUERIES = 16  # of a row in one call of decode attention
FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max

# Columns of `KeyView.where`: elements from `k` and from `v` to the real keys and values, and how far it is there from
# one KV head, token and row to the next, in units of D elements. Of a layer in host memory also, for
# kernels/decode/place.py, the addresses of its rows on the device [P, B, G, R, D] and of its host memory
# [C, B, P, G, D], and C.
KEYS, VALUES, HEAD, ROWS, HOST, HOST_TOKENS, TOKEN, ROW = range(8)
COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Scales of keys and values in e4m3, and of queries that are in e4m3 as well: float32 [G] on the device,
    contiguous, one of each KV head."""

    k_G: torch.Tensor
    v_G: torch.Tensor
    dtype: torch.dtype  # of attention over them: of queries that are not in e4m3, of the output, and of whole copies
    q_G: torch.Tensor | None = None

    def heads(self, kv: slice) -> Scales:
        return replace(self, k_G=self.k_G[kv], v_G=self.v_G[kv], q_G=None if self.q_G is None else self.q_G[kv])

    @property
    def scores_G(self) -> torch.Tensor:  # noqa: N802
        return self.k_G if self.q_G is None else self.k_G * self.q_G


def stored_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed everywhere, which numbers of 8 bits cannot."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x


def in_8_bits(x_BGSD: torch.Tensor, scale_G: torch.Tensor) -> torch.Tensor:
    """Keys or values as bytes of e4m3. What is larger than their scale allows becomes the largest."""
    quotient = x_BGSD / scale_G[:, None, None]
    return quotient.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8).view(torch.uint8)


def scaled(x8_BGSD: torch.Tensor, scale_G: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers in e4m3, or their bytes, times their scales: a copy in another dtype, rounded once."""
    return x8_BGSD.view(FLOAT8).to(dtype).mul_(scale_G[:, None, None])


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Batch rows of a request lie one behind the other and have the same keys, of which each sees its own length: a
    kernel may read them once for all."""

    of_row_B: torch.Tensor  # int64 on the device: the request of each batch row
    starts_X: torch.Tensor  # int32 on the device: the first row of each request, which may have none; the end of all
    most: int  # rows of a request


@dataclass(frozen=True, slots=True, eq=False)
class KeyView:
    """Keys and values of every batch row, contiguous by token or in pages. Nothing is copied and no stride is assumed
    but 1 in the last dimension (the torch operations of the CPU assume none).

    With `where`, the tensors only say shape, dtype and where to count from: kernels read at the offsets and by the
    strides that stand there when they run. So a captured step serves one cache after another. For Triton alone.

    Contiguous (`table_BP` is None): token t of row b is `k[b, :, t]`. Paged: it is
    `k[table_BP[b, t // T], :, t % T]`, with `requests` that of its request in place of b; entries of the table beyond a
    row's length may hold anything, and so may the memory of tokens beyond it.
    """

    k: torch.Tensor  # [B, G, S, D] or [N, G, T, D]
    v: torch.Tensor  # the same shape; strides of its own
    lengths_B: torch.Tensor  # int32 on the device: tokens of each row, the newest included
    table_BP: torch.Tensor | None = None  # int32 on the device
    where: torch.Tensor | None = None  # int64 [COLUMNS] on the device
    softmax: Softmax = PLAIN  # what attention over them has besides their scores
    held: tuple[int, ...] | None = None  # tokens of each row that can be read, where that is not all of S
    scales: Scales | None = None  # of keys and values in e4m3
    requests: Requests | None = None  # in pages

    @property
    def batch(self) -> int:
        return self.lengths_B.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def page(self) -> int:
        """T; 0 where the tokens of a row are contiguous."""
        return 0 if self.table_BP is None else self.k.shape[2]

    @property
    def capacity(self) -> int:
        """Most tokens that a row can hold here; what launch grids are made from."""
        return self.k.shape[2] if self.table_BP is None else self.table_BP.shape[1] * self.k.shape[2]

    def heads(self, kv: slice, queries: slice) -> KeyView:
        """The same tokens of these KV heads alone, and of the query heads that they serve."""
        self._check_here()
        scales = None if self.scales is None else self.scales.heads(kv)
        softmax = self.softmax.heads(queries)
        return replace(self, k=self.k[:, kv], v=self.v[:, kv], softmax=softmax, scales=scales)

    def head(self, x: torch.Tensor, b: int, g: int, tokens: slice | torch.Tensor) -> torch.Tensor:
        """[T, D] of `x`, which is `k` or `v`: some tokens of one KV head of one batch row, as they are stored.

        Args:
            tokens: an interval of contiguous keys, which is not copied, or int64 [T].
        """
        self._check_here()
        if isinstance(tokens, slice):
            return x[b, g, tokens]
        found = stored_as_bytes(x)
        if self.table_BP is None:
            return found[b, g].index_select(0, tokens).view(x.dtype)
        owner = b if self.requests is None else int(self.requests.of_row_B[b])
        page_T, slot_T = self.table_BP[owner].index_select(0, tokens // self.page), tokens % self.page
        return found[:, g][page_T, slot_T].view(x.dtype)

    def contiguous(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, G, longest, D] each: views of contiguous keys, copies of paged ones, of those `held` and of those with
        `scales`, which are multiplied. Rows shorter than `longest` hold anything behind their end.
        """
        v_BGSD = self._rows(stored_as_bytes(self.v), longest)
        if self.scales is not None:
            v_BGSD = scaled(v_BGSD, self.scales.v_G, self.scales.dtype)
        return self.contiguous_keys(longest), v_BGSD

    def contiguous_keys(self, longest: int) -> torch.Tensor:
        k_BGSD = self._rows(stored_as_bytes(self.k), longest)
        return k_BGSD if self.scales is None else scaled(k_BGSD, self.scales.k_G, self.scales.dtype)

    def _check_here(self) -> None:
        if self.where is not None:
            raise ShapeError("only Triton's decode kernels find keys by `where`: these tensors are not the keys")

    def _rows(self, x: torch.Tensor, longest: int) -> torch.Tensor:
        self._check_here()
        if longest > self.capacity:
            raise ShapeError(f"expected room for {longest} tokens a row, found a capacity of {self.capacity}")
        if self.held is not None and min(self.held) < longest:
            rows = x.new_zeros((*x.shape[:2], longest, x.shape[3]))
            for row, count in enumerate(self.held):
                rows[row, :, :count] = x[row, :, : min(count, longest)]
            return rows
        if self.table_BP is None:
            return x if longest == x.shape[2] else x[:, :, :longest]
        used_BP = self.table_BP[:, : -(-longest // self.page)].clamp(0, x.shape[0] - 1)
        used_BP = used_BP if self.requests is None else used_BP[self.requests.of_row_B]
        return x[used_BP].transpose(1, 2).flatten(2, 3)[:, :, :longest]


def full_view(k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> KeyView:
    """Contiguous keys whose every row is full."""
    lengths_B = torch.full((k_BGSD.shape[0],), k_BGSD.shape[2], dtype=torch.int32, device=k_BGSD.device)
    return KeyView(k_BGSD, v_BGSD, lengths_B)


def check_keys(
    q_BHQD: torch.Tensor, keys: KeyView, scale: float, any_strides: bool = False, most_queries: int = 1
) -> None:
    """One query token a batch row, or up to `most_queries`, and keys that fit to it. No check asks the device.

    `any_strides` is as of `check_qkv`.
    """
    check_qkv(q_BHQD, keys.k, keys.v, scale, any_strides)
    if keys.scales is None:
        check_alike(q_BHQD, keys.k, keys.v)
    if not 1 <= q_BHQD.shape[2] <= most_queries:
        raise ShapeError(
            f"decode attention takes 1 to {MOST_QUERIES} query tokens a row, and one where it chooses or follows a "
            f"choice, found {q_BHQD.shape[2]}: call it once a token, or use prefill attention"
        )
    batch, table = q_BHQD.shape[0], keys.table_BP
    _check_int32("lengths", keys.lengths_B, (batch,), q_BHQD.device)
    if table is not None:
        tables = batch if keys.requests is None else len(keys.requests.starts_X) - 1
        _check_int32("the block table", table, (tables, table.shape[-1]), q_BHQD.device)
    if table is None and batch != keys.k.shape[0]:
        raise ShapeError(
            f"k and v must have the batch of q, or a block table; found q {tuple(q_BHQD.shape)} and k "
            f"{tuple(keys.k.shape)}"
        )


def _check_int32(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or tensor.device != device:
        raise ShapeError(
            f"{name} must be int32 {shape} on {device}, found {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
