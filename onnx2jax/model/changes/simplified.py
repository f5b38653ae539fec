"""A model with constants folded, no-ops removed and BatchNormalization in weights: ``Model.simplified``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import UnsupportedError
from ...ir.graph import Graph, ancestors
from ...proto.mapped import load
from ...runtime.values import to_host
from .affine import with_affine_folded
from .constants import folded
from .known_values import known_values
from .no_ops import without_no_ops
from .rebatch import group_of
from .rewritten import Rewriting


def simplified(model: Any) -> Any:
    """The model with a smaller graph, in the file that ``save`` writes too.

    Raises:
        UnsupportedError: it is on a mesh, rebatched, or its file has training_info.
    """
    spec, graph = model.spec, model.graph
    _check(model)
    if graph.differentiates:  # its nodes name the values that they differentiate
        return model
    declared = {v.name: v for v in (*spec.inputs, *spec.optional.values())}
    inputs = tuple(declared.get(v.name, v) for v in graph.inputs if v.name in declared or v.name in spec.static)
    free = {v.name for v in inputs}
    constants = {n: to_host(spec.changes.get(n, v)) for n, v in graph.initializers.items() if n not in free}
    values = known_values(graph, inputs, constants, spec.types)
    new = folded(replace(graph, inputs=inputs), constants, spec.types, values)
    new = _live(without_no_ops(new, values))
    constants = {n: v for n, v in new.initializers.items() if n not in free} | constants

    def constant(name: str) -> Any:
        return load(constants[name]) if name in constants else None

    taken = {n for g in graph.walk() for n in g.defines}
    new = _live(with_affine_folded(new, constant, taken))
    rewriting = Rewriting.between(graph, new)
    return model._replace(
        spec.with_graph(
            new,
            changes={n: v for n, v in spec.changes.items() if n not in rewriting.new},
            bucket=spec.bucket,
            max_size=spec.max_size,
            origin=None if spec.origin is None else spec.origin.changed(rewriting),
        )
    )


def _check(model: Any) -> None:
    told = {"mesh": model.placement, "rebatch": group_of(model.graph) is not model.graph}
    if said := [n for n, v in told.items() if v]:
        raise UnsupportedError(
            f"a model converted with {said[0]}= cannot be simplified: save(convert(file).simplified(), path), and "
            f"convert(path, {said[0]}=...)"
        )
    if model.origin is not None and model.origin.open().message.training_info:
        raise UnsupportedError(
            "the file has training_info, which names initializers of the graph: remove it, del proto.training_info[:]"
        )


def _live(graph: Graph) -> Graph:
    """The graph without nodes and initializers that nothing reads."""
    outputs = {v.name for v in graph.outputs}
    nodes = tuple(ancestors(graph.nodes, outputs))
    read = outputs.union(*(n.reads for n in nodes), *(m.values() for m in graph.quantization.values()))
    read |= {v.name for v in graph.inputs}
    return replace(
        graph,
        nodes=nodes,
        initializers={n: v for n, v in graph.initializers.items() if n in read},
        lifted=graph.lifted & read,
        value_info={n: v for n, v in graph.value_info.items() if n in read},
    )
