"""Types of values: abstract evaluation for all extents, and for sample extents where symbols leave something open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from ...errors import KnownValueError
from ...eval.abstract import UNKNOWN, Abstract, is_elementwise, is_extents
from ...eval.interpreter import Context, Scope
from ...eval.known_values import EXACT, Symbolic
from ...ir.graph import Node
from ...ops.arrays import is_known, is_string
from ..changes.no_ops import returns_input
from .forms import NodeCall
from .values import Value, constant, evaluated

SYMBOLIC: Final = EXACT | {"Expand", "Range", "Tile", "Flatten", "Split", "Where", "Transpose", "Pad"}
"""Operators that compute with symbolic dimensions, or raise where the result depends on their values."""


class AllExtents(Symbolic):
    """An evaluation for all extents that a call may have, if it succeeds."""

    def is_exact(self, node: Node, operands: Mapping[str, Any]) -> bool:
        """Whether results hold for all extents."""
        if node.domain:
            return False
        if node.op_type == "Equal":  # exporters compare extents with -1
            sides = [operands[n] for n in node.inputs]
            if any(map(is_string, sides)):
                return False
            extents = [d for v in sides if is_extents(v) for d in v.reshape(-1).tolist() if not isinstance(d, int)]
            others = [v for v in sides if not is_extents(v)]
            negative = all(isinstance(v, np.ndarray) and (v < 0).all() for v in others) and len(others) == 1
            return negative and not any("-" in str(d) for d in extents)
        return node.op_type in SYMBOLIC

    def guess(self, node: Node, scope: Scope, context: Context) -> Sequence[Any]:
        """The results of an elementwise node for operands that broadcast, and of a Squeeze of extents that are 1.

        ``min(512, tokens)`` beside ``tokens``: positions of a table that is long enough for the call.
        """
        shapes: dict[str, Any] = {n: getattr(scope[n], "shape", None) for n in node.reads}
        if is_elementwise(node) and None not in shapes.values():
            fitted = {n: tuple(_longest(d, i - len(s), shapes) for i, d in enumerate(s)) for n, s in shapes.items()}
            if fitted != shapes:
                arrays = {n: lax.full(shape, 0, scope[n].dtype) for n, shape in fitted.items()}
                return self.outputs(node, arrays, context)
        if (node.domain, node.op_type) == ("", "Squeeze") and isinstance(x := scope[node.inputs[0]], jax.Array):
            axes = node.attributes.get("axes", [scope[n] for n in node.inputs[1:] if n])
            if is_known(axes) and (dropped := {int(a) % x.ndim for a in np.ravel(axes)}):
                return [lax.full([d for i, d in enumerate(x.shape) if i not in dropped], 0, x.dtype)]
        return super().guess(node, scope, context)


class SampleExtents(Abstract):
    """An evaluation with sample extents, where symbols leave something open."""

    largest_known = math.inf
    untraceable: KnownValueError | None = None
    """Why a node cannot be traced, even where all extents are known."""

    def results(self, node: Node, scope: Scope, context: Context) -> Sequence[Any]:
        """The outputs of a node, as of ``Abstract``; notes why it cannot be traced."""
        try:
            return super().results(node, scope, context)
        except KnownValueError as e:
            self.untraceable = e
            raise


def sample_of(value: Value | None, sizes: Mapping[str, int]) -> Any:
    """A value for evaluation with sample extents; None where it is left out."""
    if value is None:
        return None
    if value.known is not None:
        if not value.is_extents:
            return value.known
        numbers = [evaluated(d, sizes) for d in value.known.reshape(-1).tolist()]
        return np.array(numbers, np.int64).reshape(value.known.shape)
    if isinstance(value.sample, np.ndarray):
        return value.sample
    if value.sample is None and value.shape is None:
        return UNKNOWN
    shape = value.sample.shape if value.shape is None else [evaluated(d, sizes) for d in value.shape]
    dtype = value.sample.dtype if value.dtype is None else value.dtype
    return UNKNOWN if dtype.hasobject else lax.full(shape, 0, dtype)


def unchanged(call: NodeCall) -> Value | None:
    """The operand that a node returns, if it is one."""
    node = call.node
    if not node.domain and node.op_type in ("Mul", "Div", "And"):
        return _beside_one(call)
    every = [*zip(node.inputs, call.operands, strict=True), *zip(node.outputs, call.results, strict=False)]
    values = {n: v if v is None or v.known is None or v.is_extents else v.known for n, v in every}
    return call.value(0) if returns_input(node, values) else None


def _beside_one(call: NodeCall) -> Value | None:
    """The operand that a Mul or Div by 1, or an And with True, returns."""
    for k in (0,) if call.node.op_type == "Div" else (0, 1):
        x, one = call.value(k), call.value(1 - k)
        keeps_shape = not one.rank or (x.rank is not None and one.rank <= x.rank)
        if call.scalar(1 - k) == 1 and keeps_shape and x.dtype is not None and x.dtype == one.dtype:
            return x
    return None


def _longest(dimension: Any, axis: int, shapes: Mapping[str, Any]) -> Any:
    """The extent of another operand of which this one is the minimum with a number; the extent itself otherwise."""
    text = str(dimension)
    for shape in shapes.values():
        other = shape[axis] if len(shape) >= -axis else 1
        if not isinstance(other, int) and text.startswith("min(") and text.endswith((f", {other})", f"({other}, ")):
            return other
    return dimension


def typed(result: Any, host: bool, sample: Any = None) -> Value:
    """A value of a result of abstract evaluation, without text."""
    if result is UNKNOWN and sample is not None and hasattr(sample, "shape") and not sample.dtype.hasobject:
        kept = sample if isinstance(sample, np.ndarray) else jax.ShapeDtypeStruct(sample.shape, sample.dtype)
        return Value(dtype=np.dtype(sample.dtype), host=host, sample=kept)
    if type(result) is np.ndarray:
        return constant(result)
    if isinstance(result, jax.Array | jax.ShapeDtypeStruct):
        return Value(shape=tuple(result.shape), dtype=np.dtype(result.dtype), host=host)
    return Value(host=host)


def abstract_of(value: Value) -> Any:
    """A value for abstract evaluation."""
    if value.known is not None:
        return value.known
    if value.shape is None or value.dtype is None or value.dtype.hasobject:
        return UNKNOWN
    return lax.full(value.shape, 0, value.dtype)


def is_host(value: Value) -> bool:
    """Whether a value computed from extents and constants alone is computed in NumPy: integers, as of a shape."""
    return value.dtype is not None and value.dtype.kind in "iub" and (value.rank is None or value.rank <= 1)


def is_wide(value: Value) -> bool:
    """Whether a value is traced, and may be of a 64-bit type."""
    return not value.host and (value.dtype is None or (value.dtype.itemsize == 8 and value.dtype.kind in "iuf"))
