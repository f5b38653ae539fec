"""Types of values: abstract evaluation for all extents, and for sample extents where symbols leave something open."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from ...eval.abstract import UNKNOWN
from ...eval.interpreter import Context, run_node
from ...eval.known_values import EXACT, is_extents, symbolic_results
from ...ir.graph import Node
from ..changes.no_ops import returns_input
from .forms import NodeCall
from .values import Value, constant, evaluated

SYMBOLIC: Final = EXACT | {"Expand", "Range", "Tile", "Flatten", "Split", "Where", "Transpose", "Pad"}
"""Operators that compute with symbolic dimensions, or raise where the result depends on their values."""


def broadcast(node: Node, operands: Mapping[str, Any], context: Context) -> list[Any]:
    """The results of an elementwise node whose operands broadcast for all extents that a call may have.

    ``min(512, tokens)`` beside ``tokens``: positions of a table that is long enough for the call, if it succeeds.
    """
    shapes: list[Any] = [getattr(operands[n], "shape", None) for n in node.inputs]
    if None in shapes or not shapes:
        return []
    fitted = {}
    for name, shape in zip(node.inputs, shapes, strict=True):
        fitted[name] = tuple(_longest(d, -i, shapes) for i, d in zip(range(len(shape), 0, -1), shape, strict=True))
    if list(fitted.values()) == [tuple(s) for s in shapes]:
        return []
    arrays = {n: lax.full(s, 0, operands[n].dtype) for n, s in fitted.items()}
    return symbolic_results(node, arrays, context, is_exact)


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


def is_exact(node: Node, operands: Mapping[str, Any]) -> bool:
    """Whether results hold for all extents."""
    if node.domain:
        return False
    if node.op_type == "Equal":  # exporters compare extents with -1
        sides = [operands[n] for n in node.inputs]
        symbols = [d for v in sides if is_extents(v) for d in v.reshape(-1).tolist() if not isinstance(d, int)]
        others = [v for v in sides if not is_extents(v)]
        negative = all(isinstance(v, np.ndarray) and (v < 0).all() for v in others) and len(others) == 1
        return negative and not any("-" in str(d) for d in symbols)
    return node.op_type in SYMBOLIC


def unchanged(call: NodeCall) -> Value | None:
    """The operand that a node returns, if it is one."""
    node = call.node
    if not node.domain and node.op_type in ("Mul", "Div", "And"):
        return _beside_one(call)
    every = [*zip(node.inputs, call.operands, strict=True), *zip(node.outputs, call.results, strict=False)]
    values = {n: v if v is None or v.known is None or v.is_extents else v.known for n, v in every}
    return call.value(0) if returns_input(node, values) else None


def squeezed(call: NodeCall) -> list[Any]:
    """The result of a Squeeze whose axes have an extent of 1 in every call that succeeds."""
    axes, x = call.integers("axes", 1), call.value(0)
    if axes is None or x.shape is None or x.dtype is None:
        return []
    dropped = {a % len(x.shape) for a in axes}
    return [lax.full([d for i, d in enumerate(x.shape) if i not in dropped], 0, x.dtype)]


def _beside_one(call: NodeCall) -> Value | None:
    """The operand that a Mul or Div by 1, or an And with True, returns."""
    for k in (0,) if call.node.op_type == "Div" else (0, 1):
        x, one = call.value(k), call.value(1 - k)
        keeps_shape = not one.rank or (x.rank is not None and one.rank <= x.rank)
        if call.scalar(1 - k) == 1 and keeps_shape and x.dtype is not None and x.dtype == one.dtype:
            return x
    return None


def _longest(dimension: Any, axis: int, shapes: Sequence[Any]) -> Any:
    """The extent of another operand of which this one is the minimum with a number; the extent itself otherwise."""
    text = str(dimension)
    for shape in shapes:
        other = shape[axis] if len(shape) >= -axis else 1
        if not isinstance(other, int) and text.startswith("min(") and text.endswith((f", {other})", f"({other}, ")):
            return other
    return dimension


def sampled(node: Node, operands: dict[str, Any], context: Context) -> list[Any]:
    """The results of a node for operands of sample extents; none where it rejects them."""
    if any(v is UNKNOWN for v in operands.values()):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which may be about these extents alone
        try:
            return list(run_node(node, operands, context))
        except Exception:
            return []


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
