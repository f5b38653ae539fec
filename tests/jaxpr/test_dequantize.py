"""Products of dequantised integers, computed in integers: the same but for roundings, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from jax.extend.core import jaxpr_as_fun

import onnx2jax
from onnx2jax import compat
from onnx2jax.jaxpr import pipeline
from onnx2jax.jaxpr.passes.cpu import onednn
from onnx2jax.jaxpr.program import Program
from onnx2jax.ops.conv import conv
from onnx2jax.ops.linalg import gemm, matmul
from onnx2jax.ops.quant import dequantize_linear
from onnx2jax.ops.window import window_of
from tests.support import models
from tests.support.programs import rewritten, traced

RNG = np.random.default_rng(0)
CHANNELS = RNG.uniform(0.001, 0.01, 24).astype(np.float32)
SCALE, STEP = np.float32(0.02), np.float32(0.003)


def drawn(dtype: Any, *shape: int) -> np.ndarray:
    ends = np.iinfo(dtype)
    return RNG.integers(ends.min, ends.max, shape, dtype, endpoint=True)


def convolved(x: Any, w: Any, **given: Any) -> Any:
    return conv(x, w, window_of(x.shape[2:], w.shape[2:], **given), 1)


IMAGE, FILTERS = drawn(np.uint8, 2, 9, 7, 8), drawn(np.int8, 24, 9, 3, 3)
ROWS, MATRIX = drawn(np.int8, 17, 40), drawn(np.int8, 40, 24)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "a convolution": (convolved, (IMAGE, SCALE, np.uint8(120)), (FILTERS, CHANNELS, np.zeros(24, np.int8), 0)),
    "with padding, which is zero and not the zero point": (
        lambda x, w: convolved(x, w, pads=[1, 0, 2, 1], strides=[2, 1], dilations=[1, 2]),
        (IMAGE, SCALE, np.uint8(255)), (FILTERS, CHANNELS, None, 0),
    ),
    "with one scale": (convolved, (IMAGE, SCALE, None), (FILTERS, STEP, np.int8(0), 0)),
    "weights of uint8 around 128": (
        convolved, (IMAGE, SCALE, np.uint8(3)), (FILTERS.view(np.uint8), CHANNELS, np.full(24, 128, np.uint8), 0),
    ),
    "along one axis": (convolved, (IMAGE[:, :, 0], SCALE, np.uint8(7)), (FILTERS[..., 0], CHANNELS, None, 0)),
    "a product": (matmul, (ROWS, SCALE, np.int8(-7)), (MATRIX, CHANNELS, np.zeros(24, np.int8), 1)),
    "of a stack": (matmul, (drawn(np.uint8, 2, 3, 5, 40), SCALE, np.uint8(9)), (MATRIX, CHANNELS, None, 1)),
    "of a transposed weight": (
        lambda x, w: gemm(x, w, np.ones(24, np.float32), transB=1),
        (ROWS, SCALE, np.int8(5)), (MATRIX.T, CHANNELS, np.zeros(24, np.int8), 0),
    ),
}  # fmt: skip
LEFT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "weights with a zero point": (convolved, (IMAGE, SCALE, None), (FILTERS, CHANNELS, np.ones(24, np.int8), 0)),
    "weights of uint8 around zero": (convolved, (IMAGE, SCALE, None), (FILTERS.view(np.uint8), CHANNELS, None, 0)),
    "few channels": (convolved, (IMAGE, SCALE, None), (FILTERS[:16], STEP, None, 0)),
    "scales of the summed axis": (convolved, (IMAGE, SCALE, None), (FILTERS, CHANNELS[:9], None, 1)),
    "images with a scale a channel": (convolved, (IMAGE, CHANNELS[:9], None), (FILTERS, STEP, None, 0)),
    "few rows": (matmul, (ROWS[:15], SCALE, None), (MATRIX, CHANNELS, None, 1)),
    "stacks of weights": (matmul, (drawn(np.int8, 2, 17, 40), SCALE, None), (drawn(np.int8, 2, 40, 24), STEP, None, 1)),
}


def multiplied(program: Program, platform: str = "cpu") -> Program:
    """The pass, as it runs for a platform."""
    with compat.on_platform(platform, keeps_convolutions=True):
        return pipeline.PASSES[0].rewrite(program, pipeline.Passes(platform))


def programs(name: str, cases: Any, platform: str = "cpu") -> tuple[Any, Any, tuple[Any, ...]]:
    """A program of integers, and of the scales where there are several, as it is traced and as it becomes."""
    function, (x, *of_x), (w, scale, zero, axis) = cases[name]
    given = (x, w, *([scale] if scale.ndim else []))

    def computed(x: Any, w: Any, *scales: Any) -> list[Any]:
        weight = dequantize_linear(w, scales[0] if scales else scale, zero, axis=axis)
        return [function(dequantize_linear(x, *of_x), weight)]

    with compat.enable_x64():
        closed = traced(computed, *given, platform=platform)
        changed = rewritten(partial(multiplied, platform=platform), closed, platform=platform)
    return closed, changed, given


def sums(closed: Any) -> list[Any]:
    """The types in which a program multiplies."""
    names = ("conv_general_dilated", "dot_general")
    return [e.outvars[0].aval.dtype for e in closed.jaxpr.eqns if e.primitive.name in names]


def results(*programs: Any, given: tuple[Any, ...]) -> list[np.ndarray]:
    """What the programs give, all of them compiled at once."""
    with compat.enable_x64():
        return jax.jit(lambda *xs: [jaxpr_as_fun(p)(*xs)[0] for p in programs])(*given)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_integers(name: str) -> None:
    """On a CPU, and on a TPU."""
    closed, changed, given = programs(name, CASES)
    _, other, _ = programs(name, CASES, "tpu")
    assert sums(changed) == sums(other) == [np.int32]
    before, *both = map(np.asarray, results(closed, changed, other, given=given))
    for after in both:
        assert before.dtype == after.dtype == np.float32
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-6 * np.abs(before).max())


def test_it_runs_for_cpus_and_tpus() -> None:
    """XLA has no convolutions of integers for GPUs."""
    for platform, dtype in (("cpu", np.int32), ("tpu", np.int32), ("cuda", np.float32)):
        closed, _, _ = programs("a convolution", CASES, platform)
        main = pipeline.run(closed, 0, pipeline.Passes(platform, frozenset({"layout_assignment"}))).main
        assert sums(main or closed) == [dtype], platform


@pytest.mark.parametrize("name", LEFT)
def test_other_products_stay_in_floats(name: str) -> None:
    closed, changed, _ = programs(name, LEFT)
    assert changed is closed


def test_zero_points_and_scales_may_be_those_of_a_call() -> None:
    """As DynamicQuantizeLinear makes them."""

    def function(x: Any, zero: Any, scale: Any, w: Any) -> list[Any]:
        return [convolved(dequantize_linear(x, scale, zero), dequantize_linear(w, STEP), pads=[1] * 4)]

    given = IMAGE, np.uint8(200), SCALE, FILTERS
    with compat.enable_x64():
        closed = traced(function, *given)
        changed = rewritten(multiplied, closed)
    assert sums(changed) == [np.int32]
    before, after = results(closed, changed, given=given)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6 * np.abs(np.asarray(before)).max())


def test_sums_that_float32_would_round_are_exact() -> None:
    x, w = np.full((16, 1030), 127, np.int8), np.full((1030, 3), 127, np.int8)
    x[:, -1] = w[-1] = 1

    def function(x: Any, w: Any) -> list[Any]:
        return [matmul(dequantize_linear(x, np.float32(1)), dequantize_linear(w, np.float32(1)))]

    changed = rewritten(multiplied, jax.make_jaxpr(function)(x, w))
    (y,) = jax.jit(jaxpr_as_fun(changed))(x, w)
    np.testing.assert_array_equal(y, np.float32(1029 * 127 * 127 + 1))


def test_a_quantised_model_gives_the_numbers_of_the_plain_program() -> None:
    """Both ways; what is quantised again may fall to the next step where it lies between two."""
    weights = {
        "w": FILTERS, "ws": CHANNELS, "wz": np.zeros(24, np.int8), "s": SCALE, "z": np.uint8(120), "t": np.float32(0.1),
    }  # fmt: skip
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        onnx.helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        onnx.helper.make_node("Conv", ["xd", "wd"], ["c"], pads=[1] * 4),
        onnx.helper.make_node("QuantizeLinear", ["c", "t", "z"], ["y"]),
    ]
    ends = [models.value("x", np.float32, [2, 9, 7, 8])], [models.value("y", np.uint8, None)]
    file = models.model(nodes, *ends, weights)
    x = {"x": RNG.normal(size=(2, 9, 7, 8)).astype(np.float32)}
    ours, plain = (onnx2jax.convert(file, optimize=o).run(None, x)[0].astype(int) for o in (True, False))
    assert np.abs(ours - plain).max() <= 1
    assert (ours != plain).mean() < 1e-3


@pytest.mark.parametrize(
    ("pads", "kernel", "with_pad"),
    [
        ([2, 2, 2, 2], 3, False),
        ([1, 0, 2, 3], 3, True),
        ([0, 4, 3, 0], 5, False),
        ([1, 1, 1, 1], 3, True),
        pytest.param([2, 2, 2, 2], 3, True, marks=pytest.mark.extended),
        pytest.param([1, 0, 2, 3], 3, False, marks=pytest.mark.extended),
        pytest.param([0, 4, 3, 0], 5, True, marks=pytest.mark.extended),
        pytest.param([1, 1, 1, 1], 3, False, marks=pytest.mark.extended),
    ],
)
def test_zeros_around_an_image_may_be_more_than_keep_its_size(
    pads: list[int], kernel: int, with_pad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA of jax 0.10 writes nothing where it takes so many into a convolution of int8; that of jax 0.12 fails."""
    monkeypatch.setattr(onednn, "is_available", lambda: False)  # oneDNN takes none
    weights = {"w": RNG.integers(-127, 128, (24, 32, kernel, kernel), np.int8)}
    nodes = [onnx.helper.make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2])]
    if with_pad:
        weights["around"] = np.array([0, 0, *pads[:2], 0, 0, *pads[2:]])
        nodes.append(onnx.helper.make_node("Pad", ["first", "around"], ["wide"]))
    given = {} if with_pad else {"pads": pads}
    nodes.append(onnx.helper.make_node("ConvInteger", ["wide" if with_pad else "first", "w"], ["y"], **given))
    ends = [models.value("x", np.int8, [1, 30, 34, 32])], [models.value("y", np.int32, None)]
    file = models.model(nodes, *ends, weights)
    x = {"x": RNG.integers(-128, 128, (1, 30, 34, 32), np.int8)}
    ours, plain = (onnx2jax.convert(file, optimize=o).run(None, x)[0] for o in (True, False))
    np.testing.assert_array_equal(ours, plain)
