"""Binds nodes to registered operators: look-up by opset, validation against the signature, unsupported operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any, Final

import numpy as np

from .. import compat
from ..errors import ModelError, OnnxError, OperatorError, UnsupportedError, UnsupportedOperatorError
from ..ops import registry
from ..ops.registry import Operator
from ..proto.messages import normal_domain
from .graph import Graph, Node, Reference, Unsupported

NEWEST: Final = {"": 28, "ai.onnx.ml": 5, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}
"""The newest supported version of each domain that ONNX itself defines."""

DOMAIN: Final = "ai.onnx"
"""What the domain '' is called."""

ASSUMED: Final = {"ai.onnx.ml": NEWEST["ai.onnx.ml"], "com.microsoft": 1}
"""Versions of domains that a file uses and does not import, unless ``strict``: those that onnxruntime assumes."""


def opsets(entries: Iterable[Any]) -> dict[str, int]:
    """Domain -> version of the imported operator sets; the higher of two entries for one domain (rule OR-02)."""
    result: dict[str, int] = {}
    for entry in entries:
        domain = normal_domain(entry.domain)
        if not 0 < entry.version < 2**31:
            raise ModelError(f"the version of operator set {domain or 'ai.onnx'!r} is {entry.version}", rule="OR-11")
        result[domain] = max(entry.version, result.get(domain, 0))
    return result


def opsets_of(model: Any) -> dict[str, int]:
    """The operator sets that a model imports."""
    imported = opsets(model.opset_import)
    if model.ir_version < 3 and not imported:
        return {"": 1}  # rule MV-03: early IR versions have no opset_import
    if not imported:
        raise ModelError("the model imports no operator set (opset_import is empty)", rule="MV-03")
    return imported


def built_in_wins(domain: str, op_type: str, opset: int) -> bool:
    """Whether an operator of ONNX's own domains takes precedence over the model's function (rule OR-16)."""
    return domain in NEWEST and registry.resolve(domain, op_type, opset) is not None


def find(node: Node, allow_newer_opset: bool = False) -> Operator | None:
    """The operator that implements a node: the newest ``since`` not above the model's opset (rule OR-01)."""
    newest = NEWEST.get(node.domain)
    if newest is not None and node.opset > newest and not allow_newer_opset:
        raise UnsupportedError(
            f"the model imports opset {node.opset} of {node.domain or 'ai.onnx'}; the newest supported is {newest}, "
            f"and operators may have changed since. "
            f"To run it as opset {newest}: convert(..., allow_newer_opset=True)",
            rule="OR-12",
        )
    operator = registry.resolve(node.domain, node.op_type, node.opset)
    if operator is not None and operator.function is None:
        older = registry.resolve(node.domain, node.op_type, operator.since - 1)
        below = f", or import an opset below {operator.since}" if older is not None else ""
        text = f"{node}: {node.op_type} is deprecated since opset {operator.since}; use {operator.instead}{below}"
        raise ModelError(text, rule="OR-10")
    return operator


def check(node: Node, operator: Operator) -> None:
    """Raise ModelError if a node's inputs or attributes do not fit the operator's signature."""
    if operator.variadic is None and len(node.inputs) > len(operator.inputs):
        raise ModelError(f"{node} has {len(node.inputs)} inputs; {_takes(operator)}", rule="ND-08")
    if "" in node.inputs[len(operator.inputs) :]:
        text = f"{node} has an empty name in its list {operator.variadic!r}; {_takes(operator)}"
        raise ModelError(text, rule="ND-06")
    if operator.variadic and not operator.inputs and not node.inputs:
        raise ModelError(f"{node} has no inputs; {_takes(operator)}, at least one", rule="ND-05")
    # An attribute may have a fixture's name and then replaces it (QLinearSoftmax has an `opset`).
    known = operator.attributes, operator.inputs, operator.fixtures
    if unknown := sorted(name for name in node.attributes if not any(name in names for names in known)):
        raise ModelError(
            f"{node} has attributes {unknown}; at opset {node.opset} {node.op_type} has "
            f"{sorted(operator.attributes) or 'none'}",
            rule="ND-10",
        )
    fed = {p for p, name in zip(operator.inputs, node.inputs, strict=False) if name}
    for name in required(operator):
        if name not in fed and name not in node.attributes:
            kind, rule = ("attribute", "ND-10") if name in operator.attributes else ("input", "ND-03")
            has = f"attributes {sorted(operator.attributes)}"
            raise ModelError(f"{node} lacks {kind} {name!r}; {_takes(operator)} and {has}", rule=rule)
    if twice := fed & node.attributes.keys():
        raise ModelError(f"{node} gives {sorted(twice)} both as input and as attribute", rule="ND-10")


def attribute_errors(node: Node, operator: Operator) -> Iterator[OnnxError]:
    """An error if the operator rejects the node's attributes, whatever its inputs are."""
    values = {name: value for name, value in node.attributes.items() if not isinstance(value, Reference)}
    try:
        operator.check_choices(values)
    except NotImplementedError as e:
        yield UnsupportedError(f"{node}: {e}")
    except ValueError as e:
        yield OperatorError(f"{node}: {e}")


