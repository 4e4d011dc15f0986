"""Three methods of one's own, one of each kind, for `--methods examples/my_method.py` of `sparsekv compare`.

Shapes: B batch, H query heads, G KV heads, S queries, K keys, T row tiles, M key tiles, L new keys, D head size.
"""

import torch
from torch.nn.functional import pad

from sparsekv.kernels.methods import DecodeSelector, EvictionScore, PrefillRule


class Pooled(PrefillRule):
    """Tiles by their mean queries and keys, of a prompt in one piece."""

    name = "pooled"

    def tiles(self, q_BHSD, k_BGKD, layer, budget):
        q_BHTD, k_BGMD = means(q_BHSD, layer.tile.query), means(k_BGKD, layer.tile.key)
        k_BHMD = k_BGMD.repeat_interleave(q_BHSD.shape[1] // k_BGKD.shape[1], 1)
        return (q_BHTD @ k_BHMD.mT * layer.scale).softmax(-1)  # each head takes the best within its budget


class PageMeans(DecodeSelector):
    """Pages of 16 tokens by their mean key; sums of pages are added to as keys are appended."""

    name, page, recent, reads = "page_means", 16, 64, 0.5

    def append(self, state, k_BGLD):
        cached, sums_BGPD = state or (0, k_BGLD[:, :, :0].float())
        page_L = torch.arange(cached, cached + k_BGLD.shape[2], device=k_BGLD.device) // self.page
        cached += k_BGLD.shape[2]
        sums_BGPD = pad(sums_BGPD, (0, 0, 0, -(-cached // self.page) - sums_BGPD.shape[2]))
        return cached, sums_BGPD.index_add(2, page_L, k_BGLD.float())

    def scores(self, q_BHD, k_BGKD, state, layer):
        q_BGD = q_BHD.unflatten(1, (k_BGKD.shape[1], -1)).mean(2)
        return (state[1] / self.page @ q_BGD[..., None].float())[..., 0]  # the newest page is read anyway


class KeyNorm(EvictionScore):
    """Short keys stay (Devoto et al., 2024)."""

    name = "key_norm"

    def scores(self, q_BHWD, k_BGKD, v_BGKD, layer, statistics):
        return -k_BGKD.float().norm(dim=-1)


def means(x_BHSD, size):
    """Of so many rows at a time; the last ones may be fewer."""
    return torch.stack([part.float().mean(2) for part in x_BHSD.split(size, 2)], 2)
