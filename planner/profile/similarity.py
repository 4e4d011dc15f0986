"""Measures how well the tokens that one layer chooses serve the layers after it, over decode-like rows of one prompt.

S[i, j], OmniKV's inter-layer similarity (its section 3.1), is the share of layer j's attention mass that lies on what a
sparse layer attends to: the first `sink` tokens, those that layer i would choose among all older than the last
`recent`, and those `recent`. A head counts by what it adds to the output there, so that heads resting on the sink do
not hide one that retrieves. The worst row counts.

Shapes: H query heads, G KV heads (g of a block), N query heads of a KV head, S keys, D head size, W model size, R rows,
I filter layers, B budgets, K tokens chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.topk import blocks
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import TokenChoice
from sparsekv.plans.patterns import fraction
from sparsekv.plans.phases import RECENT, SINK
from sparsekv.runtime.hf.observe import AttentionCall

_SHARES = (0.025, 0.05, 0.1, 0.2)


def token_choice(options: PlanOptions) -> TokenChoice:
    """Returns what is measured: a few budgets and the one asked for."""
    shares = tuple(fraction(share) for share in _SHARES)
    budgets = shares if options.decode_budget in shares else (*shares, options.decode_budget)
    return TokenChoice(sink=SINK, recent=RECENT, budgets=budgets)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Holds what one layer does in the rows that stand for decode steps, on its device.

    Attributes:
        best_RS: the largest weight that a head gives a token.
        mass_RS: the weights of all heads together, each head by its share of the output.
        moved: || attention output || over all rows, after the output projection; a number.
    """

    best_RS: torch.Tensor
    mass_RS: torch.Tensor
    moved: torch.Tensor


@dataclass(slots=True)
class ReuseScores:
    """Takes the layers of one prompt in order; `rows` are those that stand for decode steps."""

    rows: tuple[int, ...]
    choice: TokenChoice
    _chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, int32 [R, K], best first
    _tables: dict[torch.device, _Tables] = field(default_factory=dict)  # layers may be spread over devices

    def attended(self, call: AttentionCall, projection_WZ: torch.Tensor) -> LayerRows:
        """The attention of a layer in the rows; its output goes through the projection."""
        tables = self._on(call.k_BGKD.device)
        hidden_RS, groups = tables.hidden_RS, call.k_BGKD.shape[1]
        k_GSD, v_GSD = (x_BGSD[0, :, : hidden_RS.shape[1]] for x_BGSD in (call.k_BGKD, call.v_BGKD))
        q_GNRD = call.q_BHSD[0].index_select(1, tables.rows_R).unflatten(0, (groups, -1))
        weight_HWD = projection_WZ.float().unflatten(1, (call.q_BHSD.shape[1], -1)).transpose(0, 1)
        weight_GNWD = weight_HWD.unflatten(0, (groups, -1))
        best, mass, norms, output = [], [], [], []
        for part in blocks(groups, q_GNRD.shape[1] * hidden_RS.numel()):
            scores_gMS = scaled_scores(
                q_GNRD[None, part].flatten(2, 3), k_GSD[None, part], call.scale, call.softmax.cap
            )[0]
            scores_gNRS = scores_gMS.unflatten(1, (-1, len(hidden_RS)))
            own, shape = slice(part.start * q_GNRD.shape[1], part.stop * q_GNRD.shape[1]), scores_gNRS.shape
            scores_1HRS = scores_gNRS.masked_fill_(hidden_RS, -torch.inf).flatten(0, 1)[None]
            weights_gNRS = call.softmax.weights(scores_1HRS, own).view(shape)
            best.append(weights_gNRS.amax((0, 1)))
            out_gNRD = (weights_gNRS.flatten(1, 2) @ v_GSD[part].float()).unflatten(1, (-1, len(self.rows)))
            out_gNRW = out_gNRD @ weight_GNWD[part].transpose(2, 3)
            norm_gNR = out_gNRW.norm(dim=-1)
            norms.append(norm_gNR.sum((0, 1)))
            mass.append((weights_gNRS * norm_gNR[..., None]).sum((0, 1)))
            output.append(out_gNRW.sum((0, 1)))
        whole_R1 = torch.stack(norms).sum(0).clamp(min=1e-20)[:, None]
        mass_RS = torch.stack(mass).sum(0) / whole_R1
        return LayerRows(torch.stack(best).amax(0), mass_RS, torch.stack(output).sum(0).norm())

    def choose(self, index: int, layer: LayerRows) -> None:
        """Notes the tokens that this layer would choose, best first, a list a row."""
        tables = self._on(layer.best_RS.device)
        free_RS = layer.best_RS.masked_fill(~tables.among_RS, -1.0)
        self._chosen[index] = free_RS.topk(tables.most).indices.int()

    def kept(self, layer: LayerRows, filters: Sequence[int]) -> npt.NDArray[np.float64]:
        """S[i, this layer] of filter layers i, for each budget: [budget, i].

        A filter of the layer's own (after `choose`) gives the mass of its own best tokens; 0 of layers that were not
        noted. Waits for the device.
        """
        mass_RS, tables = layer.mass_RS, self._on(layer.mass_RS.device)
        always_R1 = mass_RS.masked_fill(tables.among_RS, 0.0).sum(-1, keepdim=True)
        worst = []
        for filter_layer in filters:  # one at a time: of a long prompt the lists of all would be many times the masses
            if filter_layer not in self._chosen:
                worst.append(mass_RS.new_zeros(tables.counts_RB.shape[1], dtype=torch.float64))
                continue
            tokens_RK = self._chosen[filter_layer].to(mass_RS.device).long()
            running_RK = mass_RS.gather(-1, tokens_RK).double().cumsum_(-1)
            held_RB = running_RK.gather(-1, (tables.counts_RB - 1).clamp(min=0)).where(tables.counts_RB > 0, 0.0)
            worst.append((held_RB + always_R1).clamp_(0.0, 1.0).amin(0))
        return np.asarray(torch.stack(worst, -1).cpu().numpy())

    def _on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables.of(self.rows, self.choice, device)
        return self._tables[device]


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Holds what of rows and choice is the same for all layers, on one device.

    Attributes:
        rows_R: where the rows are.
        hidden_RS: the tokens behind each.
        among_RS: the tokens between sinks and recent ones.
        counts_RB: how many of these a budget chooses.
        most: the largest count, 1 at least.
    """

    rows_R: torch.Tensor
    hidden_RS: torch.Tensor
    among_RS: torch.Tensor
    counts_RB: torch.Tensor
    most: int

    @classmethod
    def of(cls, rows: Sequence[int], choice: TokenChoice, device: torch.device) -> _Tables:
        keys_S = torch.arange(max(rows) + 1, device=device)
        first_R = [min(choice.sink, row + 1) for row in rows]
        stop_R = [max(first, row + 1 - choice.recent) for first, row in zip(first_R, rows, strict=True)]
        bounds_2R1 = torch.tensor([first_R, stop_R], device=device)[..., None]
        counts = [
            [min(budget.resolve(row + 1), stop - first) for budget in choice.budgets]
            for row, first, stop in zip(rows, first_R, stop_R, strict=True)
        ]
        rows_R = torch.tensor(rows, device=device)
        return cls(
            rows_R=rows_R,
            hidden_RS=keys_S > rows_R[:, None],
            among_RS=(keys_S >= bounds_2R1[0]) & (keys_S < bounds_2R1[1]),
            counts_RB=torch.tensor(counts, device=device),
            most=max(1, *(max(row) for row in counts)),
        )
