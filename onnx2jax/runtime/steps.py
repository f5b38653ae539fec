"""A graph on the host for calls of a kind that was met before: what they have in common is worked out once.

The first call goes through ``evaluate``, which asks of each node what it needs. For later ones every node becomes a
step: the operator's function with its attributes, its values found by name. What follows from constants and from the
shapes of inputs alone is the same in all calls of a kind, and is kept.

A node that returns what it is given: 2.5 us by ``evaluate``, 0.6 us as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..ir.graph import Graph, Node
from ..ops.registry import Operator
from .evaluate import Context, Host, Scope, checked, fixtures
from .explained import explained
from .partition import body_of
from .thresholds import LARGEST_ARRAY, LARGEST_CONSTANT
from .values import to_host

Step = Callable[[Scope, Host], None]
"""Puts the outputs of a node into the scope."""


def steps(graph: Graph, context: Context) -> dict[Node, Step] | None:
    """The nodes of a graph as steps, in order; None where a node needs more than its operands' values.

    Args:
        graph: what is evaluated on the host, parts that are compiled included.
        context: that of the call, of which the settings alone are kept.
    """
    settings = context.settings
    if graph.differentiates or settings.annotate or settings.place is not None:
        return None
    if not all(body_of(n) or (n.is_plain and isinstance(n.target, Operator)) for n in graph.nodes):
        return None
    return {node: _step(node, context) for node in graph.nodes}


def decided(
    steps: Mapping[Node, Step], constants: Mapping[str, Any], inputs: Mapping[str, Any], host: Host
) -> tuple[dict[str, Any], list[Step]]:
    """What is the same in all calls with inputs of these shapes, by name, and the steps that are left for each call.

    Args:
        steps: of all nodes, in order.
        constants: what no call changes.
        inputs: those of one call, or of another of the same kind.
        host: that of the call.
    """
    scope, same, left = {**constants, **inputs}, dict(constants), list[Step]()
    with np.errstate(all="ignore"):
        for node, step in steps.items():
            if _is_decided(node, same.keys(), inputs):
                step(scope, host)
                made = {n: scope[n] for n in node.outputs if n}
                if all(type(v) is np.ndarray and v.size <= LARGEST_CONSTANT for v in made.values()):
                    same.update((n, _read_only(v)) for n, v in made.items())
                    continue
            left.append(step)
    return same, left


def _is_decided(node: Node, same: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether it reads nothing but what is the same in all calls, and of inputs the shapes."""
    if not isinstance(node.target, Operator) or body_of(node) is not None or not any(node.inputs):
        return False
    shaped = node.target.shaped
    parameters = map(node.target.parameter, range(len(node.inputs)))
    pairs = zip(node.inputs, parameters, strict=True)
    return all(not n or n in same or (p in shaped and hasattr(inputs.get(n), "shape")) for n, p in pairs)


def _read_only(value: np.ndarray) -> np.ndarray:
    """Every call reads it, and may return it."""
    value = value.view()
    value.flags.writeable = False
    return value


def _step(node: Node, context: Context) -> Step:
    body = body_of(node)
    if body is not None:
        return _part(node, body)
    operator: Any = node.target
    operator.check_choices(node.attributes)
    function = operator.function
    attributes = {**fixtures(node, operator, {}, context), **node.attributes}
    inputs, outputs = node.inputs, node.outputs
    only = outputs[0] if len(outputs) == 1 else ""

    def step(scope: Scope, _: Host) -> None:
        values = [v if type(v := scope[n]) is np.ndarray else to_host(v) for n in inputs]
        try:
            results = function(*values, **attributes)
        except Exception as e:
            if (error := explained(e, node, values, True)) is e:
                raise
            raise error from e
        if only and type(results) is np.ndarray and results.nbytes <= LARGEST_ARRAY:
            scope[only] = results
        else:
            scope.update((n, v) for n, v in zip(outputs, checked(node, values, results), strict=False) if n)

    return step


def _part(node: Node, body: Graph) -> Step:
    def step(scope: Scope, host: Host) -> None:
        scope.update(zip(node.outputs, host.part(body, scope), strict=True))

    return step
