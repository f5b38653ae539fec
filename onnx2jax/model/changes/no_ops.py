"""Removes nodes that return their input, such as Identity or two Transposes, and merges equal nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...eval.known_values import Values
from ...ir.analysis import application, by_bits, read_counts
from ...ir.graph import Graph, Node
from .constants import KEPT, SMALL, is_pure


def without_no_ops(graph: Graph, values: Values) -> Graph:
    """The graph without nodes that return their input, whose readers read that input.

    What a graph inside a node captures keeps its name, so such a node stays; and so does one between an input, or an
    initializer, and an output of the graph.
    """
    readers, fixed = read_counts(graph), _fixed_names(graph)
    renamed, nodes, producers = dict[str, str](), list[Node](), dict[str, Node]()
    for node in graph.nodes:
        node = with_inputs(node, renamed)
        node = _merged(node, producers, readers)
        source, output = _source(node, values, readers), node.outputs[0] if node.outputs else ""
        if source and output and output not in fixed:
            renamed[output] = source
        elif source and source in producers and source not in fixed and not producers[source].graphs:
            renamed[source] = output  # an output of the graph keeps its name
            producer = producers[source]
            outputs = tuple(output if n == source else n for n in producer.outputs)
            nodes = [replace(n, outputs=outputs) if n is producer else with_inputs(n, renamed) for n in nodes]
            producers = {n: m for m in nodes for n in m.outputs}
            renamed |= {old: output for old, new in renamed.items() if new == source}
        else:
            nodes.append(node)
            producers.update((n, node) for n in node.outputs if n)
    return replace(graph, nodes=tuple(nodes))


def _fixed_names(graph: Graph) -> set[str]:
    """Names that stay: of outputs of the graph, and of what graphs inside nodes capture."""
    return {v.name for v in graph.outputs}.union(*(node.captures for node in graph.nodes))


def with_inputs(node: Node, names: Mapping[str, str]) -> Node:
    """The node with other names for some of its inputs; the same object where it reads none of them."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return replace(node, inputs=tuple(names.get(n, n) for n in node.inputs))


def _source(node: Node, values: Values, readers: Mapping[str, int]) -> str:
    """The input that the first output of a node equals; empty where there is none, or other outputs are read."""
    is_same = returns_input(node, values) and not any(readers[n] for n in node.outputs[1:] if n)
    return node.inputs[0] if is_same else ""


def returns_input(node: Node, values: Mapping[str, Any]) -> bool:
    """Whether the first output of a node equals its first input.

    Args:
        node: the node.
        values: arrays that are known, by name; of other values their dtypes and shapes, None where they are unknown.
    """
    if node.domain or not node.inputs or not node.outputs:
        return False
    before, after = (values.get(n) for n in (node.inputs[0], node.outputs[0]))
    dtype, shape = getattr(before, "dtype", None), getattr(before, "shape", None)
    same_dtype = dtype is not None and dtype == getattr(after, "dtype", None)
    same_type = same_dtype and shape is not None and shape == getattr(after, "shape", None)
    match node.op_type:
        case "Identity":
            return True
        case "Concat" | "Sum" | "Max" | "Min" | "Mean":
            return len(node.inputs) == 1
        case "Dropout":
            training = operand(node, 2, values)
            return node.opset >= 7 and (node.opset < 12 or (training is not None and not training.any()))
        case "Pad":
            pads = operand(node, 1, values) if len(node.inputs) > 1 else node.attributes.get("pads")
            return pads is not None and not np.any(pads)
        case "Slice":
            steps = operand(node, 4, values)
            return same_type and steps is not None and bool((steps > 0).all())
        case "Transpose":
            reverse = None if shape is None else range(len(shape))[::-1]
            perm = node.attributes.get("perm", reverse)
            return perm is not None and list(perm) == sorted(perm)
        case "Cast" | "CastLike":
            return same_dtype
        case "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Expand":
            return same_type
        case _:
            return False


def operand(node: Node, place: int, values: Mapping[str, Any]) -> np.ndarray | None:
    """The known value of an optional input; an empty array where it is left out, None where it is unknown."""
    name = node.inputs[place] if place < len(node.inputs) else ""
    value = values.get(name) if name else np.zeros(0, np.int64)
    return value if isinstance(value, np.ndarray) else None


def _merged(node: Node, producers: Mapping[str, Node], readers: Mapping[str, int]) -> Node:
    """A Transpose of a Transpose that nothing else reads, or that it undoes, as one."""
    before = producers.get(node.inputs[0]) if (node.domain, node.op_type) == ("", "Transpose") else None
    if before is None or (before.domain, before.op_type) != ("", "Transpose"):
        return node
    if "perm" not in node.attributes or "perm" not in before.attributes:
        return node
    first: Sequence[int] = before.attributes["perm"]
    perm = tuple(first[i] for i in node.attributes["perm"])
    if readers[before.outputs[0]] > 1 and list(perm) != sorted(perm):
        return node
    return replace(node, inputs=before.inputs, attributes={**node.attributes, "perm": perm})


def without_duplicates(graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
    """The graph with one node for all with the same operator, inputs and attributes.

    Outputs of the graph, and what graphs inside nodes capture, keep their names. DequantizeLinear stays, since runtimes
    look for one in front of each operator.

    Args:
        graph: the graph.
        constants: the current values of those of its initializers that no caller can override, and that are no
            parameters: each of these stays one of its own.
    """
    fixed = _fixed_names(graph)
    arrays, applications = dict[Any, str](), dict[Any, Node]()
    renamed, nodes = dict[str, str](), list[Node]()
    for name, value in constants.items():
        if name not in fixed and value.nbytes <= SMALL and not value.dtype.hasobject:
            first = arrays.setdefault(by_bits(value), name)
            if first != name:
                renamed[name] = first
    for node in graph.nodes:
        node = same = with_inputs(node, renamed)
        if is_pure(node) and node.op_type not in KEPT:
            same = applications.setdefault(application(node, node.inputs), node)
        if same is not node and _covers(same, node) and fixed.isdisjoint(node.outputs):
            renamed.update((n, m) for n, m in zip(node.outputs, same.outputs, strict=False) if n)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _covers(node: Node, other: Node) -> bool:
    """Whether a node names all outputs that another names."""
    return all(any(node.outputs[i : i + 1]) for i, n in enumerate(other.outputs) if n)
