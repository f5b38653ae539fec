"""Constraints on symbolic dimensions, read from the message that a program without them ends in."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from .extents import FUNCTIONS, evaluated

_SHORTENED: Final = re.compile(r"\bmin\((?:([a-zA-Z_]\w*), (\d+)|(\d+), ([a-zA-Z_]\w*))\)")
"""A table's extent where a symbol is longer, in messages of JAX: what reads the table needs a shorter one."""
_COMPARED: Final = re.compile(r"Symbolic dimension comparison '(.+?)' (?:>=|<) '(.+?)' is inconclusive")
_PADDED: Final = re.compile(
    r"axis size \(= (.+?)\) is larger than 1 and larger or equal than the padding length \(= (\d+)\)"
)
_SHAPE: Final = re.compile(r"must have the shape \[([^\[\]]+)\] \(it has \(([^()]+)\)\)")
_JOINED: Final = re.compile(r"concatenating along dimension (\d+) for shapes (\([^()]+\)(?:, \([^()]+\))+)")
_FAR: Final = 10**6
_MOST: Final = 4096


def requirements(message: str, symbols: Collection[str], known: Collection[str] = ()) -> list[str]:
    """Constraints, beside those ``known``, without which a program ends in a message: bounds, equal extents.

    >>> requirements("concatenating along dimension 1 for shapes (a, 3), (b, 5).", ["a", "b"])
    ['b == a']
    >>> requirements("h must have the shape [2, batch, 64] (it has (2, 1, 64))", ["batch"])
    ['batch == 1']
    >>> requirements("Symbolic dimension comparison 'frames - 2' >= '0' is inconclusive", ["frames"])
    ['frames >= 2']
    """
    return [c for c in dict.fromkeys(_found(message, symbols, known)) if c not in known]


def _found(message: str, symbols: Collection[str], known: Collection[str]) -> Iterator[str]:
    for a, b, c, d in _SHORTENED.findall(message):
        yield f"{a or d} <= {b or c}"
    for left, right in _COMPARED.findall(message):
        yield from _bound(left, right, symbols, known)
    for size, padding in _PADDED.findall(message):
        yield from _bound(size, str(max(int(padding) + 1, 2)), symbols, known)
    for wanted, given in _SHAPE.findall(message):
        yield from _equal(_split(wanted), _split(given), symbols)
    for axis, shapes in _JOINED.findall(message):
        first, *others = (_split(shape) for shape in re.findall(r"\(([^()]+)\)", shapes))
        for other in others:
            one, two = ([d for i, d in enumerate(shape) if i != int(axis)] for shape in (first, other))
            yield from _equal(one, two, symbols)


def _split(shape: str) -> list[str]:
    return [extent.strip() for extent in shape.split(",") if extent.strip()]


def _equal(one: Collection[str], other: Collection[str], symbols: Collection[str]) -> Iterator[str]:
    """Equations between two shapes; none where no extent makes them equal."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
    pairs = [(b, a) if b in symbols else (a, b) for a, b in pairs]
    if len(one) == len(other) and all(a in symbols and (b in symbols or b.isdigit()) for a, b in pairs):
        yield from (f"{a} == {b}" for a, b in pairs)


def _bound(left: str, right: str, symbols: Collection[str], known: Collection[str]) -> Iterator[str]:
    """That left is not less than right: as a bound of its symbol, if it has one and JAX sees that."""
    difference = f"({left}) - ({right})"
    try:
        names = {
            n.id for n in ast.walk(ast.parse(difference, mode="eval")) if isinstance(n, ast.Name)
        } - FUNCTIONS.keys()
        if names - set(symbols) or not any(_bounds_below(difference, one, names - {one}) for one in names):
            return  # an upper bound, or an order of two symbols, which would be arbitrary
        if len(names) == 1:
            (one,) = names
            least = next((k for k in range(1, _MOST) if evaluated(difference, {one: k}.__getitem__) >= 0), None)
            if least is not None and (simple := f"{one} >= {least}") not in known:
                yield simple
                return
        elif bounds := [b for b in _bounds(difference, names) if b not in known]:
            yield from bounds
            return
    except (ValueError, SyntaxError, ArithmeticError):
        return
    yield f"{left} >= {right}"


def _bounds(text: str, names: Collection[str]) -> list[str]:
    """Lower bounds of symbols from which on an expression is positive, whatever the others are, if JAX may need them.

    JAX takes minutes to decide comparisons under constraints of several long terms, and no time under these.
    """

    def holds(least: Mapping[str, int], factor: int) -> bool:
        return evaluated(text, {n: factor * least.get(n, 1) for n in names}.__getitem__) >= 0

    def least(one: str) -> int | None:
        others = dict.fromkeys(names, _FAR)
        return next((k for k in range(1, _MOST) if evaluated(text, (others | {one: k}).__getitem__) > 0), None)

    found = {n: k for n in sorted(names) if (k := least(n)) is not None and k > 1}
    return [f"{n} >= {k}" for n, k in found.items()] if found and all(holds(found, f) for f in (1, 7)) else []


def _bounds_below(text: str, one: str, others: Collection[str]) -> bool:
    """Whether an expression is negative for small extents of one symbol alone, whatever the others are."""

    def at(extent: int, other: int) -> bool:
        return evaluated(text, {one: extent, **dict.fromkeys(others, other)}.__getitem__) >= 0

    extents = (1, 7, _FAR)
    return all(at(_FAR, other) for other in extents) and len({at(1, other) for other in extents}) == 1
