"""Repeated layers (see ir/layers.py) evaluated as one ``jax.lax.scan``, or as calls of one jitted function.

In the place of a run of layers stands one node, whose graph is the layer that represents them. Before, and after:

    a = layer(x, w0);  b = layer(a, w1);  c = layer(b, w2)        c = scan(layer, x, stack(w0, w1, w2))

Weights are stacked in the program; hoist_params then does it once for each set of them. Calls need no stack: the layer
is traced once, and compiled once where the program is cut at the calls (see sections.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import jax
import numpy as np
from jax import lax

from ..ir import layers as ir
from ..ir.graph import Graph, Node, in_place_of
from ..ops.arrays import is_known
from ..ops.iteration import equal, results, scan
from ..ops.registry import Operator
from ..proto.types import ValueInfo
from .values import marked_constants, with_constants

How = bool | Literal["calls", "remat"] | None
"""Whether repeated layers are loops; with "remat", gradients recompute the values inside of each layer. With "calls"
they are calls of one function. None: the same in decoders where that pays, and False elsewhere."""

LAYER: Final = "onnx_layer"
"""The name of jitted functions that are layers."""


@dataclass
class Rolling:
    """The repeated layers of the graphs of one program.

    Attributes:
        how: True, "remat" or "calls".
        unrolled: the runs that were evaluated unrolled after all -> why.
    """

    how: How
    unrolled: dict[str, str] = field(default_factory=dict)
    _nodes: dict[Graph, tuple[Node, ...]] = field(default_factory=dict, repr=False)
    _runs: dict[Graph, list[ir.Layers]] = field(default_factory=dict, repr=False)

    def nodes(self, graph: Graph) -> tuple[Node, ...]:
        """The nodes of a graph, with one node in the place of each run of layers."""
        if graph not in self._nodes:
            rolled = {run.nodes: self._node(graph, run) for run in self.runs(graph)}
            self._nodes[graph] = in_place_of(graph.nodes, rolled)
        return self._nodes[graph]

    def runs(self, graph: Graph) -> list[ir.Layers]:
        """The runs of layers in a graph."""
        if graph not in self._runs:
            self._runs[graph] = [] if graph.complete.differentiates else ir.repeated(graph)
        return self._runs[graph]

    def notes(self, graph: Graph) -> Iterator[str]:
        """What is rolled in a graph, and in the graphs inside it that were evaluated."""
        for rolled in dict.fromkeys((graph, *self._nodes)):
            for run in self.runs(rolled):
                why, form = self.unrolled.get(str(run)), "called" if self.how == "calls" else "rolled"
                yield f"{form}: {run}" if why is None else f"not {form}: {run}, because {why}"

    def _node(self, graph: Graph, run: ir.Layers) -> Node:
        formals = [*(before for _, before, _ in run.carries), *run.columns]
        body = graph.extract(run.template, [*(after for _, _, after in run.carries), *run.rows])
        outputs = (*run.last, *(name for names in run.rows.values() for name in names))
        attributes = {
            # No longer extracted: what computes a formal outside computes it for one of the layers.
            "body": replace(body, inputs=tuple(map(ValueInfo, formals)), extracted_from=None),
            "unrolled": graph.extract(run.nodes, tuple(filter(None, outputs))),
            "run": run,
            "rolling": self,
        }
        inputs = (*(first for first, _, _ in run.carries), *(n for names in run.columns.values() for n in names))
        return Node("layers", "Layers", "onnx2jax.runtime", 1, inputs, outputs, attributes, LAYERS)


def _layers(*values: Any, body: Any, unrolled: Any, run: ir.Layers, rolling: Rolling) -> tuple[Any, ...]:
    """Layers as one scan or as calls; evaluated one after the other where that fails."""
    body, unrolled = (replace(c, context=replace(c.context, layers=None)) for c in (body, unrolled))
    state, rest = values[: len(run.carries)], values[len(run.carries) :]
    columns = [rest[i : i + run.count] for i in range(0, len(rest), run.count)]
    try:
        if is_known(values):  # nothing to compile, and what is known stays known
            raise ValueError("all of their operands are known")
        if rolling.how == "calls":
            last, rows = _called(state, columns, body, run.count)
        else:
            last, rows = _scanned(state, columns, body, run.count, remat=rolling.how == "remat")
    except Exception as error:  # types differ, or a node raises: by itself it does so with its own operands
        rolling.unrolled[str(run)] = str(error).partition("\n")[0]
        outputs = dict(zip((v.name for v in unrolled.outputs), unrolled(), strict=True))
        every = (*run.last, *(name for names in run.rows.values() for name in names))
        return tuple(outputs.get(name) for name in every)
    rolling.unrolled.pop(str(run), None)
    return (*last, *(v for row in rows for v in row))


_ATTRIBUTES: Final = frozenset({"body", "unrolled", "run", "rolling"})
LAYERS: Final = Operator("onnx2jax.runtime", "Layers", 1, _layers, attributes=_ATTRIBUTES)
"""The target of a node that stands for a run of layers."""


def _scanned(
    state: Sequence[Any], columns: Sequence[Sequence[Any]], body: Any, count: int, *, remat: bool
) -> tuple[list[Any], list[Sequence[Any]]]:
    """The values after the last layer, and those of each layer that are read outside.

    Args:
        state: the values before the first layer.
        columns: each layer's own values.
        body: the layer, as a function of its state and its values.
        count: the number of layers.
        remat: recompute values inside of layers for gradients.
    """
    same = list(map(_is_fixed, columns))
    stacked = [_stacked(column) for column, fixed in zip(columns, same, strict=True) if not fixed]
    known: dict[int, Any] = {}

    def step(_: Any, state: Sequence[Any], varying: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        values = [*state, *_with_fixed(varying, columns, same)]
        operands = {i: v for i, v in enumerate(values) if not is_known(v)}

        def layer(operands: dict[int, Any]) -> list[Any]:
            return marked_constants(results(body(*(operands.get(i, v) for i, v in enumerate(values)))))

        function = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        outputs = with_constants(function(operands))
        new, outs = list(outputs[: len(state)]), dict(enumerate(outputs[len(state) :]))
        known.clear()
        known.update((i, v) for i, v in outs.items() if is_known(v))
        return np.True_, new, [v for i, v in outs.items() if i not in known]

    last, outs = scan(step, list(state), stacked, count)
    several, rows = iter(outs), range(len(body.outputs) - len(state))
    return last, [[known[i]] * count if i in known else _unstacked(next(several), count) for i in rows]


def _called(
    state: Sequence[Any], columns: Sequence[Sequence[Any]], body: Any, count: int
) -> tuple[list[Any], list[Sequence[Any]]]:
    """As ``_scanned``, by a call of a jitted function for each layer, traced once for operands of equal types."""
    same = list(map(_is_fixed, columns))

    def layer(state: Sequence[Any], varying: Sequence[Any]) -> list[Any]:
        return marked_constants(results(body(*state, *_with_fixed(varying, columns, same))))

    layer.__name__ = LAYER
    jitted, rows = jax.jit(layer), []
    for k in range(count):
        varying = [column[k] for column, fixed in zip(columns, same, strict=True) if not fixed]
        outputs = with_constants(jitted(list(state), varying))
        state, row = outputs[: len(state)], outputs[len(state) :]
        rows.append(row)
    return list(state), list(zip(*rows, strict=True))


def _is_fixed(column: Sequence[Any]) -> bool:
    """Whether a value is known, and the same in all layers."""
    return all(equal(column[0], v) for v in column)


def _with_fixed(varying: Sequence[Any], columns: Sequence[Sequence[Any]], same: Sequence[bool]) -> Iterator[Any]:
    """A layer's values of all columns, given those that are not the same in all layers."""
    rest = iter(varying)
    return (column[0] if fixed else next(rest) for column, fixed in zip(columns, same, strict=True))


def _stacked(column: Sequence[Any]) -> Any:
    """Each layer's own value along a new first axis."""
    return np.stack(column) if is_known(column) else lax.concatenate([lax.expand_dims(v, (0,)) for v in column], 0)


def _unstacked(values: Any, count: int) -> list[Any]:
    return [lax.index_in_dim(values, k, keepdims=False) for k in range(count)]
