"""Values as the source sees them: constants, extents, parameters and variables, and the text of each."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from ...ops.arrays import is_string
from .code import CONSTANT, EXTENT, mark, string

INLINE: Final = 8
"""Elements up to which a constant is part of the text."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a graph.

    Attributes:
        text: an expression; empty for a constant, and for extents, which have text of their own.
        known: the array, for a constant; of objects where symbolic dimensions are among its elements.
        shape: extents as integers and symbolic dimensions; None where the rank is unknown.
        dtype: None where it is unknown.
        host: whether the text computes a NumPy array, of extents and constants.
        stored: the name of a constant in the file.
        sample: the value, or its type, for sample extents: tells the rank where symbols leave the shape unknown.
    """

    text: str = ""
    known: np.ndarray | None = None
    shape: tuple[Any, ...] | None = None
    dtype: np.dtype | None = None
    host: bool = False
    stored: str = ""
    sample: Any = None

    @property
    def rank(self) -> int | None:
        """The number of axes; None where it is unknown."""
        shape = self.shape if self.shape is not None else getattr(self.sample, "shape", None)
        return None if shape is None else len(shape)

    @property
    def is_extents(self) -> bool:
        """Whether symbolic dimensions are among the elements."""
        known = self.known
        return known is not None and known.dtype == object and not (known.size and is_string(known))

    @property
    def is_static(self) -> bool:
        """Whether the shape has integers alone."""
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype is not None and self.dtype.kind == "f"

    @property
    def sequence(self) -> str:
        """Integers or extents as a Python number or tuple."""
        assert self.known is not None
        texts = list(map(extent, self.known.reshape(-1).tolist()))
        return tuple_of(texts) if self.known.ndim else texts[0]


def constant(array: np.ndarray, stored: str = "") -> Value:
    """A known array."""
    dtype = np.dtype(np.int64) if array.dtype == object else array.dtype
    return Value("", array, array.shape, dtype, True, stored)


# ------------------------------------------------------------------------------------------------------------ extents

_SYMBOLIC: Final = {"floordiv": ast.FloorDiv, "mod": ast.Mod}


class _Named(ast.NodeTransformer):
    """Rewrites the text of a symbolic dimension, as JAX prints it, to Python over marked names."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in ("max", "min", *_SYMBOLIC):
            node.id = mark(EXTENT + node.id)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        symbol = _SYMBOLIC.get(getattr(node.func, "id", ""))
        return ast.BinOp(node.args[0], symbol(), node.args[1]) if symbol else node


def extent(dimension: Any) -> str:
    """An extent as an expression over marked dimension variables."""
    if isinstance(dimension, int | np.integer):
        return str(int(dimension))
    tree = ast.parse(str(dimension).replace("^", "**"), mode="eval")
    return ast.unparse(_Named().visit(tree)).replace(" ** ", "**")


def is_atom(text: str) -> bool:
    """Whether an extent is a number or a name."""
    return not any(c in text for c in " (")


def extents(shape: Sequence[Any], *, inferred: bool = False) -> list[str]:
    """The extents of a shape as text; with ``inferred`` -1 for one that is no number or name, among numbers alone."""
    texts = list(map(extent, shape))
    compound = [i for i, t in enumerate(texts) if not is_atom(t)]
    others = [t for i, t in enumerate(texts) if i not in compound]
    if inferred and len(compound) == 1 and all(t.isdigit() and t != "0" for t in others):
        texts[compound[0]] = "-1"
    return texts


def tuple_of(elements: Sequence[Any]) -> str:
    """A tuple of texts or integers.

    >>> tuple_of(["x"]), tuple_of([1, 2])
    ('(x,)', '(1, 2)')
    """
    return f"({elements[0]},)" if len(elements) == 1 else f"({', '.join(map(str, elements))})"


def packed(elements: Sequence[Any], empty: str = "()") -> str:
    """One text or integer as it is, several as a tuple.

    >>> packed(["x"]), packed([1, 2]), packed([], "None")
    ('x', '(1, 2)', 'None')
    """
    return tuple_of(elements) if len(elements) > 1 else str(elements[0]) if elements else empty


