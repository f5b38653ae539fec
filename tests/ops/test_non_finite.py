"""NaN and infinities reach those results alone that read them: 0 * NaN is not 0 where a zero means "not read"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax import compat
from tests.support.helpers import run_op

RNG = np.random.default_rng(3)


def spreads(function: Callable[[Any], Any], x: np.ndarray, cell: tuple[int, ...], reach: int) -> list[float]:
    """The values that, in one cell of x, change results which do not depend on the cells up to ``reach`` around it."""
    around = x.copy()
    around[tuple(slice(max(i - reach, 0), i + reach + 1) for i in cell)] += 1000
    inputs = [x, around]
    for value in (np.nan, np.inf, -np.inf):
        inputs.append(x.copy())
        inputs[-1][cell] = value
    with compat.enable_x64():
        plain, changed, *found = np.asarray(jax.jit(lambda xs: jnp.stack([function(x) for x in xs]))(inputs))
    independent = plain == changed
    assert independent.any() and not independent.all()
    pairs = zip((np.nan, np.inf, -np.inf), found, strict=True)
    return [value for value, y in pairs if not np.array_equal(y[independent], plain[independent])]


def resized(sizes: tuple[int, int], mode: str, **attributes: Any) -> Callable[[Any], Any]:
    return lambda x: run_op("Resize", x, None, None, np.array([1, *sizes]), mode=mode, **attributes)


@pytest.mark.parametrize("sizes", [(22, 14), (33, 8), (5, 3), (11, 14)])
@pytest.mark.parametrize(
    ("mode", "attributes"),
    [
        ("linear", {}),
        ("linear", {"coordinate_transformation_mode": "align_corners"}),
        ("cubic", {"exclude_outside": 1}),
        ("linear", {"antialias": 1, "coordinate_transformation_mode": "asymmetric"}),
    ],
)
def test_resize(sizes: tuple[int, int], mode: str, attributes: dict[str, Any]) -> None:
    """A neighbour of weight 0 still counts, as in other implementations, so a pixel reaches one further."""
    x = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    assert not spreads(resized(sizes, mode, **attributes), x, (1, 5, 3), 2)
    edge = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    assert not spreads(resized(sizes, mode, **attributes), edge, (0, 10, 6), 2)
