"""A model in which some values go through more nodes before anybody reads them: in its graph, and in the file saved.

before:   x -> [node] -> y                       after:   x -> [node] -> y/before -> [steps] -> y
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from ...errors import UnsupportedError
from ...ir import analysis
from ...ir.graph import Graph, Node
from ...ops.registry import resolve
from ...proto.messages import AttributeProto, TensorProto
from ...proto.names import normal_domain
from ...proto.tensors import from_array
from ...proto.types import TensorType
from ..model import Model
from ..params import Params
from .rebatch import within_groups

OLDEST: Final = 7
"""The first opset whose arithmetic broadcasts as it does today."""
NEWEST: Final = 21
"""The opset of nodes in a model that has none of ai.onnx."""


@dataclass(frozen=True)
class Step:
    """A node of ai.onnx with one output, named as the node when nothing else is said; its attributes are integers."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    output: str = ""
    attributes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Detour:
    """What is computed between a value and those that read it.

    Attributes:
        value: the output of a node of the main graph.
        before: the name under which the steps read what that node makes.
        steps: the last of them makes ``value``.
        initializers: the constants that they use.
    """

    value: str
    before: str
    steps: tuple[Step, ...]
    initializers: Mapping[str, np.ndarray]


def opset_of(model: Model) -> int:
    """The opset of the nodes of detours.

    Raises:
        UnsupportedError: that of the model is too old.
    """
    opset = model.opsets.get("", NEWEST)
    if opset < OLDEST:
        raise UnsupportedError(
            f"the model is of opset {opset}; nodes can be added from opset {OLDEST} on. Convert the file to a later one"
        )
    return opset


def detoured(graph: Graph, detours: Sequence[Detour], opset: int) -> Graph:
    """The graph with the detours."""
    by_value = {d.value: d for d in detours}

    def nodes(graph: Graph) -> Iterable[Node]:
        for node in graph.nodes:
            found = [by_value[v] for v in node.outputs if v in by_value]
            outputs = tuple(by_value[v].before if v in by_value else v for v in node.outputs)
            yield replace(node, outputs=outputs) if found else node
            for detour in found:
                yield from (_node(step, opset) for step in detour.steps)

    changed = within_groups(graph, lambda graph: replace(graph, nodes=tuple(nodes(graph))))
    added = {n: v for d in detours for n, v in d.initializers.items()}
    return replace(changed, initializers={**changed.initializers, **added})


def _node(step: Step, opset: int) -> Node:
    target = resolve("", step.op_type, opset)
    outputs = (step.output or step.name,)
    return Node(step.name, step.op_type, "", opset, step.inputs, outputs, dict(step.attributes), target)


def with_detours(model: Model, detours: Sequence[Detour]) -> Model:
    """The model with the detours; ``save`` writes them as nodes and initializers."""
    opset = opset_of(model)
    graph = detoured(model.graph, detours, opset)
    stored = analysis.parameters(graph)
    params = Params({n: model.params.get(n, v) for n, v in stored.items()})
    placement, origin = model.placement, model.origin
    if placement is not None:
        placement = replace(placement, params={**placement.of_params(stored), **placement.params})
    if origin is not None:
        origin = origin.changed(partial(_write, tuple(detours), opset))
    types = {n: TensorType(v.dtype, v.shape) for n, v in stored.items()}
    new = object.__new__(Model)
    changes = {"graph": graph, "params": params, "placement": placement, "origin": origin, "_types": types}
    new.__setstate__(model.__getstate__() | changes)
    return new


def _write(detours: Sequence[Detour], opset: int, message: Any) -> None:
    """The detours into a ModelProto."""
    by_value, graph = {d.value: d for d in detours}, message.graph
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        kept = graph.node[-1]
        found = [by_value[v] for v in node.output if v in by_value]
        for detour in found:
            kept.output[list(kept.output).index(detour.value)] = detour.before
            for spec in (s for entry in kept.device_configurations for s in entry.sharding_spec):
                if spec.tensor_name == detour.value:
                    spec.tensor_name = detour.before
            for step in detour.steps:
                outputs = [step.output or step.name]
                added = graph.node.add(op_type=step.op_type, name=step.name, input=step.inputs, output=outputs)
                for name, value in step.attributes.items():
                    added.attribute.add(name=name, type=AttributeProto.INT, i=value)
    for detour in detours:
        graph.initializer.extend(TensorProto(**from_array(v, n)) for n, v in detour.initializers.items())
    if all(normal_domain(o.domain) for o in message.opset_import):
        message.opset_import.add(domain="", version=opset)
