"""Models derived from a graph: a part of it, and of its file; inner values as outputs; values replaced by functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final

from ...errors import InputNameError, InputTypeError, ModelError, did_you_mean, names_list
from ...eval.known_values import inferred_types
from ...ir.analysis import parameters
from ...ir.graph import Graph, Node, ancestors, nodes_named
from ...ops.registry import Operator
from ...proto.messages import ValueInfoProto, keep, subgraphs
from ...proto.types import TensorType, ValueInfo, to_code
from .rewritten import drop_unread, name_nodes, names_read

PRIVATE: Final = "onnx2jax.model"
PASSED: Final = "{}/replaced by an input"
"""What an output of a node is called where an input of a part has its name."""


def with_graph(model: Any, graph: Graph, static: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """The model with another graph over the same weights; ``fields`` are of its spec."""
    return model._replace(model.spec.with_graph(graph, static, **fields))


def with_rewritten(
    model: Any, spec: Any, graph: Graph, write: Callable[[Any], None], changes: Mapping[str, Any]
) -> Any:
    """The model of a spec with another graph for the same calls; ``write`` makes it of its file's ModelProto."""
    origin = None if spec.origin is None else spec.origin.changed(write)
    kept = {"bucket": spec.bucket, "max_size": spec.max_size}
    return model._replace(spec.with_graph(graph, changes=changes, origin=origin, **kept))


