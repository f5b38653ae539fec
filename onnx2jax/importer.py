"""From messages to frozen graphs: names resolved, nodes bound, constants decoded, the format's rules kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from . import binding
from .errors import ModelError, UnsupportedError
from .graph import Function, Graph, Imported, Missing, Node, Reference
from .ops.registry import LEGACY_HINTS, normal_domain
from .proto.external import ExternalFiles
from .proto.tensors import to_array, to_dense
from .proto.types import ValueInfo, to_type, to_value_info

NEWEST_IR: Final = 14
EXPANSION_LIMIT: Final = 1_000_000
"""Nodes a model may have after every function call is expanded; a chain of doubling functions passes it quickly."""


def build(model: Any, files: ExternalFiles, *, strict: bool = False, allow_newer_opset: bool = False) -> Imported:
    """A ModelProto as frozen objects. Operators that nothing serves end up in ``missing``.

    Raises:
        ModelError: the model breaks a rule of the format.
        UnsupportedError: its IR or operator set version is newer than those known here.
    """
    if model.ir_version < 1:
        raise ModelError(f"ir_version is {model.ir_version}; it starts at 1 (rule MV-01)")
    if model.ir_version > NEWEST_IR:
        raise UnsupportedError(f"ir_version is {model.ir_version}, the newest known here is {NEWEST_IR} (rule MV-02)")
    opsets = binding.opsets(model.opset_import)
    if model.ir_version < 3 and not opsets:
        opsets = {"": 1}  # rule MV-03: versions were not yet written down
    elif not opsets:
        raise ModelError("the model imports no operator set (opset_import is empty, rule MV-03)")
    importer = _Importer(model, files, strict, allow_newer_opset)
    graph = importer.graph(model.graph, "", opsets, frozenset())
    if graph.captures:
        raise ModelError(
            f"{_quoted(graph.captures)} read or returned by graph {graph.name!r} but defined nowhere "
            "(no input, initializer or earlier node has the name; rules GR-01, GR-14)"
        )
    importer.check_size(graph)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if model.HasField(name):
            metadata.setdefault(name, str(getattr(model, name)))
    return Imported(graph, opsets, metadata, model.ir_version, tuple(importer.missing))


class _Importer:
    """What the graphs of one model share while they are built."""

    def __init__(self, model: Any, files: ExternalFiles, strict: bool, allow_newer_opset: bool) -> None:
        self.files, self.strict, self.allow_newer_opset = files, strict, allow_newer_opset
        self.ir_version = model.ir_version
        self.model_opsets = binding.opsets(model.opset_import)
        self.missing: list[Missing] = []
        self._messages: dict[tuple[str, str, str], Any] = {}
        for f in model.functions:
            if self._messages.setdefault(key := (normal_domain(f.domain), f.name, f.overload), f) is not f:
                raise ModelError(f"function {'.'.join(filter(None, key))!r} is defined twice (rule FN-01)")
        self._functions: dict[tuple[str, str, str], Function | None] = {}

    def graph(self, message: Any, path: str, opsets: Mapping[str, int], parameters: frozenset[str]) -> Graph:
        where = f"graph {message.name or path!r}"
        initializers: dict[str, np.ndarray] = {}
        for tensor, convert in [(t, to_array) for t in message.initializer] + [
            (s, to_dense) for s in message.sparse_initializer
        ]:
            name = tensor.values.name if convert is to_dense else tensor.name
            if not name or name in initializers:
                problem = "defined twice" if name else "unnamed"
                raise ModelError(f"{where}: initializer {name!r} is {problem} (rule GR-09)")
            initializers[name] = convert(tensor, self.files)
        inputs = tuple(map(to_value_info, message.input))
        outputs = tuple(map(to_value_info, message.output))
        if not all(v.name for v in inputs):
            raise ModelError(f"{where} has an input without a name (rule GR-24)")
        nodes, constants = self._nodes(message.node, where, path, opsets, parameters)
        _single_definitions(where, inputs, initializers, nodes, constants)
        order = _in_order(where, nodes, {v.name for v in inputs} | initializers.keys() | constants.keys(), self.strict)
        return Graph(
            message.name,
            path,
            inputs,
            outputs,
            initializers | constants,
            order,
            frozenset(constants),
            {v.name: to_value_info(v) for v in message.value_info},
        )

    def _nodes(
        self, messages: Iterable[Any], where: str, path: str, opsets: Mapping[str, int], parameters: frozenset[str]
    ) -> tuple[list[Node], dict[str, np.ndarray]]:
        """The nodes, and the tensors that Constant nodes hold: those are initializers written otherwise."""
        nodes: list[Node] = []
        constants: dict[str, np.ndarray] = {}
        for i, message in enumerate(messages):
            # Node names may be empty or repeat (rule GR-22); the first output never does.
            name = message.name or next(filter(None, message.output), f"{message.op_type}_{i}")
            inner = f"{path}/{name}" if path else name
            given = [a for a in message.attribute if a.name not in LEGACY_HINTS]
            attributes = {
                a.name: self._attribute(a, f"{where}, node {name!r}", inner, opsets, parameters) for a in given
            }
            if len(attributes) < len(given):
                raise ModelError(f"{where}, node {name!r} has an attribute twice (rule ND-10)")
            domain = normal_domain(message.domain)
            tensor = attributes.get("value") if (domain, message.op_type) == ("", "Constant") else None
            if isinstance(tensor, np.ndarray) and len(attributes) == len(message.output) == 1 and not message.input:
                if message.output[0] in constants:
                    raise ModelError(f"{where}: {message.output[0]!r} is defined twice (rule GR-02)")
                constants[message.output[0]] = tensor
                continue
            nodes.append(self._node(message, name, where, domain, attributes, opsets))
        return nodes, constants

    def _node(
        self, message: Any, name: str, where: str, domain: str, attributes: dict[str, Any], opsets: Mapping[str, int]
    ) -> Node:
        opset = opsets.get(domain)
        if opset is None:
            imported = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in opsets.items())
            raise ModelError(
                f"{where}, node {name!r} uses {message.op_type} of domain {domain or 'ai.onnx'!r}, "
                f"which opset_import does not name (it has {imported}; rule OR-06)"
            )
        if not message.op_type:
            raise ModelError(f"{where}, node {name!r} has no op_type")
        inputs, outputs = _trimmed(message.input), _trimmed(message.output)
        node = Node(name, message.op_type, domain, opset, inputs, outputs, attributes, None)
        target: Any = None
        if not binding.built_in_wins(node):
            target = self._function(domain, message.op_type, message.overload)
        target = target or binding.find(node, self.allow_newer_opset)
        if target is None:
            self.missing.append(Missing(domain, message.op_type, opset, name, message.overload))
        elif isinstance(target, Function):
            _check_call(node, target)
        else:
            binding.check(node, target)
            attributes = binding.land(target, attributes)
        return Node(name, message.op_type, domain, opset, inputs, outputs, attributes, target)

    def _function(self, domain: str, name: str, overload: str) -> Function | None:
        key = (domain, name, overload)
        if key not in self._messages:
            return None
        if key not in self._functions:
            self._functions[key] = None  # being built: meeting it again is a recursion
            self._functions[key] = self._build_function(key, self._messages[key])
        function = self._functions[key]
        if function is None:
            raise ModelError(f"function {'.'.join(filter(None, key))!r} calls itself (rule FN-19)")
        return function

    def _build_function(self, key: tuple[str, str, str], message: Any) -> Function:
        title = ".".join(filter(None, key))
        where = f"function {title!r}"
        defaults = {a.name: self._attribute(a, where, title, {}, frozenset()) for a in message.attribute_proto}
        names = (*message.attribute, *defaults)
        for what, given in (("attribute", names), ("input", tuple(message.input)), ("output", tuple(message.output))):
            if len(set(given)) < len(given):
                raise ModelError(f"{where} has an {what} twice in {list(given)} (rules FN-11, FN-12)")
        opsets = binding.opsets(message.opset_import) or self.model_opsets
        nodes, constants = self._nodes(message.node, where, title, opsets, frozenset(names))
        inputs = tuple(ValueInfo(n) for n in message.input)
        _single_definitions(where, inputs, {}, nodes, constants)
        order = _in_order(where, nodes, {*message.input, *constants}, self.strict)
        outputs = tuple(ValueInfo(n) for n in message.output)
        body = Graph(title, title, inputs, outputs, constants, order, frozenset(constants))
        if body.captures:
            raise ModelError(f"{_quoted(body.captures)} read by {where} but not defined in it (rule FN-07)")
        return Function(*key, names, defaults, body, self.check_size(body))

    def check_size(self, graph: Graph) -> int:
        """The number of nodes once every call is expanded; raises before anything is expanded."""
        size = 0
        for node in graph.nodes:
            size += node.target.size if isinstance(node.target, Function) else 1
            size += sum(map(self.check_size, node.graphs))
        if size > EXPANSION_LIMIT:
            raise ModelError(f"graph {graph.name!r} expands to over {EXPANSION_LIMIT} nodes (rule FN-20)")
        return size

    def _attribute(self, a: Any, where: str, path: str, opsets: Mapping[str, int], parameters: frozenset[str]) -> Any:
        if a.ref_attr_name:
            if a.ref_attr_name not in parameters:
                raise ModelError(
                    f"{where}: attribute {a.name!r} refers to {a.ref_attr_name!r}, "
                    "which is no attribute of an enclosing function (rule FN-16)"
                )
            return Reference(a.ref_attr_name)
        kind = a.type or self._untyped(a, where)
        match kind:
            case 1:
                return a.f
            case 2:
                return a.i
            case 3:
                return _text(a.s)
            case 4:
                return to_array(a.t, self.files)
            case 5:
                return self.graph(a.g, f"{path}.{a.name}", opsets, parameters)
            case 6:
                return tuple(a.floats)
            case 7:
                return tuple(a.ints)
            case 8:
                return tuple(map(_text, a.strings))
            case 9:
                return tuple(to_array(t, self.files) for t in a.tensors)
            case 10:
                paths = (f"{path}.{a.name}.{i}" for i in range(len(a.graphs)))
                return tuple(self.graph(g, p, opsets, parameters) for g, p in zip(a.graphs, paths, strict=True))
            case 11:
                return to_dense(a.sparse_tensor, self.files)
            case 12:
                return tuple(to_dense(t, self.files) for t in a.sparse_tensors)
            case 13:
                return to_type(a.tp)
            case 14:
                return tuple(map(to_type, a.type_protos))
            case _:
                raise ModelError(f"{where}: attribute {a.name!r} has type {a.type}, which is not defined (rule AT-02)")

    def _untyped(self, a: Any, where: str) -> int:
        """IR 1 did not write an attribute's type; the one field in use tells it (rule AT-03)."""
        fields = ("f", "i", "s", "t", "g", "floats", "ints", "strings", "tensors", "graphs")
        used = [fields.index(d.name) + 1 for d, _ in a.ListFields() if d.name in fields]
        if self.ir_version >= 2 and self.strict:
            raise ModelError(f"{where}: attribute {a.name!r} has no type (rule AT-02)")
        if len(used) != 1:
            raise ModelError(f"{where}: attribute {a.name!r} has no type and {len(used)} values (rules AT-01, AT-03)")
        return used[0]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _trimmed(names: Iterable[str]) -> tuple[str, ...]:
    """Trailing empty names say the same as no names (rule ND-02)."""
    result = list(names)
    while result and not result[-1]:
        result.pop()
    return tuple(result)


