"""Shared by all operator families: the array namespace, half precision, checks of shapes and axes."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..errors import KnownValueError
from ..limits import MACHINE_MEMORY

FIX: Final = "declare the model inputs it is computed from static, or call the model outside jax.jit"
"""How to make a value known; ends an error message."""
HALF: Final = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
_LISTS: Final = (list, tuple)
_KNOWN: Final = (np.ndarray, np.generic, int, float, str, type(None), dict, type, np.dtype)


def is_known(value: Any) -> bool:
    """Whether a value is NumPy's (or None, a dtype, or a list of such) rather than a JAX array."""
    if isinstance(value, _LISTS):
        for member in value:  # noqa: SIM110 - all() takes three times as long, and every operator asks
            if type(member) is not np.ndarray and not is_known(member):
                return False
        return True
    return isinstance(value, _KNOWN)


def is_traced(*values: Any) -> bool:
    """Whether a value, or any leaf of a list or dict, is a JAX tracer."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


MOST_KNOWN: Final = 2**24
"""Elements of a range or window that NumPy makes; with temporary values 400 MB."""


def check_room(shape: Sequence[Any], dtype: Any, limit: int = MACHINE_MEMORY) -> None:
    """Raise for an array larger than the memory, before NumPy fills one whose extents are the values of an operand.

    >>> check_room((10**12, 10**12), np.float32)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: an array of shape [1000000000000, 1000000000000] and type float32 takes 4.0e+24 bytes, ...
    """
    if not all(isinstance(d, int) for d in shape):  # symbolic
        return
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    if needed == 0 and math.prod(d or 1 for d in shape) * np.dtype(dtype).itemsize > sys.maxsize:
        raise ValueError(f"no array has the shape {list(shape)}, though it is empty: the other extents are too large")
    if needed > limit:
        raise ValueError(
            f"an array of shape {list(shape)} and type {np.dtype(dtype)} takes {needed:.1e} bytes, and this machine "
            f"has {MACHINE_MEMORY:.1e} bytes of memory"
        )


def counting(count: int) -> Any:
    """0, 1, 2, ... in int64: known up to MOST_KNOWN, and beyond computed in the program, where they take no memory."""
    check_room((count,), np.int64)
    return (np if count <= MOST_KNOWN else jnp).arange(count, dtype=np.int64)


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal to the bit: 0.0 is not -0.0, and NaN is NaN.

    >>> identical(np.array(0.0), np.array(-0.0))
    False
    """
    if a.dtype.hasobject or (a.dtype, a.shape) != (b.dtype, b.shape):
        return a.dtype == b.dtype and np.array_equal(a, b)
    ours, theirs = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b))
    return np.array_equal(ours, theirs)


class _Namespace:
    """The functions that numpy and jax.numpy share: numpy's when every operand is known, otherwise jax.numpy's.

    >>> xp.where(np.array([True, False]), np.float32(1), 0)
    array([1., 0.], dtype=float32)
    """

    def __init__(self, known: ModuleType, traced: ModuleType) -> None:
        self._known, self._traced = known, traced

    def __call__(self, *operands: Any) -> ModuleType:
        """numpy if all operands are known, otherwise jax.numpy."""
        return self._known if is_known(operands) else self._traced

    def __getattr__(self, name: str) -> Any:
        known, traced = getattr(self._known, name), getattr(self._traced, name)

        def function(*operands: Any, **options: Any) -> Any:
            chosen = known if is_known(operands) and (not options or is_known([*options.values()])) else traced
            return chosen(*operands, **options)

        attribute = _Namespace(known, traced) if isinstance(known, ModuleType) else function
        setattr(self, name, attribute)
        return attribute


xp: Final = _Namespace(np, jnp)


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which values of ``dtype`` are summed: float32 for half precision."""
    return np.dtype(np.float32 if dtype in HALF else dtype)


def widen(value: Any) -> Any:
    """A half-precision array cast to float32; any other value unchanged."""
    return value.astype(np.float32) if getattr(value, "dtype", None) in HALF else value


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` computing half precision in float32 and rounding each result once, at the end."""

    @functools.wraps(function)
    def widened(*inputs: Any, **attributes: Any) -> Any:
        half = next((v.dtype for v in inputs if getattr(v, "dtype", None) in HALF), None)

        def rounded(result: Any) -> Any:
            if result is None or result.dtype.kind != "f":
                return result
            if inputs[0].dtype.kind in "biu":  # NumPy would promote integers to a float dtype of its own choice
                raise ValueError(f"the input ({inputs[0].dtype}) must have a floating type; Cast it first")
            return result if half is None else result.astype(half)

        results = function(*(inputs if half is None else map(widen, inputs)), **attributes)
        return tuple(map(rounded, results)) if isinstance(results, tuple) else rounded(results)

    return widened


