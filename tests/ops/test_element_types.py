"""Every element type that the schemas allow: the operators of the matrix run on the host and compiled, and agree.

What a type gives is also what the same numbers give in the types of the matrix's row, which onnxruntime has judged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import onnx
import pytest

from onnx2jax import compat
from onnx2jax.ops import registry
from onnx2jax.ops.cast import cast_to
from onnx2jax.proto.types import ELEMENT_TYPES
from tests.support.helpers import run_op
from tests.tables.operators import HOST_ONLY, TYPES_LEFT_OUT, Row, rows

NEWEST = 28
_DTYPES = {row.name.lower(): row.dtype for row in ELEMENT_TYPES.values()}

OWN_TYPES = {
    ("DequantizeLinear", "float8e8m0"): "as a scale it needs output_dtype",
    ("QLinearMatMul", "float8"): "both matrices change their type together",
    ("ScatterND", "string"): "text is written, not added",
    ("TfIdfVectorizer", "string"): "a pool of strings is another attribute",
}
"""(operator, beginning of the type's name) that this row cannot take, each with the reason."""


OWN_NUMBERS = {
    **dict.fromkeys(("Div", "Pow", "ReduceMean", "ReduceL2", "GridSample"), "fractions of integers are rounded"),
    **dict.fromkeys(("Abs", "BitShift", "BitwiseNot", "CastLike", "Neg"), "the width of the type shows"),
    **dict.fromkeys(("Col2Im", "ScatterND"), "of truth values the sum is the disjunction"),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), "the type is the range"),
    **dict.fromkeys(("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"), "the type is the range"),
}
"""Operators whose result depends on the type, not only on the numbers, where it is no ordinary floating type."""


def _chosen() -> Iterator[Row]:
    """The first row of each operator that the newest opset still allows."""
    seen = set()
    for row in rows():
        if not row.domain and row.until >= 27 and row.name not in seen and onnx.defs.has(row.name):
            seen.add(row.name)
            yield row


def _variants(row: Row) -> Iterator[tuple[str, list[Any]]]:
    """The row's inputs with one type variable in each type that the schema allows it."""
    schema = onnx.defs.get_schema(row.name, NEWEST, "")
    for constraint in schema.type_constraints:
        last = len(schema.inputs) - 1
        places = [
            p
            for p, x in enumerate(row.inputs)
            if x is not None and schema.inputs[min(p, last)].type_str == constraint.type_param_str
        ]
        for name in (t[len("tensor(") : -1] for t in constraint.allowed_type_strs if t.startswith("tensor(")):
            excused = any(o == row.name and name.startswith(t) for o, t in OWN_TYPES)
            if not places or excused or name in TYPES_LEFT_OUT.get(("", row.name), ()):
                continue
            if name != "string" and any(row.inputs[p].dtype == object for p in places):
                continue  # words are no numbers
            yield name, [_converted(x, name) if p in places else x for p, x in enumerate(row.inputs)]


def _converted(x: np.ndarray, name: str) -> np.ndarray:
    if name == "string":
        return np.array([str(v) for v in x.flat] + [None], object)[:-1].reshape(x.shape)
    x = abs(x) if name.startswith("uint") else abs(x) + 1 if name == "float8e8m0" else x
    with np.errstate(all="ignore"):
        return x.astype(_DTYPES[name])


def _assert_close(a: np.ndarray, b: np.ndarray, tolerance: float, name: str) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    if a.dtype != object:
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(b.astype(wide), a.astype(wide), rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in _chosen()])
def test_every_element_type_in_numpy_and_jax(row: Row) -> None:
    operator = registry.resolve("", row.name, NEWEST)
    assert operator is not None

    def call(inputs: Any) -> list[Any]:
        options: dict[str, Any] = {"opset": NEWEST, "n_outputs": row.outputs, "rng": jax.random.key(0)}
        return jax.tree.leaves(run_op(row.name, *inputs, **options, **row.attributes))

    for name, inputs in _variants(row):
        with compat.enable_x64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = [np.asarray(v) for v in call(inputs)]
            free = {
                p: x for p, x in enumerate(inputs) if x is not None and operator.parameter(p) not in operator.static
            }
            if not free or any(name.startswith(t) for t in HOST_ONLY) or any(x.dtype == object for x in free.values()):
                continue
            traced = jax.jit(lambda f, xs=inputs: call([f.get(p, x) for p, x in enumerate(xs)]))(free)
        for a, b in zip(known, map(np.asarray, traced), strict=True):
            _assert_close(a, b, 1e-5 if a.dtype.itemsize >= 4 else 2e-2, name)
        if row.name in OWN_NUMBERS and name not in ("float", "double"):
            continue
        with compat.enable_x64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same = [x if x is None else np.real(x).astype(r.dtype) for x, r in zip(inputs, row.inputs, strict=True)]
            in_the_rows_types = call(same)
        widths = {x.dtype.itemsize for x in (*inputs, *known) if x is not None and x.dtype.kind not in "biu"}
        tolerance = 6e-2 if name == "bfloat16" else {1: 0.2, 2: 3e-2}.get(min(widths, default=8), 1e-4)
        for a, b in zip(known, in_the_rows_types, strict=True):
            b = np.asarray(b)  # Cast knows what float8e8m0, which has no zero, makes of one
            b = cast_to(b, a.dtype) if a.dtype.name.startswith("float8_e8m0") else b.astype(a.dtype)
            _assert_close(a, b, tolerance, name)
