"""Abstract evaluation of a graph: constants, and types of values that the file does not declare.

``known_values`` evaluates for all inputs of the declared shapes. Free extents are symbols of ``jax.export``. A symbol
equals nothing but itself, also where the extent of a call would be equal, so what an operator decides by the value of
one is unknown: only moves and arithmetic take them as they are.

``inferred_types`` evaluates with two sets of extents for the dimension variables. An extent that is equal in both is a
constant; others are symbols, equal where both numbers are. A value that cannot be evaluated has no type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from jax import export, lax

from ..ir.graph import Graph, Node
from ..ops.arrays import is_string
from ..ops.conv import native_conv
from ..proto.mapped import load
from ..proto.types import TensorType, ValueInfo
from .abstract import UNKNOWN, Extents, abstract_values, types_and_constants, without_data
from .interpreter import Context, Scope, run_node, run_nodes

Values = Mapping[str, Any]
"""Values by name: constants as NumPy arrays, others as ``jax.ShapeDtypeStruct``."""

LARGEST_KNOWN: Final = 16
"""Elements of a parameter whose values operators may ask for, such as the scales of Resize."""
LARGEST_KEPT: Final = 2**16
"""Elements of a constant that other nodes may ask for; masks over all positions take too much memory."""
_EXACT: Final = "Add Cast Concat ConstantOfShape Gather Identity Mul Reshape Shape Size Slice Squeeze Sub Unsqueeze"
EXACT: Final = frozenset(_EXACT.split())
"""Operators of ai.onnx that move extents, or compute with them as polynomials."""


def known_values(
    graph: Graph, inputs: Iterable[ValueInfo], constants: Mapping[str, Any], weights: Iterable[str], outer: Values
) -> tuple[Values, dict[str, tuple[Any, ...]]]:
    """The values of a graph as far as they are known, and vectors of extents of which some are symbols.

    Args:
        graph: the graph.
        inputs: as declared.
        constants: its other initializers, and those that it captures.
        weights: those of which only types are told from some size on.
        outer: values of the graphs around it.
    """
    large = {n for n in weights if constants[n].size > LARGEST_KNOWN}
    types = {n: jax.ShapeDtypeStruct(constants[n].shape, constants[n].dtype) for n in large} | dict(_declared(inputs))
    types |= {n: v for n, v in outer.items() if n not in constants and not isinstance(v, np.ndarray)}
    known = {n: v for n, v in outer.items() if isinstance(v, np.ndarray)}
    values, extents = dict[str, Any](), dict[str, tuple[Any, ...]]()

    def run(tracers: dict[str, Any]) -> None:
        scope = known | {n: load(v) for n, v in constants.items() if n not in large} | tracers
        run_nodes(graph.nodes, scope, Context({}, jax.random.key(0)), symbolic_results)
        numbers = {n: v for n, v in scope.items() if not (isinstance(v, np.ndarray) and v.dtype.hasobject)}
        values.update(types_and_constants(numbers))
        vectors = {n: v for n, v in scope.items() if is_extents(v) and v.ndim == 1}
        extents.update((n, tuple(v.tolist())) for n, v in vectors.items())

    without_data(run, types)
    return values, extents


def _declared(inputs: Iterable[ValueInfo]) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """Inputs that are tensors of numbers of a declared rank, with one symbol for each dimension variable."""
    scope, symbols = export.SymbolicScope(), dict[Any, Any]()

    def symbol(variable: Any) -> Any:
        if variable not in symbols:
            (symbols[variable],) = export.symbolic_shape(f"d{len(symbols)}", scope=scope)
        return symbols[variable]

    for value in inputs:
        if isinstance(value.type, TensorType) and value.shape is not None and not value.type.dtype.hasobject:
            extents = [d if isinstance(d, int) else symbol(d or (value.name, i)) for i, d in enumerate(value.shape)]
            yield value.name, jax.ShapeDtypeStruct(extents, value.type.dtype)


def is_polynomial(node: Node, _: Mapping[str, Any]) -> bool:
    """Whether a node moves extents or computes with them as polynomials."""
    return node.domain == "" and node.op_type in EXACT


def symbolic_results(
    node: Node, scope: Scope, context: Context, is_exact: Callable[[Node, Mapping[str, Any]], bool] = is_polynomial
) -> list[Any]:
    """The outputs of a node; ``UNKNOWN`` where nothing is known.

    Args:
        node, scope, context: as for ``run_node``.
        is_exact: whether a node's results hold whatever the symbols among its operands stand for.
    """
    unknown = [UNKNOWN] * len(node.outputs)
    if any(scope.get(n, UNKNOWN) is UNKNOWN for n in node.reads):
        return unknown
    operands = {n: scope[n] for n in node.reads}
    free = any(map(_is_free, operands.values()))
    exact = is_exact(node, operands)
    if free and (node.bodies or (node.op_type == "Squeeze" and len(node.inputs) < 2 and "axes" not in node.attributes)):
        return unknown
    if free and not exact:
        operands = {n: _opaque(v) if is_extents(v) else v for n, v in operands.items()}
    try:
        if (node.domain, node.op_type) == ("", "Conv"):
            results: Any = [native_conv(*(operands[n] for n in node.inputs[:2]), **node.attributes)]
        else:
            results = run_node(node, operands, context)
    except Exception:  # for these types; a call will say what is wrong, if anything is
        return unknown
    return [UNKNOWN if v is None else _settled(v, exact or not free) for v in results]


def _settled(value: Any, is_exact: bool) -> Any:
    """A result, unknown where it was decided by a symbol."""
    if type(value) is not np.ndarray or is_string(value):
        return value
    if value.dtype.hasobject and all(isinstance(d, int) for d in value.ravel().tolist()):
        value = value.astype(np.int64)
    return value if is_exact and value.size <= LARGEST_KEPT else _opaque(value)


def _opaque(value: np.ndarray) -> jax.Array:
    """An array of unknown values."""
    return lax.full(value.shape, 0, np.int64 if value.dtype.hasobject else value.dtype)


def is_extents(value: Any) -> bool:
    """Whether a value is a NumPy array of extents, some of which are symbols."""
    return type(value) is np.ndarray and value.dtype.hasobject and not is_string(value)


def _is_free(value: Any) -> bool:
    """Whether a symbol is among a value's extents or elements."""
    return is_extents(value) or not all(isinstance(d, int) for d in getattr(value, "shape", ()))


