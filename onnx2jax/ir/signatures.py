"""Types and attributes of each version of each operator: types.txt, generated from ONNX's schemas.

Whether an operator is the same in two versions of its domain (rule FN-06).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jax import export

from ..ops.registry import Operator, is_built_in, resolve
from ..proto.messages import dotted
from ..proto.types import ELEMENT_TYPES
from .graph import Node

Type = str | None
"""A type in short notation: the element type of a tensor, or ``seq(float)`` and the like; None if unknown."""


@dataclass(frozen=True)
class TypeSignature:
    """Types or type variables of an operator's inputs and outputs."""

    since: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]
    """Type variable -> the types it stands for."""
    attributes: frozenset[str]

    @property
    def required(self) -> tuple[int, ...]:
        """The positions of the inputs without which a node is invalid."""
        return tuple(i for i, kind in enumerate(self._single) if not kind.endswith("?"))

    @property
    def min_input(self) -> int:
        """The smallest length of a node's list of inputs, in which optional ones have empty names."""
        single = self._single
        return len(single) if len(single) < len(self.inputs) else max(self.required, default=-1) + 1

    @property
    def _single(self) -> tuple[str, ...]:
        """The inputs before the variadic one."""
        return self.inputs[:-1] if self.inputs and self.inputs[-1].endswith(("*", "&")) else self.inputs


@cache
def signature(title: str, opset: int) -> TypeSignature | None:
    """The signature of an operator (``Relu``, ``ai.onnx.ml.ZipMap``) at an opset; None if ONNX defines none."""
    newest = max((s for s in _versions(title) if s.since <= opset), key=lambda s: s.since, default=None)
    return newest if newest is not None and newest.outputs else None


def is_plain(title: str, position: int, kind: str) -> bool:
    """Whether some version of an operator takes, at this position, a type of the same class as one it does not take.

    The meaning is then plain: ``int8`` where a version takes ``int32``, ``float`` where a later one does.

    >>> is_plain("MatMul", 0, "int8"), is_plain("Equal", 1, "float"), is_plain("Not", 0, "int32")
    (True, True, False)
    """
    accepted: set[str] = set()
    for version in _versions(title):
        variable = (formal(version.inputs, position) or "").rstrip("&")
        accepted |= version.allowed.get(variable, {variable})
    return any(kind == other or any({kind, other} <= alike for alike in _CLASSES) for other in accepted)


def formal(parameters: tuple[str, ...], position: int) -> str | None:
    """The type of the parameter at a position; a trailing ``&`` marks variadic ones that may differ in type."""
    if position < len(parameters):
        return parameters[position].rstrip("?*")
    return parameters[-1].rstrip("*") if parameters and parameters[-1].endswith(("*", "&")) else None


def type_mismatch(title: str, opset: int, types: Sequence[Type]) -> str:
    """Which operand has a type that the operator does not accept, and the fix; empty if they fit or are unknown."""
    schema, bound = signature(title, opset), dict[str, tuple[int, str]]()
    domain, _, name = title.rpartition(".")
    if domain in _FIRST_MAY_BE_STRINGS:
        first = int(name in _FIRST_MAY_BE_STRINGS[domain])
        i = next((i for i, kind in enumerate(types) if i >= first and kind == "string"), None)
        return "" if i is None else f"input {i} is string, and {title} takes no strings there: put a Cast before it"
    for i, kind in enumerate(types):
        variable = formal(schema.inputs, i) if schema and kind else None
        if schema is None or kind is None or variable is None:
            continue
        name = variable.rstrip("&")
        allowed = schema.allowed.get(name, frozenset({name}))
        if kind not in allowed:
            fix = "give one array" if kind.startswith("seq(") else "put a Cast before it"
            return f"input {i} is {kind}, and {title} takes {', '.join(sorted(allowed))} there: {fix}"
        first, same = bound.setdefault(name, (i, kind))
        if same != kind and name == variable:
            return f"inputs {first} and {i} are {same} and {kind}, and {title} takes one type: put a Cast before one"
    return ""


