"""Several functions compiled as one program: compiling a small program costs more than all that it contains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.test_util import check_vjp

from onnx2jax import compat
from onnx2jax.ops import registry
from tests.support.helpers import check_gradients, run_op

MICROSOFT = "com.microsoft"

Name = TypeVar("Name", bound=Hashable)


def joined(calls: Mapping[Name, tuple[Callable[..., Any], Any]], **options: Any) -> dict[Name, Any]:
    """The results of functions, by name, compiled as one program in 64 bits.

    If that fails, each function is compiled alone, and those that fail are raised with their names as notes.

    Args:
        calls: a function and the tuple of its operands, which are all traced, by name.
        options: XLA's compiler options.
    """
    functions, operands = ([call[i] for call in calls.values()] for i in (0, 1))
    with compat.enable_x64():
        try:
            results = jax.jit(
                lambda each: [f(*args) for f, args in zip(functions, each, strict=True)], compiler_options=options
            )(operands)
        except Exception as error:
            raise _each_alone(calls, options) or error from None
    return dict(zip(calls, results, strict=True))


def _each_alone(
    calls: Mapping[Name, tuple[Callable[..., Any], Any]], options: Mapping[str, Any]
) -> ExceptionGroup | None:
    errors = []
    for name, (function, operands) in calls.items():
        try:
            jax.jit(function, compiler_options=options)(*operands)
        except Exception as error:
            error.add_note(f"in {name}")
            errors.append(error)
    return ExceptionGroup("functions of one program failed", errors) if errors else None


def differences(pairs: Mapping[Name, tuple[Any, Any]], **tolerances: float) -> list[str]:
    """What ``np.testing.assert_allclose`` says of each pair of actual and desired values that differ, with its name."""
    said = []
    for name, (actual, desired) in pairs.items():
        try:
            np.testing.assert_allclose(actual, desired, **tolerances)
        except AssertionError as error:
            said.append(f"{name}: {error}")
    return said


Row = tuple[str, list[Any], int, dict[str, Any]]
"""An operator of com.microsoft, its inputs, the number of its outputs, and its attributes."""


def traced_call(row: Row) -> tuple[Callable[..., Any], tuple[dict[int, Any]]]:
    """A row's operator as a function of the inputs that may be traced, and these by position."""
    name, inputs, count, attributes = row
    operator = registry.resolve(MICROSOFT, name, 1)
    assert operator is not None
    traced = {p: x for p, x in enumerate(inputs) if x is not None and operator.parameter(p) not in operator.static}

    def call(traced: dict[int, Any]) -> Any:
        full = [traced.get(p, x) for p, x in enumerate(inputs)]
        results = run_op(name, *full, domain=MICROSOFT, n_outputs=count, **attributes)
        return results if count > 1 else [results]

    return call, (traced,)


def results_of(rows: Sequence[Row]) -> list[tuple[str, Row, list[np.ndarray]]]:
    """The rows, each with a name and its results."""
    found = joined({f"{i}: {row[0]}": traced_call(row) for i, row in enumerate(rows)})
    return [(n, row, [np.asarray(y) for y in results]) for row, (n, results) in zip(rows, found.items(), strict=True)]


def derived(row: Row, *fixed: int) -> tuple[list[Any], dict[int, np.ndarray], dict[str, Any]]:
    """The arguments of ``check_gradients`` for a row: by all floating inputs but those at fixed positions."""
    _, inputs, count, attributes = row
    floating = {i: x for i, x in enumerate(inputs) if x is not None and x.dtype.kind == "f" and i not in fixed}
    free = {i: x.astype(np.float64) for i, x in floating.items()}
    return inputs, free, {"domain": MICROSOFT, "n_outputs": count, **attributes}


def check_gradients_of(cases: Mapping[str, tuple[Sequence[Any], Mapping[int, np.ndarray], dict[str, Any]]]) -> None:
    """``check_gradients`` of several operators at once, and of each alone if that fails.

    Args:
        cases: the arguments of ``check_gradients`` by operator: inputs, those to derive by, keywords of ``run_op``.
    """

    @jax.jit
    def call(free: Mapping[str, Mapping[int, Any]]) -> Any:
        return {
            name: run_op(name, *(free[name].get(i, x) for i, x in enumerate(inputs)), **how)
            for name, (inputs, _, how) in cases.items()
        }

    free = {name: dict(some) for name, (_, some, _) in cases.items()}
    try:
        with compat.enable_x64():
            check_vjp(call, partial(jax.vjp, call), (free,), rtol=1e-5, atol=1e-5)
    except Exception:
        for name, (inputs, some, how) in cases.items():
            try:
                check_gradients(name, inputs, some, **how)
            except Exception as error:
                error.add_note(f"in {name}")
                raise
        raise
