"""Digests of graphs: equal digests in any process mean equal computations."""

from __future__ import annotations

import dataclasses
import hashlib
import marshal
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from ..ops.registry import Operator, is_built_in
from ..proto.mapped import load
from .graph import Function, Graph


def fingerprint(graph: Graph, by_type: Collection[str], *more: Any) -> bytes | None:
    """A digest of everything that decides what a graph computes; None if there is none, as with custom operators.

    Args:
        graph: a complete graph, or one extracted from it.
        by_type: keys of initializers of which only shape and dtype are hashed.
        *more: further values to hash, such as options; of a dataclass, the fields that take part in comparison.
    """
    if graph.complete.differentiates:
        return None  # gradient nodes read values outside an extracted graph
    digest = _Digest(by_type)
    try:
        digest.add((graph, *more))
    except _Unknown:
        return None
    return digest.hash.digest()


class _Unknown(Exception):
    """The value has no digest, such as a user's function."""


SCALARS: Final = frozenset((int, float, str, bytes, bool, type(None)))
"""Sequences of these are hashed at once, as marshal writes them in a version without references: by value alone. A
forest has 600,000 numbers, which take 1.5 s one by one."""


class _Digest:
    def __init__(self, by_type: Collection[str]) -> None:
        self.hash = hashlib.sha256()
        self._by_type = by_type
        self._seen: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Hash a value, prefixed by its type and length, so that different sequences of values never collide."""
        match value:
            case Graph():
                if not self._seen_before(value):
                    self._graph(value)
            case Operator():
                if not is_built_in(value):
                    raise _Unknown
                self._put(f"operator {value.domain} {value.name} {value.since}".encode())
            case Function():
                if not self._seen_before(value):
                    self._fields(value)
            case np.ndarray() | np.generic():
                array = np.asarray(load(value))
                self._put(f"array {array.dtype.name} {array.shape}".encode())
                self._put(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
            case tuple() | list() if SCALARS.issuperset(map(type, value)):
                self._put(b"scalars " + marshal.dumps([*value], 2))
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
            if field.compare:
                self.add(getattr(value, field.name))

    def _seen_before(self, value: Any) -> bool:
        """Whether the object was hashed before; if so, its index is hashed instead."""
        count = len(self._seen)
        index = self._seen.setdefault(id(value), count)
        if index < count:
            self._put(f"again {index}".encode())
        return index < count

    def _put(self, data: bytes) -> None:
        self.hash.update(len(data).to_bytes(8, "little"))
        self.hash.update(data)
