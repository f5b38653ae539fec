"""Rewrites graphs for fine-tuning: batch statistics, dropout, rematerialisation, and dtypes of computation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputNameError, InputTypeError, TrainingFormError, names_list
from ..ir.casts import bounded
from ..ir.graph import Function, Graph, Node, ancestors, descendants, with_graphs
from ..ir.precision import computed_in, parameters_in
from ..model.changes.parts import hint
from ..ops.arrays import is_known
from ..ops.registry import Operator, resolve
from ..proto.mapped import load
from ..proto.types import ValueInfo

PRIVATE: Final = "onnx2jax.finetune"
LAYER: Final = re.compile(r"((.*?[._/])\d+)[./]")
"""Matches node names with a layer prefix: ``/model/layers.0/attn/MatMul``, ``encoder.layer.11.output``. Groups: the
prefix with the layer's number, and without it."""


@dataclass(frozen=True)
class Form:
    """The graphs for evaluation (``plain``) and training, whose last outputs are the new running statistics."""

    plain: Graph
    training: Graph
    statistics: tuple[str, ...]
    """The names of the running statistics."""


def training_form(
    plain: Graph,
    training: Graph,
    *,
    batchnorm: str,
    dropout: bool | float,
    compute_dtype: Any,
    remat: bool | str | Sequence[str],
    dtype: np.dtype | None,
) -> Form:
    """The graphs rewritten as the options of ``finetune`` request.

    Args:
        plain: the graph for evaluation.
        training: the same with straight-through estimators, if they are requested.
        dtype: that in which the model computes; None for the types of its file.
    """
    statistics: tuple[str, ...] = ()
    if batchnorm == "train":
        training, statistics = with_batch_statistics(training)
    elif batchnorm != "frozen":
        raise TrainingFormError(f"batchnorm is {batchnorm!r}; it is 'frozen' or 'train'")
    if dropout is not False:
        if dropout is not True and not 0 <= dropout < 1:
            raise TrainingFormError(f"dropout is {dropout}; it is True, False, or a rate: 0 <= rate < 1")
        training = with_dropout(training, None if dropout is True else dropout)
    if dtype is not None:  # decided anew, because nodes were added
        if compute_dtype is not None:
            raise InputTypeError(f"the model computes in {dtype}, convert(dtype=): leave out compute_dtype=")
        plain, training = computed_in(plain, dtype), computed_in(training, dtype)
    elif compute_dtype is not None:
        products = jnp.dtype(compute_dtype)
        if products != jnp.bfloat16:
            raise InputTypeError(
                f"compute_dtype is {products}; only bfloat16 is supported. float16 would need loss scaling, because "
                "small gradients underflow"
            )
        plain, training = with_compute_dtype(plain, products), with_compute_dtype(training, products)
    return Form(plain, with_remat(training, remat), statistics)


