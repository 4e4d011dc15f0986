"""Writing a graph: nodes, constants and branches by one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 24  # the first with TensorScatter


class Nodes:
    """The nodes of a graph, or of a branch of one, which reads what stands before it.

    Args:
        outer: the graph that this is a branch in.
    """

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
        found = name
        if not name:
            shape = "x".join(map(str, array.shape))
            found = f"{array.dtype}_{shape}_{array.tobytes().hex()}" if array.nbytes <= 32 else self.name("c")
        if found not in self._root.constants:
            self._root.constants[found] = numpy_helper.from_array(np.array(array, order="C"), found)
        return found

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
        """The outputs of the first branch where `condition` holds, else of the second.

        Args:
            kinds: element types of the outputs.
        """
        graphs = []
        for branch in branches:
            own = Nodes(self)
            found = branch(own)
            copies = [own.op("Identity", name) for name in found]  # an output must come from inside
            infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(copies, kinds, strict=True)]
            graphs.append(helper.make_graph(own.nodes, self.name("branch"), [], infos))
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