def dims(vector: Any) -> tuple[Any, ...]:
    """A known vector of extents as a tuple of Python ints; symbolic dimensions are left unchanged."""
    if type(vector) is np.ndarray and vector.dtype.kind in "iu":
        return tuple(vector.ravel().tolist())
    if getattr(vector, "dtype", np.dtype(int)).kind not in "iuO":
        raise ValueError(f"extents and counts must be integers, not {vector.dtype}")
    return tuple(d if isinstance(d, int) or not hasattr(d, "__index__") else int(d) for d in np.ravel(vector))


def axis_of(axis: Any, rank: int) -> int:
    """A non-negative axis; raises ValueError outside [-rank, rank)."""
    axis = int(axis)
    if rank == 0:
        raise ValueError(f"axis {axis} is outside a scalar, which has no axes: reshape it")
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is outside [-{rank}, {rank - 1}] for a tensor of rank {rank}")
    return axis % rank


def flatten_or_axis(x: Any, axis: Any) -> tuple[Any, int]:
    """(data, non-negative axis); without an axis the data are flattened."""
    return (x.reshape(-1), 0) if axis is None else (x, axis_of(axis, x.ndim))


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Non-negative axes in the order given; raises ValueError for a duplicate."""
    result = tuple([axis_of(a, rank) for a in dims(axes)])
    if len(set(result)) != len(result):
        raise ValueError(f"axes {tuple(np.ravel(axes).tolist())} contain duplicates for a tensor of rank {rank}")
    return result


def check_shape(name: str, value: Any, *shape: Any) -> None:
    """Raise ValueError unless ``value`` is None or has the given shape; a string matches any extent.

    >>> check_shape("rois", np.zeros((2, 3)), "regions", 4)
    Traceback (most recent call last):
    ...
    ValueError: rois must have the shape [regions, 4] (it has (2, 3))
    """
    if value is not None:
        pairs = zip(value.shape, shape, strict=False)
        if value.ndim != len(shape) or any(not isinstance(m, str) and n != m for n, m in pairs):
            raise ValueError(f"{name} must have the shape [{', '.join(map(str, shape))}] (it has {value.shape})")


def check_shapes(extents: dict[str, Any], **operands: tuple[Any, str]) -> None:
    """Raise ValueError unless operands match their named shapes; a name has one extent everywhere ("name?" also 1).

    >>> check_shapes({"heads": 4}, bias=(np.zeros((1, 8)), "heads? keys"), past=(np.zeros((3, 8)), "heads size"))
    Traceback (most recent call last):
    ...
    ValueError: past must have the shape [heads=4, size] (it has (3, 8))
    """
    for name, (value, shape) in operands.items():
        if value is not None:
            names, known = shape.split(), dict(extents)
            pairs = [p for p in zip(names, value.shape, strict=False) if not (p[0].endswith("?") and p[1] == 1)]
            if value.ndim != len(names) or any(extents.setdefault(k.rstrip("?"), n) != n for k, n in pairs):
                wanted = ", ".join(f"{k}={known[k.rstrip('?')]}" if k.rstrip("?") in known else k for k in names)
                raise ValueError(f"{name} must have the shape [{wanted}] (it has {value.shape})")


def is_string(value: Any) -> bool:
    """Whether a value is a tensor of strings: an object array of str (symbolic dimensions are objects too)."""
    objects = isinstance(value, np.ndarray) and value.dtype == object
    return objects and all(issubclass(cls, str) for cls in set(map(type, value.ravel().tolist())))


def argmax(x: Any, axis: int, *, least: bool = False) -> Any:
    """The int64 index of the first greatest (or least) element along an axis, which is removed.

    Goes through int32, because the caller's configuration may lack int64.
    """
    if is_known(x):
        return x.argmin(axis) if least else x.argmax(axis)
    return (lax.argmin if least else lax.argmax)(x, axis, np.int32).astype(np.int64)


def repeat(n, step, state):
    """The state after ``state = step(k, state)`` for k in range(n): a Python loop if known, else a fori_loop."""
    if not is_known(state):
        return lax.fori_loop(0, n, step, state)
    for k in range(n):
        state = step(k, state)
    return state


def needs_known(value, why):
    """The value as a NumPy array; raises KnownValueError with the reason ``why`` if it is traced."""
    if type(value) is not np.ndarray and is_traced(value):
        raise KnownValueError(f"{why}: the value must be known before compiling; run the model outside jax.jit")
    return np.asarray(value)
