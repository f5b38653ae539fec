"""Models derived from a model's graph: a subgraph, inner values as outputs, values replaced by functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

from ...errors import InputNameError, InputTypeError, did_you_mean, names_list
from ...ir.graph import Graph, Node, ancestors, nodes_named
from ...ops.registry import Operator
from ...proto.types import ValueInfo

PRIVATE: Final = "onnx2jax.model"
PASSED: Final = "{}/replaced by an input"
"""What an output of a node is called where an input of a part has its name."""


def with_graph(model: Any, graph: Graph, static: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """The model with another graph over the same weights; ``fields`` are of its spec."""
    return model._replace(model.spec.with_graph(graph, static, **fields))


def cut(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """The subgraph between some values.

    Raises:
        InputNameError: there is no such value.
    """
    inputs, wanted = names_list(inputs), tuple(names_list(outputs)) or tuple(v.name for v in graph.outputs)
    if unknown := sorted({*inputs, *wanted} - graph.defines):
        raise InputNameError(
            f"the main graph has no value {', '.join(map(repr, unknown))}{_hint(graph, unknown, graph.defines)}"
        )
    nodes = tuple(_without(inputs, node) for node in ancestors(graph.nodes, wanted, given=inputs))
    reads = {*wanted, *(n for node in nodes for n in node.reads)} | set(inputs)
    known = {v.name: v for v in (*graph.value_info.values(), *graph.inputs, *graph.outputs)}
    own = [v for v in graph.inputs if v.name in reads and v.name not in inputs]
    return replace(
        graph,
        inputs=(*(known.get(n, ValueInfo(n)) for n in inputs), *own),
        outputs=tuple(known.get(n, ValueInfo(n)) for n in wanted),
        initializers={n: v for n, v in graph.initializers.items() if n in reads and n not in inputs},
        nodes=nodes,
    )


def _without(given: Sequence[str], node: Node) -> Node:
    """The node with its given outputs renamed; it stays for another output."""
    if set(given).isdisjoint(node.outputs):
        return node
    return replace(node, outputs=tuple(PASSED.format(n) if n in given else n for n in node.outputs))


def _hint(graph: Graph, unknown: Sequence[str], values: Iterable[str]) -> str:
    """The end of a message about unknown values: they are nodes, or misspelt."""
    return nodes_named(graph, unknown) or did_you_mean(unknown, values)


def node_outputs(graph: Graph) -> list[str]:
    """The names of all node outputs, in graph order."""
    return [n for node in graph.nodes for n in node.outputs if n]


def by_pattern(patterns: Iterable[str], names: Sequence[str]) -> dict[str, set[str]]:
    """For each pattern the names that match it or equal it."""
    return {p: {n for n in names if n == p or fnmatchcase(n, p)} for p in patterns}


def matching(graph: Graph, patterns: str | Iterable[str]) -> list[str]:
    """The names of node outputs that match a pattern or equal it, in graph order.

    Raises:
        InputNameError: a pattern matches none of them.
    """
    patterns = names_list(patterns)
    names = node_outputs(graph)
    found = by_pattern(patterns, names)
    if missed := [p for p in patterns if not found[p]]:
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise InputNameError(
            f"no node output of the main graph matches {', '.join(map(repr, missed))}; the outputs are {shown}"
            f"{_hint(graph, missed, names)}"
        )
    chosen = set().union(*found.values())
    return [n for n in names if n in chosen]


def with_outputs(model: Any, names: Sequence[str]) -> Any:
    """The model with these values as outputs, then the counts of ``max_size``; the inputs stay."""
    graph, sizes = model.graph, model.spec.max_size
    wanted = (*names, *(f"{n}/count" for n in sizes))
    # Untyped: exporters often declare wrong types for inner values.
    shown = replace(graph, outputs=tuple(map(ValueInfo, wanted)), nodes=tuple(ancestors(graph.nodes, wanted)))
    return with_graph(model, shown, max_size=sizes)


def _replace(value: Any, *, function: Callable[[Any], Any]) -> Any:
    """The result of a function of a value, checked to have the same dtype and shape."""
    result = function(value)
    if result is None and value is not None:
        raise ValueError("the function returned None; to leave the value as it is, return it")
    if isinstance(value, list) and not isinstance(result, list):
        raise ValueError(f"the function turned a sequence into {type(result).__name__}; a sequence stays a list")
    if not hasattr(value, "dtype"):
        return result
    dtype, shape = getattr(result, "dtype", None), getattr(result, "shape", None)
    if (dtype, shape) != (value.dtype, value.shape):
        what = f"{dtype}{list(shape)}" if shape is not None else type(result).__name__
        raise ValueError(
            f"the function turned {value.dtype}{list(value.shape)} into {what}; keep its element type and "
            "shape: jnp.broadcast_to(result, value.shape).astype(value.dtype)"
        )
    return result


REPLACE: Final = Operator(*(PRIVATE, "Replace", 1, _replace, ("value",)), attributes=frozenset({"function"}))
"""The operator of nodes inserted between a value and its readers."""


def replaced(graph: Graph, functions: Mapping[str, Callable[[Any], Any]]) -> Graph:
    """The graph with functions inserted between the values that match patterns and their readers.

    Raises:
        InputNameError: a pattern matches nothing.
    """
    if not isinstance(functions, Mapping):
        raise InputTypeError(
            "replace takes a dict of functions by the values that they change: {'relu1.out': function}"
        )
    matched = {p: set(matching(graph, p)) for p in functions}
    nodes: list[Node] = []
    for node in graph.nodes:
        steps: list[Node] = []
        outputs = list(node.outputs)
        for k, name in enumerate(node.outputs):
            chain = [functions[p] for p, names in matched.items() if name in names]
            stages = [*(f"{name}/before{i or ''}" for i in range(len(chain))), name]
            outputs[k] = stages[0]
            for function, before, after in zip(chain, stages, stages[1:], strict=False):
                attributes = {"function": function}
                steps.append(Node(before, "Replace", PRIVATE, 1, (before,), (after,), attributes, REPLACE))
        nodes += [replace(node, outputs=tuple(outputs)), *steps] if steps else [node]
    return replace(graph, nodes=tuple(nodes))
