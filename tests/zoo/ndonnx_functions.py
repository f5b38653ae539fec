"""ndonnx: functions of the array API standard, traced over each type that they take; NumPy has the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export

NDONNX: Final = "ndonnx"
Call = Callable[..., Any]

FLOATS: Final = ("float32", "float64")
INTEGERS: Final = ("int64", "int32", "uint8")
UNARY: Final = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "exp",
    "expm1",
    "floor",
    "log",
    "log10",
    "log1p",
    "log2",
    "reciprocal",
    "round",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "isfinite",
    "isnan",
]
UNARY_OF_ALL: Final = ["abs", "negative", "positive", "sign", "square"]
BINARY: Final = ["logaddexp"]
BINARY_OF_ALL: Final = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "remainder",
    "pow",
    "maximum",
    "minimum",
    "equal",
    "less",
    "greater_equal",
    "not_equal",
]
BITS: Final = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]
LOGIC: Final = ["logical_and", "logical_or", "logical_xor"]
REDUCTIONS: Final = [
    "sum",
    "prod",
    "max",
    "min",
    "argmax",
    "argmin",
    "count_nonzero",
    "cumulative_sum",
    "diff",
    "sort",
    "argsort",
]
DOMAINS: Final = dict.fromkeys(["acos", "asin", "atanh"], (-0.9, 0.9)) | {"acosh": (1.1, 3.0)}
POSITIVE: Final = ["log", "log10", "log1p", "log2", "sqrt", "reciprocal", "pow"]

SHAPED: Final[dict[str, Call]] = {
    "permute_dims, matrix_transpose": lambda xp, x: (xp.permute_dims(x, (1, 0)), xp.matrix_transpose(x)),
    "reshape, squeeze, expand_dims": lambda xp, x: (
        xp.reshape(x, (-1, 2)),
        xp.squeeze(x[:, :1], axis=1),
        xp.expand_dims(x, axis=1),
    ),
    "flip, roll": lambda xp, x: (
        xp.flip(x),
        xp.flip(x, axis=0),
        xp.roll(x, 1, axis=1),
        xp.roll(x, (1, 2), axis=(0, 1)),
    ),
    "tile, repeat": lambda xp, x: (xp.tile(x, (2, 1)), xp.repeat(x, 2, axis=1)),
    "concat, stack": lambda xp, x: (xp.concat([x, x], axis=0), xp.stack([x, x], axis=1), xp.concat([x, x], axis=None)),
    "broadcast_to, moveaxis": lambda xp, x: (xp.broadcast_to(x[:1, :], (3, 4)), xp.moveaxis(x, 0, 1)),
    "unstack": lambda xp, x: tuple(xp.unstack(x, axis=1)),
    "tril, triu": lambda xp, x: (xp.tril(x), xp.triu(x, k=1)),
    "where": lambda xp, x: xp.where(x > 1, x, -x),
    "clip": lambda xp, x: xp.clip(x, -1, 2),
    "matmul, vecdot": lambda xp, x: (xp.matmul(x, xp.matrix_transpose(x)), xp.vecdot(x, x)),
    "tensordot": lambda xp, x: xp.tensordot(x, xp.matrix_transpose(x), axes=1),
    "take, take_along_axis": lambda xp, x: (
        xp.take(x, xp.asarray([2, 0, 2]), axis=1),
        xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1),
    ),
    "slices": lambda _, x: (x[:, 1:3], x[::-1, ::2], x[..., -1], x[0, ...], x[:, None, 1:]),
    "index by integers": lambda xp, x: x[xp.asarray([1, 0, 1]), xp.asarray([0, 3, 2])],
    "index by a mask": lambda _, x: x[x > 0],
    "nonzero": lambda xp, x: xp.nonzero(x > 0),
    "unique_values": lambda xp, x: xp.unique_values(x),
    "unique_counts": lambda xp, x: tuple(xp.unique_counts(x)),
    "searchsorted": lambda xp, x: xp.searchsorted(xp.asarray([-1, 0, 2], dtype=x.dtype), xp.reshape(x, (-1,))),
    "ones_like, full_like": lambda xp, x: (xp.ones_like(x) + x, xp.full_like(x, 3), xp.zeros_like(x)),
    "any, all": lambda xp, x: (xp.any(x > 1, axis=1), xp.all(x > 1), xp.any(x > 99, axis=0, keepdims=True)),
    "astype": lambda xp, x: (xp.astype(x, xp.int32), xp.astype(x, xp.float64), xp.astype(x, xp.bool)),
    "meshgrid": lambda xp, x: tuple(xp.meshgrid(x[0, :], x[:, 0])),
}
FLOATING: Final[dict[str, Call]] = {
    "mean, var, std": lambda xp, x: (
        xp.mean(x, axis=1),
        xp.mean(x),
        xp.var(x, axis=0),
        xp.std(x, axis=1, keepdims=True, correction=1),
    ),
    "softmax by hand": lambda xp, x: (
        (e := xp.exp(x - xp.max(x, axis=1, keepdims=True))) / xp.sum(e, axis=1, keepdims=True)
    ),
    "standardised": lambda xp, x: (x - xp.mean(x, axis=0)) / (xp.std(x, axis=0) + 1e-3),
    "a network": lambda xp, x: (
        xp.tanh(x @ xp.reshape(xp.linspace(-1, 1, 12, dtype=x.dtype), (4, 3))) @ xp.ones((3, 2), dtype=x.dtype)
    ),
    "ifs of infinities": lambda xp, x: (xp.isinf(1 / xp.floor(x)), xp.isnan(xp.sqrt(x)), xp.isfinite(1 / xp.floor(x))),
}


def _operand(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers that lie where the function of that name has a value."""
    if dtype == "bool":
        return rng.random(shape) > 0.5
    if np.dtype(dtype).kind == "f":
        low, high = DOMAINS.get(name, (0.2, 3.0) if name in POSITIVE else (-3.0, 3.0))
        return rng.uniform(low, high, shape).astype(dtype)
    low = 0 if dtype.startswith("u") or name in BITS or name == "pow" else -5
    values = rng.integers(low, 4 if name in (*BITS, "pow") else 6, shape).astype(dtype)
    return np.where(values == 0, 2, values).astype(dtype) if name in ("floor_divide", "remainder", "divide") else values