def evaluated(dimension: Any, sizes: Mapping[str, int]) -> int:
    """The extent for sizes of the symbols."""
    if isinstance(dimension, int | np.integer):
        return int(dimension)
    functions = {"floordiv": operator.floordiv, "mod": operator.mod, "max": max, "min": min}
    return int(eval(str(dimension).replace("^", "**"), {"__builtins__": {}, **functions, **sizes}))


# ----------------------------------------------------------------------------------------------------------- literals


def dtype_name(dtype: np.dtype) -> str:
    """A dtype as an expression; both libraries have the names of NumPy's types, and JAX those of the others."""
    if dtype == np.bool_:
        return "bool"
    return f"{'np' if hasattr(np, dtype.name) else 'jnp'}.{dtype.name}"


def number(value: Any) -> str:
    """A Python number that a cast to the scalar's type turns into it.

    >>> number(np.float32(0.1)), number(np.float32("-inf")), number(np.int64(3)), number(np.True_)
    ('0.1', '-np.inf', '3', 'True')
    """
    dtype = np.asarray(value).dtype
    if dtype.kind == "b":
        return str(bool(value))
    if dtype.kind in "iu" or dtype.name in ("int4", "uint4", "int2", "uint2"):
        return str(int(value))
    if dtype.kind == "c":
        return repr(complex(value))
    if not math.isfinite(value):
        return "np.nan" if value != value else "np.inf" if value > 0 else "-np.inf"
    text = str(value) if dtype.kind == "f" else repr(float(value))
    return text if any(c in text for c in ".e") else f"{text}.0"


def python(value: Any) -> str:
    """An attribute as Python: numbers, strings, tuples; float attributes have float32's digits.

    >>> python((1, 2)), python(0.009999999776482582), python("same")
    ('(1, 2)', '0.01', '"same"')
    """
    match value:
        case bool() | None:
            return repr(value)
        case int():
            return str(value)
        case float():
            return number(np.float32(value) if np.float32(value) == value else np.float64(value))
        case str():
            return string(value)
        case tuple():
            return tuple_of([*map(python, value)])
        case np.ndarray():
            return array(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no text")


def array(value: np.ndarray) -> str:
    """A NumPy array as an expression; short for what repeats one number, or counts."""
    kind = dtype_name(value.dtype)
    if value.dtype == object:
        return f"np.array({_nested(value.tolist(), string)}, object)"
    if value.ndim == 0:
        return f"np.array({number(value[()])}, {kind})" if kind == "bool" else f"{kind}({number(value[()])})"
    flat, shape = value.reshape(-1), packed(value.shape)
    if value.size > 3 and (flat == flat[0]).all() and not (np.signbit(flat[0]) if value.dtype.kind == "f" else False):
        if flat[0] == 0:
            return f"np.zeros({shape}, {kind})"
        return f"np.ones({shape}, {kind})" if flat[0] == 1 else f"np.full({shape}, {number(flat[0])}, {kind})"
    if value.size > 3 and max(value.shape) == value.size and value.dtype.kind in "iu":
        start, step = int(flat[0]), int(flat[1]) - int(flat[0])
        if step > 0 and (flat == start + step * np.arange(value.size)).all():
            stop = start + step * (value.size - 1) + 1
            bounds = [start, stop, step] if step > 1 else [start, stop] if start else [stop]
            counted = f"np.arange({', '.join(map(str, bounds))}, dtype={kind})"
            return counted if value.ndim == 1 else f"{counted}.reshape{shape}"
    if value.size == 0:
        return f"np.zeros({shape}, {kind})"
    return f"np.array({_nested(value, number)}, {kind})"


def _nested(value: Any, text: Callable[[Any], str]) -> str:
    return f"[{', '.join(_nested(v, text) for v in value)}]" if isinstance(value, np.ndarray | list) else text(value)


def is_inline(value: np.ndarray) -> bool:
    """Whether the array is short as text, or has text, which no file of arrays stores."""
    return value.dtype == object or (value.size <= 2**20 and (value.size <= INLINE or len(array(value)) <= 48))


def stored(name: str) -> str:
    """The text of a constant in the file."""
    return mark(CONSTANT + name)


HALF: Final = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
