"""The fake quantisers of QONNX against its text in exact decimals, and their gradients against Brevitas'."""

from __future__ import annotations

import decimal
import itertools
from decimal import Decimal
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import OnnxError
from onnx2jax.ops import qonnx
from tests.support.branches import both
from tests.support.helpers import run_op
from tests.support.models import model, value

MODES = {
    **dict.fromkeys(("ROUND", "round", "HALF_EVEN"), decimal.ROUND_HALF_EVEN),
    **dict.fromkeys(("DOWN", "ROUND_TO_ZERO"), decimal.ROUND_DOWN),
    "CEIL": decimal.ROUND_CEILING,
    "floor": decimal.ROUND_FLOOR,
    "UP": decimal.ROUND_UP,
    "HALF_UP": decimal.ROUND_HALF_UP,
    "half_down": decimal.ROUND_HALF_DOWN,
}
X = np.arange(-10, 10, 0.25, np.float32)
"""Every half, and what lies between."""
ONE, ZERO = np.float32(1), np.float32(0)


def quant(x: Any, scale: Any, zero: Any, bits: Any, name: str = "Quant", **attributes: Any) -> Any:
    return run_op(name, *map(np.asarray, (x, scale, zero, bits)), domain=qonnx.DOMAINS[0], **attributes)


def exactly(x: float, scale: float, zero: float, bits: float, signed: int, narrow: int, mode: str) -> float:
    """What QONNX says of one number, in decimals; scale and zero have few digits."""
    if signed and bits == 1:
        return ((1 if x / scale + zero >= 0 else -1) - zero) * scale
    count = 2**bits
    low, high = (-count / 2 + narrow, count / 2 - 1) if signed else (0, count - 1 - narrow)
    ratio = min(max(Decimal(x) / Decimal(scale) + Decimal(zero), Decimal(low)), Decimal(high))
    whole = ratio.quantize(Decimal(1), rounding=MODES[mode])
    return float((whole - Decimal(zero)) * Decimal(scale))


@pytest.mark.parametrize("mode", MODES)
def test_quant_of_each_rounding_mode(mode: str) -> None:
    for signed, narrow, bits in itertools.product((0, 1), (0, 1), (1, 2, 3, 4.5, 8)):
        for scale, zero in ((1, 0), (0.5, 3)):
            given = {"signed": signed, "narrow": narrow, "rounding_mode": mode}
            y = quant(X, np.float32(scale), np.float32(zero), np.float32(bits), **given)
            expected = [exactly(float(x), scale, zero, bits, signed, narrow, mode) for x in X]
            np.testing.assert_array_equal(y, np.float32(expected), f"{bits=} {scale=} {zero=} {given}")


def test_compiled_rounding_is_exact() -> None:
    """All modes in one program, among them the greatest float below a half, which a half must not round up."""
    x = np.append(X, [np.float32(0.49999997), np.float32(2**23 + 1)])
    names = [n.upper() for n in MODES]
    compiled = jax.jit(lambda x: [qonnx.rounding(name)(x) for name in names])(x)
    for name, y in zip(names, compiled, strict=True):
        np.testing.assert_array_equal(y, qonnx.ROUNDING[name](x), name)
    half_up = dict(zip(names, compiled, strict=True))["HALF_UP"]
    assert [float(v) for v in half_up[-2:]] == [0.0, 2**23 + 1]


def test_per_channel_bit_widths() -> None:
    """Each row has a scale, a zero point and a bit width; one bit is a sign."""
    scale, zero, bits = np.float32([[1], [0.5], [2]]), np.float32([[0], [1], [-1]]), np.float32([[1], [3], [4]])
    y = both("Quant", np.tile(X, (3, 1)), scale, zero, bits, traced=(0, 1, 2), domain=qonnx.DOMAINS[0])
    parameters = (float(v) for v in (*scale[:, 0], *zero[:, 0], *bits[:, 0]))
    rows = np.reshape(list(parameters), (3, 3)).T
    expected = [[exactly(float(x), *row, 1, 0, "ROUND") for x in X] for row in rows]
    np.testing.assert_array_equal(y, np.float32(expected))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_keep_theirs(dtype: Any) -> None:
    y = quant(X.astype(dtype), np.float32(0.5), ZERO, np.int32(8))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float32), np.rint(X * 2) / 2)


@pytest.mark.parametrize("domain", qonnx.DOMAINS)
def test_each_name_of_the_domain(domain: str) -> None:
    node = helper.make_node("Quant", ["x", "scale", "zero", "bits"], ["y"], domain=domain)
    constants = {"scale": ONE, "zero": ZERO, "bits": np.float32(4)}
    proto = model([node], [value("x", np.float32, X.shape)], [value("y", np.float32, X.shape)], constants)
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    np.testing.assert_array_equal(onnx2jax.convert(proto)(X), np.rint(X).clip(-8, 7))


def test_an_unknown_rounding_mode_is_refused() -> None:
    with pytest.raises(OnnxError, match=r"rounding_mode .'STOCHASTIC_ROUND'. must be one of ROUND"):
        quant(X, ONE, ZERO, np.float32(4), rounding_mode="STOCHASTIC_ROUND")


# ---------------------------------------------------------------------------------------------- FloatQuant


