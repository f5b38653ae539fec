"""Models made of a model's own graph: a part of it, its inner values as outputs, its values through functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

from ...errors import InputNameError
from ...ir.graph import Graph, Imported, Node, ancestors
from ...ops.registry import Operator
from ...proto.types import ValueInfo
from .rebatch import group_of, within_groups

PRIVATE: Final = "onnx2jax.model"


def remade(model: Any, graph: Graph, static: Mapping[str, Any] | None = None, **told: Any) -> Any:
    """The model with another graph over the same weights, more inputs fixed, and what else ``convert`` was told."""
    declared = {v.name: v for v in (*model.inputs, *model.optional.values())}
    own = {v.name for v in model.graph.inputs} - declared.keys() - model.static.keys()  # below IR 4: weights
    inputs = tuple(declared.get(v.name, v) for v in graph.inputs if v.name not in own)
    imported = Imported(replace(graph, inputs=inputs), model.opsets, model.metadata, ir_version=4)
    names = {v.name for v in inputs}
    fixed = {n: v for n, v in {**model.static, **(static or {})}.items() if n in names}
    told = {"settings": model.settings, "placement": model.placement, **told}
    new = type(model)(imported, static=fixed, **told)
    vars(new)["_changes"] = {n: v for n, v in model.changed().items() if n in new._types}
    return new


def cut(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """The graph between some of its values.

    Raises:
        InputNameError: there is no such value.
    """
    wanted = tuple(outputs) or tuple(v.name for v in graph.outputs)
    if unknown := sorted({*inputs, *wanted} - graph.defines):
        raise InputNameError(f"the main graph has no value {', '.join(map(repr, unknown))}{_hidden(graph)}")
    nodes = tuple(ancestors(graph.nodes, wanted, given=inputs))
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


def _hidden(graph: Graph) -> str:
    """Where else its values may be."""
    if group_of(graph) is graph:
        return ""
    return "; with rebatch= its nodes run for a group of samples at a time: ask the model converted without rebatch="


def made(graph: Graph) -> list[str]:
    """The values that the graph's nodes make, in their order."""
    return [n for node in graph.nodes for n in node.outputs if n]


def matching(graph: Graph, patterns: str | Iterable[str]) -> list[str]:
    """The values that the graph's nodes make whose names match; a name that is a pattern's text matches as well.

    Raises:
        InputNameError: a pattern matches none.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    names = made(graph)
    found = {p: {n for n in names if n == p or fnmatchcase(n, p)} for p in patterns}
    if missed := [p for p in patterns if not found[p]]:
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise InputNameError(
            f"no node of the main graph makes a value that matches {', '.join(map(repr, missed))}; they make {shown}"
            f"{_hidden(graph)}"
        )
    chosen = set().union(*found.values())
    return [n for n in names if n in chosen]


def showing(model: Any, names: Sequence[str]) -> Any:
    """The model with some values as its outputs: it takes the same arguments, and counts what ``max_size`` pads."""
    graph, sizes = model.graph, model._max_size
    wanted = (*names, *(f"{n}/count" for n in sizes))
    # Without types: what an exporter says of inner values is often wrong, and nobody promised it.
    shown = replace(graph, outputs=tuple(map(ValueInfo, wanted)), nodes=tuple(ancestors(graph.nodes, wanted)))
    return remade(model, shown, max_size=sizes)


def _replace(value: Any, *, function: Callable[[Any], Any]) -> Any:
    """What a function makes of a value, which keeps its element type and shape."""
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
            f"the function turned {value.dtype}{list(value.shape)} into {what}; a value keeps its element type and "
            "shape: jnp.broadcast_to(result, value.shape).astype(value.dtype)"
        )
    return result


REPLACE: Final = Operator(*(PRIVATE, "Replace", 1, _replace, ("value",)), attributes=frozenset({"function"}))
"""What serves a node between a value and those that read it."""


def replaced(graph: Graph, functions: Mapping[str, Callable[[Any], Any]]) -> Graph:
    """The graph in which the values whose names match patterns go through functions before anybody reads them.

    Raises:
        InputNameError: a pattern matches nothing.
    """
    return within_groups(graph, lambda graph: _replaced(graph, functions))


def _replaced(graph: Graph, functions: Mapping[str, Callable[[Any], Any]]) -> Graph:
    taps = {p: set(matching(graph, p)) for p in functions}
    nodes: list[Node] = []
    for node in graph.nodes:
        steps: list[Node] = []
        outputs = list(node.outputs)
        for k, name in enumerate(node.outputs):
            chain = [functions[p] for p, names in taps.items() if name in names]
            stages = [*(f"{name}/before{i or ''}" for i in range(len(chain))), name]
            outputs[k] = stages[0]
            for function, before, after in zip(chain, stages, stages[1:], strict=False):
                attributes = {"function": function}
                steps.append(Node(before, "Replace", PRIVATE, 1, (before,), (after,), attributes, REPLACE))
        nodes += [replace(node, outputs=tuple(outputs)), *steps] if steps else [node]
    return replace(graph, nodes=tuple(nodes))
