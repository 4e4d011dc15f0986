"""One calibration prompt through the model: what is measured in each layer on the way.

Shapes: B batch (1), H query heads, S rows, D head size, W model size, Z = H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile_data import Table
from sparsekv.planner.search.fit import Patterns, Prefix, fit_to_target
from sparsekv.planner.search.layer_scores import Layer, score_candidates
from sparsekv.planner.search.partial import LayerRecord, Records
from sparsekv.planner.search.prompts import CalibrationPrompt
from sparsekv.planner.search.reuse_scores import DecodeLayer, ReuseScores
from sparsekv.planner.search.rows import rows_of
from sparsekv.planner.search.space import VerticalSlashRay, aims, decode_budgets, decode_selectors
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.describe import attention_modules, decoder_of
from sparsekv.runtime.hf.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Pass:
    """One prompt of one length."""

    loaded: LoadedModel
    options: PlanOptions
    backend: BackendName
    length: int
    sample: int
    prompt: CalibrationPrompt

    def run(self, records: Records, layer_done: Callable[[str], None]) -> None:
        """Measures every layer that has no record yet, and adds its record."""
        model, layers = self.loaded.model, range(self.loaded.info.layers)
        if all((self.length, self.sample, layer) in records for layer in layers):
            for _ in layers:
                layer_done(self.note(len(layers)))
            return
        ids_1S = torch.from_numpy(self.prompt.ids.astype(np.int64)).to(model.device)[None]
        with torch.no_grad(), _residuals(model, self.prompt.decode_rows) as residuals:
            observer = _Observer(self, records, residuals, layer_done)
            with capture_attention(model, observer):
                decoder_of(model)(input_ids=ids_1S, use_cache=False)

    def note(self, layer: int) -> str:
        """What progress says is being worked on."""
        return f"{self.length} tokens, prompt {self.sample + 1}, layer {layer}"


class _Observer:
    """Sees the layers of one pass in order."""

    def __init__(
        self, one: Pass, records: Records, residuals: dict[int, float], layer_done: Callable[[str], None]
    ) -> None:
        self._one, self._records, self._residuals, self._layer_done = one, records, residuals, layer_done
        self._aims = aims(one.options, one.length) if "prefill" in one.options.phases else ()
        self._reuse: ReuseScores | None = None
        if "decode" in one.options.phases:
            prompt = one.prompt
            self._reuse = ReuseScores(
                prompt.decode_rows, prompt.answer_start, decode_budgets(one.options), decode_selectors()
            )
        modules: Sequence[Any] = attention_modules(one.loaded.model)
        self._projections: list[torch.Tensor] = [module.o_proj.weight for module in modules]

    def __call__(self, call: AttentionCall) -> None:
        key = (self._one.length, self._one.sample, call.layer)
        projection_WZ = self._projections[call.layer]
        decode = DecodeLayer(call.q_BHSD, call.k_BGKD, call.v_BGKD, call.scale, projection_WZ)
        if self._reuse is not None:
            self._reuse.choose(call.layer, decode)
        if key not in self._records:
            self._records.add(self._record(call, decode))
        self._layer_done(self._one.note(call.layer + 1))

    def _record(self, call: AttentionCall, decode: DecodeLayer) -> LayerRecord:
        scores = self._scores(call, decode.projection_WZ) if call.window is None and self._aims else {}
        if self._reuse is not None:
            moved = self._reuse.moved(decode)
            scores["importance"] = moved / max(moved + self._residuals[call.layer], 1e-20)
            scores["kept"] = tuple(_table(table) for table in self._reuse.kept(decode, range(call.layer + 1)))
        return LayerRecord(length=self._one.length, sample=self._one.sample, layer=call.layer, **scores)

    def _scores(self, call: AttentionCall, projection_WZ: torch.Tensor) -> dict[str, Any]:
        one, tile = self._one, self._one.options.tile_shape
        sampled = [aim.ray.last_q for aim in self._aims if isinstance(aim.ray, VerticalSlashRay)]
        prefix = Prefix(call.q_BHSD, call.k_BGKD, call.chunk, tile, call.scale).with_lines(sampled)
        rows = rows_of(call.chunk.longest, one.prompt.tail_start, tile, one.options.row_stride or 1)
        patterns = self._patterns(call.layer, prefix)
        scores = score_candidates(Layer(prefix, call.v_BGKD, projection_WZ, rows, one.backend), patterns)
        return {
            "patterns": tuple(patterns),
            "error": _table([score.error_H for score in scores]),
            "tail_error": _table([score.tail_error_H for score in scores]),
            "mass": _table([score.mass_H for score in scores]),
            "tiles": _table([score.tiles_H / prefix.causal_tiles for score in scores]),
            "columns": _table([score.columns_H / prefix.causal_tiles for score in scores]),
        }

    def _patterns(self, layer: int, prefix: Prefix) -> Sequence[Patterns]:
        if self._one.sample > 0:
            return self._records[self._one.length, 0, layer].patterns
        return [fit_to_target(prefix, aim.ray, aim.density * prefix.causal_tiles) for aim in self._aims]


def _table(rows: Sequence[npt.NDArray[np.float64]] | npt.NDArray[np.float64]) -> Table:
    return tuple(tuple(float(value) for value in row) for row in rows)


@contextmanager
def _residuals(model: Any, rows: Sequence[int]) -> Iterator[dict[int, float]]:
    """|| residual || at the given rows, before each layer of a forward pass inside the `with`."""
    norms: dict[int, float] = {}

    def note(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_BSW = args[0] if args else kwargs["hidden_states"]
            norms[layer] = float(hidden_BSW[0, list(rows)].float().norm())

        return hook

    layers: Any = decoder_of(model).layers
    hooks = [layer.register_forward_pre_hook(note(place), with_kwargs=True) for place, layer in enumerate(layers)]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
