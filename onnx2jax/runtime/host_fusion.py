"""Fuses host nodes over floating-point arrays into one list of NumPy calls.

before:   Scaler -> LinearClassifier -> Normalizer -> ZipMap        after:   (sub, mul, dot, add, exp, ...) -> ZipMap

An operator in NumPy checks and converts its operands in Python, which takes longer than arithmetic on a few numbers.
After a few calls of a signature its nodes are traced, and run as ``numpy_program`` runs tiny programs. Nodes that read
integers or strings stay as they are: operators validate such values on the host, and cannot if they are traced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from ..errors import OnnxError
from ..eval.interpreter import Context, Settings, evaluate
from ..ir.graph import Graph, Node
from ..jaxpr.pipeline import HOST_PASS, guarded
from ..ops.registry import Operator
from ..proto.types import ValueInfo
from .cut import body_of
from .host_plan import Step, typed_step
from .numpy_executor import numpy_program

FEW_CALLS: Final = 4
"""Calls of a signature before its host nodes are fused, which takes some 10 ms."""

Steps = Sequence[tuple[Node, Step]]


def fused(
    steps: Steps,
    scope: Mapping[str, Any],
    same: Mapping[str, Any],
    outputs: Iterable[str],
    settings: Settings,
    inputs: Collection[str] = (),
) -> list[tuple[Node, Step]]:
    """The steps, with fusible nodes that need none of the others between them as one step, under the last node's name.

    Args:
        steps: the nodes that each call runs, in order.
        scope: the values of one call by name.
        same: values that are equal in all calls.
        outputs: names of the graph's outputs.
        settings: of the model.
        inputs: values whose types are part of the signature.
    """
    outputs = set(outputs)
    apart = {node for node, _ in steps if not _is_fusible(node, scope, same)}

    def as_one(run: Steps) -> Step | None:
        nodes = {node for node, _ in run}
        read = outputs.union(*(node.inputs for node, _ in steps if node not in nodes))
        return guarded(HOST_PASS, lambda: _fused(run, scope, same, read, settings, inputs))

    while True:
        found: list[tuple[Node, Step]] = []
        for run in _runs(steps, apart):
            node, step = run[-1]
            one = step if node in apart else as_one(run)
            if one is None:  # some have no NumPy program
                alone = {node for node, step in run if len(run) == 1 or as_one([(node, step)]) is None}
                apart |= alone or {node for node, _ in run}
                break
            found.append((node, one))
        else:
            return found


def _runs(steps: Steps, apart: Collection[Node]) -> list[Steps]:
    """The steps in an order in which those that can be fused are together; each of those apart is a run of its own."""
    runs: list[Steps] = []
    run: list[tuple[Node, Step]] = []
    behind: list[Steps] = []
    for node, step in steps:
        if node in apart:
            behind.append([(node, step)])
            continue
        if not {n for ((other, _),) in behind for n in other.outputs}.isdisjoint(node.inputs):
            runs += [run, *behind]
            run, behind = [], []
        run.append((node, step))
    return list(filter(None, [*runs, run, *behind]))


def _is_fusible(node: Node, scope: Mapping[str, Any], same: Mapping[str, Any]) -> bool:
    """Whether an operator reads floating-point arrays alone, but for constants, and needs no value among them."""
    if body_of(node) is not None or not isinstance(node.target, Operator) or node.graphs:
        return False
    operator = node.target
    for i, name in enumerate(node.inputs):
        if name in same:
            continue
        value = scope[name]
        if type(value) is not np.ndarray or value.dtype.kind != "f" or operator.parameter(i) in operator.static:
            return False
    return all(type(scope[n]) is np.ndarray and not scope[n].dtype.hasobject for n in node.outputs if n)


def _fused(
    run: Steps,
    scope: Mapping[str, Any],
    same: Mapping[str, Any],
    read: set[str],
    settings: Settings,
    inputs: Collection[str],
) -> Step | None:
    """The nodes as one step that stores the values which others ``read``; None if that is impossible."""
    nodes, plain = tuple(node for node, _ in run), tuple(step for _, step in run)
    computed = dict.fromkeys(n for node in nodes for n in node.outputs if n)
    names = list(dict.fromkeys(n for node in nodes for n in node.inputs if n not in computed and n not in same))
    writes = [n for n in computed if n in read]
    constants = {n: same[n] for node in nodes for n in node.inputs if n and n in same}
    graph = Graph("host", "", (), tuple(map(ValueInfo, writes)), {}, nodes)
    types = [jax.ShapeDtypeStruct(scope[n].shape, scope[n].dtype) for n in names]

    def results(*leaves: Any) -> tuple[Any, ...]:
        return evaluate(graph, {**constants, **dict(zip(names, leaves, strict=True))}, Context({}, None, settings))

    try:
        traced = jax.make_jaxpr(results)(*types)
    except OnnxError:  # a node whose result's shape depends on data
        return None
    program = numpy_program(traced, 0, math.inf)
    if program is None:
        return None
    return typed_step(names, scope, program.bound([]), writes, plain, inputs)
