"""Folds constants, inlines branches, removes no-ops and folds BatchNormalization into weights: ``Model.simplified``.

Products of one input are merged: ``MatMul(x, A)``, ``MatMul(x, B)`` become ``MatMul(x, [A B])`` and a Split. So one
product computes query, key and value. XLA merges them by itself on GPUs and TPUs, but then concatenates their weights
in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ...errors import UnsupportedError
from ...eval.known_values import Values, known_values
from ...eval.values import to_host
from ...ir import analysis
from ...ir.graph import Graph, Node, ancestors, with_graphs
from ...proto.mapped import load, owned
from ...proto.messages import unused_name
from ..spec import Spec
from .affine import with_affine_folded
from .constants import folded, with_constant_targets
from .inlined import with_branches_inlined
from .no_ops import without_duplicates, without_no_ops
from .parts import with_rewritten
from .rewritten import Rewriting, new_node


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
    changes = {n: v for n, v in spec.changes.items() if stored[1].get(n) is stored[0][n]}
    return with_rewritten(model, spec, new, Rewriting.between(graph, new), changes)


def _check(model: Any) -> None:
    nodes = model.graph.nodes
    options = {
        "mesh": model.placement,
        "dtype": model.settings.dtype,
        "weights": len({n.name for n in nodes}) < len(nodes),  # several replace one of the file
    }
    if option := next((n for n, v in options.items() if v), None):
        raise UnsupportedError(
            f"a model converted with {option}= cannot be simplified: save(convert(file).simplified(), path), and "
            f"convert(path, {option}=...)"
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
        arrays = {n: to_host(changes.get(graph.key(n), v)) for n, v in graph.initializers.items() if n not in free}
        constants = {n: v for n, v in self.constants.items() if n in captured} | arrays
        weights = (self.weights & captured) | {n for n in arrays if graph.key(n) in types}
        outer = {n: v for n, v in self.values.items() if n in captured}
        values, extents = known_values(graph, constants, weights, outer)
        new = with_constant_targets(graph, values, extents, self.taken)
        new = without_no_ops(folded(new, constants, weights, values), values)
        arrays = {n: arrays.get(n, v) for n, v in new.initializers.items() if n not in free}
        keys = analysis.parameters(new).keys()
        new = _live(without_duplicates(new, {n: v for n, v in arrays.items() if new.key(n) not in keys}))
        known = constants | arrays

        def constant(name: str) -> Any:
            return load(known[name]) if name in known else None

        new = with_affine_folded(new, constant, self.taken)
        if self.merges:
            new = with_products_merged(new, lambda n: constant(n) if new.key(n) in keys else None, self.taken)
        changed = {n: v for n, v in new.initializers.items() if v is not graph.initializers.get(n)}
        inside = replace(
            self,
            constants={**self.constants, **arrays, **changed},
            weights=self.weights | weights | changed.keys(),
            values={**self.values, **values},
        )
        return _live(replace(new, nodes=tuple(map(inside._node, new.nodes))))

    def _node(self, node: Node) -> Node:
        if not node.graphs or node.is_private:
            return node
        return replace(node, attributes=with_graphs(node.attributes, self.of))


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


SPLIT: Final = 13
"""The opset since which Split takes its sizes as an input."""


def with_products_merged(graph: Graph, constant: Callable[[str], Any], taken: set[str]) -> Graph:
    """The graph with one MatMul for those of an input by floating weights that nothing else reads.

    Args:
        graph: the graph.
        constant: the value of an initializer; None for other names.
        taken: names that new initializers and nodes may not have; theirs are added.
    """
    readers = analysis.read_counts(graph)
    groups: dict[Any, list[tuple[Node, np.ndarray]]] = {}
    for node in graph.nodes:
        if (node.domain, node.op_type) != ("", "MatMul") or node.opset < SPLIT or node.devices:
            continue
        name = node.inputs[1]
        weight = constant(name) if name in graph.initializers and readers[name] == 1 else None
        if weight is not None and weight.ndim == 2 and weight.dtype.name in ("float16", "bfloat16", "float32"):
            groups.setdefault((node.inputs[0], len(weight), weight.dtype), []).append((node, weight))
    merged: dict[str, Sequence[Node]] = {}  # what takes the place of a node, by its name
    new: dict[str, np.ndarray] = {}
    for members in groups.values():
        if len(members) > 1:
            merged.update(dict.fromkeys((n.name for n, _ in members), ()))
            merged[members[0][0].name] = _merged(members, new, taken)
    nodes = tuple(n for node in graph.nodes for n in merged.get(node.name, (node,)))
    return replace(graph, nodes=nodes, initializers={**graph.initializers, **new})


def _merged(members: Sequence[tuple[Node, np.ndarray]], new: dict[str, np.ndarray], taken: set[str]) -> list[Node]:
    """The product by all weights, and the Split of its result; their initializers are added to ``new``."""
    first = members[0][0]

    def named(name: str) -> str:
        taken.add(name := unused_name(f"{first.outputs[0]}.{name}", taken))
        return name

    weight, sizes, product, split = map(named, ("weight", "sizes", "product", "split"))
    new[weight] = owned(np.concatenate([w for _, w in members], axis=1))
    new[sizes] = owned(np.array([w.shape[1] for _, w in members], np.int64))
    outputs = tuple(n.outputs[0] for n, _ in members)
    return [
        replace(first, inputs=(first.inputs[0], weight), outputs=(product,)),
        new_node(split, "Split", first.opset, product, sizes, outputs=outputs, axis=-1),
    ]
