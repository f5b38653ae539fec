"""Runs an operator in NumPy, for constant values, and in JAX, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onnx2jax import compat
from onnx2jax.ops.arrays import is_traced
from tests.support.helpers import run_op


def as_jax(value: Any) -> Any:
    """A JAX array of exactly this dtype; None and strings stay as they are."""
    if value is None or value.dtype == object:
        return value
    with compat.enable_x64():
        return jnp.asarray(value)


def in_both_hands(call: Callable[[list[Any]], Any], inputs: Sequence[Any], traced: Iterable[int]) -> tuple[Any, Any]:
    """The results of a call with constant inputs, and with some traced, compiled as one program unless folded."""
    free = {i: inputs[i] for i in traced if inputs[i] is not None and inputs[i].dtype != object}
    folded: dict[str, Any] = {}

    def together(free: dict[int, Any]) -> dict[str, Any]:
        results = {"known": call(list(inputs)), "traced": call([free.get(i, x) for i, x in enumerate(inputs)])}
        folded.update({branch: result for branch, result in results.items() if not is_traced(result)})
        return {branch: result for branch, result in results.items() if branch not in folded}

    with compat.enable_x64():
        results = jax.jit(together)(free)
    results |= folded
    return results["known"], results["traced"]


def both(name: str, *inputs: Any, traced: tuple[int, ...] = (0,), **kwargs: Any) -> Any:
    """The NumPy result, asserted to agree with JAX's with the inputs at ``traced`` traced."""
    known, other = in_both_hands(lambda xs: run_op(name, *xs, **kwargs), inputs, traced)
    pairs = zip(known, other, strict=True) if isinstance(known, tuple) else [(known, other)]
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "fcV":
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=1e-6)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return known
