"""The extents of an exported program: numbers, and symbols of ``jax.export`` made from a file's dimension variables."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jax import export

from ...errors import InputNameError, InputShapeError, UnsupportedError
from ...proto.types import TensorType, ValueInfo

RESERVED: Final = {"mod", "floordiv", "max", "min"}
"""Functions where JAX reads symbols."""
OPERATIONS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
"""What may stand between the numbers and names of an expression."""


def symbolic(
    inputs: Sequence[ValueInfo], dims: Mapping[str, int | str], constraints: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """The shape of each input, in numbers and symbols.

    A dimension variable is a symbol of its name. One that is named by an expression over others, as some exporters
    write ``past + 1``, is what the expression gives.

    Args:
        inputs: tensors.
        dims: numbers, or expressions of dimensions and new symbols, for some dimensions.
        constraints: what holds between symbols, as ``jax.export.symbolic_shape`` takes it.

    Raises:
        InputNameError: ``dims`` names a dimension that there is not.
        InputShapeError: a number is negative, or an expression or a constraint cannot be read.
        UnsupportedError: the rank of an input is not declared.
    """
    names = _names(inputs)
    if unknown := sorted(dims.keys() - set(names.values())):
        raise InputNameError(f"dims names {unknown}; the free dimensions are {sorted(set(names.values()))}")
    for name, extent in dims.items():
        if isinstance(extent, bool) or not isinstance(extent, int | str) or (isinstance(extent, int) and extent < 0):
            raise InputShapeError(f"dims has {name!r}: {extent!r}; it takes numbers, and texts such as 'past + 1'")
    extents = _Extents(list(dict.fromkeys(names.values())), dims, constraints)
    return {
        v.name: tuple(d if isinstance(d, int) else extents[names[v.name, i]] for i, d in enumerate(v.shape or ()))
        for v in inputs
    }


def _names(inputs: Sequence[ValueInfo]) -> dict[tuple[str, int], str]:
    """The names of free dimensions by input and axis; those without one are called after these."""
    given = {d for v in inputs for d in v.shape or () if isinstance(d, str)}
    names: dict[tuple[str, int], str] = {}
    for info in inputs:
        if not isinstance(info.type, TensorType) or info.type.shape is None:
            raise UnsupportedError(
                f"input {info} has no declared rank, which an exported program needs: declare its shape in the file"
            )
        for axis, extent in enumerate(info.type.shape):
            if not isinstance(extent, int):
                names[info.name, axis] = extent or _unlike(f"{info.name}_{axis}", given)
    return names


class _Extents:
    """Extents by the names of dimensions."""

    def __init__(self, names: Sequence[str], dims: Mapping[str, int | str], constraints: Sequence[str]) -> None:
        self._dims = dims
        self._symbols: dict[str, str] = {n: n for n in names if n.isidentifier() and n not in {*RESERVED, "_"}}
        plain = set(self._symbols)
        for name in names:
            if name not in plain and not _is_expression(name, plain):
                word = re.sub(r"\W", "_", name).strip("_")
                word = word if word.isidentifier() and word not in RESERVED else f"dim_{word}"
                self._symbols[name] = _unlike(word, {*self._symbols.values()})
        try:
            self._scope = export.SymbolicScope(tuple(constraints))
        except (ValueError, TypeError) as e:
            raise InputShapeError(f"constraints {list(constraints)} cannot be read by jax.export: {e}") from None

    def __getitem__(self, name: str) -> Any:
        return self._of(name, frozenset())

    def _of(self, name: str, inside: frozenset[str]) -> Any:
        """An extent; in an expression for a dimension its own name is a symbol."""
        said = self._dims.get(name) if name not in inside else None
        if isinstance(said, int):
            return said
        text = said or (name if name not in self._symbols and not name.isidentifier() else None)
        try:
            if text is not None:
                return _value(ast.parse(text.strip(), mode="eval").body, lambda n: self._of(n, inside | {name}))
            (symbol,) = export.symbolic_shape(self._symbols.get(name, name), scope=self._scope)
        except (ValueError, SyntaxError, ArithmeticError) as e:
            raise InputShapeError(f"dimension {name!r}, {text or name!r}, is no expression: {e}") from None
        return symbol


def _is_expression(text: str, names: set[str]) -> bool:
    """Whether it is one over the names; another would be of symbols that no input gives."""
    found: set[str] = set()

    def one(name: str) -> int:
        found.add(name)
        return 1

    try:
        _value(ast.parse(text.strip(), mode="eval").body, one)
    except (ValueError, SyntaxError, ArithmeticError):
        return False
    return bool(found) and found <= names


def _value(node: ast.expr, of: Callable[[str], Any]) -> Any:
    """What an expression gives."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, of)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, of), _value(right, of))
    raise ValueError(f"{ast.unparse(node)!r} is none of numbers, names, +, -, *, // and %")


def _unlike(word: str, taken: set[str]) -> str:
    while word in taken:
        word += "_"
    return word
