"""What every family needs: which array namespace, which dimensions, which axes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import KnownValueError


def is_known(value: Any) -> bool:
    """True for a value in NumPy's hands (or absent, or a list of such), false for JAX's."""
    if isinstance(value, list | tuple):
        return all(is_known(v) for v in value)
    return value is None or isinstance(value, np.ndarray | np.generic | int | float | bool | str | dict)


def is_traced(*values: Any) -> bool:
    """True when a value, or a member of a sequence or mapping, is only known to the compiler so far."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def xp(*values: Any) -> ModuleType:
    """The namespace to compute in: numpy when every value is known, otherwise jax.numpy."""
    return np if is_known(values) else jnp


def dims(vector: Any) -> tuple[Any, ...]:
    """A known vector of extents as a tuple of Python ints; symbolic dimensions pass unchanged."""
    return tuple(d if isinstance(d, int) or not hasattr(d, "__index__") else int(d) for d in np.ravel(vector))


def shape_vector(shape: tuple[Any, ...]) -> np.ndarray:
    """A shape as ONNX sees it: an int64 vector, or an object vector when a dimension is symbolic."""
    return np.array(shape, np.int64 if all(isinstance(d, int) for d in shape) else object)


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front; raises ValueError outside [-rank, rank)."""
    axis = int(axis)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is outside [-{rank}, {rank - 1}] for a tensor of rank {rank}")
    return axis % rank


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given; raises ValueError for one named twice."""
    result = tuple(axis_of(a, rank) for a in np.ravel(axes))
    if len(set(result)) != len(result):
        raise ValueError(f"axes {tuple(np.ravel(axes).tolist())} name one axis of a rank-{rank} tensor twice")
    return result


def is_string(value: Any) -> bool:
    """True for a tensor of strings: an object array that holds text (symbolic dimensions are objects too)."""
    return isinstance(value, np.ndarray) and value.dtype == object and all(isinstance(v, str) for v in value.flat)


def argmax(x: Any, axis: int, *, least: bool = False) -> Any:
    """The int64 index of the first greatest (or least) element along an axis, which goes.

    JAX lowers argmax in the mode of the caller, where an int64 index may not exist: hence int32 in between.
    """
    if is_known(x):
        return (np.argmin if least else np.argmax)(x, axis)
    return (lax.argmin if least else lax.argmax)(x, axis, np.int32).astype(np.int64)


def needs_known(value, why):
    """The value as NumPy; raises KnownValueError while it is traced, saying why that is not enough."""
    if is_traced(value):
        raise KnownValueError(f"{why}: the value must be known before compiling; run the model outside jax.jit")
    return np.asarray(value)
