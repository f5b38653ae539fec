"""Running an operator in both hands: NumPy's, for known values, and JAX's, compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from onnx2jax import compat
from tests.support.helpers import run_op


def as_jax(value: Any) -> Any:
    """A JAX array of exactly this dtype; None and strings stay as they are."""
    if value is None or value.dtype == object:
        return value
    with compat.enable_x64():
        return jnp.asarray(value)


def both(name: str, *inputs: Any, traced: tuple[int, ...] = (0,), **kwargs: Any) -> Any:
    """What NumPy's branch returns, once JAX's (the inputs at ``traced`` as JAX arrays) is seen to agree."""
    known = run_op(name, *inputs, **kwargs)
    other = run_op(name, *(as_jax(x) if i in traced else x for i, x in enumerate(inputs)), **kwargs)
    pairs = zip(known, other, strict=True) if isinstance(known, tuple) else [(known, other)]
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "fcV":
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=1e-6)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return known