def cut(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """The subgraph between some values; inputs that the file does not declare have their inferred types.

    Raises:
        InputNameError: there is no such value.
    """
    inputs, wanted = names_list(inputs), tuple(names_list(outputs)) or tuple(v.name for v in graph.outputs)
    if unknown := sorted({*inputs, *wanted} - graph.defines):
        raise InputNameError(
            f"the main graph has no value {', '.join(map(repr, unknown))}{hint(graph, unknown, graph.defines)}"
        )
    nodes = tuple(_without_outputs(inputs, node) for node in ancestors(graph.nodes, wanted, roots=inputs))
    reads = {*wanted, *(n for node in nodes for n in node.reads)} | set(inputs)
    known = {v.name: v for v in (*graph.value_info.values(), *graph.inputs, *graph.outputs)}
    others = [v for v in graph.inputs if v.name in reads and v.name not in inputs]
    if untyped := [n for n in inputs if n not in known or known[n].type is None]:
        types = inferred_types(replace(graph, nodes=tuple(ancestors(graph.nodes, untyped))))
        known |= {n: ValueInfo(n, types.get(n)) for n in untyped}
    return replace(
        graph,
        inputs=(*(known.get(n, ValueInfo(n)) for n in inputs), *others),
        outputs=tuple(known.get(n, ValueInfo(n)) for n in wanted),
        initializers={n: v for n, v in graph.initializers.items() if n in reads and n not in inputs},
        nodes=nodes,
    )


def _without_outputs(names: Sequence[str], node: Node) -> Node:
    """The node with some of its outputs renamed; it stays for another output."""
    if set(names).isdisjoint(node.outputs):
        return node
    return replace(node, outputs=tuple(PASSED.format(n) if n in names else n for n in node.outputs))


def hint(graph: Graph, unknown: Sequence[str], values: Iterable[str]) -> str:
    """The end of a message about names that are none of these values: they are nodes, inputs, weights, or misspelt."""
    inputs, weights = {v.name for v in graph.inputs}, parameters(graph)
    hints = [
        f"; {n!r} is an input: read or change it before the call, model(f({n}))"
        if n in inputs
        else f"; {n!r} is a weight: model.params[{n!r}], and model.with_params({{{n!r}: array}}) for another"
        for n in unknown
        if n in inputs or n in weights
    ]
    return nodes_named(graph, unknown) or "".join(hints[:3]) or did_you_mean(unknown, values)


def node_outputs(graph: Graph) -> list[str]:
    """The names of all node outputs, in graph order."""
    return [n for node in graph.nodes for n in node.outputs if n]


def by_pattern(patterns: Iterable[str], names: Sequence[str]) -> tuple[set[str], list[str]]:
    """The names that match a pattern or equal it, and the patterns that match none."""
    matches = {p: {n for n in names if n == p or fnmatchcase(n, p)} for p in patterns}
    return set().union(*matches.values()), [p for p, matched in matches.items() if not matched]


def matching(graph: Graph, patterns: str | Iterable[str]) -> list[str]:
    """The names of node outputs that match a pattern or equal it, in graph order.

    Raises:
        InputNameError: a pattern matches none of them.
    """
    names = node_outputs(graph)
    matches, missed = by_pattern(names_list(patterns), names)
    if missed:
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise InputNameError(
            f"no node output of the main graph matches {', '.join(map(repr, missed))}; the outputs are {shown}"
            f"{hint(graph, missed, names)}"
        )
    return [n for n in names if n in matches]


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


def _check_function(pattern: str, function: Any) -> None:
    """Raise InputTypeError if a function given to ``replace`` cannot be called with a value alone."""
    if not callable(function):
        raise InputTypeError(
            f"replace has {pattern!r}: {type(function).__name__}; give a function of the value. To put an array in its "
            f"place: {{{pattern!r}: lambda value: jnp.broadcast_to(array, value.shape).astype(value.dtype)}}"
        )
    try:
        called = inspect.signature(function)
    except (TypeError, ValueError):  # NumPy's and built-in functions may have none
        return
    try:
        called.bind(None)
    except TypeError as e:
        name = getattr(function, "__name__", type(function).__name__)
        raise InputTypeError(
            f"replace has {pattern!r}: {name}{called}, which is called with the value alone ({e}). Fix other "
            f"arguments: {{{pattern!r}: lambda value: {'f' if name == '<lambda>' else name}(value, ...)}}"
        ) from None


REPLACE: Final = Operator(*(PRIVATE, "Replace", 1, _replace, ("value",)), attributes=frozenset({"function"}))
"""The operator of nodes inserted between a value and its readers."""


def replaced(graph: Graph, functions: Mapping[str, Callable[[Any], Any]]) -> Graph:
    """The graph with functions inserted between the values that match patterns and their readers.

    Raises:
        InputNameError: a pattern matches nothing.
        InputTypeError: a function cannot be called with the value alone.
    """
    if not isinstance(functions, Mapping):
        raise InputTypeError(
            "replace takes a dict of functions by the values that they change: {'relu1.out': function}"
        )
    for pattern, function in functions.items():
        _check_function(pattern, function)
    matched = {p: set(matching(graph, p)) for p in functions}
    nodes: list[Node] = []
    for node in graph.nodes:
        steps: list[Node] = []
        outputs: list[str] = []
        for name in node.outputs:
            chain = [functions[p] for p, names in matched.items() if name in names]
            stages = [*(f"{name}/before{i or ''}" for i in range(len(chain))), name]
            outputs.append(stages[0])
            for function, (before, after) in zip(chain, pairwise(stages), strict=True):
                attributes = {"function": function}
                steps.append(Node(before, "Replace", PRIVATE, 1, (before,), (after,), attributes, REPLACE))
        nodes += [replace(node, outputs=tuple(outputs)), *steps] if steps else [node]
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class FilePart:
    """A change of a ModelProto: its graph between some values; training_info refers to the whole graph, and goes.

    Attributes:
        inputs, outputs: values of the main graph.
        graph: the whole graph, from which types are inferred where the file declares none.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: Graph

    def __call__(self, message: Any) -> None:
        graph, ends = message.graph, {*self.inputs, *self.outputs}
        declared = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output) if v.HasField("type")}
        weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        computed = {name for node in graph.node for name in node.output}
        if unknown := ends - weights - computed - declared.keys():
            raise ModelError(
                f"the file has no value {sorted(unknown)[0]!r}, which an option of convert computes: cut the model "
                "converted without that option, and save it"
            )
        read = self._keep_nodes(graph)
        inferred = inferred_types(self.graph) if ends - declared.keys() else {}
        declared = {n: declared[n] if n in declared else _value_info(n, inferred) for n in ends}
        others = [v for v in graph.input if v.name in read and v.name not in self.inputs]
        inputs, outputs = [declared[n] for n in self.inputs] + others, [declared[n] for n in self.outputs]
        for field, values in ((graph.input, inputs), (graph.output, outputs)):
            copies = [type(v).FromString(v.SerializeToString()) for v in values]
            del field[:]
            field.extend(copies)
        keep(graph.initializer, lambda t: t.name not in self.inputs)
        keep(graph.sparse_initializer, lambda t: t.values.name not in self.inputs)
        drop_unread(graph)
        del message.training_info[:]

    def _keep_nodes(self, graph: Any) -> set[str]:
        """Remove the nodes that the outputs do not need; returns the names that are read."""
        name_nodes(graph)
        for node in graph.node:
            node.output[:] = [PASSED.format(n) if n in self.inputs else n for n in node.output]
        read = {*self.outputs}
        for node in reversed(graph.node):
            if not read.isdisjoint(node.output):
                read.update(filter(None, node.input))
                read.update(name for inner in subgraphs(node) for name in names_read(inner) if name)
        keep(graph.node, lambda n: not read.isdisjoint(n.output))
        return read


def _value_info(name: str, types: Mapping[str, TensorType]) -> Any:
    """The declaration of a value, with its type where it is inferred."""
    info, kind = ValueInfoProto(name=name), types.get(name)
    if kind is not None:
        tensor = info.type.tensor_type
        tensor.elem_type = to_code(kind.dtype)
        for extent in kind.shape or ():
            tensor.shape.dim.add(**({"dim_value": extent} if isinstance(extent, int) else {"dim_param": extent or ""}))
    return info
