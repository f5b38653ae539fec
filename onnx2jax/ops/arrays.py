"""What every family needs: the array namespace, half precision, which dimensions, which axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..errors import KnownValueError

HALF: Final = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
_LISTS: Final = (list, tuple)
_KNOWN: Final = (np.ndarray, np.generic, int, float, str, type(None), dict, type, np.dtype)


def is_known(value: Any) -> bool:
    """True for a value in NumPy's hands (or absent, a type, or a list of such), false for JAX's."""
    if isinstance(value, _LISTS):
        for member in value:  # noqa: SIM110 - all() takes three times as long, and every operator asks
            if type(member) is not np.ndarray and not is_known(member):
                return False
        return True
    return isinstance(value, _KNOWN)


def is_traced(*values: Any) -> bool:
    """True when a value, or a member of a sequence or mapping, is only known to the compiler so far."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


class _Namespace:
    """What numpy and jax.numpy share: computed by numpy where every operand is known, otherwise by jax.numpy.

    >>> xp.where(np.array([True, False]), np.float32(1), 0)
    array([1., 0.], dtype=float32)
    """

    def __init__(self, known: ModuleType, traced: ModuleType) -> None:
        self._known, self._traced = known, traced

    def __call__(self, *operands: Any) -> ModuleType:
        """The namespace itself that these operands need."""
        return self._known if is_known(operands) else self._traced

    def __getattr__(self, name: str) -> Any:
        known, traced = getattr(self._known, name), getattr(self._traced, name)

        def function(*operands: Any, **options: Any) -> Any:
            return (known if is_known((*operands, *options.values())) else traced)(*operands, **options)

        found = _Namespace(known, traced) if isinstance(known, ModuleType) else function
        setattr(self, name, found)
        return found


xp: Final = _Namespace(np, jnp)


def accumulator(dtype: Any) -> np.dtype:
    """The type in which values of this type are summed: float32 for half precision."""
    return np.dtype(np.float32 if dtype in HALF else dtype)


def wide(value: Any) -> Any:
    """A half-precision array in float32; any other value as it is."""
    return value.astype(np.float32) if getattr(value, "dtype", None) in HALF else value


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with half precision computed in float32, and its results rounded once, at the end."""

    @functools.wraps(function)
    def widened(*inputs: Any, **attributes: Any) -> Any:
        half = next((v.dtype for v in inputs if getattr(v, "dtype", None) in HALF), None)

        def fitting(result: Any) -> Any:
            if result is None or result.dtype.kind != "f":
                return result
            if inputs[0].dtype.kind in "biu":  # NumPy would choose a type by itself
                raise ValueError(f"the input ({inputs[0].dtype}) must have a floating type; Cast it first")
            return result if half is None else result.astype(half)

        results = function(*(inputs if half is None else map(wide, inputs)), **attributes)
        return tuple(map(fitting, results)) if isinstance(results, tuple) else fitting(results)

    return widened


def dims(vector: Any) -> tuple[Any, ...]:
    """A known vector of extents as a tuple of Python ints; symbolic dimensions pass unchanged."""
    if type(vector) is np.ndarray and vector.dtype.kind in "iu":
        return tuple(vector.ravel().tolist())
    if getattr(vector, "dtype", np.dtype(int)).kind not in "iuO":
        raise ValueError(f"extents and counts are integers, not {vector.dtype}")
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


def row_or_axis(x: Any, axis: Any) -> tuple[Any, int]:
    """The data and their axis, counted from the front; where none is given, all elements in a row."""
    return (x.reshape(-1), 0) if axis is None else (x, axis_of(axis, x.ndim))


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given; raises ValueError for one named twice."""
    result = tuple([axis_of(a, rank) for a in dims(axes)])
    if len(set(result)) != len(result):
        raise ValueError(f"axes {tuple(np.ravel(axes).tolist())} name one axis of a rank-{rank} tensor twice")
    return result


def check_shape(name: str, value: Any, *shape: Any) -> None:
    """Refuse a value that is there but has another shape; a name stands for any extent.

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
    """Refuse operands of other shapes than their names say: a name is one extent everywhere, with "?" or else 1.

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
    """True for a tensor of strings: an object array that holds text (symbolic dimensions are objects too)."""
    objects = isinstance(value, np.ndarray) and value.dtype == object
    return objects and all(issubclass(kind, str) for kind in set(map(type, value.ravel().tolist())))


def argmax(x: Any, axis: int, *, least: bool = False) -> Any:
    """The int64 index of the first greatest (or least) element along an axis, which goes.

    JAX lowers argmax in the mode of the caller, where an int64 index may not exist: hence int32 in between.
    """
    if is_known(x):
        return x.argmin(axis) if least else x.argmax(axis)
    return (lax.argmin if least else lax.argmax)(x, axis, np.int32).astype(np.int64)


def needs_known(value, why):
    """The value as NumPy; raises KnownValueError while it is traced, saying why that is not enough."""
    if type(value) is not np.ndarray and is_traced(value):
        raise KnownValueError(f"{why}: the value must be known before compiling; run the model outside jax.jit")
    return np.asarray(value)
