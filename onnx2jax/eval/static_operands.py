"""Operands that an operator must know before compiling: known, traced by the caller, or known in part.

A traced operand may still be known, as ``end - start`` is for the ends ``start`` and ``start + 4``. The integer
arithmetic before the node is repeated on the symbolic dimensions of ``jax.export``, which operators support anyway: a
traced integer that follows from no others is one, of any sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import jax
import numpy as np
from jax import export

from ..ir.graph import Graph, Node
from ..ops.arrays import is_known, is_traced
from ..ops.registry import is_built_in
from ..ops.traced import TracedIntegers
from .node_errors import needs_known

MOST_INTEGERS: Final = 8
"""Elements of a traced operand, such as the starts of a Slice, up to which it is expressed by others."""
_INTEGERS: Final = frozenset({np.dtype(np.int32), np.dtype(np.int64)})


def static_operands(
    node: Node,
    values: Sequence[Any],
    scope: Mapping[str, Any],
    graphs: Sequence[Graph],
    *,
    caller_traces: bool,
) -> list[Any]:
    """A node's operands, as NumPy where the operator must know the value before compiling.

    Args:
        node: the node.
        values: of its inputs.
        scope: values by name.
        graphs: that of the scope and those around it, the innermost first.
        caller_traces: whether values that operators would like to know are traced by the caller.

    Raises:
        KnownValueError: one of them is traced, and nothing that the operator could use is known of it.
    """
    operator, arithmetic = node.operator, _Arithmetic(scope, graphs)
    results = []
    for position, (name, value) in enumerate(zip(node.inputs, values, strict=True)):
        parameter = operator.parameter(position)
        if parameter not in operator.static or is_known(value):
            results.append(value)
        elif not is_traced(value):
            results.append(jax.tree.map(np.asarray, value))
        elif caller_traces and parameter in operator.may_be_traced:
            results.append(value)
        else:
            terms = arithmetic.terms(name)
            if terms is not None and all(isinstance(term, int) for term in terms.ravel().tolist()):
                results.append(terms.astype(value.dtype))
            elif terms is not None and parameter in operator.relative:
                results.append(TracedIntegers(value, terms))
            else:
                raise needs_known(node, f"{parameter!r}", (name,))
    return results


class _Arithmetic:
    """Traced integers expressed by others, each an array of integers and symbolic dimensions."""

    def __init__(self, scope: Mapping[str, Any], graphs: Sequence[Graph]) -> None:
        """``graphs``: that of the scope and those around it, the innermost first."""
        self._scope, self._graphs = scope, graphs
        self._count = 0
        self._terms_of: dict[str, Any] = {}

    @cached_property
    def _symbols(self) -> export.SymbolicScope:
        return export.SymbolicScope()

    def terms(self, name: str) -> Any:
        """The value of a name; None if it is no small tensor of integers."""
        if name not in self._terms_of:
            self._terms_of[name] = self._terms(name)
        return self._terms_of[name]

    def _terms(self, name: str) -> Any:
        value: Any = self._scope.get(name)
        if getattr(value, "dtype", None) not in _INTEGERS or value.size > MOST_INTEGERS:
            return None
        if not is_traced(value):
            return np.asarray(value)
        terms = self._computed(name)
        return terms if terms is not None and terms.shape == value.shape else self._unknown(value.shape)

    def _computed(self, name: str) -> Any:
        """The value, computed from the terms of its operands; None where an operator does not support them."""
        node = next((g.producers.get(name) for g in self._graphs if name in g.defines), None)
        if node is None or not node.is_plain:
            return None
        operator, supplied = node.operator, {"opset": node.opset, "n_outputs": len(node.outputs), "extents": None}
        if operator.function is None or not operator.fixtures <= supplied.keys() or not is_built_in(operator):
            return None
        operands = [self.terms(n) if n else None for n in node.inputs]
        if any(n and v is None for n, v in zip(node.inputs, operands, strict=True)):
            return None
        try:
            results = operator.function(*operands, **{n: supplied[n] for n in operator.fixtures}, **node.attributes)
        except Exception:  # such as a comparison that depends on the symbols
            return None
        result = results[node.outputs.index(name)] if isinstance(results, tuple) else results
        return np.asarray(result) if is_known(result) else None

    def _unknown(self, shape: Sequence[int]) -> Any:
        result = np.empty(shape, object)
        for i in np.ndindex(*shape):
            # Symbolic dimensions are positive, their difference is any integer.
            more, less = export.symbolic_shape(f"p{self._count}, n{self._count}", scope=self._symbols)
            result[i], self._count = more - less, self._count + 1
        return result
