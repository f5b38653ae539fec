"""Casts around an operator in a model that computes in another type than its file's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops.arrays import HALF, is_known
from ..proto.types import to_code

WIDE: Final = np.dtype(np.float32)
DOUBLE: Final = np.dtype(np.float64)
NARROWER: Final = {WIDE: frozenset(map(np.dtype, HALF)), DOUBLE: frozenset((*map(np.dtype, HALF), WIDE))}
"""A compute dtype that widens a file -> the types that become it."""
CODES: Final = {wide: frozenset(map(to_code, narrower)) for wide, narrower in NARROWER.items()}
"""The same as codes in TensorProto."""


@dataclass(frozen=True)
class Casts:
    """Casts of float32 values, and of those in the compute dtype; values of any other type are left unchanged.

    A compute dtype that widens takes all types narrower than it.

    Attributes:
        dtype: the compute dtype.
        operand: dtype of the operands; None for float32 where one of them is float32, the compute dtype otherwise.
        result: dtype of the results.
        kept: positions of operands that are never rounded: left unchanged, or all float32 where one of them is.
        bounded: positions of operands to which ``bounded`` applies.
        pinned: whether the caller keeps the node in float32; a later decision about casts keeps it, too.
        types: attributes that name an element type, with their defaults: one narrower than a compute dtype that widens
            is the compute dtype there.
    """

    dtype: np.dtype
    operand: np.dtype | None
    result: np.dtype
    kept: frozenset[int] = frozenset()
    bounded: frozenset[int] = frozenset()
    pinned: bool = False
    types: tuple[tuple[str, int | None], ...] = ()

    def call(self, function: Callable[..., Any], *values: Any, **attributes: Any) -> Any:
        """What the operator returns for operands cast, cast to ``result``."""
        kept, others = (
            {v.dtype for i, v in enumerate(values) if (i in self.kept) == is_kept and hasattr(v, "dtype")}
            for is_kept in (True, False)
        )
        operand = self.operand or (WIDE if WIDE in others else self.dtype)
        exact = WIDE if {WIDE, self.dtype} <= kept else None
        cast = [self._operand(i, v, exact if i in self.kept else operand) for i, v in enumerate(values)]
        named = {n: to_code(self.dtype) for n, v in self.types if attributes.get(n, v) in CODES[self.dtype]}
        return self.results(function(*cast, **{**attributes, **named}))

    def results(self, returned: Any) -> Any:
        """The results of a node, cast to ``result``."""
        if isinstance(returned, tuple):
            return tuple(self._cast(value, self.result) for value in returned)
        return self._cast(returned, self.result)

    def _operand(self, position: int, value: Any, dtype: np.dtype | None) -> Any:
        if dtype is None:
            return value
        if position in self.bounded and getattr(value, "dtype", None) == WIDE:
            value = bounded(value, self.dtype)
        return self._cast(value, dtype)

    def _cast(self, value: Any, dtype: np.dtype) -> Any:
        if isinstance(value, list):
            return [self._cast(v, dtype) for v in value]
        source = getattr(value, "dtype", None)
        if dtype == self.dtype and dtype in NARROWER:
            return value.astype(dtype) if source in NARROWER[dtype] else value
        other = self.dtype if dtype == WIDE else WIDE
        return value.astype(dtype) if source == other else value


def bounded(value: Any, dtype: Any) -> Any:
    """A float32 value with finite numbers beyond the range of ``dtype`` replaced by a quarter of its greatest one.

    Such numbers are masks, the most negative of float32 or -1e9. As infinities they would turn into NaN in a softmax
    over nothing else; at a quarter of the range several of them can be added.

    >>> bounded(np.array([1.5, -1e9, -np.inf], np.float32), np.float16)
    array([ 1.5000e+00, -1.6376e+04,        -inf], dtype=float32)
    """
    if dtype in NARROWER:
        return value
    limit, size = float(jnp.finfo(dtype).max), abs(value)
    beyond = (size > limit) & (size < np.inf)
    if is_known(value):
        return np.where(beyond, np.copysign(np.float32(limit / 4), value), value)
    return lax.select(beyond, lax.sign(value) * np.float32(limit / 4), value)