@pytest.mark.parametrize(
    ("dtype", "bits", "attributes"),
    [
        ("float8_e5m2", (5, 2, 15, 57344), {"has_inf": 1, "has_nan": 1, "saturation": 0}),
        ("float8_e4m3fn", (4, 3, 7, 448), {"has_nan": 1, "saturation": 0}),
        ("float4_e2m1fn", (2, 1, 1, 6), {}),
        ("float16", (5, 10, 15, 65504), {"has_inf": 1, "saturation": 0}),
    ],
)
def test_float_quant_of_formats_that_have_a_dtype(dtype: str, bits: tuple[int, ...], attributes: Any) -> None:
    """A cast rounds as FloatQuant does: halves to even, with subnormals; what is beyond becomes the same."""
    to = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    steps = np.arange(-2, 2.01, 0.0625, np.float32)
    x = np.concatenate([steps * np.float32(2) ** e for e in (-16, -9, -3, 0, 4, 8, 15)])
    parameters = [np.float32(v) for v in (1, *bits)]
    y = both("FloatQuant", x, *parameters, domain=qonnx.DOMAINS[0], **attributes)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, x.astype(to).astype(np.float32))


def test_float_quant_needs_something_beyond_the_greatest() -> None:
    with pytest.raises(OnnxError, match="has_inf or has_nan must be 1"):
        run_op("FloatQuant", X, *np.float32([1, 4, 3, 7, 448])[:, None], domain=qonnx.DOMAINS[0], saturation=0)


# ---------------------------------------------------------------------------------------------- gradients


POINTS = np.float32([-8.4, -8.6, -3.2, 0.4, 7.4, 7.6, 30])
"""Inside the range of four bits, at its ends, which the rounded value still is in, and outside."""


def test_gradients_are_those_of_brevitas() -> None:
    """By x: one where the rounded value is in the range. By the scale: the rounding error inside, the end outside."""

    def total(x: Any, scale: Any) -> Any:
        y = run_op("Quant", x, scale, np.zeros(1, np.float32), np.float32([4]), domain=qonnx.DOMAINS[0])
        return (y * np.arange(1, 8, dtype=np.float32)).sum()

    by_x, by_scale = jax.jit(jax.grad(total, (0, 1)))(POINTS, np.ones(1, np.float32))
    weights, inside = np.arange(1, 8), np.array([1, 0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(by_x, weights * inside)
    rounding = np.rint(POINTS).clip(-8, 7) - POINTS * inside
    np.testing.assert_allclose(by_scale, [(weights * rounding).sum()], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("IntQuant", (1, 0, 4), [1, 0, 1, 1, 1, 0, 0]),
        ("BipolarQuant", (2,), [2] * 7),
        ("Trunc", (1, 0, 5, 4), [0.5] * 7),
        ("FloatQuant", (1, 2, 1, 1, 6), [0, 0, 1, 1, 0, 0, 0]),
    ],
)
def test_jax_grad_is_straight_through(name: str, parameters: tuple[int, ...], expected: list[float]) -> None:
    constants = [np.float32([v]) for v in parameters]
    down = jax.grad(lambda x: run_op(name, x, *constants, domain=qonnx.DOMAINS[0]).sum())(POINTS)
    np.testing.assert_array_equal(down, expected)


def network() -> onnx.ModelProto:
    """x times a weight of three bits per column."""
    nodes = [
        helper.make_node("Quant", ["w", "scale", "zero", "bits"], ["v"], domain=qonnx.DOMAINS[0], narrow=1, signed=1),
        helper.make_node("MatMul", ["x", "v"], ["y"]),
    ]
    w = np.float32([[0.2, 0.9], [-0.6, 0.4], [0.05, -2.0]])
    constants = {"w": w, "scale": np.float32([[0.25, 0.5]]), "zero": ZERO, "bits": np.float32(3)}
    proto = model(nodes, [value("x", np.float32, (1, 3))], [value("y", np.float32, (1, 2))], constants)
    proto.opset_import.append(helper.make_opsetid(qonnx.DOMAINS[0], 2))
    return proto


@pytest.mark.parametrize("straight_through", [False, True])
def test_fine_tuning_trains_the_weights_behind(straight_through: bool) -> None:
    """Neither scales nor zero points nor bit widths, unless they are named; no warning of zero gradients."""
    x = np.float32([[1, 2, 3]])
    tuned = onnx2jax.finetune(
        onnx2jax.convert(network()), lambda y, _: y.sum(), optax.sgd(0.1), straight_through=straight_through
    )
    assert tuned.trainable == ("w",)
    state, metrics = tuned.step(tuned.init(), {"x": x})
    on_grid = np.float32([[0.25, 1.0], [-0.5, 0.5], [0, -1.5]])
    np.testing.assert_allclose(metrics["loss"], (x @ on_grid).sum(), rtol=1e-6)
    down = np.float32([[1, 1], [2, 2], [3, 0]])  # the last weight is below -3 steps
    moved = onnx.numpy_helper.to_array(network().graph.initializer[0]) - 0.1 * down
    np.testing.assert_allclose(state.params["w"], moved, rtol=1e-6)


def test_simplified_folds_quantised_weights() -> None:
    x = np.float32([[1, 2, 3]])
    plain = onnx2jax.convert(network())
    simple = plain.simplified()
    assert [n.op_type for n in simple.graph.nodes] == ["MatMul"]
    np.testing.assert_array_equal(simple(x), plain(x))
