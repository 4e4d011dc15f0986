"""Live bits of single columns: 32 columns to an int32 word, bit b of word n being column 32 n + b."""

from __future__ import annotations

import torch

WORD = 32


def pack_bits(bits_XC: torch.Tensor) -> torch.Tensor:
    """bool [X, C] to int32 words [X, ceil(C / 32)]; missing bits are 0."""
    columns = bits_XC.shape[-1]
    padded_XC = torch.nn.functional.pad(bits_XC, (0, -columns % WORD))
    # Bit 31 is the sign: the sum over all bits lies within int32 and never wraps.
    weight_32 = torch.ones((), dtype=torch.int32, device=bits_XC.device) << _places(bits_XC.device)
    return (torch.unflatten(padded_XC, -1, (-1, WORD)) * weight_32).sum(-1, dtype=torch.int32)


def unpack_bits(words_XN: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 words to bool [X, columns]."""
    return ((words_XN.unsqueeze(-1) >> _places(words_XN.device)) & 1).flatten(-2)[..., :columns].bool()


def count_bits(words_XN: torch.Tensor) -> torch.Tensor:
    """Bits set in each int32 word, by halving: pairs, nibbles, bytes, then their sum."""
    pairs = words_XN - ((words_XN >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = octets + (octets >> 8)
    return (halves + (halves >> 16)) & 0x3F


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(WORD, dtype=torch.int32, device=device)
