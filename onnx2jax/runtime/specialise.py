"""What calls of a subprogram have taught: the inputs whose values are part of its signature, and nodes for the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import KnownValueError
from ..eval.values import is_jax, to_host, without_arrays
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..limits import BY_VALUE, MOST_VALUES
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from .dispatch import CallContext, Constants


class NeedsHost(Exception):
    """Some nodes have to run on the host."""

    def __init__(self, nodes: list[Node], reason: str) -> None:
        super().__init__(reason)
        self.nodes, self.reason = nodes, reason


@dataclass(eq=False)
class Specialisation:
    """The inputs of a graph whose values are part of the signature of its programs.

    Attributes:
        graph: the graph.
        chosen: those of its inputs whose values a caller chooses, unlike a loop's counter.
        names: the inputs whose values are part of the signature.
        seen: for each input, the shapes in which it was compiled, or the values, as text.
        deciding: control-flow nodes, with the inputs that are specialised on for them.
    """

    graph: Graph
    chosen: frozenset[str] = frozenset()
    names: set[str] = field(default_factory=set)
    seen: dict[str, set[str]] = field(default_factory=dict)
    deciding: dict[Node, set[str]] = field(default_factory=dict)

    def divided(
        self, reads: Mapping[str, Any], fixed: Collection[str], context: CallContext, caller_traces: bool = False
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], CallContext]:
        """The values that are part of the signature, ``fixed`` ones included, the others, and the call's context."""
        known = {n for n, v in reads.items() if n in fixed or (n in self.names and not is_traced(v))}
        if not (known or context.constants.inputs or caller_traces):
            return {}, reads, context
        pinned = {n: np.asarray(to_host(reads[n])) for n in reads if n in known}
        specialised = context._replace(constants=Constants(context.constants.params, pinned, caller_traces))
        return pinned, {n: v for n, v in reads.items() if n not in known}, specialised

    def check_types(self, rest: Mapping[str, Any]) -> None:
        """Raise NeedsHost for nodes that read strings, maps or floats of 6 bits."""
        if foreign := sorted(n for n, v in rest.items() if not is_jax(v)):
            readers = [node for node in self.graph.nodes if not {*foreign}.isdisjoint(node.reads)]
            kinds = sorted({without_arrays(rest[n]) for n in foreign})
            verb = "hold" if len(foreign) > 1 else "holds"
            raise NeedsHost(readers, f"{', '.join(map(repr, foreign))} {verb} {' and '.join(kinds)}")

    def check_values(self, pinned: Mapping[str, np.ndarray]) -> None:
        """Raise NeedsHost for a control-flow node that would be specialised on many values."""
        for node, names in self.deciding.items():
            for name in names & pinned.keys() & self.seen.keys():
                if len(self.seen[name]) >= MOST_VALUES and str(pinned[name].tolist()) not in self.seen[name]:
                    what = f"{name!r}, which decides {node.op_type} {node.name!r}, comes in many values"
                    raise NeedsHost([node], what)

    def learn(self, error: KnownValueError, values: Mapping[str, Any]) -> None:
        """Specialise on small inputs that a node needs; raise NeedsHost if that does not help."""
        node = error.node
        assert node is not None
        sources = self.sources(error, values)
        small = {n for n in sources if not is_traced(values[n]) and is_small(values[n])}
        # Each value costs a compilation: worth it for what a caller chooses, and before heavy work.
        chosen = small if isinstance(node.target, Operator) and node.target.heavy else small & self.chosen
        if chosen and (node.graphs or chosen == sources):
            self.names |= chosen
            if node.graphs:
                self.deciding.setdefault(node, set()).update(chosen)
            return
        names = " or ".join(map(repr, error.values[:3]))
        raise NeedsHost([node], f"{node.op_type} {node.name!r} needs the value of {names}") from error

    def sources(self, error: KnownValueError, values: Iterable[str]) -> set[str]:
        """The inputs from which the needed values are computed."""
        return analysis.sources(self.graph.nodes, error.values).intersection(values)


def is_small(value: Any) -> bool:
    """Whether a value is small enough to specialise on: a shape, axes, a count, scales."""
    return getattr(value, "ndim", 2) <= 1 and value.size <= BY_VALUE and value.dtype != object
