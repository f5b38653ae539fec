"""Products and convolutions of int8 in float32, for processors without kernels of int8: exact sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from onnx2jax import compat
from onnx2jax.jaxpr.passes.cpu.int8_in_float32 import SUMMANDS, multiply_in_float32
from onnx2jax.jaxpr.pipeline import Passes, run
from tests.support.programs import rewritten


def least(*shape: int) -> np.ndarray:
    """The numbers whose products are largest, but for one, so that sums beyond 2**24 are odd."""
    values = np.full(shape, -128, np.int8)
    values.flat[0] = 1
    return values


def multiplied(x: Any, w: Any, contracted: Any = ((1,), (0,)), batch: Any = ((), ())) -> Any:
    return lax.dot_general(x, w, (contracted, batch), preferred_element_type=np.int32)


def convolved(x: Any, w: Any, **given: Any) -> Any:
    given = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **given}
    return lax.conv_general_dilated(x, w, (1, 1), preferred_element_type=np.int32, **given)


ROWS, LONG = 17, 2 * SUMMANDS + 3
CASES: dict[str, tuple[Callable[..., Any], Any, Any, int]] = {
    "as many summands as float32 holds": (multiplied, least(ROWS, SUMMANDS), least(SUMMANDS, 2), 1),
    "more": (multiplied, least(ROWS, LONG), least(LONG, 2), 3),
    "two axes": (
        partial(multiplied, contracted=((0, 2), (1, 0))), least(40, ROWS, 30), least(30, 40, 2), 2,
    ),
    "a batch": (partial(multiplied, contracted=((2,), (1,)), batch=((0,), (0,))), least(2, ROWS, 5), least(2, 5, 2), 1),
    "a convolution": (convolved, least(1, 4, 3, 600), least(3, 3, 600, 2), 6),
    "of groups": (partial(convolved, feature_group_count=2), least(1, 4, 3, 8), least(3, 3, 4, 2), 1),
    "few rows": (multiplied, least(3, 5), least(5, 2), 0),
    "groups of many summands": (
        partial(convolved, feature_group_count=2), least(1, 4, 3, 600), least(3, 3, 300, 2), 0,
    ),
    "nothing to sum": (partial(multiplied, contracted=((), ())), least(ROWS), least(2), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name: str) -> None:
    function, x, w, pieces = CASES[name]
    closed = jax.make_jaxpr(lambda x, w: [function(x, w)])(x, w)
    changed = rewritten(multiply_in_float32, closed)
    in_float32 = [e for e in changed.jaxpr.eqns if getattr(e.outvars[0].aval, "dtype", None) == np.float32]
    assert sum(e.primitive.name in ("dot_general", "conv_general_dilated") for e in in_float32) == pieces
    found, wanted = jax.jit(lambda x, w: [jaxpr_as_fun(c)(x, w)[0] for c in (changed, closed)])(x, w)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_it_runs_where_the_processor_has_no_kernels(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_int8_kernels", lambda: has_kernels)
    closed = jax.make_jaxpr(lambda x, w: [multiplied(x, w)])(least(ROWS, LONG), least(LONG, 2))
    assert ("f32" in str(run(closed, 0, Passes(skip=frozenset({"onednn"}))).main)) is not has_kernels


@pytest.mark.parametrize(
    ("features", "has_kernels"), [({"avx2"}, False), ({"avx2", "avx_vnni"}, True), (set(), True)]
)  # fmt: skip
def test_processors_with_kernels(features: set[str], has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx2jax.compat.programs.x86_features", lambda: frozenset(features))
    assert compat.has_int8_kernels() is has_kernels
