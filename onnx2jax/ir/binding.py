"""Which operator serves a node, whether the node's inputs and attributes fit it, and what is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any, Final

import numpy as np

from ..errors import ModelError, OnnxError, OperatorError, UnsupportedError, UnsupportedOperatorError
from ..ops import registry
from ..ops.registry import Operator
from ..proto.names import normal_domain
from .graph import Missing, Node, Reference

NEWEST: Final = {"": 28, "ai.onnx.ml": 5, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}
"""The newest version known here of each domain that ONNX itself defines."""


def opsets(entries: Iterable[Any]) -> dict[str, int]:
    """Domain -> version of the operator sets imported; of two entries for one domain the higher counts (OR-02)."""
    result: dict[str, int] = {}
    for entry in entries:
        domain = normal_domain(entry.domain)
        if not 0 < entry.version < 2**31:
            raise ModelError(f"the version of operator set {domain or 'ai.onnx'!r} is {entry.version}", rule="OR-11")
        result[domain] = max(entry.version, result.get(domain, 0))
    return result


def opsets_of(model: Any) -> dict[str, int]:
    """The operator sets that a model imports."""
    found = opsets(model.opset_import)
    if model.ir_version < 3 and not found:
        return {"": 1}  # rule MV-03: versions were not yet written down
    if not found:
        raise ModelError("the model imports no operator set (opset_import is empty)", rule="MV-03")
    return found


def built_in_wins(node: Node) -> bool:
    """A model's own function gives way to an operator of ONNX's domains (rule OR-16), to nothing else."""
    return node.domain in NEWEST and registry.resolve(node.domain, node.op_type, node.opset) is not None


def find(node: Node, allow_newer_opset: bool = False) -> Operator | None:
    """The operator that serves a node: the newest since not above the model's opset (rule OR-01)."""
    newest = NEWEST.get(node.domain)
    if newest is not None and node.opset > newest and not allow_newer_opset:
        raise UnsupportedError(
            f"the model imports opset {node.opset} of {node.domain or 'ai.onnx'}, the newest known here is {newest}; "
            "operators may mean something else there. "
            "To run it as the newest known: convert(..., allow_newer_opset=True)",
            rule="OR-12",
        )
    operator = registry.resolve(node.domain, node.op_type, node.opset)
    if operator is not None and operator.function is None:
        raise ModelError(
            f"{node}: {node.op_type} is deprecated since opset {operator.since}; "
            f"use {operator.instead}, or import an opset below {operator.since}",
            rule="OR-10",
        )
    return operator


def check(node: Node, operator: Operator) -> None:
    """Raise ModelError when a node's operands or attributes do not fit the operator's signature."""
    if operator.variadic is None and len(node.inputs) > len(operator.inputs):
        raise ModelError(f"{node} has {len(node.inputs)} inputs; {_takes(operator)}", rule="ND-08")
    if "" in node.inputs[len(operator.inputs) :]:
        raise ModelError(
            f"{node} has an empty name in its list {operator.variadic!r}; {_takes(operator)}", rule="ND-06"
        )
    if operator.variadic and not operator.inputs and not node.inputs:
        raise ModelError(f"{node} has no inputs; {_takes(operator)}, at least one", rule="ND-05")
    # An attribute may carry a fixture's name and then comes instead of it (QLinearSoftmax has an `opset`).
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


def refusals(node: Node, operator: Operator) -> Iterator[OnnxError]:
    """What the operator refuses in the node's attributes, whatever its inputs are."""
    given = {name: value for name, value in node.attributes.items() if not isinstance(value, Reference)}
    try:
        operator.check_choices(given)
    except NotImplementedError as e:
        yield UnsupportedError(f"{node}: {e}")
    except ValueError as e:
        yield OperatorError(f"{node}: {e}")


def check_served(missing: Sequence[Missing], refused: Sequence[Exception]) -> None:
    """Raise one error for all operators that nothing serves, or for all nodes whose attributes are refused."""
    if missing:
        raise missing_error(missing)
    if refused:
        raise type(refused[0])("\n".join(dict.fromkeys(map(str, refused))))


def required(operator: Operator) -> tuple[str, ...]:
    """Inputs and attributes without a default."""
    return _required(operator.function, operator.fixtures | operator.may_be_empty)


@cache
def _required(function: Any, others: frozenset[str]) -> tuple[str, ...]:
    lists = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    found = (p.name for p in signature(function).parameters.values() if p.default is p.empty and p.kind not in lists)
    return tuple(name for name in found if name not in others)


def land(operator: Operator, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as arrays where they land on an input: numbers that later opsets made operands."""
    return {k: _array(v) if k in operator.inputs else v for k, v in attributes.items()}


def _array(value: Any) -> Any:
    match value:
        case np.ndarray():  # which NumPy 2.5 counts among sequences
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


def missing_error(missing: Iterable[Missing]) -> UnsupportedOperatorError:
    """One error that lists every missing operator with domain, opset, count and nodes (rule MV-10)."""
    groups: dict[tuple[str, str, int], list[Missing]] = defaultdict(list)
    for m in missing:
        groups[m.domain, m.op_type, m.opset].append(m)
    lines = []
    for (domain, name, opset), nodes in sorted(groups.items()):
        note = f": {nodes[0].note}" if nodes[0].note else ""
        shown = ", ".join(repr(m.node) for m in nodes[:3]) + (", ..." if len(nodes) > 3 else "")
        lines.append(
            f"  {domain or 'ai.onnx'} {opset}: {name} x{len(nodes)} (nodes {shown}){_hint(domain, name, opset) or note}"
        )
    domain, name, opset = next(iter(sorted(groups)))
    return UnsupportedOperatorError(
        f"nothing serves {len(groups)} operator{'s' if len(groups) > 1 else ''} of the model:\n"
        + "\n".join(lines)
        + f"\nTo add one:\n  @onnx2jax.op({name!r}, domain={domain!r}, since={opset})\n"
        "  def f(x, *, attribute=1.0): ...\nbefore calling convert."
    )


def _hint(domain: str, name: str, opset: int) -> str:
    table = registry.supported().get(domain, {})
    if name in table:
        return f": {name} begins at opset {min(table[name])}, the model imports {opset}"
    same = [n for n in table if n.lower() == name.lower()]
    if same:
        return f": names are case sensitive, did you mean {same[0]}?"
    others = [d or "ai.onnx" for d, names in registry.supported().items() if name in names]
    return f": the name exists in domain {others[0]}" if others else ""
