"""Horizontal fusion of siblings, nodes of one operator on the same values: trees of a forest in one loop.

In the place of the first of them stands one node with the outputs of all. Operators make tables of a node's attributes
``once``, whichever way the node is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..ir.analysis import siblings
from ..ir.graph import Graph, Node, in_place_of
from ..ops.registry import Operator

_made: WeakKeyDictionary[Node, dict[Any, Any]] = WeakKeyDictionary()
"""What operators made of their nodes' attributes."""


def fused(graph: Graph) -> tuple[Node, ...]:
    """The nodes of a graph, with one node in the place of siblings."""
    groups = [] if graph.complete.differentiates else siblings(graph)
    return in_place_of(graph.nodes, {group: _node(graph, group) for group in groups})


def _node(graph: Graph, group: tuple[Node, ...]) -> Node:
    operator: Any = group[0].target
    attributes = {"group": group, "alone": tuple(graph.extract([node], _named(node)) for node in group)}
    target = Operator("onnx2jax.runtime", "Together", 1, _fused, attributes=frozenset(attributes))
    outputs = tuple(name for node in group for name in _named(node))
    name = f"{group[0].name} and {len(group) - 1} other {operator.name}"
    return replace(
        group[0], name=name, op_type="Together", domain="onnx2jax.runtime", outputs=outputs, attributes=attributes,
        target=target,
    )  # fmt: skip


def _named(node: Node) -> tuple[str, ...]:
    return tuple(filter(None, node.outputs))


def _fused(*values: Any, group: tuple[Node, ...], alone: Any) -> tuple[Any, ...]:
    """The outputs of all nodes of a group; of one after the other where that fails, so that errors name the node."""
    operator: Any = group[0].target
    try:
        calls = []
        for node in group:
            operator.check_choices(node.attributes)
            fixtures = {"once": once_of(node), "double": node.casts is not None and node.casts.result == np.float64}
            calls.append({**node.attributes, **{n: v for n, v in fixtures.items() if n in operator.fixtures}})
        several = operator.for_siblings(*values, nodes=calls)
    except Exception:
        return tuple(value for closure in alone for value in closure())
    by_node = zip(group, (r if isinstance(r, tuple) else (r,) for r in several), strict=True)
    return tuple(v for node, results in by_node for n, v in zip(node.outputs, results, strict=False) if n)


def once_of(node: Node) -> Callable[..., Any]:
    """The fixture ``once`` of a node."""
    return partial(_once, _made.setdefault(node, {}) if node.is_plain else {})


def _once(made: dict[Any, Any], function: Callable[..., Any], *attributes: Any, dtype: Any = None) -> Any:
    """What a function makes of a node's attributes; the first time for all, unless a caller's attributes count.

    With ``dtype``, which the function takes as well, the first time for each.
    """
    more = {} if dtype is None else {"dtype": dtype}
    if (function, dtype) not in made:
        made[function, dtype] = function(*attributes, **more)
    return made[function, dtype]
