"""The graph as an interactive HTML page: facts of nodes and values as JSON, drawn by the script in view/."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from typing import Any, Final

import numpy as np

from ...checker.check import check_message
from ...checker.report import Finding
from ...errors import InputTypeError, OnnxError
from ...eval.known_values import inferred_types
from ...eval.values import to_host
from ...ir.graph import Function, Graph, Node
from ...ops.registry import Operator
from ...proto.mapped import load
from ...proto.messages import tensors
from ..changes.parts import node_outputs
from .arrays import MOST_SHOWN, figures, histogram, picture, text_of
from .comparison import Verification, described
from .outline import Item, NodeGroup, Outline, alike, folded, known_inside, named_graphs
from .profile import Profile
from .summary import Summary, feeds_of, summary

MOST_BYTES: Final = 1 << 31
"""Parameters of more bytes in all have no histograms: they would all be read."""
FAMILIES: Final = {
    "product": "conv linalg recurrent attention microsoft.attention microsoft.paged microsoft.weights",
    "activation": "activation",
    "norm": "norm",
    "pool": "pool reduce resize vision",
    "shape": "shape indexing cast padded microsoft.tensors",
    "arithmetic": "elementwise signal training microsoft.fused",
    "quant": "quant qonnx microsoft.quant",
    "control": "control random",
}
"""Kinds of operators, which have a colour each, by the modules that define them, or their traits and names."""
SCRIPTS: Final = ("layout.js", "graph.js", "draw.js", "panel.js", "page.js")
"""The files of the page's script, in order."""
_KINDS: Final = {module: kind for kind, modules in FAMILIES.items() for module in modules.split()}


def page(model: Any, facts: PageFacts) -> str:
    """The page of a model, which needs no network."""
    data = json.dumps(_Page(model, facts).data(), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": escape(model.graph.name or "model", quote=False),
        "style": _file("page.css"),
        "script": "".join(map(_file, SCRIPTS)),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files(__package__) / "view" / name).read_text(encoding="utf-8")


