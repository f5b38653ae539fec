"""Abstract evaluation of a graph: constants, and types of values that the file does not declare.

``known_values`` evaluates for all inputs of the declared shapes. Free extents are symbols of ``jax.export``. A symbol
equals nothing but itself, also where the extent of a call would be equal, so what an operator decides by the value of
one is unknown: only moves and arithmetic take them as they are.

``inferred_types`` evaluates with two sets of extents for the dimension variables. An extent that is equal in both is a
constant; others are symbols, equal where both numbers are. A value that cannot be evaluated has no type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..ir.graph import Graph, Node
from ..ops.arrays import is_known
from ..ops.conv import native_conv
from ..proto.mapped import load
from ..proto.types import TensorType
from .abstract import (
    LARGEST_KNOWN,
    Abstract,
    Extents,
    abstract_values,
    is_extents,
    opaque,
    primes,
    symbols,
    types_and_constants,
    without_data,
)
from .interpreter import Context, Scope

Values = Mapping[str, Any]
"""Values by name: constants as NumPy arrays, others as ``jax.ShapeDtypeStruct``."""

_EXACT: Final = "Add Cast Concat ConstantOfShape Gather Identity Mul Reshape Shape Size Slice Squeeze Sub Unsqueeze"
EXACT: Final = frozenset(_EXACT.split())
"""Operators of ai.onnx that move extents, or compute with them as polynomials."""


class Symbolic(Abstract):
    """An evaluation for all extents, which are symbols: what one decides by its value is unknown."""

    trusts_types = False
    largest_known = 2**16  # positions and tables; masks over all positions take too much memory

    def __init__(self) -> None:
        super().__init__(Extents(symbols()))

    def is_exact(self, node: Node, operands: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether a node's results hold whatever the symbols among its operands stand for."""
        return node.domain == "" and node.op_type in EXACT

    def results(self, node: Node, scope: Scope, context: Context) -> Sequence[Any]:
        """The outputs of a node; of one that is not exact the types, for unknown values of extents."""
        operands = {n: scope[n] for n in node.reads}
        if not any(map(_is_free, operands.values())):
            return super().results(node, operands, context)
        if node.graphs or (node.op_type == "Squeeze" and len(node.inputs) < 2 and "axes" not in node.attributes):
            return self.guess(node, scope, context)
        if self.is_exact(node, operands):
            return super().results(node, operands, context)
        operands = {n: opaque(v) if is_extents(v) else v for n, v in operands.items()}
        if (node.domain, node.op_type) == ("", "Conv"):
            return [native_conv(*(operands[n] for n in node.inputs[:2]), **node.attributes)]
        return [opaque(v) if is_known(v) else v for v in super().results(node, operands, context)]


def known_values(
    graph: Graph, constants: Mapping[str, Any], weights: Iterable[str], outer: Values
) -> tuple[Values, dict[str, tuple[Any, ...]]]:
    """The values of a graph as far as they are known, and vectors of extents of which some are symbols.

    Args:
        graph: the graph. Inputs of one inside a node are unknown: those of a Loop or Scan may not be as declared.
        constants: its initializers but for defaults of inputs, and those that it captures.
        weights: those that are parameters, of which only small ones are known: operators may ask for scales of Resize.
        outer: values of the graphs around it.
    """
    large = {n for n in weights if constants[n].size > LARGEST_KNOWN}
    values, extents = dict[str, Any](), dict[str, tuple[Any, ...]]()

    def run() -> None:
        scope = {n: v if isinstance(v, np.ndarray) else opaque(v) for n, v in outer.items()}
        scope |= {n: opaque(v) if n in large else load(v) for n, v in constants.items()}
        inputs = () if graph.path else graph.inputs
        scope = Symbolic().graph(replace(graph, inputs=inputs, initializers={}), outer=scope)
        values.update(types_and_constants(scope))
        extents.update((n, tuple(v.tolist())) for n, v in scope.items() if is_extents(v) and v.ndim == 1)

    without_data(run)
    return values, extents


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
    first, second = Extents(primes(0, least)), Extents(primes(1, least))
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
