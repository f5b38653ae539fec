"""Strategies for operands of folding operators: shapes, types, and numbers with extremes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from hypothesis import strategies as st

from onnx2jax.proto.types import ELEMENT_TYPES, to_dtype


@dataclass(frozen=True)
class Draw:
    """Hypothesis's draw function with the number of the draw, so that proportions are fixed."""

    function: Callable[[st.SearchStrategy[Any]], Any]
    number: int

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.function(strategy)

    def turn(self, choices: Sequence[Any]) -> Any:
        """Cycles through choices, once for floats and once for other types."""
        return choices[self.number // 2 % len(choices)]

    @property
    def floats(self) -> bool:
        """Floating types if the operator has any; otherwise its other types."""
        return self.number % 2 == 0

    @property
    def extremes(self) -> bool:
        """Whether to draw infinities, NaN, signed zeros, and extreme integers."""
        return self.number // 2 % 2 == 0

    @property
    def empty(self) -> bool:
        """Whether to draw empty arrays where possible."""
        return self.number % 9 in (6, 7)


Case = Callable[[Draw, list[np.dtype]], tuple[Sequence[Any], dict[str, Any]]]

FLOATS = [to_dtype(code) for code in (10, 16, 1, 11)]
INT64 = np.dtype(np.int64)
SIDES = st.sampled_from([2, 3, 1, 4, 2, 3, 1, 2, 3, 2, 3, 0])  # hypothesis shrinks towards the first


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "f" or dtype.name.startswith(("bfloat", "float"))


def shapes(low: int = 0, high: int = 5, sides: st.SearchStrategy[int] = SIDES) -> st.SearchStrategy[tuple[int, ...]]:
    ranks = st.sampled_from([r for r in (2, 3, 1, 2, 3, 4, 5, 0) if low <= r <= high])
    return ranks.flatmap(lambda rank: st.tuples(*[sides] * rank))


SOME = st.sampled_from([2, 3, 1])


def limits(dtype: np.dtype) -> tuple[int, int]:
    """The smallest and largest integer of a type."""
    bits = next(row.bits for row in ELEMENT_TYPES.values() if row.dtype == dtype)
    return (0, 2**bits - 1) if dtype.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def extremes(dtype: np.dtype) -> np.ndarray:
    """Extreme values of a type, where operators tend to fail, and their neighbours."""
    if dtype == np.bool_:
        return np.array([False, True])
    if is_float(dtype):
        info = ml_dtypes.finfo(dtype)
        found = [np.nan, np.inf, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, info.max, info.tiny]
        return np.array(found + [-v for v in found[1:]]).astype(dtype)
    lowest, highest = limits(dtype)
    bits = (highest - lowest).bit_length()
    near = {v for v in (-bits, -3, -2, -1, 0, 1, 2, 3, bits - 1, bits) if lowest <= v <= highest}
    return np.array(
        sorted({lowest, lowest + 1, highest - 1, highest} | near), np.uint64 if lowest == 0 else np.int64
    ).astype(dtype)


def broadcast_shapes(draw: Draw, whole: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast against each other to one like ``whole``."""
    ends = [whole[draw(st.sampled_from([0, 0, *range(len(whole))])) :] for _ in range(count)]
    return [tuple(draw(st.sampled_from([n, n, 1])) for n in end) for end in ends]


def values(draw: Draw, dtype: Any, shape: tuple[int, ...], low: float | None = None, high: float = 4) -> np.ndarray:
    """Numbers of a type, with extremes among them if the draw has extremes.

    With ``low`` only ordinary ones, between it and ``high``.
    """
    rng, dtype = np.random.default_rng(draw(st.integers(0, 2**20))), np.dtype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind == "c":
        return np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if is_float(dtype):
        x = rng.uniform(-4 if low is None else low, high, shape)
        x = np.where(rng.random(shape) < 0.3, np.rint(x), x)
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    else:
        lowest, highest = limits(dtype)
        x = rng.integers(
            max(lowest, -5 if low is None else int(low)), min(highest, int(high) + 1), shape, endpoint=True
        )
        special = [lowest, highest, 0, min(1, highest), max(-1, lowest)]
    x = np.asarray(x).astype(dtype)
    if low is None and draw.extremes and x.size:
        places = rng.permutation(x.size)[: max(1, int(x.size * rng.choice([0.25, 0.5])))]
        x.flat[places] = np.array([np.array(special[i % len(special)]).astype(dtype) for i in range(len(places))])
    return x


def indices(draw: Draw, extent: int, shape: tuple[int, ...], dtype: Any = INT64) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    return rng.integers(-extent, extent, shape).astype(dtype)


def vector(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def axis(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


def dtype_of(draw: Draw, types: list[np.dtype]) -> np.dtype:
    return draw(st.sampled_from([d for d in types if is_float(d) == draw.floats] or types))


def like(inputs: Sequence[Any], free: Sequence[bool]) -> Case:
    """The operands with new numbers for the free floating ones, all of one type."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        dtype = dtype_of(draw, [d for d in types if is_float(d)] or FLOATS)
        chosen = [f and x is not None and x.dtype.kind == "f" for f, x in zip(free, inputs, strict=True)]
        return [values(draw, dtype, x.shape) if c else x for c, x in zip(chosen, inputs, strict=True)], {}

    return case


@functools.cache
def types_of(domain: str, name: str) -> list[np.dtype]:
    """The compilable types of the first input by the newest schema; floats without a schema."""
    try:
        schema = onnx.defs.get_schema(name, domain=domain)
    except onnx.defs.SchemaError:
        return FLOATS
    constraints = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    first = schema.inputs[0].type_str
    allowed = {a.split("tensor(")[-1].rstrip(")") for a in constraints.get(first, [first])}
    names = {"float": "FLOAT", "double": "DOUBLE"}
    rows = {row.name: row.dtype for row in ELEMENT_TYPES.values()}
    found = [rows[names.get(a, a.upper())] for a in sorted(allowed) if names.get(a, a.upper()) in rows]
    return [d for d in found if d != object and not d.name.startswith("float6_")]
