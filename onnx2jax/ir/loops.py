"""Loops: which part of a body decides how often it runs, and where ONNX and onnxruntime differ on that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from .graph import Graph, Node, ancestors

IGNORED_CONDITION: Final = (
    "it has no condition input, so by ONNX the condition that its body returns is ignored (SC-13); onnxruntime ends "
    "the loop when that is false, as exporters may mean: convert(..., loop_cond='onnxruntime')"
)


def ignored_conditions(graph: Graph) -> Iterator[Node]:
    """Loops without condition input whose body computes a condition, which ONNX ignores and onnxruntime obeys."""
    for inner in graph.walk():
        for node in inner.nodes:
            if _is_loop(node) and not any(node.inputs[1:2]):
                body = node.graphs[0]
                if not _is_true(body, body.outputs[0].name):
                    yield node


def _is_true(body: Graph, name: str) -> bool:
    """Whether a body's condition is its own condition, or a constant that is true."""
    while (node := body.producers.get(name)) is not None and node.op_type in ("Identity", "Cast"):
        name = node.inputs[0]
    constant = body.initializers.get(name)
    return name == body.inputs[1].name or (constant is not None and bool(np.all(constant)))


def condition(body: Graph) -> tuple[Graph, list[int]]:
    """Of a Loop's body the part that computes its condition, and the positions of the states that it depends on.

    The part's outputs are the condition, and the next values of those states.
    """
    formals = {v.name: k for k, v in enumerate(body.inputs[2 : len(body.outputs) + 1])}
    needed: set[int] = set()
    while True:
        outputs = [*body.outputs[:1], *(body.outputs[1 + k] for k in sorted(needed))]
        nodes = ancestors(body.nodes, [v.name for v in outputs])
        reads = {v.name for v in outputs}.union(*(node.reads for node in nodes))
        if (grown := {k for name, k in formals.items() if name in reads}) == needed:
            part = replace(body, outputs=tuple(outputs), nodes=tuple(nodes), extracted_from=body.complete)
            return part, sorted(needed)
        needed = grown


def deciding(node: Node) -> set[str]:
    """The names outside on which the number of a Loop's trips depends; empty for other nodes."""
    if not _is_loop(node):
        return set()
    part, needed = condition(node.graphs[0])
    states = dict(enumerate(node.inputs[2:]))
    return {*node.inputs[:2], *(states[k] for k in needed if k in states), *part.captures} - {""}


def _is_loop(node: Node) -> bool:
    """Whether the node is a Loop whose body has what every body has; the operator rejects others."""
    if node.op_type != "Loop" or node.domain or not node.graphs:
        return False
    body = node.graphs[0]
    return len(body.inputs) >= 2 and len(body.outputs) >= len(node.inputs) - 1
