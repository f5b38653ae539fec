"""Folds constants, inlines branches, removes no-ops and folds BatchNormalization into weights: ``Model.simplified``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UnsupportedError
from ...eval.known_values import Values, known_values
from ...eval.values import to_host
from ...ir import analysis
from ...ir.graph import Graph, Node, ancestors, with_graphs
from ...proto.mapped import load
from ..spec import Spec
from .affine import with_affine_folded
from .constants import folded, with_constant_targets
from .inlined import with_branches_inlined
from .no_ops import without_duplicates, without_no_ops
from .products import with_products_merged
from .rewritten import Rewriting


def simplified(model: Any, *, merge_products: bool = False) -> Any:
    """The model with a simplified graph, which ``save`` writes.

    Args:
        model: the model.
        merge_products: whether products of one input become one.

    Raises:
        UnsupportedError: it is on a mesh, of another ``dtype`` or of unpacked weights, or its file has
            training_info.
    """
    spec, graph = model.spec, model.graph
    _check(model)
    if graph.differentiates:  # nodes refer to the values that they differentiate by name
        return model
    spec, graph = with_branches_inlined(spec, spec.imported(graph).graph)
    new = _Simplification(spec, {n for g in graph.walk() for n in g.defines}, merge_products).of(graph)
    stored = [{g.key(n): v for g in graphs.walk() for n, v in g.initializers.items()} for graphs in (graph, new)]
    return model._replace(
        spec.with_graph(
            new,
            changes={n: v for n, v in spec.changes.items() if stored[1].get(n) is stored[0][n]},
            bucket=spec.bucket,
            max_size=spec.max_size,
            origin=None if spec.origin is None else spec.origin.changed(Rewriting.between(graph, new)),
        )
    )


def _check(model: Any) -> None:
    nodes = model.graph.nodes
    options = {
        "mesh": model.placement,
        "dtype": model.settings.dtype,
        "weights": len({n.name for n in nodes}) < len(nodes),  # several replace one of the file
    }
    if given := [n for n, v in options.items() if v]:
        raise UnsupportedError(
            f"a model converted with {given[0]}= cannot be simplified: save(convert(file).simplified(), path), and "
            f"convert(path, {given[0]}=...)"
        )
    if model.origin is not None and model.origin.open().message.training_info:
        raise UnsupportedError(
            "the file has training_info, which refers to initializers of the graph: remove it, "
            "del proto.training_info[:]"
        )


@dataclass(frozen=True)
class _Simplification:
    """Simplifies a graph and those inside its nodes.

    Attributes:
        spec: has the current values of initializers.
        taken: names that new initializers may not have; theirs are added.
        merges: whether products of one input become one.
        constants: of the graphs around, by name; so are ``weights``, those that are parameters, and ``values``.
    """

    spec: Spec
    taken: set[str]
    merges: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    values: Values = field(default_factory=dict)

    def of(self, graph: Graph) -> Graph:
        """The graph, with fewer nodes."""
        free, captured = {v.name for v in graph.inputs}, graph.captures
        changes, types = self.spec.changes, self.spec.types
        own = {n: to_host(changes.get(graph.key(n), v)) for n, v in graph.initializers.items() if n not in free}
        constants = {n: v for n, v in self.constants.items() if n in captured} | own
        weights = (self.weights & captured) | {n for n in own if graph.key(n) in types}
        outer = {n: v for n, v in self.values.items() if n in captured}
        # Inside Loop and Scan the types of inputs follow from the operands, not from declarations.
        values, extents = known_values(graph, () if graph.path else graph.inputs, constants, weights, outer)
        new = with_constant_targets(graph, values, extents, self.taken)
        new = without_no_ops(folded(new, constants, weights, values), values)
        own = {n: own.get(n, v) for n, v in new.initializers.items() if n not in free}
        keys = analysis.parameters(new).keys()
        new = _live(without_duplicates(new, {n: v for n, v in own.items() if new.key(n) not in keys}))
        known = constants | own

        def constant(name: str) -> Any:
            return load(known[name]) if name in known else None

        new = with_affine_folded(new, constant, self.taken)
        if self.merges:
            new = with_products_merged(new, lambda n: constant(n) if new.key(n) in keys else None, self.taken)
        changed = {n: v for n, v in new.initializers.items() if v is not graph.initializers.get(n)}
        inside = replace(
            self,
            constants={**self.constants, **own, **changed},
            weights=self.weights | weights | changed.keys(),
            values={**self.values, **values},
        )
        return _live(replace(new, nodes=tuple(map(inside._node, new.nodes))))

    def _node(self, node: Node) -> Node:
        if not node.graphs or node.domain.startswith("onnx2jax."):
            return node
        return replace(node, attributes={k: with_graphs(v, self.of) for k, v in node.attributes.items()})


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
