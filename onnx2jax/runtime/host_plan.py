"""Host nodes as a list of steps, replayed by calls whose signature is known.

The first call goes through ``evaluate``, which looks up what each node needs. Later calls replay one step a node: the
operator's function with its attributes bound. Values that follow from constants and input shapes alone are computed
once.

An Identity node takes 2.5 us in ``evaluate`` and 0.6 us as a step.

An operator in NumPy checks and converts its operands in Python, which takes longer than arithmetic on a few numbers.
So nodes over floating-point arrays are traced after a few calls of a signature, and run as one list of NumPy calls, as
``numpy_program`` runs tiny programs:

before:   Scaler -> LinearClassifier -> Normalizer -> ZipMap        after:   (sub, mul, dot, add, exp, ...) -> ZipMap

Nodes that read integers or strings stay as they are: operators validate such values on the host, and cannot if they are
traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import jax
import numpy as np

from ..errors import OnnxError
from ..eval.interpreter import Context, Host, Scope, Settings, checked_results, evaluate, fixtures
from ..eval.node_errors import node_error
from ..eval.values import to_host
from ..ir.graph import Graph, Node
from ..jaxpr.pipeline import HOST_PASS, guarded
from ..limits import LARGEST_ARRAY, LARGEST_CONSTANT
from ..ops.registry import Operator
from ..proto.mapped import owned
from ..proto.types import ValueInfo
from .cut import body_of
from .numpy_executor import numpy_program

Step = Callable[[Scope, Host], None]
"""Runs a node and stores its outputs in the scope."""


def host_steps(graph: Graph, context: Context) -> dict[Node, Step] | None:
    """The nodes of a graph as steps, in order; None if a node needs more than its operands' values.

    Args:
        graph: the host nodes, and nodes that stand for compiled partitions.
        context: of the call; only its settings are kept.
    """
    settings = context.settings
    if graph.differentiates or settings.annotate or settings.place is not None:
        return None
    if not all(body_of(n) or (n.is_plain and isinstance(n.target, Operator)) for n in graph.nodes):
        return None
    return {node: _step(node, context) for node in graph.nodes}


def precomputed(
    host_steps: Mapping[Node, Step], constants: Mapping[str, Any], inputs: Mapping[str, Any], host: Host
) -> tuple[dict[str, Any], list[tuple[Node, Step]]]:
    """The values shared by all calls with inputs of these shapes, and the nodes and steps that each call still runs.

    Args:
        host_steps: of all nodes, in order.
        constants: values by name that are equal in all calls.
        inputs: of one call with these shapes.
        host: of that call.
    """
    scope, same, left = {**constants, **inputs}, dict(constants), list[tuple[Node, Step]]()
    with np.errstate(all="ignore"):
        for node, step in host_steps.items():
            if _is_precomputable(node, same.keys(), inputs):
                step(scope, host)
                made = {n: scope[n] for n in node.outputs if n}
                if all(type(v) is np.ndarray and v.size <= LARGEST_CONSTANT for v in made.values()):
                    same.update((n, owned(v)) for n, v in made.items())
                    continue
            left.append((node, step))
    return same, left


def _is_precomputable(node: Node, same: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a node reads only shared values and the shapes of inputs."""
    if not isinstance(node.target, Operator) or body_of(node) is not None or not any(node.inputs):
        return False
    shaped = node.target.shaped
    parameters = map(node.target.parameter, range(len(node.inputs)))
    pairs = zip(node.inputs, parameters, strict=True)
    return all(not n or n in same or (p in shaped and hasattr(inputs.get(n), "shape")) for n, p in pairs)


def _step(node: Node, context: Context) -> Step:
    body = body_of(node)
    if body is not None:
        return _part(node, body)
    operator: Any = node.target
    operator.check_choices(node.attributes)
    function = operator.function if node.casts is None else partial(node.casts.call, operator.function)
    attributes = {**fixtures(node, operator, {}, context), **node.attributes}
    inputs, outputs = node.inputs, node.outputs
    only = outputs[0] if len(outputs) == 1 else ""

    def step(scope: Scope, _: Host) -> None:
        values = [v if type(v := scope[n]) is np.ndarray else to_host(v) for n in inputs]
        try:
            results = function(*values, **attributes)
        except Exception as e:
            if (error := node_error(e, node, values, True)) is e:
                raise
            raise error from e
        kind = type(results)
        if only and (kind is list or (kind is np.ndarray and results.nbytes <= LARGEST_ARRAY)):
            scope[only] = results
        else:
            scope.update((n, v) for n, v in zip(outputs, checked_results(node, values, results), strict=False) if n)

    return step


def _part(node: Node, body: Graph) -> Step:
    def step(scope: Scope, host: Host) -> None:
        scope.update(zip(node.outputs, host.run_partition(body, scope), strict=True))

    return step


def typed_step(
    names: Sequence[str],
    scope: Mapping[str, Any],
    call: Callable[[list[Any]], Sequence[Any]],
    outputs: Sequence[str],
    plain: Sequence[Step],
    inputs: Collection[str] = (),
) -> Step:
    """A step that calls a function of some values, and runs ``plain`` steps if their types are not those in ``scope``.

    Args:
        names: the values, NumPy arrays in ``scope``.
        call: the function, specialised on their dtypes and shapes.
        outputs: names of its results.
        plain: steps that compute the same from values of any type.
        inputs: values whose types are part of the signature.
    """
    types = [(scope[n].dtype, scope[n].shape) for n in names]

    def step(scope: Scope, _: Host) -> None:
        scope.update(zip(outputs, call([scope[n] for n in names]), strict=True))

    def checked(scope: Scope, host: Host) -> None:
        if [(v.dtype, v.shape) for n in names if type(v := scope[n]) is np.ndarray] == types:
            step(scope, host)
        else:  # shapes that depend on data
            for one in plain:
                one(scope, host)

    return step if set(names) <= set(inputs) else checked


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
        done: list[tuple[Node, Step]] = []
        for run in _runs(steps, apart):
            node, step = run[-1]
            one = step if node in apart else as_one(run)
            if one is None:  # some have no NumPy program
                alone = {node for node, step in run if len(run) == 1 or as_one([(node, step)]) is None}
                apart |= alone or {node for node, _ in run}
                break
            done.append((node, one))
        else:
            return done


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
