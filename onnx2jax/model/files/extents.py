"""The extents of an exported program: integers, and symbolic dimensions for the file's dimension variables."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from jax import export

from ...errors import InputShapeError, UnsupportedError
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
