"""The branch for known values (NumPy) and the traced one (one jit) give the same, for every operator that folds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.ops import registry
from tests.support.drawing import FLOATS, Draw, extremes, is_float, like, types_of
from tests.support.helpers import run_op
from tests.tables.folding import CASES, ELEMENTWISE
from tests.tables.operators import Row, rows

NEWEST = 28
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
FOLDS = tuple(CASES)

# Half precision rounds once, at the end; in the wide types the order of sums and the mathematical libraries differ.
_TOLERANCE = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 2**-19, "complex64": 2**-19}


EITHER_ZERO = {"Max", "Min", "Relu", "Selu", "Sign"}
"""Elementwise operators whose zeros may have either sign: where 0 meets -0, IEEE 754 leaves the greater one open."""


REFUSED = {("", "ArgMax"): 4, ("", "ArgMin"): 4, ("", "ReduceMean"): 4}
"""How many draws of a dozen an operator may refuse the operands: of no elements none is the greatest, and integers have
no mean."""


def _draws(key: tuple[str, str], function: Callable[[st.SearchStrategy[Any]], Any], count: int) -> list[Any]:
    """Operands and attributes."""
    return [CASES[key](Draw(function, n), types_of(*key)) for n in range(count)]


def _check(key: tuple[str, str], drawn: list[Any], newest: int = NEWEST, zeros: bool = False) -> None:
    """Several draws, compiled together; with the signs of zeros on request (sums and products have them by chance)."""
    domain, name = key
    operator = registry.resolve(domain, name, newest)
    opset = None if domain else newest
    if operator is None or operator.function is None:  # withdrawn
        opset, operator = 1, registry.resolve(domain, name, 1)
    assert operator is not None

    def call(n: int, values: Any) -> list[Any]:
        return jax.tree.leaves(run_op(name, *values, **{"opset": opset, "domain": domain, **drawn[n][1]}))

    def free(n: int) -> dict[int, Any]:
        inputs = enumerate(drawn[n][0])
        return {p: x for p, x in inputs if x is not None and operator.parameter(p) not in operator.static}

    def compiled(chosen: Iterable[int]) -> dict[int, list[Any]]:
        def together(free: dict[int, dict[int, Any]]) -> dict[int, list[Any]]:
            return {n: call(n, [f.get(p, x) for p, x in enumerate(drawn[n][0])]) for n, f in free.items()}

        return jit(together)({n: free(n) for n in chosen})

    known = {}
    with compat.enable_x64():
        for n, (inputs, _) in enumerate(drawn):
            try:
                known[n] = call(n, inputs)
            except OnnxError:
                with pytest.raises(OnnxError):  # refused by both
                    compiled([n])
        traced = compiled(known)
    assert len(known) >= len(drawn) - REFUSED.get(key, 0), "a case that is refused compares nothing"
    for n, results in known.items():
        assert all(isinstance(v, np.ndarray) for v in results), "it does not fold"
        for a, b in zip(results, traced[n], strict=True):
            _assert_close(a, np.asarray(b), 2**-19 if "stash_type" in operator.attributes else 0)  # float32 inside
            if zeros and is_float(a.dtype):
                _assert_same_zeros(a, np.asarray(b))


def _assert_close(a: np.ndarray, b: np.ndarray, least: float) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if not (is_float(a.dtype) or a.dtype.kind == "c"):
        np.testing.assert_array_equal(a, b)
        return
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    tolerance = _TOLERANCE.get(a.dtype.name, 2**-46 if a.dtype.itemsize >= 8 else 0)  # the 8-bit floats are exact
    tolerance = max(tolerance, least)
    np.testing.assert_allclose(b.astype(wide), a.astype(wide), rtol=tolerance, atol=tolerance / 4)


def _assert_same_zeros(a: np.ndarray, b: np.ndarray) -> None:
    a, b = a.astype(np.float64), b.astype(np.float64)
    zeros = (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(a[zeros]), np.signbit(b[zeros]), "signs of zeros")


def _keys() -> list[Any]:
    return [pytest.param(key, id="-".join(filter(None, key))) for key in FOLDS]


_OPTIONS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.parametrize("key", _keys())
@settings(max_examples=2, phases=[Phase.generate], **_OPTIONS)  # the long profile makes failures small
@given(data=st.data())
def test_numpy_and_jax_agree(key: tuple[str, str], data: st.DataObject) -> None:
    simplest = data.draw(st.integers(0, 2**20)) == 0  # which hypothesis tries first
    _check(key, _draws(key, data.draw, 1 if simplest else 12))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_numpy_and_jax_agree_on_extremes(name: str) -> None:
    """All pairs of the values at which operators go wrong, in every element type."""
    count, choices = ELEMENTWISE[name]
    drawn = []
    for dtype in types_of("", name):
        if dtype.kind == "c" or (name == "Mod" and is_float(dtype)) or (name == "Cast" and dtype not in FLOATS):
            continue
        x = extremes(dtype)
        inputs = (x,) if count == 1 else tuple(v.flatten() for v in np.meshgrid(x, x))
        drawn += [(inputs, attributes) for attributes in choices]
    _check(("", name), drawn, zeros=name not in EITHER_ZERO)


@pytest.mark.long
@pytest.mark.parametrize("key", _keys())
@settings(max_examples=20, **_OPTIONS)
@given(data=st.data())
def test_numpy_and_jax_agree_on_many_operands(key: tuple[str, str], data: st.DataObject) -> None:
    _check(key, _draws(key, data.draw, 8))


def folds(row: Row) -> bool:
    """Whether an operator that may be traced returns NumPy for the row; what JAX computes is traced, and never runs."""
    operator = registry.resolve(row.domain, row.name, row.opsets()[-1])
    assert operator is not None
    if all(p in operator.static for p in operator.inputs):
        return False  # the host's alone
    seen = []

    def note() -> None:
        options: dict[str, Any] = {"opset": row.opsets()[-1], "domain": row.domain, "n_outputs": row.outputs}
        results = run_op(row.name, *row.inputs, **options, **row.attributes)
        seen.append(all(isinstance(v, np.ndarray) for v in jax.tree.leaves(results)))

    with contextlib.suppress(OnnxError), compat.enable_x64():
        jax.eval_shape(note)
    return any(seen)


def without_a_case() -> list[Row]:
    """The last row of each operator that has no entry in the table of folding operators."""
    return [row for key, row in {r.key: r for r in rows()}.items() if key not in CASES]


def check_row(row: Row, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Both branches on operands drawn like the row's, where the operator folds."""
    opset = row.opsets()[-1]
    operator = registry.resolve(row.domain, row.name, opset)
    assert operator is not None
    if not folds(row):
        return
    free = [operator.parameter(p) not in operator.static for p in range(len(row.inputs))]
    fixed = {"opset": opset, "n_outputs": row.outputs, **row.attributes}
    drawn = [like(row.inputs, free)(Draw(draw, n), types_of(*row.key)) for n in range(12)]
    _check(row.key, [(inputs, fixed) for inputs, _ in drawn], opset)


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in without_a_case()])
@settings(max_examples=1, phases=[Phase.generate], **_OPTIONS)
@given(data=st.data())
def test_numpy_and_jax_agree_on_operands_like_the_rows(row: Row, data: st.DataObject) -> None:
    check_row(row, data.draw)
