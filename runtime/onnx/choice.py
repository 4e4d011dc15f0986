"""Decode of a plan in ONNX operators: budgets by length, the choice of a filter layer, attention to what was chosen;
and a graph's nodes, constants and branches by one call each.

Lists have room for the most that is chosen at any length; what a row has fewer of is masked. A row that its budget
covers attends to everything by the same list.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, g lists of a row (1 or G), C capacity, D head
size, K chosen tokens at most, M listed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.roles import Follower
from sparsekv.runtime.core.segments import SegmentProgram

OPSET = 24  # the first with TensorScatter


class Nodes:
    """The nodes of a graph, or of a branch of `outer`, which reads the nodes before it."""

    def __init__(self, outer: Nodes | None = None) -> None:
        self._root: Nodes = self if outer is None else outer._root
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._count = 0

    def name(self, stem: str) -> str:
        self._root._count += 1
        return f"{stem}_{self._root._count}"

    def constant(self, values: npt.ArrayLike, name: str = "") -> str:
        """A tensor that the whole graph shares: int64 where nothing else is said."""
        array = values if isinstance(values, np.ndarray) else np.asarray(values, np.int64)
        key = name
        if not name:
            shape = "x".join(map(str, array.shape))
            key = f"{array.dtype}_{shape}_{array.tobytes().hex()}" if array.nbytes <= 32 else self.name("c")
        if key not in self._root.constants:
            self._root.constants[key] = numpy_helper.from_array(np.array(array, order="C"), key)
        return key

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        names = [self.name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def skipping(self, kind: str, *inputs: str, outputs: Sequence[bool], **attributes: Any) -> list[str]:
        names = [self.name(kind.lower()) if wanted else "" for wanted in outputs]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return [name for name in names if name]

    def either(self, condition: str, kinds: Sequence[int], *branches: Callable[[Nodes], Sequence[str]]) -> list[str]:
        """The outputs, of these element types, of the first branch where `condition` holds, else of the second."""
        graphs = []
        for branch in branches:
            inner = Nodes(self)
            outputs = branch(inner)
            copies = [inner.op("Identity", name) for name in outputs]  # an output must come from inside
            infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(copies, kinds, strict=True)]
            graphs.append(helper.make_graph(inner.nodes, self.name("branch"), [], infos))
        then_branch, else_branch = graphs
        return self.ops("If", condition, outputs=len(kinds), then_branch=then_branch, else_branch=else_branch)

    def cast(self, value: str, kind: int) -> str:
        return self.op("Cast", value, to=kind)

    def reshape(self, value: str, *shape: int) -> str:
        """0 keeps a dimension."""
        return self.op("Reshape", value, self.constant(shape))

    def transpose(self, value: str, *order: int) -> str:
        return self.op("Transpose", value, perm=list(order))

    def dimension(self, value: str, axis: int) -> str:
        """[1]: the length of a dimension."""
        return self.op("Shape", value, start=axis, end=axis + 1)


INT64, BOOL, FLOAT = TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT


_LEAST = np.float32(-1.0)  # below every attention weight


class ChoiceStep:
    """The lengths of a step, int64 with the new token, and the tokens that a row chooses for each segment."""

    def __init__(self, nodes: Nodes, program: Program, lengths_B: str, is_step: str) -> None:
        self._nodes, self.lengths_B = nodes, lengths_B
        self._counts: dict[int, str] = {}
        self._chosen: dict[int, str] = {}
        self.is_sparse = ""
        if program.segments:
            self.is_sparse = nodes.op("And", is_step, self._any_chooses(program.segments))

    def _any_chooses(self, segments: Sequence[SegmentProgram]) -> str:
        """Returns whether a row chooses, and none is in a bucket that is dense."""
        n, bounds = self._nodes, segments[0].bounds
        longer_BN = n.op(
            "Greater", n.op("Unsqueeze", self.lengths_B, n.constant([1])), n.constant(list(bounds) or [-1])
        )
        bucket_B = n.op("ReduceSum", n.cast(longer_BN, INT64), n.constant([1]), keepdims=0)
        if not bounds:
            bucket_B = n.op("Sub", bucket_B, n.constant([1]))
        chooses = ""
        for segment in segments:
            most = [0 if flag is None else flag.budget.most for flag in segment.buckets]
            share = [0.0 if flag is None else flag.budget.fraction or 0.0 for flag in segment.buckets]
            count_B = n.op("Gather", n.constant(most), bucket_B)
            if any(share):
                share_B = n.op("Gather", n.constant(np.asarray(share, np.float64)), bucket_B)
                wanted_B = n.op("Mul", share_B, n.cast(self.lengths_B, _DOUBLE))
                rounded_B = n.op("Ceil", n.op("Sub", wanted_B, n.constant(np.asarray([1e-9], np.float64))))
                fewer_B = n.op("Min", n.cast(rounded_B, INT64), count_B)
                count_B = n.op("Where", n.op("Greater", share_B, n.constant(np.asarray([0.0]))), fewer_B, count_B)
            edges = n.constant([segment.sink + segment.recent])
            free_B = n.op("Max", n.op("Sub", self.lengths_B, edges), n.constant([0]))
            own_B = n.op("Less", count_B, free_B)
            self._counts[segment.filter] = n.op("Min", count_B, free_B)
            chooses = n.op("Or", chooses, own_B) if chooses else own_B
        dense = n.constant(np.asarray([flag is None for flag in segments[0].buckets]))
        none_dense_B = n.op("Not", n.op("Gather", dense, bucket_B))
        any_B, all_B = (n.cast(flag, INT64) for flag in (chooses, none_dense_B))
        return n.cast(n.op("Mul", n.op("ReduceMax", any_B, keepdims=0), n.op("ReduceMin", all_B, keepdims=0)), BOOL)

    def chosen(self, segment: SegmentProgram) -> str:
        """[B, g, K]: what the filter layer chose; where no step is sparse, anything."""
        return self._chosen[segment.filter]

    def remember(self, segment: SegmentProgram, chosen_BgK: str) -> None:
        self._chosen[segment.filter] = chosen_BgK

    def choose(self, n: Nodes, layer: LayerProgram, segment: SegmentProgram, weights_BH1C: str) -> str:
        """[B, g, K]: the tokens between sinks and recent ones with most weight for the newest query, best first."""
        lists = segment.lists
        weights_BgNC = n.cast(n.reshape(weights_BH1C, 0, lists, layer.heads // lists, -1), _FLOAT)
        score_BgC = n.op("ReduceMax", weights_BgNC, n.constant([2]), keepdims=0)
        capacity = n.op("Squeeze", n.dimension(weights_BH1C, 3), n.constant([0]))
        at_C = n.op("Range", n.constant(np.int64(0)), capacity, n.constant(np.int64(1)))
        end_B1 = n.op("Unsqueeze", n.op("Sub", self.lengths_B, n.constant([segment.recent])), n.constant([1]))
        is_free_BC = n.op(
            "And", n.op("GreaterOrEqual", at_C, n.constant(np.int64(segment.sink))), n.op("Less", at_C, end_B1)
        )
        free_BgC = n.op(
            "Where", n.op("Unsqueeze", is_free_BC, n.constant([1])), score_BgC, n.constant(np.asarray([_LEAST]))
        )
        most = n.op("Min", n.constant([segment.most]), n.dimension(weights_BH1C, 3))
        return n.ops("TopK", free_BgC, most, outputs=2, axis=-1)[1]

    def attend(
        self, n: Nodes, layer: LayerProgram, role: Follower, chosen_BgK: str, qkv: tuple[str, str, str], scale: float
    ) -> str:
        """[B, H, 1, D]: attention to sinks, chosen and recent tokens."""
        segment, (q_BH1D, k_BGCD, v_BGCD) = role.segment, qkv
        sink, recent, lists = segment.sink, segment.recent, role.lists
        if role.kv_map is not None:
            chosen_BgK = n.op("Gather", chosen_BgK, n.constant(list(role.kv_map)), axis=1)
        length_B11 = n.op("Unsqueeze", self.lengths_B, n.constant([1, 2]))
        slot_K = n.op(
            "Range",
            n.constant(np.int64(0)),
            n.op("Squeeze", n.dimension(chosen_BgK, 2), n.constant([0])),
            n.constant(np.int64(1)),
        )
        count_B11 = n.op("Unsqueeze", self._counts[segment.filter], n.constant([1, 2]))
        sinks_11M = n.constant(np.arange(sink, dtype=np.int64)[None, None])
        recent_B1M = n.op("Add", length_B11, n.constant(np.arange(-recent, 0, dtype=np.int64)[None, None]))
        is_sink_B1M = n.op("Less", sinks_11M, length_B11)
        is_recent_B1M = n.op("GreaterOrEqual", recent_B1M, n.constant([[[sink]]]))
        is_chosen_B1K = n.op("Less", slot_K, count_B11)
        rows_11 = n.op("Concat", n.dimension(q_BH1D, 0), n.constant([lists, 1]), axis=0)
        parts = [n.op("Expand", part, rows_11) for part in (sinks_11M, n.op("Max", recent_B1M, n.constant([0])))]
        at_BgM = n.op("Concat", parts[0], chosen_BgK, parts[1], axis=2)
        is_seen_B1M = n.op("Concat", is_sink_B1M, is_chosen_B1K, is_recent_B1M, axis=2)
        whole = n.op("Concat", n.dimension(q_BH1D, 0), n.constant([layer.kv_heads]), n.dimension(at_BgM, 2), axis=0)
        at_BGM1 = n.op("Unsqueeze", n.op("Expand", at_BgM, whole), n.constant([3]))
        k_BGMD, v_BGMD = (n.op("GatherND", x_BGCD, at_BGM1, batch_dims=2) for x_BGCD in (k_BGCD, v_BGCD))
        mask_B11M = n.op("Unsqueeze", is_seen_B1M, n.constant([1]))
        return n.op("Attention", q_BH1D, k_BGMD, v_BGMD, mask_B11M, scale=scale)


_DOUBLE, _FLOAT = 11, 1  # of TensorProto
