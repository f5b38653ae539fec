"""Imports protobuf messages as frozen graphs: resolves names, binds nodes, decodes constants, validates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from ..errors import ModelError, OnnxError, UnsupportedError
from ..ops.registry import LEGACY_HINTS
from ..proto.devices import read_configurations, read_node
from ..proto.external import ExternalFiles
from ..proto.messages import dotted, inside, node_names, normal_domain
from ..proto.operator_sets import OperatorSet, find
from ..proto.tensors import to_array, to_dense
from ..proto.types import ValueInfo, to_value_info
from . import attributes, binding, rules, signatures
from .attributes import entries, metadata
from .derivatives import with_implicit_inputs
from .graph import Function, Graph, Imported, Node, Reference, Unsupported

NEWEST_IR: Final = 14
DEPTH_LIMIT: Final = 100
"""How deeply functions and graphs may nest; the onnx package has the same limit."""

Collect = Callable[[OnnxError, str], None]
"""Receives each violation and its location, instead of an exception at the first one."""

Parameters = dict[str, int]
"""The attributes of the function being imported, with the type that its body uses them as, 0 while unknown."""

Key = tuple[str, str, str]
"""Domain, name and overload of a function."""


class Importer:
    """Imports a ModelProto; holds what its graphs share meanwhile.

    Args:
        model: the message.
        files: its external data files.
        strict: enforce rules of order and form that common runtimes do not.
        allow_newer_opset: treat operator sets newer than the newest supported one as that one.
        collect: receives every violation; the result is then incomplete, and must not be run.
        documents: operator set documents, whose functions implement operators that are otherwise unsupported.
    """

    def __init__(
        self,
        model: Any,
        files: ExternalFiles,
        strict: bool = False,
        allow_newer_opset: bool = False,
        collect: Collect | None = None,
        documents: Iterable[OperatorSet] = (),
    ) -> None:
        self._model_files, self._documents = files, tuple(documents)
        self.files, self.strict, self.allow_newer_opset, self.collect = files, strict, allow_newer_opset, collect
        self.message, self.ir_version = model, model.ir_version
        self.opsets = dict(binding.NEWEST)
        with self.guard("model, opset_import"):
            self.opsets = binding.opsets_of(model)
        self.unsupported: list[Unsupported] = []
        self.rejected: list[OnnxError] = []
        self.deviations: list[str] = []
        self._depth = 0
        self._messages: dict[Key, Any] = {}
        for f in model.functions:
            texts = (f.domain, f.name, f.overload, *f.input, *f.output, *f.attribute)
            rules.check_text(f"function {f.name!r:.80}", *texts)
            key = (normal_domain(f.domain), f.name, f.overload)
            where = f"function {dotted(*key)!r}"
            with self.guard(where):
                if self._messages.setdefault(key, f) is not f:
                    raise ModelError(f"{where} is defined twice", rule="FN-01")
        self._functions: dict[Key, Function | None] = {}

    def model(self) -> Imported:
        """The imported model; its ``unsupported`` lists nodes whose operators are unsupported.

        Raises:
            ModelError: the model violates a rule of the format.
            UnsupportedError: its IR or operator set version is newer than the newest supported one.
        """
        model = self.message
        with self.guard("model"):
            if model.ir_version < 1:
                raise ModelError(f"ir_version is {model.ir_version}; it starts at 1", rule="MV-01")
            if model.ir_version > NEWEST_IR:
                text = f"ir_version is {model.ir_version}, the newest supported is {NEWEST_IR}"
                raise UnsupportedError(text, rule="MV-02")
        graph = self.graph(model.graph, "", self.opsets, {})
        with self.guard(f"graph {graph.name!r}"):
            rules.check_defined(graph.captures, f"graph {graph.name!r}")
            rules.expanded_size(graph)
            graph = with_implicit_inputs(graph)
        findings = tuple(self.unsupported), read_configurations(model), tuple(self.rejected), tuple(self.deviations)
        return Imported(graph, self.opsets, metadata(model), model.ir_version, *findings)

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """Pass violations raised inside to ``collect``, if there is one; else let them end the import."""
        try:
            yield
        except OnnxError as e:
            if self.collect is None:
                raise
            self.collect(e, where)

    def unused_functions(self) -> None:
        """Import the functions that no node calls, to validate them too."""
        for key in self._messages:
            with self.guard(f"function {dotted(*key)!r}"):
                self._function(*key)

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        if self._depth > DEPTH_LIMIT:
            raise ModelError(f"functions and graphs are nested more than {DEPTH_LIMIT} deep", rule="FN-20")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def graph(self, message: Any, path: str, opsets: Mapping[str, int], parameters: Parameters) -> Graph:
        """Import a graph; ``path`` is its location in the model, empty for the main graph."""
        with self._deeper():
            return self._graph(message, path, opsets, parameters)

    def _graph(self, message: Any, path: str, opsets: Mapping[str, int], parameters: Parameters) -> Graph:
        where = f"graph {(message.name or path)[:80]!r}"
        rules.check_text(where, message.name)
        initializers: dict[str, np.ndarray] = {}
        stored: list[tuple[str, Any, Callable[..., np.ndarray]]] = [
            *((t.name, t, partial(to_array, lazy=True)) for t in message.initializer),
            *((s.values.name, s, to_dense) for s in message.sparse_initializer),
        ]
        for name, tensor, convert in stored:
            with self.guard(f"{where}, initializer {name!r}"):
                if not name or name in initializers:
                    problem = "defined twice" if name else "unnamed"
                    raise ModelError(f"{where}: initializer {name!r} is {problem}", rule="GR-09")
                initializers[name] = np.empty(0)
                initializers[name] = convert(tensor, self.files)
        inputs, outputs = self._declared(message.input, where), self._declared(message.output, where)
        with self.guard(where):
            if not all(v.name for v in inputs):
                raise ModelError(f"{where} has an input without a name", rule="GR-24")
        for v in inputs:
            with self.guard(f"{where}, initializer {v.name!r}"):
                rules.check_default(where, v, initializers.get(v.name))
        nodes, constants = self._nodes(message.node, where, path, opsets, parameters)
        with self.guard(where):
            rules.single_definitions(where, inputs, initializers, nodes, constants)
        order = self._ordered(where, nodes, {v.name for v in inputs} | initializers.keys() | constants.keys())
        value_info = {v.name: v for v in self._declared(message.value_info, where)}
        annotations = ((a.tensor_name, a.quant_parameter_tensor_names) for a in message.quantization_annotation)
        quantization = {name: {e.key: e.value for e in tensors} for name, tensors in annotations}
        facts = value_info, entries(message), quantization
        return Graph(message.name, path, inputs, outputs, initializers | constants, order, frozenset(constants), *facts)

    def _declared(self, messages: Iterable[Any], where: str) -> tuple[ValueInfo, ...]:
        result = []
        for message in messages:
            info = ValueInfo(message.name)
            rules.check_text(where, message.name)
            with self.guard(f"{where}, value {message.name!r}"):
                info = to_value_info(message)
            result.append(info)
        return tuple(result)

    def _ordered(self, where: str, nodes: list[Node], defined: set[str]) -> tuple[Node, ...]:
        order = tuple(nodes)
        with self.guard(where):
            order = rules.in_order(where, nodes, defined)
            early = next((node for node, first in zip(nodes, order, strict=True) if node is not first), None)
            if early and self.strict:
                raise ModelError(f"{where}: {early} reads a value that a later node defines", rule="GR-01")
        return order

    def _nodes(
        self, messages: Iterable[Any], where: str, path: str, opsets: Mapping[str, int], parameters: Parameters
    ) -> tuple[list[Node], dict[str, np.ndarray]]:
        """The nodes, and the tensors of Constant nodes, which become initializers."""
        nodes: list[Node] = []
        constants: dict[str, np.ndarray] = {}
        for message, name in zip(messages, node_names(messages), strict=True):
            here = f"{where}, node {name!r:.80}"
            inputs, outputs = tuple(message.input), tuple(message.output)
            rules.check_text(here, message.op_type, message.domain, name, *inputs, *outputs)
            values: dict[str, Any] = {}
            for a in message.attribute:
                if a.name in LEGACY_HINTS:
                    continue
                rules.check_text(here, a.name, a.ref_attr_name)
                with self.guard(f"{here}, attribute {a.name!r}"):
                    if a.name in values:
                        raise ModelError(f"{here} has an attribute twice: {a.name!r}", rule="ND-10")
                    values[a.name] = self._attribute(a, here, inside(path, name), opsets, parameters)
            domain = normal_domain(message.domain)
            tensor = values.get("value") if (domain, message.op_type) == ("", "Constant") else None
            if isinstance(tensor, np.ndarray) and len(values) == len(outputs) == 1 and not inputs:
                with self.guard(here):
                    if outputs[0] in constants:
                        raise ModelError(f"{where}: {outputs[0]!r} is defined more than once", rule="GR-02")
                constants[outputs[0]] = tensor
                continue
            inputs, outputs = _trimmed(inputs), _trimmed(outputs)
            opset = opsets.get(domain) or self._assumed_opset(domain)
            node = Node(name, message.op_type, domain, opset, inputs, outputs, values, None, metadata=entries(message))
            if message.device_configurations:
                node = replace(node, devices=read_node(message))
            with self.guard(here):
                node = self._bound(node, message, where, opsets)
            nodes.append(node)
        return nodes, constants

    def _bound(self, node: Node, message: Any, where: str, opsets: Mapping[str, int]) -> Node:
        """The node bound to its implementation, and validated against it."""
        if not node.op_type:
            raise ModelError(f"{where}, node {node.name!r} has no op_type", rule="OR-08")
        if not node.opset:
            imported = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in opsets.items())
            rule = "FN-04" if any(key[0] == node.domain for key in self._messages) else "OR-06"
            lenient = f"; strict=False reads it as version {n}" if (n := binding.ASSUMED.get(node.domain)) else ""
            raise ModelError(
                f"{where}, node {node.name!r} uses {node.op_type} of domain {node.domain or 'ai.onnx'!r}, "
                f"which opset_import does not name (it has {imported}){lenient}",
                rule=rule if node.domain else "OR-04",
            )
        target: Any = None
        if not binding.built_in_wins(node.domain, node.op_type, node.opset):
            target = self._function(node.domain, node.op_type, message.overload)
        target = target or binding.find(node, self.allow_newer_opset) or self._from_document(node, message.overload)
        values = node.attributes
        if isinstance(target, Function):
            rules.check_call(node, target, message)
        elif target is not None:
            binding.check(node, target)
            if text := signatures.before_its_definition(node):
                if self.strict:
                    raise ModelError(f"{text}; strict=False runs it", rule="OR-09")
                self.deviations.append(text)
            for rule, text in signatures.schema_violations(node, target, message):
                if self.strict:
                    raise ModelError(f"{node} {text}", rule=rule)
                text = f"{text}; it is computed all the same"
                if not any(other.endswith(text) for other in self.deviations):  # one warning for nodes alike
                    self.deviations.append(f"{node} {text}")
            self.rejected += binding.attribute_errors(node, target)
            if (node.domain, node.op_type) == ("", "If"):
                rules.check_branches(node)
            values = binding.convert_attributes(target, values)
        return replace(node, attributes=values, target=target)

    def _assumed_opset(self, domain: str) -> int:
        """The version of a domain that is not imported, with a deviation; 0 if none is assumed."""
        version = 0 if self.strict else binding.ASSUMED.get(domain, 0)
        text = (
            f"opset_import does not name the domain {domain!r}, which is read as version {version}, as by onnxruntime; "
            f"to be sure, add onnx.helper.make_opsetid({domain!r}, {version}) to it"
        )
        if version and text not in self.deviations:
            self.deviations.append(text)
        return version

    def _function(self, domain: str, name: str, overload: str) -> Function | None:
        key = (domain, name, overload)
        if key not in self._messages:
            return None
        return self._once(key, f"function {dotted(*key)!r}", self._messages[key], self._model_files, self.opsets)

    def _from_document(self, node: Node, overload: str) -> Function | None:
        body = find(self._documents, node.domain, node.op_type, overload, node.opset)
        if isinstance(body, str):
            self.unsupported.append(Unsupported(node.domain, node.op_type, node.opset, node.name, overload, body))
            return None
        document, message = body
        if document.ir_version > NEWEST_IR:
            raise UnsupportedError(f"{document.name} is of IR {document.ir_version}, above {NEWEST_IR}", rule="MV-02")
        # With the version, functions and weights of two documents for one domain keep different names.
        key = (f"{node.domain}:{document.version}", node.op_type, overload)
        return self._once(key, f"function {dotted(*key)!r} of {document.name}", message, document.files, {})

    def _once(self, key: Key, where: str, message: Any, files: ExternalFiles, opsets: Mapping[str, int]) -> Function:
        if key not in self._functions:
            outside, self.files = self.files, files
            try:
                with self._deeper():
                    self._functions[key] = None  # being imported: a further call is a recursion
                    self._functions[key] = self._build_function(key, where, message, opsets)
            finally:
                self.files = outside
        function = self._functions[key]
        if function is None:
            pending = [k for k, f in self._functions.items() if f is None]
            between = ", ".join(repr(dotted(*k)) for k in pending[pending.index(key) + 1 :])
            raise ModelError(f"{where} calls itself{' through ' * bool(between)}{between}", rule="FN-19")
        return function

    def _build_function(self, key: Key, where: str, message: Any, opsets: Mapping[str, int]) -> Function:
        title = dotted(*key)
        imports, defaults = opsets, dict[str, Any]()
        parameters: Parameters = dict.fromkeys(message.attribute, 0)
        for a in message.attribute_proto:
            with self.guard(f"{where}, attribute {a.name!r}"):
                defaults[a.name] = self._attribute(a, where, title, {}, {})
                parameters[a.name] = a.type
        names = (*message.attribute, *(a.name for a in message.attribute_proto))
        for what, listed in (("attribute", names), ("input", tuple(message.input)), ("output", tuple(message.output))):
            with self.guard(where):
                if len(set(listed)) < len(listed):
                    rule = "FN-11" if what == "output" else "FN-12"
                    raise ModelError(f"{where} has an {what} twice in {list(listed)}", rule=rule)
        with self.guard(where):
            imports = binding.opsets(message.opset_import) or imports
        nodes, constants = self._nodes(message.node, where, title, imports, parameters)
        self.deviations += signatures.deviations(nodes, opsets, where)
        inputs = tuple(map(ValueInfo, message.input))
        outputs = tuple(map(ValueInfo, message.output))
        with self.guard(where):
            rules.single_definitions(where, inputs, {}, nodes, constants)
        order = self._ordered(where, nodes, {*message.input, *constants})
        body = Graph(title, title, inputs, outputs, constants, order, frozenset(constants))
        with self.guard(where):
            if body.captures:
                raise ModelError(f"{rules.quoted(body.captures)} read by {where} but not defined in it", rule="FN-07")
            body = with_implicit_inputs(body)
        size = 0
        with self.guard(where):
            size = rules.expanded_size(body)
        required = rules.required(body).difference(defaults)
        return Function(*key, tuple(dict.fromkeys(names)), defaults, body, size, parameters, required)

    def _attribute(self, a: Any, where: str, path: str, opsets: Mapping[str, int], parameters: Parameters) -> Any:
        if a.ref_attr_name:
            if a.ref_attr_name not in parameters:
                raise ModelError(
                    f"{where}: attribute {a.name!r} refers to {a.ref_attr_name!r}, "
                    "which is not an attribute of an enclosing function",
                    rule="FN-16",
                )
            if parameters[a.ref_attr_name] and a.type and parameters[a.ref_attr_name] != a.type:
                raise ModelError(
                    f"{where}: attribute {a.name!r} uses {a.ref_attr_name!r} as type {a.type}, "
                    f"other nodes as type {parameters[a.ref_attr_name]}",
                    rule="FN-15",
                )
            parameters[a.ref_attr_name] = a.type or parameters[a.ref_attr_name]
            return Reference(a.ref_attr_name)
        kind = attributes.kind_of(a, where, self.ir_version, self.strict)

        def graph(message: Any, i: int | None = None) -> Graph:
            place = f"{path}.{a.name}" if i is None else f"{path}.{a.name}.{i}"
            return self.graph(message, place, opsets, parameters)

        return attributes.value(a, kind, where, self.files, graph)


def _trimmed(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names without trailing empty ones, which have no meaning (rule ND-02)."""
    return names[: max((i for i, name in enumerate(names, 1) if name), default=0)]
