"""The graph as an interactive HTML page: facts of nodes and values as JSON, drawn by the script in view/."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

import numpy as np

from ...checker.check import check_message
from ...checker.report import Finding
from ...errors import InputTypeError, OnnxError
from ...eval.abstract import Extents, abstract_values
from ...eval.values import to_host
from ...ir.graph import Function, Graph, Node, Reference
from ...ops.registry import Operator
from ...proto.mapped import load
from ...proto.types import TensorType
from ...proto.walk import tensors
from ..changes.parts import node_outputs
from .arrays import figures, histogram, picture
from .outline import Group, Item, Outline, alike, folded, known_inside, named_graphs
from .profile import Profile
from .summary import Summary, feeds_of, summary
from .verification import Verification

MOST_LETTERS: Final = 200
"""Letters of an attribute's value."""
MOST_SHOWN: Final = 16
"""Elements of a constant whose values are shown."""
MOST_BYTES: Final = 1 << 31
"""Parameters of more bytes in all have no histograms: they would all be read."""
EXTENTS: Final = 1009
"""Free extents are prime numbers from here on, in two evaluations, to recognise them in the shapes of inner values."""
FAMILIES: Final = {
    "product": "conv linalg recurrent attention microsoft.recurrent microsoft.attention microsoft.paged "
    "microsoft.weights",
    "activation": "activation",
    "norm": "norm",
    "pool": "pool reduce resize vision",
    "shape": "shape indexing cast sequence padded microsoft.tensors",
    "arithmetic": "elementwise signal loss microsoft.fused",
    "quant": "quant qonnx microsoft.quant",
    "control": "control random",
}
"""Kinds of operators, which have a colour each, by the modules that define them, or their traits and names."""
SCRIPTS: Final = ("layout.js", "graph.js", "draw.js", "panel.js", "page.js")
"""The files of the page's script, in order."""
_KINDS: Final = {module: kind for kind, modules in FAMILIES.items() for module in modules.split()}


@dataclass(frozen=True)
class Facts:
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
    model: Any,
    inputs: Any,
    dims: Mapping[str, int] | None,
    profile: Profile | None,
    verification: Verification | None,
) -> Facts:
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
            costs = summary(model, inputs, dims)
        except (OnnxError, NotImplementedError) as e:
            lines = str(e).splitlines()
            hint = "".join(f". {line}" for line in lines[1:] if line.startswith("Extents"))
            hint = hint.replace("model.summary(", "model.draw(path, ")
            notes.append(f"FLOPs and bytes are not known: {lines[0]}{hint}")
    values: dict[str, Any] = {}
    if inputs:
        names = node_outputs(model.graph)
        rng = 0 if model.graph.draws else None
        args, named = by_position(model, inputs)
        found = model.values(*args, names=names, rng=rng, **named) if names else {}
        values = {**inputs, **{n: to_host(v) for n, v in found.items()}}
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
    return Facts(costs, findings, types, values, profile, verification, size <= MOST_BYTES, notes)


def page(model: Any, facts: Facts) -> str:
    """The page of a model, which needs no network."""
    data = json.dumps(_Page(model, facts).data(), separators=(",", ":"), allow_nan=False)
    title = model.graph.name or "model"
    parts = {
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": _file("page.css"),
        "script": "".join(map(_file, SCRIPTS)),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files(__package__) / "view" / name).read_text(encoding="utf-8")


