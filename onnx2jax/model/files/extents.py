"""The extents of an exported program: integers, symbolic dimensions, constraints on their symbols, and multiples.

Constraints are checked when a program is written, and for a call's extents.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from jax import export

from ...errors import InputNameError, InputShapeError, InputTypeError, UnsupportedError, did_you_mean, names_list
from ...eval.abstract import Abstract, without_data
from ...ir.graph import Graph, Node
from ...proto.messages import unused_name
from ...proto.types import TensorType, ValueInfo
from ..calls.dims import check_dims, checked_extent, named_dims, variables

OPERATIONS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
"""The operators of expressions."""
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}
"""What JAX writes as functions; no symbol has such a name."""
COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
"""The comparisons that ``jax.export`` takes."""
MULTIPLE: Final = re.compile(r"(\d+)\*(\w+)")
"""The extent of a dimension that must be a multiple, as JAX writes it."""
FARTHEST: Final = 2**16
"""How far from a rejected extent one that a program takes is sought."""
STEPS: Final = 64
"""The largest number that export tries of which an extent be a multiple."""
EXTENT: Final = 512
"""Of free dimensions in an evaluation, a multiple of ``STEPS``; of an image's sizes it is the least that is tried."""
BITS: Final = (1, 63, 21, 43)
"""Odd numbers whose halves, rounded down or up, are odd and even in turn: strided layers round either way."""


def symbolic(
    inputs: Sequence[ValueInfo],
    dims: Mapping[str, int | str],
    constraints: Sequence[str],
    multiples: Mapping[str, int] | None = None,
) -> dict[str, tuple[Any, ...]]:
    """The shape of each input, in integers and symbolic dimensions.

    A dimension variable is a symbol of its name. If its name is an expression of others, as some exporters write
    ``past + 1``, it is the value of the expression.

    Args:
        inputs: tensors.
        dims: integers, or expressions of dimensions and new symbols, for some dimensions.
        constraints: constraints on symbols, as for ``jax.export.symbolic_shape``.
        multiples: by dimension a number: it is so many times its symbol.

    Raises:
        InputNameError: ``dims`` names an unknown dimension.
        InputValueError: an extent is neither an integer of at least 0 nor a string.
        InputShapeError: an expression or a constraint is invalid.
        UnsupportedError: the rank of an input is not declared.
    """
    named = _named(inputs)
    check_dims("dims", dims, named)
    also = ", or an expression such as 'past + 1'"
    dims = {n: d if isinstance(d, str) else checked_extent("dims", n, d, also) for n, d in dims.items()}
    symbols = symbols_of(variables(named))
    dims |= {n: f"{k}*{symbols[n]}" for n, k in (multiples or {}).items()}
    try:
        scope = export.SymbolicScope(tuple(constraints))
    except (ValueError, TypeError) as e:
        raise InputShapeError(f"jax.export rejects the constraints {list(constraints)}: {e}") from None

    def extent_of(name: str, inside: frozenset[str] = frozenset()) -> Any:
        """The extent of a dimension; ``inside`` the expression for a dimension, its name is a symbol."""
        extent = dims.get(name) if name not in inside else None
        if isinstance(extent, int):
            return extent
        text = extent or (name if name not in symbols and not name.isidentifier() else None)
        try:
            if text is not None:
                return evaluated(text, lambda n: extent_of(n, inside | {name}))
            (symbol,) = export.symbolic_shape(symbols.get(name, name), scope=scope)
        except (ValueError, SyntaxError, ArithmeticError) as e:
            raise InputShapeError(f"dimension {name!r}, {text or name!r}, is no expression: {e}") from None
        return symbol

    return {v.name: tuple(extent_of(d) if isinstance(d, str) else d for d in v.shape or ()) for v in named}


def _named(inputs: Sequence[ValueInfo]) -> tuple[ValueInfo, ...]:
    """The inputs with a name for each free dimension; raises UnsupportedError if an input has no declared rank."""
    for info in inputs:
        if not isinstance(info.type, TensorType) or info.type.shape is None:
            raise UnsupportedError(
                f"input {info} has no declared rank, which an exported program needs: declare its shape in the file"
            )
    return named_dims(inputs)


def symbols_of(names: Iterable[str]) -> dict[str, str]:
    """The symbols of dimensions; none for names that are expressions of others."""
    names = list(dict.fromkeys(names))
    symbols = {n: n for n in names if n.isidentifier() and n not in {*FUNCTIONS, "_"}}
    plain = set(symbols)
    for name in names:
        if name not in plain and not _is_expression(name, plain):
            word = re.sub(r"\W", "_", name).strip("_")
            word = word if word.isidentifier() and word not in FUNCTIONS else f"dim_{word}"
            symbols[name] = unused_name(word, {*symbols.values()})
    return symbols


