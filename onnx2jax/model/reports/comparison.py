"""Compares two implementations' results: of one value, and of a model, the result of ``Model.verify``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ...ir.casts import NARROWER, WIDE
from ...printed import Printed
from ...proto import atomic
from ...proto.files import path_of
from .table import table

TOLERANCES: Final = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "float16": 1e-2}
"""Tolerance for reordered sums by element type, relative to a number and to the largest in its tensor."""
BFLOAT16: Final = 5e-2
EIGHT_BITS: Final = 0.26
"""One rounding step of floats with 8 bits or fewer."""
FLIPS: Final = 100
"""A rounding node may differ by one step in one of so many numbers, and in one number at least."""
LARGEST: Final = 1e4
"""Larger operands are taken for masks: their rounding is no measure of the result's."""
HEAD: Final = ("value", "type", "largest difference", "relative", "")


@dataclass(frozen=True)
class Comparison:
    """The comparison of one value in two implementations.

    Attributes:
        value: its ONNX name.
        ours, theirs: element type and shape, or the kind of value.
        absolute, relative: the largest difference, and its ratio to the largest number in the tensor; infinite where
            one has NaN or another infinity, None if shapes or types differ.
        ok: whether all differences are within the tolerance, or roundings explain them.
        why: the difference in words, or what explains it; empty if there is none.
        node: the node that computes it, if it is a node output.
    """

    value: str
    ours: str
    theirs: str
    absolute: float | None
    relative: float | None
    ok: bool
    why: str = ""
    node: str = ""


