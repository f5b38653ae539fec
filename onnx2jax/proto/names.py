"""Canonical names of domains, of unnamed nodes, and of values in subgraphs."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any


def node_names(nodes: Iterable[Any]) -> list[str]:
    """A unique name for each node: its own or its first output's, followed by its index if that is taken.

    Node names may be empty or repeat (rule GR-22), but keys of weights and random streams in subgraphs depend on them.
    """
    names: dict[str, None] = {}
    for i, node in enumerate(nodes):
        name = node.name or next(filter(None, node.output), f"{node.op_type}_{i}")
        while name in names:
            name = f"{name}_{i}"
        names[name] = None
    return list(names)


def unused_name(name: str, taken: Container[str], suffix: str = "_") -> str:
    """The name, with the suffix as often as it takes to be none of those taken.

    >>> unused_name("w", {"w", "w_"})
    'w__'
    """
    while name in taken:
        name += suffix
    return name


def inside(path: str, name: str) -> str:
    """The name of a value, unique in the model, given the location of its graph."""
    return f"{path}/{name}" if path else name


def normal_domain(domain: str) -> str:
    """The domain, with ``ai.onnx`` spelled as the empty string (rule OR-03)."""
    return "" if domain == "ai.onnx" else domain
