"""Versions of operator sets: whether an operator is the same in two of them (rule FN-06)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..ops.registry import Operator, resolve
from .graph import Node
from .signatures import first_version, formal, signature


def same_schema(domain: str, op_type: str, one: int, other: int) -> bool:
    """Whether an operator has the same schema in two versions of its domain, as FN-06 demands of functions."""
    schemas = [signature(_title(domain, op_type), version) for version in (one, other)]
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
    first = first_version(_title(node.domain, node.op_type))
    if first <= node.opset:
        return ""
    return (
        f"{node}: ONNX defines {node.op_type} from opset {first} on; it is computed as in onnxruntime, whose optimizer "
        f"writes such files. To make the file valid: onnx.version_converter.convert_version(proto, {first})"
    )


def _same_meaning(node: Node, operator: Operator, version: int) -> bool:
    """Whether another version of the operator computes the same from the node's operands and attributes."""
    if version == node.opset:
        return True
    if resolve(node.domain, node.op_type, version) is not operator:
        return False
    own, other = (signature(_title(node.domain, node.op_type), v) for v in (node.opset, version))
    if own is None or other is None:
        return own is other
    # Between the versions an attribute may have become an input.
    given = [name for name in operator.inputs if name in node.attributes]
    used = [i for i, name in enumerate(node.inputs) if name] + [operator.inputs.index(name) for name in given]
    return all((formal(own.inputs, i) is None) == (formal(other.inputs, i) is None) for i in used)


def _title(domain: str, op_type: str) -> str:
    return ".".join(filter(None, (domain, op_type)))
