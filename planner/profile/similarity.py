"""How well the tokens that one layer chooses serve the layers after it, over decode-like rows of one prompt.

S[i, j], OmniKV's inter-layer similarity (its section 3.1), is the share of layer j's attention mass that lies on what a
sparse layer attends to: the first `sink` tokens, those that layer i would choose among all older than the last
`recent`, and those `recent`. A head counts by what it adds to the output there, so that heads resting on the sink do
not hide one that retrieves. The worst row counts.

Shapes: H query heads, G KV heads, N query heads of a KV head, S keys, D head size, W model size,
C choices (filter layer x selector), K tokens chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.scores import token_scores
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import SelectorChoice, TokenChoice
from sparsekv.plans.patterns import fraction
from sparsekv.runtime.core.select import selector_weights
from sparsekv.runtime.hf.capture import AttentionCall

# The observation window of OmniKV's released configuration.
WINDOW = 16
_SHARES = (0.025, 0.05, 0.1, 0.2)
_SELECTORS = (
    SelectorChoice(selector="last", window=1),
    SelectorChoice(selector="uniform", window=WINDOW),
    SelectorChoice(selector="exponential", window=WINDOW),
)


def token_choice(options: PlanOptions) -> TokenChoice:
    """What is measured: a few budgets and the one asked for, and OmniKV's three ways to weigh the last queries."""
    shares = tuple(fraction(share) for share in _SHARES)
    budgets = shares if options.decode_budget in shares else (*shares, options.decode_budget)
    return TokenChoice(sink=options.decode_sink, recent=options.decode_recent, budgets=budgets, selectors=_SELECTORS)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLayer:
    """What a layer attends with over the whole prompt, and what its output goes through."""

    call: AttentionCall
    projection_WZ: torch.Tensor


@dataclass(slots=True)
class ReuseScores:
    """Takes the layers of one prompt in order; `rows` are those that stand for decode steps."""

    rows: tuple[int, ...]
    choice: TokenChoice
    _chosen: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def choose(self, index: int, layer: DecodeLayer) -> None:
        """Notes the tokens that this layer would choose, best first, a list a selector and row."""
        for position, selector in enumerate(self.choice.selectors):
            self._chosen[index, position] = [self._choice(layer, selector, row) for row in self.rows]

    def kept(self, layer: DecodeLayer, filters: Sequence[int]) -> npt.NDArray[np.float64]:
        """S[i, this layer] of filter layers i that were noted, for each selector and budget: [selector, budget, i].

        A filter of the layer's own (after `choose`) gives the mass of its own best tokens.
        """
        shape = (len(self.choice.selectors), len(self.choice.budgets), len(filters))
        worst = np.ones(shape)
        for position, row in enumerate(self.rows):
            worst = np.minimum(worst, self._kept_in_row(layer, filters, position, row).reshape(shape))
        return worst

    def moved(self, layer: DecodeLayer) -> float:
        """|| attention output || of this layer over all rows, after the output projection."""
        outputs = (_head_outputs(layer, _probabilities(layer, row), row).sum(0) for row in self.rows)
        return float(torch.stack(list(outputs)).norm())

    def _choice(self, layer: DecodeLayer, selector: SelectorChoice, row: int) -> torch.Tensor:
        positions = range(max(0, row + 1 - selector.window), row + 1)
        scores_B1S = token_scores(
            layer.call.q_BHSD[:, :, positions.start : positions.stop],
            layer.call.k_BGKD[:, :, : row + 1],
            positions,
            torch.tensor(selector_weights(selector.selector, len(positions))),
            scale=layer.call.scale,
        )
        among = self._candidates(row)
        return scores_B1S[0, 0, among.start : among.stop].topk(max(self._counts(row))).indices + among.start

    def _candidates(self, row: int) -> range:
        first = min(self.choice.sink, row + 1)
        return range(first, max(first, row + 1 - self.choice.recent))

    def _counts(self, row: int) -> list[int]:
        return [min(budget.resolve(row + 1), len(self._candidates(row))) for budget in self.choice.budgets]

    def _kept_in_row(
        self, layer: DecodeLayer, filters: Sequence[int], position: int, row: int
    ) -> npt.NDArray[np.float64]:
        weights_HS = _probabilities(layer, row)
        share_H = _head_shares(layer, weights_HS, row)
        mass_S = (weights_HS * share_H[:, None]).sum(0)
        selectors = range(len(self.choice.selectors))
        # layers may be spread over devices
        tokens_CK = torch.stack([self._chosen[i, s][position].to(mass_S.device) for s in selectors for i in filters])
        running_CK = torch.nn.functional.pad(mass_S[tokens_CK].double().cumsum(-1), (1, 0))
        among = self._candidates(row)
        always = mass_S[: among.start].sum() + mass_S[among.stop :].sum()
        held_CB = running_CK[:, self._counts(row)] + always
        held_SIB = held_CB.clamp_(0.0, 1.0).cpu().numpy().reshape(len(selectors), len(filters), -1)
        return np.asarray(held_SIB).swapaxes(1, 2)


def _probabilities(layer: DecodeLayer, row: int) -> torch.Tensor:
    q_BH1D, k_BGSD = layer.call.q_BHSD[:, :, row : row + 1], layer.call.k_BGKD[:, :, : row + 1]
    return token_scores(q_BH1D, k_BGSD, (row,), torch.ones(1), scale=layer.call.scale, heads=None)[0]


def _head_shares(layer: DecodeLayer, weights_HS: torch.Tensor, row: int) -> torch.Tensor:
    norm_H: torch.Tensor = _head_outputs(layer, weights_HS, row).norm(dim=-1)
    return norm_H / norm_H.sum().clamp(min=1e-20)


def _head_outputs(layer: DecodeLayer, weights_HS: torch.Tensor, row: int) -> torch.Tensor:
    """What each head adds to the residual: [H, W]."""
    weights_GNS = weights_HS.reshape(layer.call.v_BGKD.shape[1], -1, row + 1)
    out_HD = (weights_GNS @ layer.call.v_BGKD[0, :, : row + 1].float()).flatten(0, 1)
    weight_HDW = layer.projection_WZ.float().reshape(-1, *out_HD.shape).permute(1, 2, 0)
    return (out_HD[:, None] @ weight_HDW)[:, 0]
