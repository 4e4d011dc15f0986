"""What the layers of a decode step share: lengths, budgets, choices, the newest queries of filter layers.

Shapes: B batch, H query heads, S queries, W queries of a selector, D head size; F filter layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.core.budgets import Budgets, scored_tokens
from sparsekv.runtime.core.program import LayerProgram, Program, SegmentProgram
from sparsekv.runtime.core.retention import Observed

Gather = Callable[[torch.Tensor], torch.Tensor]
"""The tensors that all ranks give, [ranks, ...], in the order of the ranks."""

OnChoice = Callable[[SegmentProgram, Selection], None]
"""Is told what a segment's filter layer chose, before its layers follow."""


Remembered = tuple[dict[int, torch.Tensor], dict[int, Observed]]


def lists_of(layer: LayerProgram) -> int:
    """Lists that a filter layer chooses: one for all KV heads, or one for each."""
    assert layer.filters is not None
    return 1 if layer.filters.heads == "max" else layer.kv_heads


class DecodeState:
    """The state of one batch of sequences. Nothing in it asks the device, so that a step can be captured.

    Args:
        program: what the layers compute.
        gather: over the ranks; needed where `program.reduces`.
        on_choice: what to do right behind every choice.
        scratch: float32 memory of the host for the scores of one filter layer after another; its size bounds them.

    Raises:
        UsageError: the program reduces over ranks and there is no `gather`.
    """

    def __init__(
        self,
        program: Program,
        gather: Gather | None = None,
        on_choice: OnChoice | None = None,
        scratch: torch.Tensor | None = None,
    ) -> None:
        if program.reduces and gather is None:
            raise UsageError(
                f"expected gather for a program of {program.rank.count} ranks whose filter layers choose together, "
                f"found none; pass an all-gather over the ranks, or plan with `scope: local`"
            )
        self.gather = gather
        self.scratch = scratch
        self._on_choice = on_choice
        self._windows = {
            layer.layer: layer.filters.queries
            for layer in program.layers
            if layer.filters and layer.filters.queries > 1
        }
        self._filters = program.filters
        self._numbers = {layer.layer: number for number, layer in enumerate(program.filters)}
        self._tables: dict[torch.device, Budgets] = {}
        self._constants: dict[object, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets the sequences."""
        self.lengths: tuple[int, ...] | None = None  # of the step under way, where the host knows them
        self._lengths_B: torch.Tensor | None = None
        self._budgets_2FB: tuple[torch.Tensor, torch.Tensor] | None = None
        self._choosing_FB: torch.Tensor | None = None
        self._selected: dict[int, Selection | None] = {}
        self._moved: dict[tuple[int, torch.device], Selection] = {}  # to the devices of other layers
        self._slots: dict[tuple[int, torch.device], SlotMap] = {}
        self._remembered: set[int] = set()
        self._queries: dict[int, torch.Tensor] = {}
        self._observed: dict[int, Observed] = {}  # of the prompt under way, of layers that drop tokens

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def begin(self, lengths: Sequence[int] | torch.Tensor, device: torch.device) -> None:
        """Starts a decode step.

        Args:
            lengths: tokens of each row, the new one included: numbers, or int32 on the device, which the host then
                never learns.
            device: of the tensors to come.
        """
        self.lengths = None if isinstance(lengths, torch.Tensor) else tuple(lengths)
        self._selected.clear()
        self._moved.clear()
        self._remembered.clear()
        self._budgets_2FB = self._choosing_FB = None
        if isinstance(lengths, torch.Tensor):
            self._lengths_B = lengths
            return
        if self._lengths_B is None or self._lengths_B.shape[0] != len(lengths):
            self._lengths_B = torch.empty(len(lengths), dtype=torch.int32, device=device)
        if len(set(lengths)) == 1:
            self._lengths_B.fill_(lengths[0])  # a launch; a copy from the host would wait
        else:
            self._lengths_B.copy_(on_device(self.lengths, device, torch.int32))

    def budget(self, segment: SegmentProgram, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that every row chooses in this step, or ALL, and where its scores begin, or -1: int32 [B] each.
        `backend` is that of the attention."""
        counts_FB, starts_FB = self._budget(backend)
        number = self._numbers[segment.filter]
        return counts_FB[number], starts_FB[number]

    def choosing(self, segment: SegmentProgram, backend: str) -> torch.Tensor:
        """int32 [B]: lengths of the rows that choose for the segment in this step, 0 for those that attend to
        everything."""
        if self._choosing_FB is None:
            self._choosing_FB = self.lengths_B * (self._budget(backend)[0] != ALL)
        return self._choosing_FB[self._numbers[segment.filter]]

    def room(self, layer: LayerProgram) -> int:
        """Tokens of all rows together that a filter layer can score."""
        return scored_tokens(layer.heads, self.scratch, lists_of(layer))

    def _budget(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._budgets_2FB is None:
            self._budgets_2FB = self.budgets(self.lengths_B.device).of(self.lengths_B, backend)
        return self._budgets_2FB

    def budgets(self, device: torch.device) -> Budgets:
        """Of all segments, for lengths on the device."""
        if device not in self._tables:
            segments = [layer.filters for layer in self._filters if layer.filters]
            with torch.inference_mode(False):
                self._tables[device] = Budgets(segments, [self.room(layer) for layer in self._filters], device)
        return self._tables[device]

    def constant(self, values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the plan as a tensor that lives as long as the state, so that a captured step can read it."""
        key = (values, device, dtype)
        if key not in self._constants:
            with torch.inference_mode(False):
                self._constants[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[key]

    @property
    def lengths_B(self) -> torch.Tensor:  # noqa: N802
        """int32 [B] on the device: tokens of each row, the new one included."""
        assert self._lengths_B is not None, "begin() comes first"
        return self._lengths_B

    def remember(self, layer: LayerProgram, q_BHSD: torch.Tensor) -> None:
        """Keeps the newest queries of a filter layer whose selector looks at several; called for every token."""
        count = self._windows.get(layer.layer)
        if count is not None:
            self._remember(layer, q_BHSD, count)

    def remember_step(self, layer: LayerProgram, q_BH1D: torch.Tensor) -> None:
        """`remember` of the step under way, once: another backend may begin the layer again."""
        if layer.layer not in self._remembered:
            self._remembered.add(layer.layer)
            self.remember(layer, q_BH1D)

    @torch.inference_mode(False)
    def _remember(self, layer: LayerProgram, q_BHSD: torch.Tensor, count: int) -> None:
        batch, heads, new, size = q_BHSD.shape
        newest_BHWD = q_BHSD[:, :, -count:].detach().clone()  # leaving inference mode turns autograd on
        if new < count:
            older = self._queries.get(layer.layer)
            older_BHWD = q_BHSD.new_zeros((batch, heads, count, size)) if older is None else older
            newest_BHWD = torch.cat((older_BHWD[:, :, new:], newest_BHWD), 2)
        self._queries[layer.layer] = newest_BHWD

    @torch.inference_mode(False)
    def observe(self, layer: LayerProgram, new: Observed) -> None:
        """Keeps the newest queries of a prompt in a layer that drops tokens, as many as its rule looks at."""
        assert layer.retains is not None
        most = layer.retains.observe or 0
        newest = Observed(new.q_BHWD[:, :, -most:].detach().clone(), new.scale, new.softmax)
        self._observed[layer.layer] = newest.before(self._observed.get(layer.layer), most)

    def observed(self, layer: LayerProgram) -> Observed | None:
        """What `observe` has kept of the prompt, which is complete; None from then on."""
        return self._observed.pop(layer.layer, None)

    @property
    def remembered(self) -> Remembered:
        """The newest queries of each layer that keeps them, [B, H, W, D]: never written to in place."""
        return dict(self._queries), dict(self._observed)

    @remembered.setter
    def remembered(self, queries: Remembered) -> None:
        self._queries, self._observed = dict(queries[0]), dict(queries[1])

    def restore(self, layer: int, before: Remembered) -> None:
        """What is remembered of a layer becomes what it was."""
        queries, observed = before
        self._queries.pop(layer, None)
        self._observed.pop(layer, None)
        if layer in queries:
            self._queries[layer] = queries[layer]
        if layer in observed:
            self._observed[layer] = observed[layer]

    def select(self, layer: int, rows_B: torch.Tensor) -> None:
        """Row i of the sequences becomes a copy of row `rows_B[i]`, in what is remembered of a layer."""
        if layer in self._queries:
            queries_BHWD = self._queries[layer]
            self._queries[layer] = queries_BHWD.index_select(0, rows_B.to(queries_BHWD.device))

    def queries(self, layer: LayerProgram, q_BH1D: torch.Tensor) -> torch.Tensor:
        """[B, H, W, D]: the newest queries of a filter layer, zeros before the first token."""
        return self._queries.get(layer.layer, q_BH1D)

    def choose(self, segment: SegmentProgram, selection: Selection | None) -> None:
        """Records what a filter layer chose in this step; None is everything in every row."""
        if selection is not None and self._on_choice is not None:
            self._on_choice(segment, selection)
        self._selected[segment.filter] = selection
        self._moved.clear()

    def chosen(self, segment: SegmentProgram, device: torch.device | None = None) -> Selection | None:
        """What the filter layer chose in this step, for keys on `device`: one object for all who ask in the step."""
        assert segment.filter in self._selected, "the filter layer comes first"
        selection = self._selected[segment.filter]
        if selection is None or device is None or selection.counts_B.device == device:
            return selection
        key = segment.filter, device
        if key not in self._moved:
            self._moved[key] = selection.to(device)
        return self._moved[key]

    def has_chosen(self, segment: SegmentProgram) -> bool:
        """Whether the filter layer came before in this step."""
        return segment.filter in self._selected

    def slots(self, layer: LayerProgram, device: torch.device) -> SlotMap:
        """The hot set of a layer of a segment, shared with the segment's layers on the device that take the very same
        choice."""
        assert layer.follows is not None
        number = layer.follows.filter if layer.kv_map is None else layer.layer
        return self._slots.setdefault((number, device), SlotMap())
