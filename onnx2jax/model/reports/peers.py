"""Runs a model's file, or a graph inside it, in other implementations of ONNX, for comparison.

A graph inside a node runs on the arguments of the calls that our node makes of it, which are recorded.
"""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import jax
import numpy as np

from ... import compat
from ...errors import UnsupportedError
from ...eval.interpreter import Context, evaluate, run_node
from ...eval.values import to_host
from ...ir.graph import Graph, Node
from ...proto.messages import TensorProto, ValueInfoProto
from ...proto.tensors import from_array
from ...proto.types import to_code
from ..files.save import save

REFUSALS: Final = {
    "onnxruntime": ("onnxruntime", "Try another implementation: verify(against='reference')"),
    "reference": ("ONNX's reference implementation", "Compare with test data or, if it takes the model, onnxruntime"),
}
"""The start and the end of the message that an implementation does not take a model."""
NAMES: Final = tuple(REFUSALS)
THREADED: Final = "DynamicQuantizeLSTM"
"""onnxruntime quantises the hidden states of some sequences at a time: those that a thread computes."""
InnerGraph = tuple[str, str, int]
"""A graph inside a node: an output of the node, the attribute's name, and the index in a list of graphs, or -1."""
MOST_CALLS: Final = 64
"""Calls of a body (trips of a loop) that are recorded."""


class Peer:
    """A model in another implementation.

    Args:
        name: one of NAMES.
        model: the Model; its file is run with the Model's present weights.
        every: whether all node outputs are outputs, to be compared node by node. onnxruntime then runs on one thread if
            its results depend on their number (see THREADED).
        optimised: whether onnxruntime optimises the graph, which it does by default.
        steps: the path to the graph to run; empty for the main graph.
        feeds: for an inner graph: its inputs, and the outer values it reads, which become inputs.
        alone: a node that is run alone, and its operands. Weights stay weights, for which implementations choose their
            kernels; the other operands are fed as ``operand0``, ``operand1``, ...
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        every: bool = False,
        optimised: bool = False,
        steps: Sequence[InnerGraph] = (),
        feeds: Mapping[str, Any] | None = None,
        alone: tuple[Node, Sequence[Any]] | None = None,
    ) -> None:
        self.name = name
        nodes = (node for graph in model.graph.walk() for node in graph.nodes)
        self._optimised = optimised
        self._threads = 1 if every and any(node.op_type == THREADED for node in nodes) else 0

        def change(message: Any) -> None:
            if steps:
                _go_inside(message, steps, feeds or {})
            if alone:
                _isolate(message.graph, *alone)
            if every:
                outputs = {v.name for v in message.graph.output}
                names = dict.fromkeys(n for node in message.graph.node for n in node.output if n and n not in outputs)
                message.graph.output.extend(ValueInfoProto(name=n) for n in names)

        package = "onnxruntime" if name == "onnxruntime" else "onnx"
        library = compat.optional(package, "verify")
        with tempfile.TemporaryDirectory() as folder:
            changed = SimpleNamespace(origin=model.origin.changed(change), changed=model.changed)  # as save takes it
            path = save(changed, Path(folder, "model.onnx"))
            try:
                self._open(library, path)
            except Exception as e:
                raise self._refusal("does not take the model", e) from e

    def _open(self, library: Any, path: Path) -> None:
        if self.name == "onnxruntime":
            options = library.SessionOptions()
            if not self._optimised:
                options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            options.intra_op_num_threads = self._threads
            self._session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            inputs = (*self._session.get_inputs(), *self._session.get_overridable_initializers())
            self.inputs = {v.name for v in inputs}
            self.outputs = [v.name for v in self._session.get_outputs()]
        else:
            compat.optional("onnx.reference", "verify")
            message = library.load(path)
            self._session = library.reference.ReferenceEvaluator(message)
            self.inputs = {v.name for v in message.graph.input}
            self.outputs = [v.name for v in message.graph.output]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name.

        Raises:
            UnsupportedError: the other implementation cannot run this.
        """
        try:
            results = self._session.run(self.outputs, {n: v for n, v in feeds.items() if n in self.inputs})
        except Exception as e:
            raise self._refusal("does not run the model", e) from e
        return dict(zip(self.outputs, results, strict=True))

    def _refusal(self, what: str, e: Exception) -> UnsupportedError:
        who, other = REFUSALS[self.name]
        return UnsupportedError(f"{who} {what}: {e}\n{other}")


def step_into(node: Node, graph: Graph) -> InnerGraph:
    """The step from a node's graph into a graph among its attributes."""
    for name, value in node.attributes.items():
        for i, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if inner is graph:
                return next(filter(None, node.outputs)), name, i if isinstance(value, tuple) else -1
    raise ValueError(f"{node} has no graph {graph.name!r}")


def _go_inside(message: Any, steps: Sequence[InnerGraph], feeds: Mapping[str, Any]) -> None:
    """Make an inner graph the main graph; outer values that it reads become its inputs."""
    graph: Any = message.graph
    around: dict[str, Any] = {}
    for output, name, i in steps:
        around |= {t.name: t for t in graph.initializer}
        node = next(n for n in graph.node if output in n.output)
        attribute = next(a for a in node.attribute if a.name == name)
        graph = attribute.g if i < 0 else attribute.graphs[i]
    inside = deepcopy(graph)
    inside.name = inside.name or "inside"
    initializers = {t.name for t in inside.initializer}
    inside.initializer.extend(t for n, t in around.items() if n in feeds and n not in initializers)
    del inside.input[:]
    _declare(inside, feeds)
    message.graph.CopyFrom(inside)


def _isolate(graph: Any, node: Node, operands: Sequence[Any]) -> None:
    """Keep one node of a graph; of its operands those that were initializers still are, and the others are inputs."""
    alone = deepcopy(next(n for n in graph.node if list(n.output) == list(node.outputs)))
    initializers = {t.name for t in graph.initializer}
    weights = {f"operand{i}" for i, n in enumerate(alone.input) if n in initializers}
    feeds = {f"operand{i}": v for i, v in enumerate(operands) if v is not None}
    alone.input[:] = [n if (n := f"operand{i}") in feeds else "" for i in range(len(operands))]
    for part in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
        graph.ClearField(part)
    graph.node.append(alone)
    graph.initializer.extend(TensorProto(**from_array(v, n)) for n, v in feeds.items() if n in weights)
    _declare(graph, feeds)


def _declare(graph: Any, feeds: Mapping[str, Any]) -> None:
    """Add the values that are no initializers to the inputs of a graph."""
    initializers = {t.name for t in graph.initializer}
    for name, value in feeds.items():
        if name in initializers:
            continue
        kind, inner = graph.input.add(name=name).type, value
        while isinstance(inner, list):
            kind, inner = kind.sequence_type.elem_type, inner[0] if inner else np.zeros(0, np.float32)
        kind.tensor_type.elem_type = to_code(np.asarray(inner).dtype)


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
