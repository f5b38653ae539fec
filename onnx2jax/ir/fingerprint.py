"""What a graph computes, as a number that is the same in another process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from ..ops.registry import Operator
from ..proto.mapped import load
from .graph import Function, Graph

OWN: Final = f"{__name__.split('.')[0]}.ops."
"""Where the functions of operators lie whose meaning is that of this package's version."""


def fingerprint(graph: Graph, by_type: Collection[str]) -> bytes | None:
    """A digest of all that decides what a graph computes; None where that cannot be said, as of a user's operators.

    Args:
        graph: whole, or part of one.
        by_type: keys of initializers of which only shape and dtype count.
    """
    if (graph.whole or graph).differentiates:
        return None  # those read more of the graph than is seen from here
    digest = _Digest(by_type)
    try:
        digest.add(graph)
    except _Unknown:
        return None
    return digest.hash.digest()


class _Unknown(Exception):
    """A value whose meaning is not to be seen from it."""


class _Digest:
    def __init__(self, by_type: Collection[str]) -> None:
        self.hash = hashlib.sha256()
        self._by_type = by_type
        self._seen: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Each value with its type and its length in front, so that no two lists of values look alike."""
        match value:
            case Graph():
                if not self._again(value):
                    self._graph(value)
            case Operator():
                if not getattr(value.function, "__module__", "").startswith(OWN):
                    raise _Unknown
                self._put(f"operator {value.domain} {value.name} {value.since}".encode())
            case Function():
                if not self._again(value):
                    self._fields(value)
            case np.ndarray() | np.generic():
                array = np.asarray(load(value))
                self._put(f"array {array.dtype.name} {array.shape}".encode())
                self._put(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
            case None | bool() | int() | float() | complex() | str() | bytes():
                self._put(f"{type(value).__name__} {value!r}".encode("utf-8", "surrogateescape"))
            case tuple() | list() | frozenset() | Mapping():
                items = [x for item in value.items() for x in item] if isinstance(value, Mapping) else value
                self._put(f"{'set' if isinstance(value, frozenset) else 'items'} {len(items)}".encode())
                for item in sorted(items) if isinstance(items, frozenset) else items:
                    self.add(item)
            case np.dtype() | type():
                self._put(f"type {value}".encode())
            case _ if dataclasses.is_dataclass(value):
                self._fields(value)
            case _:
                raise _Unknown

    def _graph(self, graph: Graph) -> None:
        self._put(b"graph")
        self.add((graph.name, graph.path, graph.inputs, graph.outputs, graph.nodes))
        for name, value in graph.initializers.items():
            only_type = graph.key(name) in self._by_type
            self.add((name, (value.dtype, value.shape) if only_type else value))

    def _fields(self, value: Any) -> None:
        self._put(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            self.add(getattr(value, field.name))

    def _again(self, value: Any) -> bool:
        """Whether it came before; then its place says what it is."""
        known = len(self._seen)
        place = self._seen.setdefault(id(value), known)
        if place < known:
            self._put(f"again {place}".encode())
        return place < known

    def _put(self, data: bytes) -> None:
        self.hash.update(len(data).to_bytes(8, "little"))
        self.hash.update(data)