def type_of_array(value: Any) -> Type:
    """The element type of an array, or the type of a sequence of arrays, in short notation; None for other values."""
    if isinstance(value, list):
        types = set(map(type_of_array, value))
        return f"seq({types.pop()})" if len(types) == 1 and None not in types else None
    if not hasattr(value, "dtype"):
        return None
    if value.dtype == object and any(map(export.is_symbolic_dim, value.flat)):  # a shape inside jax.export
        return "int64"
    return _BY_DTYPE.get(value.dtype)


def type_of(message: Any) -> Type:
    """A TypeProto in short notation; a sparse tensor as the dense one that it represents."""
    kind = message.WhichOneof("value")
    value: Any = getattr(message, kind) if kind else None
    match kind:
        case "tensor_type" | "sparse_tensor_type":
            return element(value.elem_type)
        case "sequence_type" | "optional_type":
            inner = type_of(value.elem_type)
            return inner and f"{'seq' if kind == 'sequence_type' else 'optional'}({inner})"
        case "map_type":
            key, inner = element(value.key_type), type_of(value.value_type)
            return f"map({key},{inner})" if key and inner else None
        case _:
            return None


def element(code: int) -> Type:
    """An element type code in short notation."""
    return ELEMENT_TYPES[code].name.lower() if code in ELEMENT_TYPES else None


_CLASSES: Final = (
    frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    frozenset({"bfloat16", "float16", "float", "double"}),
    frozenset({"complex64", "complex128"}),
)
"""Element types alike: integers of at least 8 bits, floats of at least 16, complex numbers."""

_FIRST_MAY_BE_STRINGS: Final = {
    "com.microsoft": frozenset({"ExpandDims", "GatherND", "MurmurHash3", "Tokenizer", "UnfoldTensor", "Unique"})
}
"""Operators outside types.txt, because ONNX has no schemas for their domain, whose first input may be strings."""

_BY_DTYPE: Final = {row.dtype: row.name.lower() for row in ELEMENT_TYPES.values()}


@cache
def _lines() -> tuple[list[frozenset[str]], dict[str, list[str]]]:
    """Of types.txt: the sets of types, and the lines of each operator."""
    sets: list[frozenset[str]] = []
    lines: dict[str, list[str]] = {}
    for line in files(__package__).joinpath("types.txt").read_text(encoding="utf-8").splitlines():
        if line[0].isdigit():
            sets.append(frozenset(line.split()[1:]))
        elif not line.startswith("#"):
            lines.setdefault(line.partition(" ")[0], []).append(line)
    return sets, lines


@cache
def _versions(title: str) -> tuple[TypeSignature, ...]:
    """The signatures of an operator, oldest first; parsed when it is first met, since all take 50 ms."""
    sets, lines = _lines()
    versions = []
    for line in lines.get(title, ()):
        head, _, rest = line.partition(":")
        ends, variables, attributes = rest.split(";") if rest else ("", "", "")
        inputs, _, outputs = ends.partition("->")
        allowed = {name: sets[int(i)] for name, i in (v.split("=") for v in variables.split())}
        names = frozenset(attributes.split())
        since = int(head.split()[1])
        versions.append(TypeSignature(since, tuple(inputs.split()), tuple(outputs.split()), allowed, names))
    return tuple(versions)


def same_schema(domain: str, op_type: str, one: int, other: int) -> bool:
    """Whether an operator has the same schema in two versions of its domain, as FN-06 demands of functions."""
    schemas = [signature(dotted(domain, op_type), version) for version in (one, other)]
    since = {schema and schema.since for schema in schemas}
    return len(since) == 1 and resolve(domain, op_type, one) is resolve(domain, op_type, other)


