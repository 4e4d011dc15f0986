"""How well the tokens that one layer chooses serve the layers after it, over decode-like rows of one prompt.

S[i, j], OmniKV's inter-layer similarity (its section 3.1), is the share of layer j's attention mass that lies on what a
sparse layer attends to: the first `sink` tokens, those that layer i would choose among all older than the last
`recent`, and those `recent`. A head counts by what it adds to the output there, so that heads resting on the sink do
not hide one that retrieves. The worst row counts.

Shapes: H query heads, G KV heads (g of a block), N query heads of a KV head, S keys, D head size, W model size, R rows,
U queries that selectors look at, C selectors, I filter layers, B budgets, K tokens chosen.
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
from sparsekv.planner.profile.profile_data import SelectorChoice, TokenChoice
from sparsekv.plans.patterns import fraction
from sparsekv.runtime.core.select import selector_weights
from sparsekv.runtime.hf.observe import AttentionCall

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


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """What one layer does in the rows that stand for decode steps, on its device.

    Attributes:
        best_US: the largest weight that a head gives a token, by the queries of all windows.
        mass_RS: the weights of all heads together, each head by its share of the output.
        moved: || attention output || over all rows, after the output projection; a number.
    """

    best_US: torch.Tensor
    mass_RS: torch.Tensor
    moved: torch.Tensor


@dataclass(slots=True)
class ReuseScores:
    """Takes the layers of one prompt in order; `rows` are those that stand for decode steps."""

    rows: tuple[int, ...]
    choice: TokenChoice
    _chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, int32 [C, R, K], best first
    _tables: dict[torch.device, _Tables] = field(default_factory=dict)  # layers may be spread over devices

    def attended(self, layer: DecodeLayer) -> LayerRows:
        """What the layer does in the rows."""
        call, tables = layer.call, self._on(layer.call.k_BGKD.device)
        hidden_US, groups = tables.hidden_US, call.k_BGKD.shape[1]
        k_GSD, v_GSD = (x_BGSD[0, :, : hidden_US.shape[1]] for x_BGSD in (call.k_BGKD, call.v_BGKD))
        q_GNUD = call.q_BHSD[0].index_select(1, tables.queries_U).unflatten(0, (groups, -1))
        weight_HWD = layer.projection_WZ.float().unflatten(1, (call.q_BHSD.shape[1], -1)).transpose(0, 1)
        weight_GNWD = weight_HWD.unflatten(0, (groups, -1))
        best, mass, norms, output = [], [], [], []
        for part in blocks(groups, q_GNUD.shape[1] * hidden_US.numel()):
            scores_gMS = scaled_scores(q_GNUD[None, part].flatten(2, 3), k_GSD[None, part], call.scale)[0]
            scores_gNUS = scores_gMS.unflatten(1, (-1, len(hidden_US)))
            weights_gNUS = scores_gNUS.masked_fill_(hidden_US, -torch.inf).softmax(-1)
            best.append(weights_gNUS.amax((0, 1)))
            weights_gNRS = weights_gNUS.index_select(2, tables.own_R)
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
        """Notes the tokens that this layer would choose, best first, a list a selector and row."""
        tables = self._on(layer.best_US.device)
        lists = []
        for at_RW, weight_RW in tables.windows:
            scores_RS = (layer.best_US[at_RW] * weight_RW[..., None]).sum(1)
            lists.append(scores_RS.masked_fill_(~tables.among_RS, -1.0).topk(tables.most).indices.int())
        self._chosen[index] = torch.stack(lists)

    def kept(self, layer: LayerRows, filters: Sequence[int]) -> npt.NDArray[np.float64]:
        """S[i, this layer] of filter layers i that were noted, for each selector and budget: [selector, budget, i].

        A filter of the layer's own (after `choose`) gives the mass of its own best tokens. Waits for the device.
        """
        mass_RS, tables = layer.mass_RS, self._on(layer.mass_RS.device)
        always_R1 = mass_RS.masked_fill(tables.among_RS, 0.0).sum(-1, keepdim=True)
        several = (len(self.choice.selectors), -1, -1)
        mass_CRS, counts_CRB = mass_RS.expand(several), tables.counts_RB.expand(several)
        worst = []
        for filter_layer in filters:  # one at a time: of a long prompt the lists of all would be many times the masses
            tokens_CRK = self._chosen[filter_layer].to(mass_RS.device).long()
            running_CRK = mass_CRS.gather(-1, tokens_CRK).double().cumsum_(-1)
            held_CRB = running_CRK.gather(-1, (counts_CRB - 1).clamp(min=0)).where(counts_CRB > 0, 0.0)
            worst.append((held_CRB + always_R1).clamp_(0.0, 1.0).amin(1))
        return np.asarray(torch.stack(worst, -1).cpu().numpy())

    def _on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables.of(self.rows, self.choice, device)
        return self._tables[device]


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """What of rows and choice is the same for all layers, on one device.

    Attributes:
        queries_U: all that some selector looks at, ascending.
        hidden_US: the tokens behind each.
        own_R: which of them the rows are.
        windows: for each selector, which of them it looks at, and how each weighs; no weight before the first token.
        among_RS: the tokens between sinks and recent ones.
        counts_RB: how many of these a budget chooses.
        most: the largest count, 1 at least.
    """

    queries_U: torch.Tensor
    hidden_US: torch.Tensor
    own_R: torch.Tensor
    windows: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    among_RS: torch.Tensor
    counts_RB: torch.Tensor
    most: int

    @classmethod
    def of(cls, rows: Sequence[int], choice: TokenChoice, device: torch.device) -> _Tables:
        widest = max(selector.window for selector in choice.selectors)
        queries = sorted({row - age for row in rows for age in range(widest) if row >= age})
        places = {query: place for place, query in enumerate(queries)}

        def window(selector: SelectorChoice) -> tuple[torch.Tensor, torch.Tensor]:
            ages = range(selector.window - 1, -1, -1)
            weights = selector_weights(selector.selector, selector.window)
            at_RW = [[places.get(row - age, 0) for age in ages] for row in rows]
            weight_RW = [[weight * (row >= age) for age, weight in zip(ages, weights, strict=True)] for row in rows]
            return torch.tensor(at_RW, device=device), torch.tensor(weight_RW, device=device)

        keys_S = torch.arange(max(rows) + 1, device=device)
        first_R = [min(choice.sink, row + 1) for row in rows]
        stop_R = [max(first, row + 1 - choice.recent) for first, row in zip(first_R, rows, strict=True)]
        bounds_2R1 = torch.tensor([first_R, stop_R], device=device)[..., None]
        counts = [
            [min(budget.resolve(row + 1), stop - first) for budget in choice.budgets]
            for row, first, stop in zip(rows, first_R, stop_R, strict=True)
        ]
        queries_U = torch.tensor(queries, device=device)
        return cls(
            queries_U=queries_U,
            hidden_US=keys_S > queries_U[:, None],
            own_R=torch.tensor([places[row] for row in rows], device=device),
            windows=tuple(map(window, choice.selectors)),
            among_RS=(keys_S >= bounds_2R1[0]) & (keys_S < bounds_2R1[1]),
            counts_RB=torch.tensor(counts, device=device),
            most=max(1, *(max(row) for row in counts)),
        )
