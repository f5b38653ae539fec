"""Names in a file: of domains, of nodes that may have none, and of what lies in graphs inside graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def node_names(nodes: Iterable[Any]) -> list[str]:
    """A name for each node of a list: its own or its first output's, with its position where that is taken.

    Names of nodes may be empty or repeat (rule GR-22), but weights and random numbers inside go by them.
    """
    names: dict[str, None] = {}
    for i, node in enumerate(nodes):
        name = node.name or next(filter(None, node.output), f"{node.op_type}_{i}")
        while name in names:
            name = f"{name}_{i}"
        names[name] = None
    return list(names)


def inside(path: str, name: str) -> str:
    """The name of something in a graph, unique over the model; ``path`` says where the graph stands."""
    return f"{path}/{name}" if path else name


def normal_domain(domain: str) -> str:
    """ONNX's default domain has two spellings; the empty one is used here (rule OR-03)."""
    return "" if domain == "ai.onnx" else domain