def free_dimensions(inputs: Sequence[ValueInfo], dims: Mapping[str, int | str]) -> dict[str, str]:
    """The dimensions that ``dims`` leaves free, by symbol."""
    return {symbol: n for n, symbol in symbols_of(variables(_named(inputs))).items() if n not in dims}


def images(inputs: Sequence[ValueInfo], dims: Mapping[str, int | str]) -> dict[str, str]:
    """The symbols of the free dimensions that may be an image's size: those of axes from the third on only."""
    named = _named(inputs)
    first = {d for v in named for d in (v.shape or ())[:2]}
    return {n: symbol for n, symbol in symbols_of(variables(named)).items() if n not in {*first, *dims}}


def _is_expression(text: str, names: set[str]) -> bool:
    """Whether the text is an expression of these names; symbols that no input defines would be unknown."""
    try:
        evaluated(text, dict.fromkeys(names, 1).__getitem__)
        return bool(symbols_in(text))
    except (KeyError, ValueError, SyntaxError, ArithmeticError):
        return False


def symbols_in(text: str) -> set[str]:
    """The symbols in an expression; raises SyntaxError if it is none."""
    return {n.id for n in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(n, ast.Name)} - FUNCTIONS.keys()


def evaluated(text: str, of: Callable[[str], Any]) -> Any:
    """The value of an expression in text."""
    return _value(ast.parse(text.strip(), mode="eval").body, of)


def _value(node: ast.expr, of: Callable[[str], Any]) -> Any:
    """The value of an expression, with names looked up by ``of``."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, of)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, of), _value(right, of))
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(argument, of) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not made of integers, names, +, -, *, // and %")


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


def needed_multiples(
    graph: Graph, inputs: Sequence[ValueInfo], dims: Mapping[str, int | str], constraints: Sequence[str]
) -> dict[str, int]:
    """Powers of two from 2 to ``STEPS``, by those free dimensions of images whose other extents some node refuses.

    Strides halve an image, and a skip connection adds what is doubled again: an extent of 33 has no such sum. JAX would
    find that out with symbolic extents too, but compares the terms of 30 strided layers for most of a minute. So they
    are found by abstract evaluation with numbers for extents.

    Empty if a node refuses multiples of ``STEPS`` too: it does so for another reason.

    Args:
        graph: the model's, with its fixed inputs as initializers.
        inputs: those that are free, as declared.
        dims, constraints: those of ``export``.
    """
    sizes, shapes = images(inputs, dims), symbolic(inputs, dims, in_symbols(inputs, dims, constraints))

    def accepts(steps: Mapping[str, int]) -> bool:
        """Whether every node takes extents that are multiples of these powers of two, and of no larger ones."""
        tried = dict.fromkeys(tuple((k * odd) % STEPS for k in steps.values()) for odd in BITS)
        return all(fits({sizes[n]: EXTENT + more for n, more in zip(steps, one, strict=True)}) for one in tried)

    def fits(extents: Mapping[str, int]) -> bool:
        """Whether every node takes these extents of symbols."""

        def extent(d: Any) -> int:
            return d if isinstance(d, int) else evaluated(str(d), lambda symbol: extents.get(symbol, EXTENT))

        inputs = tuple(v.reshaped([*map(extent, shapes[v.name])]) if v.name in shapes else v for v in graph.inputs)
        evaluation = _Refusals()

        def run() -> None:
            evaluation.graph(replace(graph, inputs=inputs))

        without_data(run)
        return not evaluation.has_refused

    if not sizes or accepts(dict.fromkeys(sizes, 1)):
        return {}
    coarsest = dict.fromkeys(sizes, STEPS)
    if not accepts(coarsest):
        return {}
    powers = [2**i for i in range(STEPS.bit_length() - 1)]
    for name in sizes:
        first = bisect_left(powers, True, key=lambda k: accepts({**dict.fromkeys(sizes, STEPS), name: k}))
        coarsest[name] = 2**first
    return {n: k for n, k in coarsest.items() if k > 1} if accepts(coarsest) else {}


class _Refusals(Abstract):
    has_refused = False

    def reject(self, path: str, node: Node, values: Sequence[Any], reason: str) -> None:  # noqa: ARG002
        self.has_refused = True
