"""The calls that a node makes of its graphs: the branch taken, the trips of a loop."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from ... import compat
from ...eval.interpreter import Context, evaluate, run_node
from ...eval.values import to_host
from ...ir.graph import Graph, Node

MOST_CALLS: Final = 64
"""Calls of a body (trips of a loop) that are recorded."""


@dataclass
class _Recorder:
    """Runs the graphs of a node in NumPy, and records the arguments of their calls."""

    context: Context
    calls: list[tuple[Graph, Mapping[str, Any], Mapping[str, Any]]]

    def run_graph(self, graph: Graph, named: Mapping[str, Any], around: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        if len(self.calls) < MOST_CALLS:
            self.calls.append((graph, dict(named), around))
        return tuple(map(to_host, evaluate(graph, named, replace(self.context, rng=rng), ChainMap({}, dict(around)))))

    def run_partition(self, graph: Graph, scope: Any, rng: Any = None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{graph.name!r} is not partitioned")

    def run_trips(self, *_: Any, **__: Any) -> None:
        return None


def calls(model: Any, node: Node, scope: Mapping[str, Any]) -> list[Any]:
    """The calls that a node makes of its graphs on given values: graph, arguments, outer values."""
    with compat.enable_x64():
        context = Context(dict(model.params), jax.random.key(0) if model.graph.draws else None, model.settings)
        recorder = _Recorder(context, [])
        values = {**model.graph.initializers, **model.params, **scope}
        try:
            run_node(node, values, replace(context, host=recorder))
        except Exception:
            if not recorder.calls:  # a wrong value may end it; the calls before are recorded
                raise
    return recorder.calls
