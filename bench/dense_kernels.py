"""Dense attention of a whole prompt, which every ratio is against: by every kernel that there may be.

Of very long prompts, where dense takes minutes, the kernels are compared on a part, and the fastest alone runs on all.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.bench.harness import PARTS, RANKED_FROM, Call, DensePeers, fastest_that_runs, measure, once, try_each
from sparsekv.kernels.backends import dense_prefill
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk

FLASH_ATTN = "flash-attn-4"
TORCH_KERNELS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# What torch warns of at every kernel that it does not take; that it was refused stands in the row.
_WHY_NOT = r"(?s).*Triggered internally at .*sdp_utils"
# A peer this much slower than the fastest in one run cannot turn out to be the fastest.
_OUT_OF_REACH = 1.5


def dense_calls(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> dict[str, Call]:
    """Causal attention of a whole prompt by every dense kernel that there may be for these tensors.

    On a CPU, where torch's kernel does not know grouped heads, K and V may be repeated beforehand, which is then not
    counted: what is compared with sparse is the kernel alone.
    """
    if q_BHSD.is_cuda:
        calls: dict[str, Call] = {
            name: partial(torch_kernel, kernel, q_BHSD, k_BGSD, v_BGSD) for name, kernel in TORCH_KERNELS.items()
        }
        if q_BHSD.shape[3] > 256:  # where torch's fast kernels end, and flash-attn-4
            calls["sparsekv triton, dense"] = partial(_ours, q_BHSD, k_BGSD, v_BGSD)
        return calls | {FLASH_ATTN: partial(flash_attn_4, q_BHSD, k_BGSD, v_BGSD)}
    chunk, scale = Chunk.uniform(q_BHSD.shape[0], 0, q_BHSD.shape[2]), q_BHSD.shape[-1] ** -0.5
    group = q_BHSD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x_BGSD.repeat_interleave(group, 1) for x_BGSD in (k_BGSD, v_BGSD))
    return {
        "torch SDPA": lambda: dense_attention(q_BHSD, k_BGSD, v_BGSD, chunk, scale=scale),
        "torch SDPA, K and V repeated beforehand": lambda: scaled_dot_product_attention(
            q_BHSD, k_BHSD, v_BHSD, is_causal=True
        ),
    }


def _ours(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    chunk = Chunk.uniform(q_BHSD.shape[0], 0, q_BHSD.shape[2])
    return dense_prefill(q_BHSD, k_BGSD, v_BGSD, chunk, scale=q_BHSD.shape[-1] ** -0.5, backend="triton").out_BHSD


def time_dense(
    q_BHSD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    rounds: int,
    *,
    ranked_from: int = RANKED_FROM,
) -> DensePeers:
    """Milliseconds of every dense kernel that runs on these tensors; of a very long prompt, of the fastest alone."""
    length, device = q_BHSD.shape[2], q_BHSD.device
    calls = dense_calls(q_BHSD, k_BGSD, v_BGSD)
    if length < ranked_from:
        return time_calls(calls, length, device, rounds)
    part = length // PARTS
    on_part = time_calls(dense_calls(*(x[:, :, :part] for x in (q_BHSD, k_BGSD, v_BGSD))), part, device, 1)
    found, refused = fastest_that_runs(
        on_part.timed_ms, length, lambda name: measure({name: calls[name]}, device, rounds)[name]
    )
    return DensePeers(length, found, dict(on_part.refused) | refused)


def time_calls(calls: Mapping[str, Call], length: int, device: torch.device, rounds: int) -> DensePeers:
    """Tries every call once, and times those again, in turn, that may be the fastest."""

    def first(name: str) -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_WHY_NOT, category=UserWarning)
            calls[name]()
        return once(calls[name], device)

    first_ms, refused = try_each(calls, first)
    near = {name for name, ms in first_ms.items() if ms <= _OUT_OF_REACH * min(first_ms.values())}
    if rounds > 1 and len(near) > 1:
        first_ms |= measure({name: calls[name] for name in near}, device, rounds)
    return DensePeers(length, first_ms, refused)


def dense_flops(heads: int, head_dim: int, length: int) -> float:
    """Operations of causal attention: two products of the lower half of the matrix."""
    return 4.0 * heads * head_dim * length * (length + 1) / 2


def flash_attn_4(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, **options: Any) -> torch.Tensor:
    """flash-attn-4's dense causal kernel; queries are the last of the keys. [B, H, S, D].

    Args:
        options: others of its own.
    """
    from sparsekv.kernels.prefill.flash.call import ignore_argument_warnings  # it imports Triton

    attend: Callable[..., object] = import_module("flash_attn.cute").flash_attn_func
    ignore_argument_warnings()
    found = attend(*(x.transpose(1, 2) for x in (q_BHSD, k_BGSD, v_BGSD)), causal=True, **options)
    out_BSHD = found[0] if isinstance(found, tuple) else found
    assert isinstance(out_BSHD, torch.Tensor)
    return out_BSHD.transpose(1, 2)


def torch_kernel(
    kernel: SDPBackend, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """One kernel of torch's SDPA, [B, H, S, D]. Raises RuntimeError where it does not take the tensors."""
    grouped = q_BHSD.shape[1] != k_BGSD.shape[1]
    with sdpa_kernel(kernel):
        try:
            return scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=causal, enable_gqa=grouped)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise RuntimeError("torch has no such kernel for these tensors") from error
            raise