EXTENTS: Final = 1009
"""Free extents are prime numbers from here on, to recognise them in the shapes of inner values."""
UNNAMED: Final = "?"
"""Begins the symbol of an extent that is no expression of one dimension variable."""


def symbolic_types(graph: Graph, least: int = 11) -> dict[str, TensorType]:
    """The types of a graph's values whose rank is known, by name; each extent is a number or a symbol.

    ``least`` of the primes that stand for extents: values up to some 64 elements are known, larger ones are types.
    """
    first, second = Extents(0, least), Extents(1, least)
    ones = abstract_values(graph, first)
    twos = abstract_values(graph, second) if first else ones
    unnamed: dict[tuple[int, int], str] = {}

    def extent(one: int, two: int) -> int | str:
        if one == two:
            return one
        return _expression(one, two, first, second) or unnamed.setdefault((one, two), f"{UNNAMED}{len(unnamed)}")

    return {
        name: TensorType(np.dtype(one.dtype), tuple(map(extent, one.shape, twos[name].shape)))
        for name, one in ones.items()
        if name in twos and len(one.shape) == len(twos[name].shape)
    }


def inferred_types(graph: Graph) -> dict[str, TensorType]:
    """The types of a graph's values, with dimension variables or expressions of one; None for other extents."""
    return {
        name: TensorType(kind.dtype, tuple(None if str(d).startswith(UNNAMED) else d for d in kind.shape or ()))
        for name, kind in symbolic_types(graph, EXTENTS).items()
    }


def _expression(one: int, two: int, first: Extents, second: Extents) -> str | None:
    """An extent as an expression of one dimension variable, from its values for two extents of it."""
    named = {n: (a, second.get(n, a)) for n, a in first.items() if ", axis " not in n and not n.startswith("trips of ")}
    for name, pair in named.items():
        if (one, two) == pair:
            return name
    for name, (a, b) in named.items():
        if a == b:
            continue
        factor, rest = divmod(one - two, a - b)
        if not rest and factor > 0:
            more = one - factor * a
            text = f"{factor}*{name}" if factor > 1 else name
            return f"{text}{more:+d}" if more else text
        for k in (2, 4, 8, 16, 32, 64):
            if (one, two) == (-(-a // k), -(-b // k)):
                return f"{name}/{k}"
    return None