def check_supported(unsupported: Sequence[Unsupported], rejected: Sequence[Exception]) -> None:
    """Raise one error for all unsupported operators, or for all nodes whose attributes are rejected."""
    if unsupported:
        raise unsupported_error(unsupported)
    if rejected:
        raise type(rejected[0])("\n".join(dict.fromkeys(map(str, rejected))))


def missing_extras(graph: Graph) -> list[str]:
    """Which extras of this package nodes need that are not installed, in the words of the error of a call."""
    needing: dict[str, list[Node]] = defaultdict(list)
    for node in (node for inner in graph.walk() for node in inner.nodes):
        needs = node.operator.extra
        if extra := needs if isinstance(needs, str) else needs(node.attributes):
            needing[extra].append(node)
    texts = []
    for extra, (first, *others) in needing.items():
        if compat.lacks(extra):
            more, why = f" and {len(others)} more" * bool(others), f"No module named {compat.MODULES[extra]!r}"
            texts.append(f"{first}{more} will raise when it runs: {compat.needs(extra, why)}")
    return texts


def required(operator: Operator) -> tuple[str, ...]:
    """Names of the inputs and attributes without a default."""
    return _required(operator.function, operator.fixtures | operator.may_be_empty)


@cache
def _required(function: Any, others: frozenset[str]) -> tuple[str, ...]:
    lists = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = (p.name for p in signature(function).parameters.values() if p.default is p.empty and p.kind not in lists)
    return tuple(name for name in names if name not in others)


def convert_attributes(operator: Operator, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, as arrays where the operator takes them as inputs because a later opset made them inputs."""
    return {k: _array(v) if k in operator.inputs else v for k, v in attributes.items()}


def _array(value: Any) -> Any:
    match value:
        case np.ndarray():  # NumPy 2.5 registers it as a sequence
            return value
        case float() | (float(), *_):
            return np.asarray(value, np.float32)
        case int() | tuple() | list():
            return np.asarray(value, np.int64)
        case _:
            return value


def _takes(operator: Operator) -> str:
    inputs = (*operator.inputs, f"*{operator.variadic}") if operator.variadic else operator.inputs
    return f"{operator.name} takes inputs ({', '.join(inputs)})"


def unsupported_error(unsupported: Iterable[Unsupported]) -> UnsupportedOperatorError:
    """One error that lists every unsupported operator with domain, opset, count and nodes (rule MV-10)."""
    groups: dict[tuple[str, str, int], list[Unsupported]] = defaultdict(list)
    for node in unsupported:
        groups[node.domain, node.op_type, node.opset].append(node)
    lines, unknown, newer = [], [], dict[str, int]()
    for (domain, name, opset), nodes in sorted(groups.items()):
        table = registry.supported().get(domain, {})
        if name in table:
            since = min(table[name])
            newer[domain] = max(since, newer.get(domain, 0))
            note = f"{name} exists from opset {since} on, the model imports {opset}"
        elif same := [n for n in table if n.lower() == name.lower()]:
            note = f"names are case sensitive, did you mean {same[0]}?"
        else:
            unknown.append((domain, name, opset))
            note = _replacement(domain, name) or nodes[0].note
        shown = ", ".join(repr(m.node) for m in nodes[:3]) + (", ..." if len(nodes) > 3 else "")
        lines.append(f"  {domain or 'ai.onnx'} {opset}: {name} x{len(nodes)} (nodes {shown}){': ' * bool(note)}{note}")
    fixes = [_newer_opset(*entry) for entry in newer.items()]
    if unknown:
        domain, name, opset = unknown[0]
        fixes.append(
            f"To add one:\n  @onnx2jax.ops.op({name!r}, domain={domain!r}, since={opset})\n"
            "  def f(x, *, attribute=1.0): ...\nbefore calling convert."
        )
    many = "s of the model are" if len(groups) > 1 else " of the model is"
    return UnsupportedOperatorError("\n".join([f"{len(groups)} operator{many} unsupported:", *lines, *fixes]))


def _newer_opset(domain: str, version: int) -> str:
    """How to declare a newer version of an operator set."""
    names = f"in ('', {DOMAIN!r})" if not domain else f"== {domain!r}"
    return (
        f"To import {domain or DOMAIN} {version}, if the other nodes of the file mean the same there:\n"
        "  model = onnx.load(path)\n"
        f"  next(o for o in model.opset_import if o.domain {names}).version = {version}\n"
        "  onnx2jax.convert(model)\n"
        "or export the model again, for that opset."
    )


def _replacement(domain: str, name: str) -> str:
    """What to use in place of an operator that has no near relative in its domain; empty if nothing is known."""
    from ..ops import extensions  # at the first unsupported operator

    if domain in extensions.DOMAINS and name in extensions.REPLACEMENTS:
        return extensions.REPLACEMENTS[name]
    others = [d or DOMAIN for d, names in registry.supported().items() if name in names]
    return f"the name exists in domain {others[0]}" if others else ""
