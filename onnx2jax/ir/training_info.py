"""A model's training_info: the graphs that initialize and update its variables, and their bindings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from ..errors import ModelError
from ..proto.types import TensorType, ValueInfo
from .derivatives import with_implicit_inputs
from .graph import Function, Graph, Node
from .importer import Importer
from .rules import check_defined, quoted

GRAPH_CALL: Final = ("ai.onnx.preview.training", "GraphCall")
"""The operator that calls the main graph from an algorithm, in files of ONNX 1.7.0 only."""


@dataclass(frozen=True, eq=False)
class TrainingInfo:
    """One entry of ``training_info``."""

    path: str
    """Its location in the model: ``training_info[0]``."""
    name: str
    """The name of the algorithm's graph."""
    initialization: Graph
    initialization_binding: Mapping[str, str]
    algorithm: Graph
    """The main graph followed by the algorithm's (rule TR-16), or the latter alone when it calls the main graph."""
    update_binding: Mapping[str, str]
    initializers: Mapping[str, np.ndarray]
    """Those of the algorithm's graph."""

    def key(self, name: str) -> str:
        """The key of one of its own initializers, unique in the model."""
        return f"{self.path}.algorithm/{name}"

    @property
    def assigned(self) -> set[str]:
        """The variables that it initializes or updates."""
        return {*self.initialization_binding, *self.update_binding}


def read_training(model: Any, main: Graph, importer: Importer) -> tuple[TrainingInfo, ...]:
    """The validated entries of a model's training_info.

    Args:
        model: the ModelProto.
        main: its imported main graph.
        importer: the importer of ``main``; it raises or collects violations.

    Raises:
        ModelError: a graph or a binding violates a rule.
    """
    with importer.guard("graph"):
        if calls := [n for n in main.nodes if (n.domain, n.op_type) == GRAPH_CALL]:
            raise ModelError(f"{calls[0]} is in the main graph; only algorithm graphs may contain it", rule="TR-18")
    infos = tuple(_read(i, info, model, main, importer) for i, info in enumerate(model.training_info))
    times = Counter(name for info in infos for name in info.update_binding if name in main.initializers)
    with importer.guard("training_info"):
        if importer.strict and (twice := [name for name, n in times.items() if n > 1]):
            raise ModelError(f"{quoted(twice)} assigned by several update bindings", rule="TR-09")
    return infos


def _read(index: int, info: Any, model: Any, main: Graph, importer: Importer) -> TrainingInfo:
    path = f"training_info[{index}]"
    first = importer.graph(info.initialization, f"{path}.initialization", importer.opsets, {})
    update = importer.graph(info.algorithm, f"{path}.algorithm", importer.opsets, {})
    variables = main.initializers.keys() | update.initializers.keys()
    _check_initialization(info, first, variables, f"{path}, initialization", importer)
    where = f"{path}, algorithm"
    calls = [n for n in update.nodes if (n.domain, n.op_type) == GRAPH_CALL]
    algorithm = main
    with importer.guard(where):
        _check_calls(update, main, calls)
        importer.unsupported = [n for n in importer.unsupported if (n.domain, n.op_type) != GRAPH_CALL]
        algorithm = with_implicit_inputs(_calling(main, update) if calls else _combined(main, update))
        check_defined(algorithm.captures, where)
    sparse = {s.values.name for s in (*model.graph.sparse_initializer, *info.algorithm.sparse_initializer)}
    bind = partial(_binding, variables=variables, sparse=sparse, importer=importer)
    begun = bind(info.initialization_binding, f"{path}, initialization_binding", outputs=first.outputs)
    updated = bind(info.update_binding, f"{path}, update_binding", outputs=algorithm.outputs)
    return TrainingInfo(path, update.name, first, begun, algorithm, updated, update.initializers)


def _check_initialization(info: Any, graph: Graph, variables: Collection[str], where: str, importer: Importer) -> None:
    with importer.guard(where):
        if info.initialization_binding and not info.HasField("initialization"):
            raise ModelError(f"{where}: there is an initialization_binding, but no initialization graph", rule="TR-07")
        if info.initialization.input:
            text = f"{where}: the graph has inputs {[v.name for v in graph.inputs]}; it may have none"
            raise ModelError(text, rule="TR-05")
    with importer.guard(where):
        check_defined(graph.captures.difference(variables), where)