def _export(name: str, dtypes: Sequence[str], call: Call, folder: Path) -> Export:
    import ndonnx as ndx
    import onnx

    rng = np.random.default_rng(0)
    names = [f"x{i}" for i in range(len(dtypes))]
    inputs = [{n: _operand(name, d, (rows, 4), rng) for n, d in zip(names, dtypes, strict=True)} for rows in (3, 2)]
    args = {n: ndx.argument(shape=("N", 4), dtype=getattr(ndx, d)) for n, d in zip(names, dtypes, strict=True)}
    results = _listed(call(ndx, *args.values()))
    model = ndx.build(args, {f"y{i}": y for i, y in enumerate(results)})
    onnx.save(model, folder / "model.onnx")
    with np.errstate(all="ignore"):
        expected = [_listed(call(np, *i.values())) for i in inputs]
    return Export(folder / "model.onnx", inputs, expected)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _named(name: str) -> Call:
    return lambda xp, *xs: getattr(xp, name)(*xs)


def _along(name: str) -> Call:
    return lambda xp, x: getattr(xp, name)(x, axis=1)


def _rows() -> dict[str, tuple[str, Sequence[str], Call]]:
    """Name of the case -> name of the function, types of its operands, call."""
    one: Mapping[str, Sequence[str]] = {
        **dict.fromkeys(UNARY, FLOATS),
        **dict.fromkeys(UNARY_OF_ALL, (*FLOATS, *INTEGERS)),
        "bitwise_invert": INTEGERS,
        "logical_not": ("bool",),
    }
    two: Mapping[str, Sequence[str]] = {
        **dict.fromkeys(BINARY, FLOATS),
        **dict.fromkeys(BINARY_OF_ALL, (*FLOATS, *INTEGERS)),
        **dict.fromkeys(BITS, INTEGERS),
        **dict.fromkeys(LOGIC, ("bool",)),
    }
    some: Mapping[str, tuple[Call, Sequence[str]]] = {
        **{n: (_along(n), ("float32", "int64")) for n in REDUCTIONS},
        **{n: (c, ("float32", "int64")) for n, c in SHAPED.items()},
        **{n: (c, FLOATS) for n, c in FLOATING.items()},
    }
    rows = {f"{n}, {d}": (n, [d], _named(n)) for n, dtypes in one.items() for d in dtypes}
    rows |= {f"{n}, {d}": (n, [d, d], _named(n)) for n, dtypes in two.items() for d in dtypes}
    return rows | {f"{n}, {d}": (n, [d], call) for n, (call, dtypes) in some.items() for d in dtypes}


KNOWN: Final = {
    "unique_values, int64": {"outputs": "the standard leaves the order of values open, and NumPy's differs"},
}
REFUSED: Final = {
    "signbit, atan2, copysign, hypot, nextafter / ndonnx": "NotImplementedError",
    "cumulative_prod / ndonnx": "writes the exponential of a sum of logarithms, which is NaN for negative numbers",
    "take_along_axis of one row of indices / ndonnx": "writes GatherElements, which does not broadcast",
}
CASES: Final = tuple(
    Case("ndonnx", name, NDONNX, partial(_export, *row), ("ndonnx",), known=KNOWN.get(name, {}))
    for name, row in _rows().items()
)
