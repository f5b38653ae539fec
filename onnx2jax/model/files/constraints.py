"""Constraints on the symbols of an exported program: checked when it is written, and for a call's extents."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...errors import InputNameError, InputShapeError, InputTypeError, did_you_mean, names_list
from ...proto.types import ValueInfo
from ..calls.dims import named_dims
from .extents import FUNCTIONS, evaluated, symbolic, symbols_in

COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
"""The comparisons that ``jax.export`` takes."""
MULTIPLE: Final = re.compile(r"(\d+)\*(\w+)")
"""The extent of a dimension that must be a multiple, as JAX writes it."""
FARTHEST: Final = 2**16
"""How far from a rejected extent one that a program takes is sought."""


def in_symbols(
    inputs: Sequence[ValueInfo],
    dims: Mapping[str, int | str],
    constraints: str | Sequence[str],
    multiples: Mapping[str, int] | None = None,
) -> list[str]:
    """Constraints on dimensions of the file, and on symbols, as constraints on symbols alone.

    Args:
        inputs, dims, multiples: as for ``symbolic``. A name of ``multiples`` is that of the whole extent.
        constraints: those of ``export``.

    Raises:
        InputNameError: a constraint names neither a dimension nor a symbol.
        InputShapeError: it is no comparison of expressions.
        InputTypeError: it is no text.
    """
    shapes = symbolic(inputs, dims, (), multiples)
    pairs = (p for v in named_dims(inputs) for p in zip(v.shape or (), shapes[v.name], strict=True))
    extents = {d: str(extent) for d, extent in pairs if isinstance(d, str)}
    symbols = {s for extent in extents.values() for s in symbols_in(extent)}
    others = {
        d: e if re.fullmatch(r"\w+", e) else f"({e})"
        for d, e in extents.items()
        if d not in symbols or d in (multiples or ())
    }
    name = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, sorted(others, key=len, reverse=True)))})(?![\w.])")
    replaced = names_list(constraints)
    if invalid := [c for c in replaced if not isinstance(c, str)]:
        raise InputTypeError(f"constraints has {invalid[0]!r}; it takes texts, ['sequence <= 512']")
    if others:
        replaced = [name.sub(lambda match: others[match[0]], c) for c in replaced]
    for constraint in replaced:
        left, _, right = _sides(constraint)
        try:
            unknown = sorted((symbols_in(left) | symbols_in(right)) - symbols)
        except SyntaxError as e:
            raise InputShapeError(f"constraints has {constraint!r}, which compares no expressions: {e}") from None
        if unknown:
            known = sorted({*extents} | symbols)
            raise InputNameError(
                f"constraints names {unknown} in {constraint!r}; there are {known}{did_you_mean(unknown, known)}"
            )
    return replaced


def _sides(constraint: str) -> tuple[str, Callable[[Any, Any], bool], str]:
    """What a constraint compares, and how."""
    for sign, compare in COMPARISONS.items():
        if sign in constraint:
            left, _, right = constraint.partition(sign)
            return left, compare, right
    raise InputShapeError(
        f"constraints has {constraint!r}, which compares nothing by {', '.join(COMPARISONS)}: ['sequence <= 512']"
    )


class _Axis:
    """An axis of an input, its extent in symbols, and that of a call."""

    def __init__(self, value: ValueInfo, axis: int, text: str, extent: int) -> None:
        self.text, self.extent, self.symbols = text, extent, symbols_in(text)
        self.where = f"input {value} has {extent} on axis {axis}"

    def solve(self, known: dict[str, int]) -> None:
        """Add the value of the only symbol that is not ``known``; compare if all are.

        Raises:
            InputShapeError: no value of the symbol has the extent.
        """
        unknown = self.symbols - known.keys()
        if not unknown:
            if (wanted := evaluated(self.text, known.__getitem__)) != self.extent:
                raise InputShapeError(f"{self.where}, and the program takes {self.text} there, which is {wanted}")
        elif len(unknown) == 1 and not any(f"{name}(" in self.text for name in FUNCTIONS):
            (symbol,) = unknown
            at = [evaluated(self.text, {**known, symbol: k}.__getitem__) for k in range(3)]
            if (step := at[1] - at[0]) != at[2] - at[1] or not step:
                return
            value, rest = divmod(self.extent - at[0], step)
            if rest or value < 1:
                takes = f"{self.text} there, with {symbol} of at least 1"
                if multiple := MULTIPLE.fullmatch(self.text):
                    k = int(multiple[1])
                    takes = f"multiples of {k} there: pad or resize it to {max(k, -(-self.extent // k) * k)}"
                raise InputShapeError(f"{self.where}, and the program takes {takes}")
            known[symbol] = value


def check_extents(inputs: Sequence[ValueInfo], values: Mapping[str, Any], constraints: Sequence[str]) -> None:
    """Compare the extents of a call with those that an exported program takes, as far as they are linear in symbols.

    Args:
        inputs: as the program declares them.
        values: the call's, of these ranks.
        constraints: on the program's symbols.

    Raises:
        InputShapeError: an extent does not match its expression, or symbols a constraint.
    """
    shapes = {v.name: np.shape(values[v.name]) for v in inputs}
    if not all(isinstance(n, int) for shape in shapes.values() for n in shape):
        return  # symbolic: the caller exports
    axes = [
        _Axis(v, i, d, n)
        for v in inputs
        for i, (d, n) in enumerate(zip(v.shape or (), shapes[v.name], strict=True))
        if isinstance(d, str)
    ]
    known = dict[str, int]()
    for axis in sorted(axes, key=lambda axis: len(axis.symbols)):
        axis.solve(known)
    for constraint in constraints:
        if not _holds(constraint, known):
            left, _, right = _sides(constraint)
            names = symbols_in(left) | symbols_in(right)
            axis = next(a for a in axes if a.symbols & names)
            values_of = " and ".join(f"{n} is {known[n]}" for n in sorted(names))
            nearest = _nearest(axis, known, constraints)
            raise InputShapeError(f"{axis.where}, and the program requires {constraint}, where {values_of}{nearest}")


def _holds(constraint: str, known: Mapping[str, int]) -> bool:
    """Whether a constraint holds, or is on a symbol that is not known."""
    left, compare, right = _sides(constraint)
    if symbols_in(left) | symbols_in(right) <= known.keys():
        return compare(*(evaluated(side, known.__getitem__) for side in (left, right)))
    return True


def _nearest(axis: _Axis, known: Mapping[str, int], constraints: Sequence[str]) -> str:
    """The nearest extent that a program takes on an axis of one symbol, as the end of a message; empty if none is."""
    if len(axis.symbols) != 1:
        return ""
    (symbol,) = axis.symbols
    for k in sorted(range(1, known[symbol] + FARTHEST), key=lambda k: abs(k - known[symbol])):
        if all(_holds(c, {**known, symbol: k}) for c in constraints):
            return f": the nearest extent that it takes is {evaluated(axis.text, {symbol: k}.__getitem__)}"
    return ""