def _binding(
    entries: Any,
    path: str,
    variables: Collection[str],
    sparse: Collection[str],
    outputs: Iterable[ValueInfo],
    importer: Importer,
) -> dict[str, str]:
    """Variable -> the name of the output that is assigned to it."""
    binding: dict[str, str] = {}
    names = {v.name for v in outputs}
    for entry in entries:
        with importer.guard(path):
            if entry.key in binding:
                raise ModelError(f"{path}: {entry.key!r} is assigned twice", rule="TR-09")
            if entry.key in names and entry.value in variables:
                text = f"{path}: {entry.key!r} and {entry.value!r} are swapped; the key is the variable"
                raise ModelError(text, rule="TR-08")
            if entry.key in sparse:
                raise ModelError(f"{path}: {entry.key!r} is a sparse initializer; variables are dense", rule="TR-29")
            if entry.key not in variables:
                raise ModelError(
                    f"{path}: {entry.key!r} is not an initializer of the main graph or of this algorithm, "
                    f"which have {sorted(variables)[:10]}",
                    rule="TR-10",
                )
            if entry.value not in names:
                text = f"{path}: {entry.value!r} is not an output of the graph, which has {sorted(names)[:10]}"
                raise ModelError(text, rule="TR-11")
            binding[entry.key] = entry.value
    return binding


def _combined(main: Graph, update: Graph) -> Graph:
    """The main graph followed by the algorithm's (rule TR-16)."""
    _check_apart(main.defines, update)
    return replace(
        main,
        name=update.name or main.name,
        inputs=main.inputs + update.inputs,
        outputs=main.outputs + update.outputs,
        initializers={**main.initializers, **update.initializers},
        nodes=main.nodes + update.nodes,
        lifted=main.lifted | update.lifted,
        value_info={**main.value_info, **update.value_info},
    )


def _check_apart(names: Iterable[str], update: Graph) -> None:
    if clash := update.defines.intersection(names):
        raise ModelError(f"{quoted(clash)} defined by both the main graph and algorithm {update.name!r}", rule="TR-17")


def _check_calls(update: Graph, main: Graph, calls: list[Node]) -> None:
    everywhere = [n for graph in update.walk() for n in graph.nodes if (n.domain, n.op_type) == GRAPH_CALL]
    if inner := [n for n in everywhere if n not in calls]:
        raise ModelError(f"{inner[0]} is in a subgraph; it must be a node of the algorithm graph itself", rule="TR-18")
    for call in calls:
        name = call.attributes.get("graph_name")
        if name != main.name:
            raise ModelError(f"{call} has graph_name ({name!r}); the main graph is {main.name!r}", rule="TR-18")
        if len(call.inputs) > len(main.inputs) or len(call.outputs) > len(main.outputs):
            raise ModelError(
                f"{call} has {len(call.inputs)} inputs and {len(call.outputs)} outputs, the main graph "
                f"{len(main.inputs)} and {len(main.outputs)}",
                rule="TR-18",
            )


def _calling(main: Graph, update: Graph) -> Graph:
    """The algorithm's graph with GraphCall nodes bound to a function of the main graph.

    The function's inputs are the main graph's inputs and all its initializers, so that every dependence on a variable
    is explicit, also for Gradient (rule TR-19).
    """
    _check_apart(main.initializers, update)
    formals = [v.name for v in main.inputs]
    rest = {n: TensorType(v.dtype, v.shape) for n, v in main.initializers.items() if n not in formals}
    values = tuple(ValueInfo(*item) for item in rest.items())
    body = replace(main, inputs=main.inputs + values, initializers={})
    function = Function(*GRAPH_CALL, "", (), {}, body, len(main.nodes), {}, frozenset())

    def bound(node: Node) -> Node:
        if (node.domain, node.op_type) != GRAPH_CALL:
            return node
        passed = dict(zip(formals, node.inputs, strict=False))
        operands = {n: passed.get(n) or (n if n in main.initializers else "") for n in formals}
        if lacking := [n for n, operand in operands.items() if not operand]:
            raise ModelError(f"{node} omits inputs {lacking}, which have no initializer", rule="TR-18")
        return replace(node, inputs=(*operands.values(), *rest), attributes={}, target=function)

    nodes = tuple(map(bound, update.nodes))
    return replace(update, path="", nodes=nodes, initializers={**main.initializers, **update.initializers})