def tolerance(dtype: np.dtype) -> float:
    """The default tolerance of an element type; 0 for integers.

    >>> tolerance(np.dtype("float32"))
    0.0001
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCES.get(dtype.name, EIGHT_BITS if dtype.itemsize == 1 else BFLOAT16)


def compared(
    value: str,
    ours: Any,
    theirs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: np.dtype | None = None,
    only_types: bool = False,
    node: str = "",
    scale: float = 0.0,
    rounds: bool = False,
) -> Comparison:
    """Compare two results: NaN equals NaN, and floats are within ``atol + rtol * |theirs|``.

    Args:
        value: the name.
        ours, theirs: arrays, lists, dicts, or None.
        rtol: by element type when left out (see ``tolerance``).
        atol: likewise, times the largest finite number in ``theirs``.
        dtype: the type in which ours is computed where theirs is float32: its type is right, and the larger of the two
            tolerances applies.
        only_types: ignore numbers, which are random.
        node: the node that computes the value.
        scale: the size of the numbers from which it is computed: their last digit is added to the default ``atol``.
        rounds: the node rounds to integers: a few numbers between two steps may differ by one.

    >>> compared("y", np.float32([1, 2]), np.float32([1, 3])).absolute
    1.0
    """
    differences = [*_differences(ours, theirs, (rtol, atol, dtype, scale, rounds), only_types)]
    whys = [why for _, _, why in differences if why]
    absolute, relative = None, None
    if all(a is not None for a, _, _ in differences):
        absolute = max((a for a, _, _ in differences), default=0.0)
        relative = max((r for _, r, _ in differences), default=0.0)
    return Comparison(value, described(ours), described(theirs), absolute, relative, not whys, "".join(whys[:1]), node)


def described(value: Any) -> str:
    """Element type and shape.

    >>> described([np.zeros(3)])
    'list of 1: float64[3]'
    """
    if isinstance(value, list | tuple | Mapping):
        inside = value.values() if isinstance(value, Mapping) else value
        kinds = list(dict.fromkeys(map(described, inside)))
        more = ", ..." if len(kinds) > 2 else ""
        kind = "dict" if isinstance(value, Mapping) else "list"
        return f"{kind} of {len(value)}" + (f": {', '.join(kinds[:2])}{more}" if kinds else "")
    if value is None:
        return "nothing"
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return f"{'string' if array.dtype.kind in 'OU' else array.dtype}{list(array.shape)}"


Limits = tuple[float | None, float | None, np.dtype | None, float, bool]
"""rtol, atol, dtype, scale and rounds, as of ``compared``."""
Distance = tuple[Any, Any, str]
"""The largest absolute and relative differences, or None, and the difference in words."""


def _differences(ours: Any, theirs: Any, limits: Limits, only_types: bool) -> Iterator[Distance]:
    """The difference of each pair of arrays in two results."""
    wrong = f"{described(ours)} instead of {described(theirs)}"
    kinds = [list if isinstance(v, tuple) else dict if isinstance(v, Mapping) else type(v) for v in (ours, theirs)]
    if not {list, dict, type(None)}.isdisjoint(kinds):
        if kinds[0] != kinds[1] or (theirs is not None and len(ours) != len(theirs)):
            yield None, None, wrong
        elif kinds[0] is dict and ours.keys() != theirs.keys():
            yield None, None, "other keys"
        elif theirs is not None:
            pairs: Iterable[tuple[Any, Any]] = zip(ours, theirs, strict=True)
            if kinds[0] is dict:
                pairs = [(_single(ours[k]), _single(theirs[k])) for k in theirs]
                if pairs and all(isinstance(v, np.float32) for pair in pairs for v in pair):
                    a, b = np.array(pairs).T  # differences are relative to the largest number of the map
                    pairs = [(a, b)]
            for a, b in pairs:
                yield from _differences(a, b, limits, only_types)
        return
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if (computed := limits[2]) is not None and ours.dtype == computed:  # np.dtype("float64") equals None
        ours = ours.astype(theirs.dtype) if theirs.dtype in NARROWER.get(computed, {WIDE}) else ours
    texts = [a.dtype.kind in "OU" for a in (ours, theirs)]
    if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and not all(texts)):
        yield None, None, wrong
    elif only_types:
        yield 0.0, 0.0, ""
    elif all(texts):
        count = int((ours.astype(object) != theirs.astype(object)).sum())
        yield (None, None, f"{count} of {ours.size} texts differ") if count else (0.0, 0.0, "")
    else:
        yield _in_numbers(ours, theirs, limits)


def _single(value: Any) -> Any:
    """A value of a map: ONNX's maps hold float32, which runtimes return as Python's floats."""
    return np.float32(value) if type(value) is float else value


def magnitude(value: Any) -> float:
    """The largest finite number up to LARGEST in a float array; 0 for other values.

    >>> magnitude(np.float32([-3, 2, -1e9]))
    3.0
    """
    if not is_inexact(value):
        return 0.0
    size = np.abs(_wide(value))
    return float(size[size <= LARGEST].max(initial=0))


def is_inexact(value: Any) -> bool:
    """Whether a value is an array of floats or complex numbers."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def _wide(array: Any) -> np.ndarray:
    """An array in float64 or complex128."""
    return np.asarray(array).astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _in_numbers(ours: np.ndarray, theirs: np.ndarray, limits: Limits) -> Distance:
    rtol, atol, computed, operands, rounds = limits
    dtype = theirs.dtype if computed is None or computed in NARROWER or theirs.dtype != np.float32 else computed
    exact = not jnp.issubdtype(dtype, jnp.inexact)
    if exact and np.array_equal(ours, theirs):  # float64 cannot represent all 64-bit integers
        return 0.0, 0.0, ""
    a, b = _wide(ours), _wide(theirs)
    size = np.abs(b)
    is_finite = np.isfinite(size)
    scale = size[is_finite].max(initial=0)
    digit = 0.0 if exact else float(jnp.finfo(dtype).eps)
    rtol = tolerance(dtype) if rtol is None else rtol
    atol = tolerance(dtype) * scale + digit * operands if atol is None else atol
    with np.errstate(all="ignore"):
        same = (a == b) | ((a != a) & (b != b))
        apart = np.where(same, 0, np.abs(a - b))
        apart = np.where(np.isnan(apart), np.inf, apart)
        allowed = np.where(is_finite, atol + rtol * size, 0)
    must_be_equal = exact and not (rtol or atol)
    bad = ours != theirs if must_be_equal else ~same & ~(apart <= allowed)
    absolute = float(apart.max(initial=0))
    relatively = absolute / float(scale or np.abs(a[np.isfinite(a)]).max(initial=0) or 1)
    is_flipped = must_be_equal and rounds and absolute <= 1 and bad.sum() <= max(1, bad.size // FLIPS)
    if is_flipped or not bad.any():
        return absolute, relatively, ""
    where = tuple(map(int, np.unravel_index(int(np.argmax(np.where(bad, apart, -1))), bad.shape)))
    text = (
        f"{int(bad.sum())} of {bad.size} numbers differ, by up to {absolute:.3g} absolutely and {relatively:.3g} "
        f"relatively; at {list(where)} it is {ours[where]} instead of {theirs[where]}"
    )
    return absolute, relatively, text


@dataclass(frozen=True)
class Difference:
    """The node that differs on equal operands: of several the first whose error is comparable to the largest.

    Attributes:
        node: its name, operator and opset, followed by those of inner nodes.
        value: the output that differs.
        comparison: the comparison of that output.
        operands: its operands by name, and ``ours/NAME`` and ``theirs/NAME`` for its outputs.
        accumulated: no node differs on equal operands, and this is the first whose accumulated rounding error exceeds
            the tolerance.
    """

    node: str
    value: str
    comparison: Comparison
    operands: Mapping[str, Any] = field(repr=False)
    accumulated: bool = False

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the operands and results as .npz; maps and missing values are omitted."""
        arrays: dict[str, Any] = {}
        for name, value in self.operands.items():
            for key, part in _parts(name, value):
                array = np.asarray(part)
                arrays[key] = array.astype(str) if array.dtype == object else array
        path = path_of(path)
        with atomic.replacing(path) as file:
            atomic.write_npz(file, {n.replace("/", "|"): v for n, v in arrays.items()})
        return path


@dataclass(frozen=True, repr=False)
class Verification(Printed):
    """The result of ``Model.verify``; true if nothing differs.

    Attributes:
        against: the other implementation, or the folder of test data.
        outputs: comparisons of the outputs, by set of inputs.
        nodes: likewise comparisons of node outputs, each node on the other's operands; empty if not compared.
        first: the node that differs.
        notes: values that could not be compared.
    """

    against: str
    outputs: Mapping[str, Sequence[Comparison]]
    nodes: Mapping[str, Sequence[Comparison]]
    first: Difference | None = None
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(c.ok for comparisons in (*self.outputs.values(), *self.nodes.values()) for c in comparisons)

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """The comparisons as JSON, without the operands."""
        facts: dict[str, Any] = {"ok": self.ok, "against": self.against, "notes": list(self.notes), "first": None}
        for part in ("outputs", "nodes"):
            facts[part] = {n: list(map(_facts, comparisons)) for n, comparisons in getattr(self, part).items()}
        if self.first is not None:
            kept = ("node", "value", "accumulated")
            facts["first"] = {n: getattr(self.first, n) for n in kept} | {"comparison": _facts(self.first.comparison)}
        return json.dumps(facts, indent=2)

    def __str__(self) -> str:
        lines = []
        for what, sets in (("outputs", self.outputs), ("values of nodes", self.nodes)):
            for name, comparisons in sets.items():
                bad = [c for c in comparisons if not c.ok]
                lines.append(f"{name}: {len(comparisons)} {what} compared with {self.against}, {len(bad)} differ")
                if what == "outputs" or bad:
                    lines.append(table([HEAD, *map(_row, comparisons if what == "outputs" else bad[:10])], width=140))
        if self.first is not None:
            begins = "Roundings add up; past the tolerance first at" if self.first.accumulated else "It begins at"
            lines.append(f"{begins} {self.first.node}: {self.first.value!r}, {self.first.comparison.why}")
        return "\n".join([*lines, *self.notes])


def _facts(comparison: Comparison) -> dict[str, Any]:
    """A comparison as a dict for JSON, which has no infinity."""
    return {n: "inf" if v == np.inf else v for n, v in asdict(comparison).items()}


def _row(comparison: Comparison) -> tuple[str, ...]:
    numbers = ("-" if d is None else f"{d:.3g}" for d in (comparison.absolute, comparison.relative))
    return comparison.value, comparison.ours, *numbers, comparison.why or "same"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from _parts(f"{name}[{i}]", v)
    elif value is not None and not isinstance(value, Mapping):
        yield name, value