class _Page:
    """Collects the JSON of a page; graphs and nodes are numbered over the whole model."""

    def __init__(self, model: Any, facts: PageFacts) -> None:
        self.model, self.facts = model, facts
        self.graphs: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.operators: dict[str, dict[str, Any]] = {}
        self.numbers: dict[int, int] = {}
        self.findings: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        for finding in facts.findings:
            self.findings[_place(finding)].append(finding)
        self.shown: set[int] = set()
        self.times = {} if facts.profile is None else {n.name: n for n in facts.profile.nodes}

    def data(self) -> dict[str, Any]:
        """Everything."""
        model, facts = self.model, self.facts
        self._graph(model.graph, (), {})
        data: dict[str, Any] = {
            "title": model.graph.name or "model",
            "opsets": {domain or "ai.onnx": version for domain, version in model.opsets.items()},
            "metadata": {str(k): text_of(v) for k, v in model.metadata.items()},
            "inputs": [(v.name, str(v.type)) for v in (*model.inputs, *model.optional.values())],
            "outputs": [(v.name, str(v.type)) for v in model.outputs],
            "parameters": sum(int(np.prod(t.shape)) for t in model.types.values()),
            "bytes": sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in model.types.values()),
            "notes": list(facts.notes),
            "findings": [asdict(f) for f in facts.findings if id(f) not in self.shown],
            "operators": self.operators,
            "nodes": self.nodes,
            "graphs": self.graphs,
        }
        if facts.costs is not None:
            data |= {"flops": facts.costs.flops, "sizes": dict(facts.costs.inputs)}
        if facts.profile is not None:
            data["time"] = facts.profile.total
        if facts.verification is not None:
            data["against"] = facts.verification.against
            data["verified"] = str(facts.verification).splitlines()[0]
        if model.placement is not None:
            data["mesh"] = {str(n): int(k) for n, k in model.placement.mesh.shape.items()}
        return data

    # ------------------------------------------------------------------------------------------------ graphs

    def _graph(self, graph: Graph, known: Collection[str], outer: Mapping[str, str], title: str = "") -> int:
        """Add a graph, and those inside it; returns its number. A function has a title."""
        if id(graph) in self.numbers:
            return self.numbers[id(graph)]
        number = self.numbers[id(graph)] = len(self.graphs)
        entry: dict[str, Any] = {}
        self.graphs.append(entry)
        main = number == 0
        hidden = folded(graph, known)
        types = {**outer, **(self.facts.types if main else {}), **declared_types(graph)}
        inside = known_inside(graph, hidden, known)
        first = len(self.nodes)
        self.nodes += [self._node(node, number, title or graph.name) for node in graph.nodes]
        costs = self.facts.costs.nodes if main and self.facts.costs else ()
        for k, row in enumerate(costs):
            self.nodes[first + k] |= {"flops": row.flops, "bytes": row.bytes, "parameters": row.parameters}
        for k in hidden:
            self.nodes[first + k]["folded"] = True
        for k, node in enumerate(graph.nodes):
            bodies = named_graphs(node)
            if isinstance(node.target, Function):
                called = f"{node.target.domain}.{node.target.name}"
                self.nodes[first + k]["graphs"] = [("", self._graph(node.target.body, (), {}, called))]
            elif bodies:
                self.nodes[first + k]["graphs"] = [(name, self._graph(g, inside, types)) for name, g in bodies]
        outline = Outline(graph, hidden).items()
        inputs = alike([v.name for v in graph.inputs if v.name not in graph.initializers])
        outputs = alike([v.name for v in graph.outputs])
        entry |= {
            "title": graph.name,
            "items": [
                *({"kind": "input", "title": title, "values": names} for title, names in inputs),
                *(_item(item, first) for item in outline),
                *({"kind": "output", "title": title, "values": names} for title, names in outputs),
            ],
            "values": self._values(graph, types, main),
        }
        return number

    def _values(self, graph: Graph, types: Mapping[str, str], main: bool) -> dict[str, dict[str, Any]]:
        """Types of values, and what is known of parameters, constants and the values of a call."""
        values: dict[str, dict[str, Any]] = {n: {"type": t} for n, t in types.items()}
        parameters, changes = self.model.types, self.model.spec.changes
        for name, array in graph.initializers.items():
            key = graph.key(name)
            array = changes.get(key, array)
            entry = values[name] = {"type": described(array), "bytes": int(array.nbytes)}
            if key in parameters:
                entry["parameter"] = True
                if self.model.placement is not None:
                    entry["sharding"] = self._sharding(key)
            if not getattr(array, "is_fully_addressable", True):  # shards of it are in other processes
                continue
            if array.size <= MOST_SHOWN:
                entry["value"] = text_of(np.asarray(load(array)).tolist())
            if self.facts.statistics and array.size > 1 and (stats := figures(array)) is not None:
                entry |= {"figures": stats, "histogram": histogram(array)}
        for name, value in self.facts.values.items() if main else ():
            entry = values.setdefault(name, {})
            if hasattr(value, "dtype") and hasattr(value, "shape"):
                entry.setdefault("type", described(value))
                entry["shape"] = list(value.shape)
            if (stats := figures(value, whole=True)) is not None:
                entry |= {"figures": stats, "picture": picture(value)}
        verification = self.facts.verification
        comparisons = verification.nodes.values() if main and verification is not None else ()
        for comparison in (c for group in comparisons for c in group if not c.ok):
            values.setdefault(comparison.value, {})["differs"] = comparison.why
        return values

    def _sharding(self, key: str) -> str:
        placement = self.model.placement
        sharding = placement.params.get(key)
        spec = "replicated" if sharding is None or not any(sharding.spec) else str(sharding.spec)
        homes = getattr(placement, "homes", {})
        return f"stage {homes[key]}, {spec}" if key in homes else spec

    # ------------------------------------------------------------------------------------------------ nodes

    def _node(self, node: Node, number: int, holder: str) -> dict[str, Any]:
        main = number == 0
        graphs = {name for name, _ in named_graphs(node)}
        attributes = {n: text_of(v) for n, v in node.attributes.items() if n not in graphs}
        entry: dict[str, Any] = {
            "name": node.name,
            "type": self._operator(node),
            "graph": number,
            "inputs": node.inputs,
            "outputs": node.outputs,
        }
        places = dict.fromkeys((where, name) for where in (holder, "") for name in (node.name, node.name[:80]))
        findings = [f for place in places for f in self.findings.get(place, ())]
        self.shown.update(map(id, findings))
        more: dict[str, Any] = {"captures": node.captures, "attributes": attributes}
        more["findings"] = [asdict(f) for f in findings]
        if main and (time := self.times.get(node.name)) is not None:
            entry |= {"seconds": time.seconds, "share": time.share}
            more |= {"fused": list(time.fused), "host": time.host}
        first = None if self.facts.verification is None else self.facts.verification.first
        if main and first is not None and (first.value in node.outputs or first.node.startswith(str(node))):
            more["differs"] = f"{first.value}: {first.comparison.why}"
        return entry | {n: v for n, v in more.items() if v}

    def _operator(self, node: Node) -> str:
        """The key of a node's operator, which is described once."""
        key = f"{node.domain}:{node.op_type}:{node.opset}"
        if key in self.operators:
            return key
        entry: dict[str, Any] = {"name": node.op_type, "domain": node.domain, "kind": "other"}
        target = node.target
        if isinstance(target, Operator) and target.function is not None:
            function = inspect.unwrap(target.function)
            kind = _KINDS.get(function.__module__.partition(".ops.")[2], "other")
            entry["kind"] = "product" if target.product else "norm" if "Norm" in node.op_type else kind
            entry |= {"since": target.since, "inputs": target.inputs, "signature": _signature(target)}
            document = (inspect.getdoc(target.function) or "").partition("\n\n")[0].replace("\n", " ")
            more = {"variadic": target.variadic, "document": document, "limits": target.limits}
            entry |= {n: text for n, text in more.items() if text}
        elif isinstance(target, Function):
            entry |= {"kind": "control", "inputs": [v.name for v in target.body.inputs]}
            entry["document"] = f"A function of the model, of {target.size} nodes."
        else:
            entry["document"] = "Unsupported."
        self.operators[key] = entry
        return key


