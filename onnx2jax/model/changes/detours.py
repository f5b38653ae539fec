"""Inserts nodes between values and their readers, in the graph and in the saved file.

before:   x -> [node] -> y                       after:   x -> [node] -> y/before -> [nodes] -> y
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from ...errors import UnsupportedError
from ...ir import analysis
from ...ir.graph import Graph, Node
from ...proto.messages import TensorProto, normal_domain
from ...proto.tensors import from_array
from ..model import Model
from .dtype import computed_again
from .rewritten import node_message, rename_ends

OLDEST: Final = 7
"""The first opset whose arithmetic broadcasts as it does today."""
NEWEST: Final = 21
"""The opset of nodes in a model that has none of ai.onnx."""


@dataclass(frozen=True)
class Detour:
    """Nodes inserted between a value and its readers.

    Attributes:
        value: the output of a node of the main graph.
        before: the new name of the original output, which ``nodes`` read.
        nodes: of ai.onnx with integer attributes, in execution order; the last one outputs ``value``.
        initializers: their constants, by name.
    """

    value: str
    before: str
    nodes: Sequence[Node]
    initializers: Mapping[str, np.ndarray]


def opset_of(model: Model) -> int:
    """The opset of inserted nodes.

    Raises:
        UnsupportedError: the model's opset is too old.
    """
    opset = model.opsets.get("", NEWEST)
    if opset < OLDEST:
        raise UnsupportedError(
            f"nodes can be added from opset {OLDEST} on, and the model has opset {opset}: convert it to a later one"
        )
    return opset


def detoured(graph: Graph, detours: Sequence[Detour]) -> Graph:
    """The graph with the nodes inserted."""
    by_value, nodes = {d.value: d for d in detours}, list[Node]()
    for node in graph.nodes:
        behind = [by_value[v] for v in node.outputs if v in by_value]
        outputs = tuple(by_value[v].before if v in by_value else v for v in node.outputs)
        nodes.append(replace(node, outputs=outputs) if behind else node)
        nodes += (step for d in behind for step in d.nodes)
    added = {n: v for d in detours for n, v in d.initializers.items()}
    return replace(graph, nodes=tuple(nodes), initializers={**graph.initializers, **added})


def with_detours(model: Model, detours: Sequence[Detour]) -> Model:
    """The model with the nodes inserted; ``save`` writes them as nodes and initializers."""
    graph = computed_again(model, detoured(model.graph, detours))
    placement, origin = model.placement, model.origin
    if placement is not None:
        stored = analysis.parameters(graph)
        placement = replace(placement, params={**placement.of_params(stored), **placement.params})
    if origin is not None:
        origin = origin.changed(partial(_write, tuple(detours)))
    return model._replace(replace(model.spec, graph=graph, placement=placement, origin=origin, types={}))


def _write(detours: Sequence[Detour], message: Any) -> None:
    """Insert the nodes into a ModelProto."""
    by_value, graph, nodes = {d.value: d for d in detours}, message.graph, []
    for node in graph.node:
        behind = [by_value[v] for v in node.output if v in by_value]
        rename_ends(node, {}, {d.value: d.before for d in behind})
        nodes += [node, *(node_message(step) for d in behind for step in d.nodes)]
    del graph.node[:]
    graph.node.extend(nodes)
    for detour in detours:
        graph.initializer.extend(TensorProto(**from_array(v, n)) for n, v in detour.initializers.items())
    if all(normal_domain(o.domain) for o in message.opset_import):
        message.opset_import.add(domain="", version=detours[0].nodes[0].opset)
