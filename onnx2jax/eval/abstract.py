"""Shape inference for given extents, by abstract evaluation of the operators.

Only values that depend on constants alone are computed. Three layers of BERT, 177 nodes, take 0.1 s of processor time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from math import isqrt
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from .. import compat
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..ops.registry import Operator
from ..proto.mapped import load
from ..proto.types import TensorType, ValueInfo
from .interpreter import Context, Scope, run_node
from .known_values import LARGEST_KNOWN

_SAME: Final = (
    "Abs BiasDropout BiasGelu Cast CastLike Ceil Celu Clip Cos Dropout Elu Erf Exp FastGelu Floor Gelu HardSigmoid "
    "HardSwish Identity IsNaN LeakyRelu Log Mish Neg Not QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Sin "
    "Softplus Softsign Sqrt Swish Tanh ThresholdedRelu"
)
SAME: Final = frozenset(_SAME.split())
"""Operators that map each element of their first input separately."""
_ALONG: Final = (
    "CumSum DequantizeLinear LayerNormalization LogSoftmax LpNormalization QuantizeLinear RMSNormalization "
    "RotaryEmbedding SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Softmax Trilu"
)
ALONG: Final = frozenset(_ALONG.split())
"""Other operators whose result has the shape of their first input."""


class Extents(dict[str, int]):
    """Extents of dimension variables, distinct primes assigned on first use, so that none divides another."""

    def __init__(self, first: int) -> None:
        """Every second prime from index ``first``, 0 or 1; small primes do not exceed position tables."""
        super().__init__()
        self._primes = islice(_primes(), first, None, 2)

    def __missing__(self, name: str) -> int:
        self[name] = next(self._primes)
        return self[name]

    def shape(self, name: str, declared: Sequence[int | str | None]) -> tuple[int, ...]:
        """A declared shape with extents substituted; unnamed dimensions are keyed by the value's ``name``."""
        return tuple(d if isinstance(d, int) else self[d or f"{name}, axis {i}"] for i, d in enumerate(declared))


def _primes() -> Iterator[int]:
    return (n for n in count(11, 2) if all(n % k for k in range(3, isqrt(n) + 1, 2)))


LIKE_FIRST: Final = ALONG | {"Attention", "GroupQueryAttention", "MoE", "MultiHeadAttention", "QMoE"}
"""Operators whose result has the shape of their first input, even if other inputs do not match the extents."""


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result depends on one element of each broadcast operand."""
    return node.op_type in SAME or (isinstance(node.target, Operator) and node.target.broadcasts)


def abstract_values(graph: Graph, extents: Extents) -> dict[str, Any]:
    """Values by name: NumPy arrays if they depend on constants alone, otherwise ``jax.ShapeDtypeStruct``.

    Outputs of a node that cannot be evaluated have the shapes that the file declares, if any.
    """
    found, parameters = dict[str, Any](), analysis.parameters(graph)

    def run() -> None:
        for name, value in _evaluated(graph, parameters, extents).items():
            if type(value) is np.ndarray:
                found[name] = value
            elif isinstance(value, jax.Array):
                found[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)

    with compat.outside(), compat.enable_x64(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a call will show them
        jax.eval_shape(run)
    return found


def _evaluated(graph: Graph, parameters: Mapping[str, Any], extents: Extents) -> Scope:
    scope: Scope = {}
    for name, array in graph.initializers.items():
        is_abstract = name in parameters and array.size > LARGEST_KNOWN
        scope[name] = lax.full(array.shape, 0, array.dtype) if is_abstract else load(array)
    for value in graph.inputs:
        if value.name not in graph.initializers:
            scope[value.name] = _declared(value, extents)
    context = Context({}, jax.random.key(0))
    for node in graph.nodes:
        try:
            results = list(run_node(node, scope, context))
        except Exception:  # these extents may be invalid; a call raises the error, if there is one
            results = _guessed(node, scope, context, extents)
        results += [None] * (len(node.outputs) - len(results))
        for name, result in zip(node.outputs, results, strict=False):
            if result is None and name in graph.value_info:
                result = _declared(graph.value_info[name], extents)
            scope[name] = result
    return scope


def _declared(value: ValueInfo, extents: Extents) -> Any:
    """A value of the declared type; None if its rank is unknown or it is no array."""
    if value.shape is None or not isinstance(value.type, TensorType) or value.type.dtype.hasobject:
        return None
    return lax.full(extents.shape(value.name, value.shape), 0, value.type.dtype)


def _guessed(node: Node, scope: Scope, context: Context, extents: Extents) -> list[Any]:
    """The outputs of a node with unknown operands, or operands whose extents do not match; empty for most.

    The extent of a mask over past and new tokens is a sum of others: another operand's extent replaces it. An unknown
    operand next to one of several axes is assumed to be a mask that broadcasts to it.
    """
    operands: dict[str, Any] = {n: scope.get(n) for n in node.inputs if n}
    known = {n: v for n, v in operands.items() if hasattr(v, "shape")}
    first = known.get(node.inputs[0]) if node.inputs else None
    if node.op_type in LIKE_FIRST:
        return [] if first is None else [lax.full(first.shape, 0, first.dtype)]
    if len(known) < len(operands):
        shapes = [v.shape for v in known.values()]
        if not is_elementwise(node) or max(map(len, shapes), default=0) < 2:
            return []
        return [lax.full(np.broadcast_shapes(*_agreed(shapes, extents, None)), 0, [*known.values()][-1].dtype)]
    shapes = _agreed([v.shape for v in known.values()], extents, node.attributes.get("axis"))
    fitted = {n: lax.full(s, 0, v.dtype) for (n, v), s in zip(known.items(), shapes, strict=True) if s != v.shape}
    try:
        return list(run_node(node, {**scope, **fitted}, context)) if fitted else []
    except Exception:
        return []


def _agreed(shapes: Any, extents: Extents, axis: int | None) -> list[tuple[int, ...]]:
    """The shapes with declared extents replaced by other operands' extents, except along the axis of a Concat."""
    free = set(extents.values())

    def extent(shape: tuple[int, ...], i: int) -> int:
        others = [s[i] for s in shapes if len(s) >= -i and s[i] not in free and s[i] != 1]
        along = axis is not None and axis in (i, i + len(shape))
        return others[0] if shape[i] in free and others and not along else shape[i]

    return [tuple(extent(shape, i) for i in range(-len(shape), 0)) for shape in shapes]
