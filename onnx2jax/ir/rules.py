"""Rules of the format for graphs, functions and calls, which the importer enforces."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import numpy as np

from ..errors import ModelError
from ..proto.types import TensorType, ValueInfo, shapes_agree
from . import binding
from .graph import Function, Graph, Node, Reference

_SCALARS = ("f", "i", "s", "t", "g")
_LISTS = ("floats", "ints", "strings", "tensors", "graphs")
_LATER = ("sparse_tensor", "sparse_tensors", "tp", "type_protos")
VALUE_FIELDS: Final = dict(enumerate((*_SCALARS, *_LISTS, *_LATER), 1))
"""Attribute type -> the field that holds the value."""
_FIELD_NAMES: Final = frozenset(VALUE_FIELDS.values())
EXPANSION_LIMIT: Final = 1_000_000
"""The most nodes of a model once every function call is expanded; a chain of doubling functions soon exceeds it."""


def used_fields(a: Any) -> list[str]:
    """The fields of an AttributeProto that hold a value."""
    return [d.name for d, _ in a.ListFields() if d.name in _FIELD_NAMES]


def quoted(names: Iterable[str]) -> str:
    """The names as the subject of a sentence: ``'a', 'b' are``."""
    names = sorted(names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more + (" is" if len(names) == 1 else " are")


def check_text(where: str, *names: Any) -> None:
    """Raise unless all names are valid UTF-8; protobuf returns bytes for those that are not."""
    if bytes in map(type, names):
        broken = next(name for name in names if isinstance(name, bytes))
        raise ModelError(f"{where}: {broken[:40]!r} is not valid UTF-8", rule="GR-23")


def check_call(node: Node, function: Function, message: Any) -> None:
    """Raise unless a node's inputs, outputs and attributes fit the function that it calls."""
    for what, actual, formal in (
        ("inputs", node.inputs, function.body.inputs),
        ("outputs", node.outputs, function.body.outputs),
    ):
        if len(actual) > len(formal):
            raise ModelError(f"{node} gives {len(actual)} {what}, the function has {len(formal)}", rule="FN-09")
    unknown = set(node.attributes) - set(function.attributes)
    if unknown:
        known = list(function.attributes)
        raise ModelError(f"{node} has attributes {sorted(unknown)}; the function has {known}", rule="FN-12")
    for a in message.attribute:
        wanted = function.parameters.get(a.name)
        if wanted and a.type and a.type != wanted:
            text = f"{node} gives attribute {a.name!r} as type {a.type}, the function uses it as {wanted}"
            raise ModelError(text, rule="FN-15")
    lacking = sorted(function.required - set(node.attributes))
    if lacking:
        raise ModelError(f"{node} lacks attributes {lacking}, which the function requires", rule="FN-14")


def check_branches(node: Node) -> None:
    """Raise if a branch of If declares inputs, which nothing supplies (rule SC-11)."""
    for name, branch in node.attributes.items():
        formals = branch.inputs if isinstance(branch, Graph) else ()
        if inputs := [v.name for v in formals if v.name not in branch.initializers]:
            raise ModelError(
                f"{node}: {name} declares the inputs {inputs}, and branches of If take none: they read the values of "
                "the graphs around by name. Remove them from the branch's graph.input",
                rule="SC-11",
            )


def check_defined(names: Collection[str], where: str) -> None:
    """Raise if there are names that a graph reads and that nothing defines."""
    if names:
        raise ModelError(
            f"{quoted(names)} read or returned by {where} but defined nowhere "
            "(no input, initializer or earlier node has the name)",
            rule=("GR-01", "GR-14"),
        )


def required(body: Graph) -> frozenset[str]:
    """Attributes of a function that operators in its body require."""
    names: set[str] = set()
    pending = list(body.nodes)
    while pending:
        node = pending.pop()
        pending += [n for g in node.graphs for n in g.nodes]
        references = {k: v.name for k, v in node.attributes.items() if isinstance(v, Reference)}
        if references and node.target is not None:
            target = node.target
            needed = target.required if isinstance(target, Function) else binding.required(target)
            names.update(references[k] for k in needed if k in references)
    return frozenset(names)


def check_default(where: str, declared: ValueInfo, value: np.ndarray | None) -> None:
    """Raise unless an initializer that is an input's default has the input's type (rule GR-19)."""
    kind = declared.type
    if value is None or not isinstance(kind, TensorType):
        return
    if kind.dtype != value.dtype or not shapes_agree(kind.shape, value.shape):
        have = TensorType(value.dtype, value.shape)
        raise ModelError(f"{where}: input {declared} has an initializer of type {have}", rule="GR-19")


def single_definitions(
    where: str,
    inputs: Iterable[ValueInfo],
    initializers: Iterable[str],
    nodes: Iterable[Node],
    constants: Iterable[str],
) -> None:
    """Raise if a name is defined more than once."""
    names = [v.name for v in inputs] + list(constants) + [n for node in nodes for n in node.outputs if n]
    names += set(initializers) - {v.name for v in inputs}  # an initializer may be an input's default (rule GR-04)
    twice = [n for n, times in Counter(names).items() if times > 1]
    if twice:
        raise ModelError(f"{where}: {quoted(twice)} defined more than once", rule="GR-02")


def in_order(where: str, nodes: list[Node], defined: set[str]) -> tuple[Node, ...]:
    """The nodes in topological order, as close to the file's order as possible."""
    producers = {name: i for i, node in enumerate(nodes) for name in node.outputs if name not in defined}
    sources = {i: [producers[n] for n in node.reads if n in producers] for i, node in enumerate(nodes)}
    sorter = TopologicalSorter(sources)
    try:
        sorter.prepare()
    except CycleError as e:
        cycle = {nodes[i].name for i in e.args[1]}
        raise ModelError(f"{where} has a cycle: {quoted(cycle)} waiting for one another", rule="GR-01") from None
    ready: list[int] = []
    result: list[Node] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        first = heapq.heappop(ready)  # the earliest ready node of the file
        sorter.done(first)
        result.append(nodes[first])
    return tuple(result)


def expanded_size(graph: Graph) -> int:
    """The number of nodes once every call is expanded; raises ModelError if it exceeds EXPANSION_LIMIT."""
    size = 0
    for node in graph.nodes:
        size += node.target.size if isinstance(node.target, Function) else 1
        size += sum(map(expanded_size, node.graphs))
    if size > EXPANSION_LIMIT:
        raise ModelError(f"graph {graph.name!r} expands to more than {EXPANSION_LIMIT} nodes", rule="FN-20")
    return size
