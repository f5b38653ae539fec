"""Runs an operator in NumPy, for constant values, and in JAX, compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from onnx2jax import compat
from onnx2jax.ops.arrays import is_traced
from tests.support import emitters
from tests.support.helpers import run_op
from tests.support.joined import joined
from tests.support.violations import every_case

Name = TypeVar("Name", bound=Hashable)


def as_jax(value: Any) -> Any:
    """A JAX array of exactly this dtype; None and strings stay as they are."""
    if value is None or value.dtype == object:
        return value
    with compat.enable_x64():
        return jnp.asarray(value)


Hands = tuple[Callable[[list[Any]], Any], Sequence[Any], Iterable[int]]
"""A call, its inputs, and the positions of those that may be traced."""


def each_in_both_hands(calls: Mapping[Name, Hands]) -> dict[Name, tuple[Any, Any]]:
    """The results of each call with constant inputs, and with some traced: one program of all that does not fold."""
    folded: dict[Name, dict[str, Any]] = {}

    def together(name: Name, call: Callable[[list[Any]], Any], inputs: Sequence[Any], traced: Iterable[int]) -> Any:
        free = {i: inputs[i] for i in traced if inputs[i] is not None and inputs[i].dtype != object}

        def compute(free: dict[int, Any]) -> dict[str, Any]:
            results = {"known": call(list(inputs)), "traced": call([free.get(i, x) for i, x in enumerate(inputs)])}
            folded[name] = {branch: result for branch, result in results.items() if not is_traced(result)}
            return {branch: result for branch, result in results.items() if branch not in folded[name]}

        return compute, (free,)

    options = emitters.NEWER if any(emitters.needs_newer(x) for _, inputs, _ in calls.values() for x in inputs) else {}
    compiled = joined({name: together(name, *hands) for name, hands in calls.items()}, **options)
    found = {name: results | folded[name] for name, results in compiled.items()}
    return {name: (results["known"], results["traced"]) for name, results in found.items()}


def in_both_hands(call: Callable[[list[Any]], Any], inputs: Sequence[Any], traced: Iterable[int]) -> tuple[Any, Any]:
    """The results of a call with constant inputs, and with some traced, compiled as one program unless folded."""
    return each_in_both_hands({"": (call, inputs, traced)})[""]


def op(name: str, *inputs: Any, traced: Iterable[int] = (0,), **options: Any) -> Hands:
    """A call of an operator with the inputs at ``traced`` traced; other keywords are those of ``run_op``."""
    return (lambda xs: run_op(name, *xs, **options)), inputs, traced


def each_by_both(calls: Mapping[Name, Hands], rtol: float = 1e-6, atol: float = 0) -> dict[Name, Any]:
    """The NumPy results, asserted to agree with JAX's with inputs traced; these are compiled as one program."""
    found = each_in_both_hands(calls)
    with every_case() as case:
        for name, (known, other) in found.items():
            with case(name):
                _assert_agree(known, other, rtol, atol)
    return {name: known for name, (known, _) in found.items()}


def _assert_agree(known: Any, other: Any, rtol: float, atol: float) -> None:
    pairs = zip(known, other, strict=True) if isinstance(known, tuple) else [(known, other)]
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "fcV":
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol, atol)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def both(name: str, *inputs: Any, **options: Any) -> Any:
    """The NumPy result of ``op``, asserted to agree with JAX's."""
    return each_by_both({"": op(name, *inputs, **options)})[""]


def assert_each(cases: Mapping[Name, tuple[Hands, Any]], **options: Any) -> None:
    """Both branches of each call give the array that is expected of it.

    Args:
        cases: a call and its expected result, by name.
        options: keywords of ``assert_array_equal``.
    """
    with every_case() as case:
        for name, found in each_by_both({name: call for name, (call, _) in cases.items()}).items():
            with case(name):
                np.testing.assert_array_equal(found, cases[name][1], **options)