def by_position(model: Any, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call: by position as far as they are given in order, as a name may be that of an argument."""
    required = [v.name for v in model.inputs]
    first = required if inputs.keys() >= {*required} else []
    return [inputs[n] for n in first], {n: v for n, v in inputs.items() if n not in first}


def _types(model: Any, costs: Summary | None) -> dict[str, str]:
    """The types of values that the file does not declare, as text by name, as far as they are known."""
    if _declared(model.graph).keys() >= {*node_outputs(model.graph)}:
        return {}
    free = any(not isinstance(d, int) for v in (*model.inputs, *model.optional.values()) for d in v.shape or (None,))
    if costs is not None and not free:
        return {n: t for node in costs.nodes for n, t in node.outputs.items()}
    return inferred(model.graph)


def inferred(graph: Graph) -> dict[str, str]:
    """The types of a graph's values as text, with dimension variables, by two abstract evaluations."""
    first, second = Extents(0, EXTENTS), Extents(1, EXTENTS)
    ones = abstract_values(graph, first)
    twos = abstract_values(graph, second) if first else ones
    return {
        name: str(TensorType(np.dtype(one.dtype), tuple(map(_Extent(first, second), one.shape, twos[name].shape))))
        for name, one in ones.items()
        if name in twos and len(one.shape) == len(twos[name].shape)
    }


@dataclass(frozen=True)
class _Extent:
    """An extent as an expression of one dimension variable, from its values for two extents of it."""

    first: Extents
    second: Extents

    def __call__(self, one: int, two: int) -> int | str | None:
        if one == two:
            return one
        for name, a in self.first.items():
            b = self.second.get(name, a)
            if ", axis " in name or name.startswith("trips of ") or a == b:
                continue
            if (one, two) == (a, b):
                return name
            factor, rest = divmod(one - two, a - b)
            if not rest and factor > 0:
                more = one - factor * a
                text = f"{factor}*{name}" if factor > 1 else name
                return f"{text}{more:+d}" if more else text
            for k in (2, 4, 8, 16, 32, 64):
                if (one, two) == (-(-a // k), -(-b // k)):
                    return f"{name}/{k}"
        return None


class _Page:
    """Collects the JSON of a page; graphs and nodes are numbered over the whole model."""

    def __init__(self, model: Any, facts: Facts) -> None:
        self.model, self.facts = model, facts
        self.graphs: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.operators: dict[str, dict[str, Any]] = {}
        self.numbers: dict[int, int] = {}
        self.findings: dict[str, list[Finding]] = defaultdict(list)
        for finding in facts.findings:
            if found := re.findall(r"node '((?:[^'\\]|\\.)*)'", finding.path):
                self.findings[found[-1]].append(finding)
        profile = () if facts.profile is None else facts.profile.nodes
        self.times = {n.name: n for n in profile}

    def data(self) -> dict[str, Any]:
        """Everything."""
        model, facts = self.model, self.facts
        self._graph(model.graph, {}, {})
        elsewhere = [f for f in facts.findings if not re.search(r"node '", f.path)]
        found: dict[str, Any] = {
            "title": model.graph.name or "model",
            "opsets": {domain or "ai.onnx": version for domain, version in model.opsets.items()},
            "metadata": {str(k): _text(v) for k, v in model.metadata.items()},
            "inputs": [(v.name, str(v.type)) for v in (*model.inputs, *model.optional.values())],
            "outputs": [(v.name, str(v.type)) for v in model.outputs],
            "parameters": sum(int(np.prod(t.shape)) for t in model.types.values()),
            "bytes": sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in model.types.values()),
            "notes": list(facts.notes),
            "findings": [_finding(f) for f in elsewhere],
            "operators": self.operators,
            "nodes": self.nodes,
            "graphs": self.graphs,
        }
        if facts.costs is not None:
            found |= {"flops": facts.costs.flops, "sizes": dict(facts.costs.inputs)}
        if facts.profile is not None:
            found["time"] = facts.profile.total
        if facts.verification is not None:
            found["against"] = facts.verification.against
            found["verified"] = str(facts.verification).splitlines()[0]
        if model.placement is not None:
            found["mesh"] = {str(n): int(k) for n, k in model.placement.mesh.shape.items()}
        return found

    # ------------------------------------------------------------------------------------------------ graphs

    def _graph(self, graph: Graph, known: dict[str, None], outer: Mapping[str, str]) -> int:
        """Add a graph, and those inside it; returns its number."""
        if id(graph) in self.numbers:
            return self.numbers[id(graph)]
        number = self.numbers[id(graph)] = len(self.graphs)
        entry: dict[str, Any] = {}
        self.graphs.append(entry)
        main = number == 0
        hidden = folded(graph, known)
        types = {**outer, **(self.facts.types if main else {}), **_declared(graph)}
        inside = known_inside(graph, hidden, known)
        first = len(self.nodes)
        self.nodes += [self._node(node, number, main) for node in graph.nodes]
        costs = self.facts.costs.nodes if main and self.facts.costs else ()
        for k, row in enumerate(costs):
            self.nodes[first + k] |= {"flops": row.flops, "bytes": row.bytes, "parameters": row.parameters}
        for k in hidden:
            self.nodes[first + k]["folded"] = True
        for k, node in enumerate(graph.nodes):
            bodies = sorted(named_graphs(node), key=lambda pair: pair[0] == "else_branch")  # then_branch is first
            if isinstance(node.target, Function):
                self.nodes[first + k]["graphs"] = [("", self._graph(node.target.body, {}, {}))]
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
        found: dict[str, dict[str, Any]] = {n: {"type": t} for n, t in types.items()}
        parameters, changes = self.model.types, self.model.spec.changes
        for name, array in graph.initializers.items():
            key = graph.key(name)
            array = changes.get(key, array)
            entry = found[name] = {"type": str(TensorType(np.dtype(array.dtype), tuple(array.shape)))}
            entry["bytes"] = int(array.nbytes)
            if key in parameters:
                entry["parameter"] = True
                if self.model.placement is not None:
                    entry["sharding"] = self._sharding(key)
            if array.size <= MOST_SHOWN:
                entry["value"] = _text(np.asarray(load(array)).tolist())
            if self.facts.statistics and array.size > 1 and (stats := figures(array)) is not None:
                entry |= {"figures": stats, "histogram": histogram(array)}
        for name, value in self.facts.values.items() if main else ():
            entry = found.setdefault(name, {})
            if hasattr(value, "dtype") and hasattr(value, "shape"):
                entry["type"] = entry.get("type") or str(TensorType(np.dtype(value.dtype), tuple(value.shape)))
                entry["shape"] = list(value.shape)
            if (stats := figures(value, whole=True)) is not None:
                entry |= {"figures": stats, "picture": picture(value)}
        verification = self.facts.verification
        comparisons = verification.nodes.values() if main and verification is not None else ()
        for comparison in (c for group in comparisons for c in group if not c.ok):
            found.setdefault(comparison.value, {})["differs"] = comparison.why
        return found

    def _sharding(self, key: str) -> str:
        placement = self.model.placement
        sharding = placement.params.get(key)
        spec = "replicated" if sharding is None or not any(sharding.spec) else str(sharding.spec)
        homes = getattr(placement, "homes", {})
        return f"stage {homes[key]}, {spec}" if key in homes else spec

    # ------------------------------------------------------------------------------------------------ nodes

    def _node(self, node: Node, number: int, main: bool) -> dict[str, Any]:
        attributes = {n: _text(v) for n, v in node.attributes.items() if not _is_graph(v)}
        found: dict[str, Any] = {
            "name": node.name,
            "type": self._operator(node),
            "graph": number,
            "inputs": node.inputs,
            "outputs": node.outputs,
        }
        if node.captures:
            found["captures"] = node.captures
        if attributes:
            found["attributes"] = attributes
        if findings := self.findings.get(node.name):
            found["findings"] = [_finding(f) for f in findings]
        if main and (time := self.times.get(node.name)) is not None:
            found |= {"seconds": time.seconds, "share": time.share}
            if time.fused:
                found["fused"] = list(time.fused)
            if time.host:
                found["host"] = True
        first = None if self.facts.verification is None else self.facts.verification.first
        if main and first is not None and (first.value in node.outputs or first.node.startswith(str(node))):
            found["differs"] = f"{first.value}: {first.comparison.why}"
        return found

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
            if target.variadic:
                entry["variadic"] = target.variadic
            if document := inspect.getdoc(target.function):
                entry["document"] = document.partition("\n\n")[0].replace("\n", " ")
            if target.limits:
                entry["limits"] = target.limits
        elif isinstance(target, Function):
            entry |= {"kind": "control", "inputs": [v.name for v in target.body.inputs]}
            entry["document"] = f"A function of the model, of {target.size} nodes."
        else:
            entry["document"] = "Unsupported."
        self.operators[key] = entry
        return key


def _item(item: Item, first: int) -> Any:
    """An item of an outline, with nodes by their number in the model."""
    if isinstance(item, Group):
        return {"kind": item.kind, "title": item.title, "items": [_item(i, first) for i in item.items]}
    return first + item


def _declared(graph: Graph) -> dict[str, str]:
    """The types of the values that a graph declares, as text by name."""
    every = (*graph.value_info.values(), *graph.inputs, *graph.outputs)
    return {v.name: str(v.type) for v in every if v.type is not None}


def _signature(target: Operator) -> str:
    """The operator's function as a call, without what the interpreter supplies."""
    own = inspect.signature(target.function)  # type: ignore[arg-type]  # checked by the caller
    kept = [
        p.replace(annotation=inspect.Parameter.empty) for p in own.parameters.values() if p.name not in target.fixtures
    ]
    return f"{target.name}{own.replace(parameters=kept, return_annotation=inspect.Signature.empty)}"


def _finding(finding: Finding) -> dict[str, str]:
    return {n: getattr(finding, n) for n in ("rule", "severity", "message", "fix", "path")}


def _is_graph(value: Any) -> bool:
    return isinstance(value, Graph) or (isinstance(value, tuple) and any(isinstance(v, Graph) for v in value[:1]))


def _text(value: Any) -> str:
    if isinstance(value, Reference):
        return f"the caller's {value.name}"
    if isinstance(value, np.ndarray):
        if value.size > MOST_SHOWN:
            return str(TensorType(value.dtype, value.shape))
        value = load(value).tolist()
    if isinstance(value, tuple | list) and len(value) > 4 * MOST_SHOWN:
        return f"{len(value):,} values: {', '.join(map(_text, value[:8]))}, …"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"