def _quoted(names: Iterable[str], limit: int = 10) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more + (" is" if len(names) == 1 else " are")


def _check_call(node: Node, function: Function) -> None:
    for what, given, formal in (
        ("inputs", node.inputs, function.body.inputs),
        ("outputs", node.outputs, function.body.outputs),
    ):
        if len(given) > len(formal):
            raise ModelError(f"{node} gives {len(given)} {what}, the function has {len(formal)} (rule FN-09)")
    unknown = set(node.attributes) - set(function.attributes)
    if unknown:
        known = list(function.attributes)
        raise ModelError(f"{node} has attributes {sorted(unknown)}; the function has {known} (rule FN-12)")


def _single_definitions(
    where: str,
    inputs: Iterable[ValueInfo],
    initializers: Iterable[str],
    nodes: Iterable[Node],
    constants: Iterable[str],
) -> None:
    names = [v.name for v in inputs] + list(constants) + [n for node in nodes for n in node.outputs if n]
    names += set(initializers) - {v.name for v in inputs}  # an initializer may be an input's default (rule GR-04)
    twice = [n for n, times in Counter(names).items() if times > 1]
    if twice:
        raise ModelError(f"{where}: {_quoted(twice)} defined more than once (rule GR-02)")


def _in_order(where: str, nodes: list[Node], defined: set[str], strict: bool) -> tuple[Node, ...]:
    """The nodes so that each comes after those it reads. Files out of order are sorted unless ``strict``."""
    later = {n for node in nodes for n in node.outputs}
    result: list[Node] = []
    waiting = nodes
    while waiting:
        blocked = []
        for node in waiting:
            if any(n in later and n not in defined for n in node.reads):
                if strict:
                    raise ModelError(f"{where}: {node} reads a value that a later node defines (rule GR-01)")
                blocked.append(node)
            else:
                result.append(node)
                defined.update(node.outputs)
        if len(blocked) == len(waiting):
            raise ModelError(f"{where} has a cycle through {_quoted(n.name for n in blocked)} waiting (rule GR-01)")
        waiting = blocked
    return tuple(result)