def stored_in(dtype: np.dtype | None, params: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The parameters, with those in ``dtype`` that both graphs of the form store in it."""
    if dtype is None:
        return dict(params)
    stored = parameters_in(form.plain, dtype) & parameters_in(form.training, dtype)
    return {n: bounded(load(v), dtype).astype(dtype) if n in stored else v for n, v in params.items()}


def rematerialized(*, body: Any) -> Any:
    """The outputs of a graph whose intermediate values are recomputed in the backward pass."""
    known: list[Any] = []

    def run() -> list[Any]:
        results = body()
        known[:] = [r if is_known(r) else None for r in results]
        return [None if is_known(r) else r for r in results]

    results = jax.remat(run)()
    return tuple(k if r is None else r for r, k in zip(results, known, strict=True))


REMAT: Final = Operator(PRIVATE, "Remat", 1, rematerialized, attributes=frozenset({"body"}))


def with_remat(graph: Graph, patterns: bool | str | Sequence[str]) -> Graph:
    """The graph with the nodes of each pattern or layer, and all nodes between them, under ``jax.remat``."""
    layers = _layers(graph) if patterns is True else {}
    for pattern in layers if isinstance(patterns, bool) else names_list(patterns):
        nodes = layers.get(pattern) or [n for n in graph.nodes if fnmatchcase(n.name, pattern)]
        if not nodes:
            names = [n.name for n in graph.nodes]
            raise InputNameError(f"remat has {pattern!r}, which no node name matches; the first are {names[:8]}")
        graph = _under_remat(graph, nodes, f"remat {pattern}")
    return graph


def _layers(graph: Graph) -> dict[str, list[Node]]:
    """The nodes of each layer, by the name prefix up to the layer's number.

    Raises:
        InputNameError: node names contain no layer numbers.
    """
    nodes: dict[tuple[str, ...], list[Node]] = {}
    for node in graph.nodes:
        if match := LAYER.match(node.name):
            nodes.setdefault(match.groups(), []).append(node)
    counts = Counter(prefix for _, prefix in nodes)
    layers = {name: group for (name, prefix), group in nodes.items() if counts[prefix] > 1 and len(group) > 1}
    if not layers:
        raise InputNameError(
            f"remat=True needs layer numbers in node names ('/model/layers.0/...'), and "
            f"{[n.name for n in graph.nodes][:4]} have none; give name patterns: remat=['*block1*', '*block2*']"
        )
    return layers


def _under_remat(graph: Graph, chosen: Collection[Node], name: str) -> Graph:
    after = set(descendants(graph.nodes, (v for n in chosen for v in n.outputs)))
    before = ancestors(graph.nodes, (v for n in chosen for v in n.reads))
    inside = after.intersection(before).union(chosen)
    block = tuple(n for n in graph.nodes if n in inside)
    outside = [n for n in graph.nodes if n not in inside]
    wanted = {v for n in outside for v in n.reads} | {v.name for v in graph.outputs}
    outputs = tuple(v for n in block for v in n.outputs if v and v in wanted)
    body = Graph(name, "", (), tuple(map(ValueInfo, outputs)), {}, block)
    node = Node(name, "Remat", PRIVATE, 1, (), outputs, {"body": body}, REMAT)
    first, last = [n for n in outside if n not in after], [n for n in outside if n in after]
    return replace(graph, nodes=(*first, node, *last))


def map_graphs(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """Applies ``change`` to the graph and, first, to the graphs and functions inside its nodes."""

    @cache
    def changed(function: Function) -> Function:
        return replace(function, body=visit(function.body))

    def with_bodies(node: Node) -> Node:
        if not node.bodies:
            return node
        attributes = with_graphs(node.attributes, visit)
        target = changed(node.target) if isinstance(node.target, Function) else node.target
        return replace(node, attributes=attributes, target=target)

    def visit(graph: Graph) -> Graph:
        return change(replace(graph, nodes=tuple(map(with_bodies, graph.nodes))))

    return visit(graph)


def map_nodes(graph: Graph, change: Callable[[Node, dict[str, np.ndarray]], Node]) -> Graph:
    """Applies ``change`` to every node, also inside nested graphs and functions.

    ``change`` may add constants to the dict it receives; they become initializers of the node's graph.
    """

    def each(graph: Graph) -> Graph:
        constants: dict[str, np.ndarray] = {}
        nodes = tuple(change(node, constants) for node in graph.nodes)
        return replace(graph, nodes=nodes, initializers={**graph.initializers, **constants})

    return map_graphs(graph, each)


def with_dropout(graph: Graph, rate: float | None) -> Graph:
    """The graph with active Dropout nodes that draw from the call's key; ``rate`` replaces the nodes' ratios.

    Raises:
        TrainingFormError: there is no Dropout node.
    """
    if not any(is_onnx(node, "Dropout") for inner in graph.walk() for node in inner.nodes):
        raise TrainingFormError(
            "the model has no Dropout node: exporters remove them in inference mode, and they cannot be restored. "
            "Leave dropout=False, or export the model in training mode"
        )

    def change(node: Node, constants: dict[str, np.ndarray]) -> Node:
        if not is_onnx(node, "Dropout"):
            return node
        attributes = {k: v for k, v in node.attributes.items() if k not in ("seed", "is_test")}
        if node.opset < 10 or (node.opset < 12 and len(node.outputs) < 2):
            # Opsets 7 to 11 define inference alone; the operator of opset 1 has both modes.
            attributes |= {} if rate is None else {"ratio": rate}
            return replace(node, attributes=attributes, target=resolve("", "Dropout", 1))
        ratio, on = (*node.inputs, "")[1], f"{node.name}/training_mode"
        fixed = attributes.get("ratio") if rate is None else rate
        if fixed is not None:
            ratio = f"{node.name}/ratio"
            constants[ratio] = np.array(fixed, np.float32)
        constants[on] = np.array(True)
        return replace(node, inputs=(node.inputs[0], ratio, on), attributes={}, target=resolve("", "Dropout", 12))

    return map_nodes(graph, change)


def with_batch_statistics(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph with every BatchNormalization in training mode, and the new running statistics as last outputs.

    Returns:
        The graph, and the names of the parameters that hold the statistics.

    Raises:
        TrainingFormError: there is no BatchNormalization, or one whose statistics cannot be updated.
    """
    nested = ((inner, node) for inner in graph.walk() if inner is not graph for node in inner.nodes)
    for inner, node in nested:
        if is_onnx(node, "BatchNormalization"):
            raise TrainingFormError(
                f"{node} is inside {inner.name!r} (a branch, loop or function), "
                "which cannot return its running statistics; leave batchnorm='frozen'"
            )
    current: dict[str, str] = {}  # running statistic -> its value after the nodes so far
    nodes = []
    for node in graph.nodes:
        if not is_onnx(node, "BatchNormalization"):
            nodes.append(node)
            continue
        sources = [_source(graph, name) for name in node.inputs[3:5]]
        if not graph.initializers.keys() >= set(sources):
            raise TrainingFormError(
                f"{node}: its running statistics {list(node.inputs[3:5])} are computed by the model, so there is "
                "no parameter to update; leave batchnorm='frozen'"
            )
        if any(node.outputs[1:]):
            raise TrainingFormError(f"{node} is already in training mode (outputs {list(node.outputs)})")
        # Nodes that share statistics update them in turn.
        inputs = (*node.inputs[:3], *(current.get(name, name) for name in sources))
        updated = [f"{node.name}/{name}" for name in ("running_mean", "running_var")]
        current.update(zip(sources, updated, strict=True))
        attributes = {k: v for k, v in node.attributes.items() if k != "is_test"}
        if node.opset >= 14:
            attributes["training_mode"] = 1
        else:  # the number of outputs selects training mode
            updated += [f"{node.name}/saved_{name}" for name in ("mean", "var")]
        nodes.append(replace(node, inputs=inputs, outputs=(node.outputs[0], *updated), attributes=attributes))
    if not current:
        raise TrainingFormError(
            "the model has no BatchNormalization node: exporters fold them into convolutions, and they cannot be "
            "restored. Leave batchnorm='frozen'"
        )
    outputs = graph.outputs + tuple(ValueInfo(name) for name in current.values())
    return replace(graph, nodes=tuple(nodes), outputs=outputs), tuple(map(graph.key, current))


def is_onnx(node: Node, op_type: str) -> bool:
    """Whether a node applies this operator of ai.onnx."""
    return (node.domain, node.op_type) == ("", op_type)


def _source(graph: Graph, name: str) -> str:
    """The source of a value through Identity nodes, by which exporters share a tensor."""
    while (node := graph.producers.get(name)) and is_onnx(node, "Identity"):
        name = node.inputs[0]
    return name


def with_compute_dtype(graph: Graph, dtype: Any) -> Graph:
    """The graph with float32 products computed in a narrower dtype; other nodes are unchanged."""

    def change(node: Node, _: dict[str, np.ndarray]) -> Node:
        if not node.operator.product:
            return node
        return replace(node, target=replace(node.operator, function=partial(_in_compute_dtype, node.operator, dtype)))

    return map_nodes(graph, change)


def _in_compute_dtype(operator: Operator, dtype: Any, *values: Any, **named: Any) -> Any:
    """An operator's float32 results for operands cast to the narrower dtype."""
    wide, limit = np.dtype(np.float32), jnp.finfo(dtype)
    assert operator.function is not None
    if not any(getattr(v, "dtype", None) == wide for v in values) or is_known(values):
        return operator.function(*values, **named)

    def narrow(value: Any) -> Any:
        if getattr(value, "dtype", None) != wide:
            return value
        # Masks contain the most negative float32, which would round to -inf and then give NaN.
        return jnp.clip(value, float(limit.min), float(limit.max)).astype(dtype)

    results = operator.function(*map(narrow, values), **named)
    return jax.tree.map(lambda r: r.astype(wide) if getattr(r, "dtype", None) == dtype else r, results)


def select_outputs(graph: Graph, outputs: str | Sequence[str]) -> Graph:
    """The graph with only these outputs, or inner values, and the nodes that they need."""
    outputs, names = names_list(outputs), [v.name for v in graph.outputs]
    if unknown := sorted(set(outputs).difference(graph.producers, names)):
        near = hint(graph, unknown, {*graph.producers, *names})
        raise InputNameError(f"outputs has {unknown}; the model's outputs are {names}{near}")
    declared = {**graph.value_info, **{v.name: v for v in graph.outputs}}
    nodes = tuple(ancestors(graph.nodes, outputs))
    return replace(graph, nodes=nodes, outputs=tuple(declared.get(n, ValueInfo(n)) for n in outputs))