def _item(item: Item, first: int) -> Any:
    """An item of an outline, with nodes by their number in the model."""
    if isinstance(item, NodeGroup):
        return {"kind": item.kind, "title": item.title, "items": [_item(i, first) for i in item.items]}
    return first + item


def _signature(target: Operator) -> str:
    """The operator's function as a call, without what the interpreter supplies."""
    signature = inspect.signature(target.function)  # type: ignore[arg-type]  # checked by the caller
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for name, p in signature.parameters.items()
        if name not in target.fixtures
    ]
    return f"{target.name}{signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def _place(finding: Finding) -> tuple[str, str]:
    """The names of a finding's innermost graph or function, "" if its path has none, and node; "" for other places."""
    graph = node = ""
    for kind, name in re.findall(r"""(graph|function|node) ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", finding.path):
        name = ast.literal_eval(name)
        graph, node = (graph, name) if kind == "node" else (name, "")
    return graph, node


@dataclass(frozen=True)
class PageFacts:
    """What a page shows beside the graph.

    Attributes:
        costs: FLOPs, bytes and parameters of each node of the main graph.
        findings: violations of the ONNX specification.
        types: types of values of the main graph, as text by name.
        values: values of a call by name.
        profile: the time of nodes.
        verification: the comparison with another implementation.
        statistics: whether parameters have figures and histograms.
        notes: what the page lacks, and why.
    """

    costs: Summary | None = None
    findings: Sequence[Finding] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    verification: Verification | None = None
    statistics: bool = False
    notes: Sequence[str] = ()


def facts(
    model: Any, inputs: Any, dims: Mapping[str, int] | None, profile: Profile | None, verification: Verification | None
) -> PageFacts:
    """Everything that is known about a model; with ``inputs`` also what its nodes compute for them.

    Raises:
        InputError: ``inputs`` or ``dims`` do not match the model.
    """
    notes = []
    costs = None
    if inputs is not None and not isinstance(inputs, Mapping):
        if len(model.inputs) != 1:
            raise InputTypeError(f"inputs takes a dict by name: the model's are {[v.name for v in model.inputs]}")
        inputs = {model.inputs[0].name: inputs}
    if inputs or dims:
        feeds_of(model, inputs or {}, dims or {}, abstract=True)  # raises for wrong names
    nodes = [node for graph in model.graph.walk() for node in graph.nodes]
    if unsupported := sorted({n.op_type for n in nodes if n.target is None}):
        notes.append(f"Unsupported: {', '.join(unsupported)}")
    else:
        try:
            costs = summary(model, inputs or {}, dims)
        except (OnnxError, TypeError, ValueError) as e:  # the graph can be shown without
            lines = str(e).splitlines() or [type(e).__name__]
            hint = "".join(f". {line}" for line in lines[1:] if line.startswith("Extents"))
            hint = hint.replace("model.summary(", "model.draw(path, ")
            notes.append(f"FLOPs and bytes are not known: {lines[0]}{hint}")
    values: dict[str, Any] = {}
    if inputs:
        args, named = by_position(model, inputs)
        names, rng = node_outputs(model.graph), 0 if model.graph.draws else None
        results = model.values(*args, names=names, rng=rng, **named) if names else {}
        values = {**inputs, **{n: to_host(v) for n, v in results.items()}}
    findings: Sequence[Finding] = ()
    if model.origin is not None:
        opened = model.origin.open()
        for tensor, _ in tensors(opened.message):
            opened.attach(tensor)
        findings = check_message(opened.message, opened.files, allow_newer_opset=True).findings
    size = sum(t.dtype.itemsize * int(np.prod(t.shape)) for t in model.types.values())
    if size > MOST_BYTES:
        notes.append(f"parameters of {size:,} bytes are not read, so they have no histograms")
    types = _types(model, costs)
    return PageFacts(costs, findings, types, values, profile, verification, size <= MOST_BYTES, notes)


def by_position(model: Any, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call: by position as far as they are given in order, as a name may be that of an argument."""
    required = [v.name for v in model.inputs]
    first = required if inputs.keys() >= {*required} else []
    return [inputs[n] for n in first], {n: v for n, v in inputs.items() if n not in first}


def _types(model: Any, costs: Summary | None) -> dict[str, str]:
    """The types of values that the file does not declare, as text by name, as far as they are known."""
    if declared_types(model.graph).keys() >= {*node_outputs(model.graph)}:
        return {}
    free = any(not isinstance(d, int) for v in (*model.inputs, *model.optional.values()) for d in v.shape or (None,))
    if costs is not None and not free:
        return {n: t for node in costs.nodes for n, t in node.outputs.items()}
    return {name: str(kind) for name, kind in inferred_types(model.graph).items()}


def declared_types(graph: Graph) -> dict[str, str]:
    """The types of the values that a graph declares, as text by name."""
    every = (*graph.value_info.values(), *graph.inputs, *graph.outputs)
    return {v.name: str(v.type) for v in every if v.type is not None}