def deviations(nodes: Sequence[Node], opsets: Mapping[str, int], where: str) -> Iterator[str]:
    """A text for each node of a function that means something else in the versions that the model imports."""
    for node in nodes:
        version = opsets.get(node.domain, node.opset)
        if isinstance(node.target, Operator) and not _same_meaning(node, node.target, version):
            yield (
                f"{node} of {where} differs from {node.op_type} of opset {version}, which the model imports (FN-06): "
                f"it is computed as in opset {node.opset}, by onnxruntime as in opset {version}. To make the file "
                "unambiguous: onnx.inliner.inline_local_functions(proto, convert_version=True)"
            )
        for graph in node.graphs:
            yield from deviations(graph.nodes, opsets, where)


def before_its_definition(node: Node) -> str:
    """A text if ONNX defines the node's operator in later opsets only, and onnxruntime runs it all the same."""
    first = min((s.since for s in _versions(node.title)), default=0)
    if first <= node.opset:
        return ""
    return (
        f"{node}: ONNX defines {node.op_type} from opset {first} on; it is computed as in onnxruntime, whose optimizer "
        f"writes such files. To make the file valid: onnx.version_converter.convert_version(proto, {first})"
    )


def schema_violations(node: Node, operator: Operator, message: Any) -> Iterator[tuple[str, str]]:
    """Rule and text for attributes and inputs that the operator does not have, or lacks, at the node's opset.

    The function of an operator implements several of its versions, and accepts the attributes and inputs of each.
    """
    title, name = node.title, node.op_type
    schema = signature(title, node.opset)
    if schema is None or not is_built_in(operator):
        return
    if unknown := sorted({a.name for a in message.attribute} - schema.attributes):
        fixes = "; ".join(_attribute_fix(title, node.opset, operator, attribute) for attribute in unknown)
        has = f"at opset {node.opset} {name} has {sorted(schema.attributes) or 'none'}"
        yield "ND-10", f"has attributes {unknown}; {has} ({fixes})"
    count = len(node.inputs)
    if count and formal(schema.inputs, count - 1) is None:
        yield "ND-08", f"has {count} inputs; at opset {node.opset} {name} takes at most {len(schema.inputs)}"
    fed = {i for i, value in enumerate(node.inputs) if value}
    lacking = [i for i in schema.required if i not in fed and operator.parameter(i) not in node.attributes]
    if lacking or (not unknown and len(message.input) < schema.min_input):
        problem = f"lacks input {lacking[0]}" if lacking else f"has {len(message.input)} inputs"
        yield "ND-03", f"{problem}; at opset {node.opset} {name} needs {schema.min_input}"


def _attribute_fix(title: str, opset: int, operator: Operator, name: str) -> str:
    """How to fix an attribute that the operator does not have at this opset."""
    versions = _versions(title)
    having = [s.since for s in versions if name in s.attributes]
    before, later = max((v for v in having if v <= opset), default=0), min((v for v in having if v > opset), default=0)
    until = next(s.since for s in versions if s.since > before)  # the version that removes it, if there is one
    schema = signature(title, opset)
    position = operator.inputs.index(name) if name in operator.inputs else -1
    if schema is not None and position >= 0 and formal(schema.inputs, position) is not None:
        return f"{name} is an input{f' since opset {until}' if before else ''}: pass it as input {position}"
    if later:
        return f"{name} exists from opset {later} on: import opset {later}, or remove it"
    return f"{name} was removed in opset {until}: remove it" if before else f"{name} is unknown: remove it"


def _same_meaning(node: Node, operator: Operator, version: int) -> bool:
    """Whether another version of the operator computes the same from the node's operands and attributes."""
    if version == node.opset:
        return True
    if resolve(node.domain, node.op_type, version) is not operator:
        return False
    schema, other = (signature(node.title, v) for v in (node.opset, version))
    if schema is None or other is None:
        return schema is other
    # Between the versions an attribute may have become an input.
    moved = [name for name in operator.inputs if name in node.attributes]
    used = [i for i, name in enumerate(node.inputs) if name] + [operator.inputs.index(name) for name in moved]
    return all((formal(schema.inputs, i) is None) == (formal(other.inputs, i) is None) for i in used)
