"""The network for training: the Llama architecture in plain torch, parameters named as `LlamaForCausalLM` names them.

Training does not use the class of `transformers`, because that one builds a full attention mask when it is compiled.

Shapes: R rows, T tokens, C hidden, H heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from reference_model.recipe import Shape


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x_RTC: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x_RTC.shape
        split = (rows, tokens, -1, self.shape.head_dim)
        q_RHTD = _rotate(self.q_proj(x_RTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        k_RGTD = _rotate(self.k_proj(x_RTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        v_RGTD = self.v_proj(x_RTC).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        out_RHTD = F.scaled_dot_product_attention(
            q_RHTD, k_RGTD.repeat_interleave(group, 1), v_RGTD.repeat_interleave(group, 1), is_causal=True
        )
        return self.o_proj(out_RHTD.transpose(1, 2).reshape(rows, tokens, -1))


class Mlp(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x_RTC: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_RTC)) * self.up_proj(x_RTC))


class RmsNorm(nn.Module):
    """In float32 inside, in the type of its input outside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.eps = shape.norm_eps

    def forward(self, x_RTC: torch.Tensor) -> torch.Tensor:
        x = x_RTC.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * self.weight).to(x_RTC.dtype)


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape)
        self.mlp = Mlp(shape)

    def forward(self, x_RTC: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        x_RTC = x_RTC + self.self_attn(self.input_layernorm(x_RTC), cos_TD, sin_TD)
        return x_RTC + self.mlp(self.post_attention_layernorm(x_RTC))


class Body(nn.Module):
    """Everything below the output head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape)


class Retriever(nn.Module):
    """The whole model; the output head is the embedding, transposed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.apply(_initialise)
        for block in self.model.layers:
            for matrix in (block.self_attn.o_proj, block.mlp.down_proj):
                nn.init.normal_(matrix.weight, std=0.02 / (2 * shape.layers) ** 0.5)

    def hidden(self, ids_RT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The normalised output of the last layer, `[R, T, C]`."""
        x_RTC = self.model.embed_tokens(ids_RT).to(dtype)
        cos_TD, sin_TD = _rotary_tables(self.shape, ids_RT.shape[1], ids_RT.device, dtype)
        for block in self.model.layers:
            x_RTC = block(x_RTC, cos_TD, sin_TD)
        normalised: torch.Tensor = self.model.norm(x_RTC)
        return normalised

    def token_losses(self, x_RTC: torch.Tensor, ids_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy of predicting each next token, and whether the best guess is right, both `[R, T - 1]`."""
        logits = F.linear(x_RTC[:, :-1], self.model.embed_tokens.weight).float()
        targets = ids_RT[:, 1:].long()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return losses, logits.argmax(-1) == targets


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _rotary_tables(
    shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), shape.rope_theta**-half)
    angles_TD = torch.cat([angles, angles], dim=-1)
    return angles_TD.cos().to(dtype), angles_TD.sin().to(dtype)


def _rotate(x: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TD + torch.cat([-second, first], dim=-1) * sin_TD
