"""The branch for known values (NumPy) and the traced one (one jit) give the same, for every operator that folds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.ops import registry
from onnx2jax.ops.registry import Operator
from tests.support import emitters
from tests.support.drawing import FLOATS, Draw, extremes, is_float, like, types_of
from tests.support.helpers import run_op
from tests.support.joined import joined
from tests.support.tiers import extended, groups
from tests.support.violations import every_case
from tests.tables.folding import CASES, ELEMENTWISE
from tests.tables.operators import Row, rows

NEWEST = 28
FOLDS = tuple(CASES)

HALF = (0, 1, 2, 3, 4, 6)
"""Numbers of draws: floats and other types, extremes and ordinary numbers, empty arrays."""
REST = (5, 7, 8, 9, 10, 11)

# Half precision rounds once, at the end; in the wide types the order of sums and the mathematical libraries differ.
_TOLERANCE = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 2**-19, "complex64": 2**-19}


EITHER_ZERO = {"Max", "Min", "Relu", "Selu", "Sign"}
"""Elementwise operators whose zeros may have either sign: where 0 meets -0, IEEE 754 leaves the greater one open."""


REFUSED = {("", "ArgMax"): 4, ("", "ArgMin"): 4, ("", "ReduceMean"): 4}
"""How many draws of a dozen an operator may refuse the operands: of no elements none is the greatest, and integers have
no mean."""


class Subject(NamedTuple):
    """An operator with its operands and attributes, drawn several times."""

    key: tuple[str, str]
    drawn: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    newest: int = NEWEST
    zeros: bool = False
    """Whether to compare the signs of zeros; sums and products have them by chance."""

    def operator(self) -> tuple[Operator, int | None]:
        """The newest version, and the opset to ask for it by."""
        domain, name = self.key
        operator, opset = registry.resolve(domain, name, self.newest), None if domain else self.newest
        if operator is None or operator.function is None:  # withdrawn
            operator, opset = registry.resolve(domain, name, 1), 1
        assert operator is not None
        return operator, opset


def check(subjects: Iterable[Subject]) -> None:
    """Both branches of several operators; the traced ones are compiled together."""
    known: dict[str, tuple[Subject, list[Any]]] = {}
    programs: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for place, subject in enumerate(subjects):
        refused = 0
        for n, (inputs, _) in enumerate(subject.drawn):
            call, free = _traced(subject, n)
            name = f"{place}: {subject.key}, draw {n}"
            with compat.enable_x64():
                try:
                    results = call({})
                except OnnxError:
                    refused += 1
                    with pytest.raises(OnnxError):  # refused by both
                        jax.eval_shape(call, free)
                    continue
            known[name] = subject, results
            programs[any(map(emitters.needs_newer, (*inputs, *results)))][name] = call, (free,)
        assert refused <= REFUSED.get(subject.key, 0), f"{subject.key}: a case that is refused compares nothing"
    traced = joined(programs[False], xla_backend_optimization_level=0)
    traced |= joined(programs[True], xla_backend_optimization_level=0, **emitters.NEWER)
    with every_case() as case:
        for name, (subject, results) in known.items():
            with case(name):
                _assert_agree(subject, results, traced[name])


def _traced(subject: Subject, n: int) -> tuple[Callable[[dict[int, Any]], list[Any]], dict[int, Any]]:
    """The operator as a function of operands by position, and those of its operands that may be traced."""
    operator, opset = subject.operator()
    inputs, attributes = subject.drawn[n]
    options = {"opset": opset, "domain": subject.key[0], **attributes}

    def call(free: dict[int, Any]) -> list[Any]:
        return jax.tree.leaves(run_op(subject.key[1], *(free.get(p, x) for p, x in enumerate(inputs)), **options))

    places = [p for p, x in enumerate(inputs) if x is not None and operator.parameter(p) not in operator.static]
    return call, {p: inputs[p] for p in places}


def _assert_agree(subject: Subject, known: Sequence[Any], traced: Sequence[Any]) -> None:
    assert all(isinstance(v, np.ndarray) for v in known), "it does not fold"
    least = 2**-19 if "stash_type" in subject.operator()[0].attributes else 0  # float32 inside
    for a, b in zip(known, map(np.asarray, traced), strict=True):
        _assert_close(a, b, least)
        if subject.zeros and is_float(a.dtype):
            _assert_same_zeros(a, b)


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


_OPTIONS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=2, phases=[Phase.generate], **_OPTIONS)  # the long profile makes failures small
@given(data=st.data())
def _draw(case: Callable[[Draw], Any], numbers: Sequence[int], found: list[Any], data: st.DataObject) -> None:
    simplest = data.draw(st.integers(0, 2**20)) == 0  # which hypothesis tries first
    found += [case(Draw(data.draw, n)) for n in ([0] if simplest else numbers)]


def of_cases(key: tuple[str, str], numbers: Sequence[int] = HALF) -> Subject:
    drawn: list[Any] = []
    _draw(lambda draw: CASES[key](draw, types_of(*key)), numbers, drawn)
    return Subject(key, drawn)


@pytest.mark.parametrize("numbers", [HALF, extended(REST)], ids=["half", "rest"])
@pytest.mark.parametrize("keys", groups(FOLDS, 30))
def test_numpy_and_jax_agree(keys: list[tuple[str, str]], numbers: Sequence[int]) -> None:
    check(of_cases(key, numbers) for key in keys)


def of_extremes(name: str) -> Subject:
    count, choices = ELEMENTWISE[name]
    drawn: list[Any] = []
    for dtype in types_of("", name):
        if dtype.kind == "c" or (name == "Mod" and is_float(dtype)) or (name == "Cast" and dtype not in FLOATS):
            continue
        x = extremes(dtype)
        inputs = (x,) if count == 1 else tuple(v.flatten() for v in np.meshgrid(x, x))
        drawn += [(inputs, attributes) for attributes in choices]
    return Subject(("", name), drawn, zeros=name not in EITHER_ZERO)


@pytest.mark.parametrize("names", groups(ELEMENTWISE, 20))
def test_numpy_and_jax_agree_on_extremes(names: list[str]) -> None:
    """All pairs of the values at which operators go wrong, in every element type."""
    check(map(of_extremes, names))


@pytest.mark.long
@pytest.mark.parametrize("key", [pytest.param(key, id="-".join(filter(None, key))) for key in FOLDS])
@settings(max_examples=20, **_OPTIONS)
@given(data=st.data())
def test_numpy_and_jax_agree_on_many_operands(key: tuple[str, str], data: st.DataObject) -> None:
    check([Subject(key, [CASES[key](Draw(data.draw, n), types_of(*key)) for n in range(8)])])


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


def check_rows(some: Iterable[Row]) -> None:
    """Both branches of the rows that fold, on operands drawn like theirs: extremes, and ordinary numbers."""
    subjects = []
    for row in filter(folds, some):
        opset = row.opsets()[-1]
        operator = registry.resolve(row.domain, row.name, opset)
        assert operator is not None
        free = [operator.parameter(p) not in operator.static for p in range(len(row.inputs))]
        drawn: list[Any] = []
        case = like(row.inputs, free)
        _draw(lambda draw, case=case, key=row.key: case(draw, types_of(*key)), (2,), drawn)
        fixed = {"opset": opset, "n_outputs": row.outputs, **row.attributes}
        subjects.append(Subject(row.key, [(inputs, fixed) for inputs, _ in drawn], opset))
    check(subjects)


@pytest.mark.parametrize("some", groups(without_a_case(), 40))
def test_numpy_and_jax_agree_on_operands_like_the_rows(some: list[Row]) -> None:
    check_rows(some)
