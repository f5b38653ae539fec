"""Gradients with respect to parameters that are bounds, fills, ratios, exponents and scales of other ranks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx

import onnx2jax
from tests.model.test_32_bits import X, chain
from tests.tables.operators import f

F32 = np.float32


def one(name: str, *, inputs: list[str] | None = None, then: dict[str, Any] | None = None, **constants: Any) -> Any:
    return chain((name, inputs or ["_", *constants], then or {}), **constants)


def image(name: str, inputs: list[str], then: dict[str, Any], **constants: Any) -> onnx.ModelProto:
    """The operator on x as an image, [1, 1, 3, 4]."""
    return chain(("Unsqueeze", ["_", "a"], {}), (name, inputs, then), a=np.array([0, 1]), **constants)


STEPS = F32([1, 1, 2, 1.5])
MODELS: dict[str, onnx.ModelProto] = {
    "Clip": one("Clip", l=F32(-0.5), h=F32(0.5)),
    "Clip by a bound": one("Clip", inputs=["_", "", "h"], h=F32([0.5])),
    "Pad": one("Pad", p=np.array([1, 0, 0, 2]), v=F32(2)),
    "Pad that reflects": one("Pad", then={"mode": "reflect"}, p=np.array([1, 0, 0, 2]), v=F32(2)),
    "Resize": image("Resize", ["_", "", "s"], {"mode": "linear"}, s=STEPS),
    "Upsample": image("Resize", ["_", "", "s"], {"mode": "nearest"}, s=F32([1, 1, 2, 2])),
    "RoiAlign": image("RoiAlign", ["_", "r", "i"], {}, r=F32([[0, 0.5, 2, 2]]), i=np.array([0])),
    "GridSample": image("GridSample", ["_", "g"], {}, g=f(1, 2, 2, 2) / 4),
    "Dropout": one("Dropout", r=F32(0.5)),
    "Dropout in training": one("Dropout", then={"seed": 1}, r=F32(0.5), t=np.array(True)),
    "Pow": one("Pow", e=F32(2)),
    "Pow of absolutes": chain(("Abs", ["_"], {}), ("Pow", ["_", "e"], {}), e=F32([0.5])),
    "Mod": one("Mod", then={"fmod": 1}, m=F32([0.7])),
    "LayerNormalization": one("LayerNormalization", s=f(1, 4), b=f(3, 1)),
    "LayerNormalization by a scalar": one("LayerNormalization", s=F32(2)),
    "LayerNormalization of all": one("LayerNormalization", then={"axis": 0}, s=f(3, 4), b=f(4)),
    "BatchNormalization": one("BatchNormalization", s=f(4), b=f(4), m=f(4), v=f(4) ** 2 + F32(0.1)),
    "PRelu": one("PRelu", s=f(3, 1)),
    "PRelu by a scalar": one("PRelu", s=F32(0.2)),
    "Where": chain(("Greater", ["_", "z"], {}), ("Where", ["_", "x", "w"], {}), z=F32(0), w=F32([9])),
    "Max": one("Max", m=F32(0)),
    "Gemm": one("Gemm", w=f(4, 2), c=f(3, 1)),
    "Expand": chain(("Expand", ["w", "s"], {}), ("Mul", ["_", "x"], {}), w=f(1), s=np.array([3, 4])),
    "OneHot": chain(
        *[("OneHot", ["i", "d", "v"], {}), ("Mul", ["_", "x"], {})], i=np.array([0, 1, 2]), d=np.array(4), v=f(2)
    ),
    "QuantizeLinear": chain(
        *[("QuantizeLinear", ["_", "s", "z"], {}), ("DequantizeLinear", ["_", "s", "z"], {})], s=F32(0.1), z=np.uint8(9)
    ),
    "ScatterND": one("ScatterND", then={"reduction": "mul"}, i=np.array([[1], [1]]), u=f(2, 4)),
    "SoftmaxCrossEntropyLoss": one("SoftmaxCrossEntropyLoss", l=np.array([0, 1, 3]), w=f(4) ** 2),
    "Range": chain(("Range", ["a", "b", "c"], {}), ("Mul", ["_", "x"], {}), a=F32(0), b=F32(4), c=F32(1)),
}


def test_gradients_with_respect_to_parameters_of_every_role() -> None:
    models = {name: onnx2jax.convert(proto) for name, proto in MODELS.items()}
    params = {name: dict(m.params) for name, m in models.items()}

    def losses(params: Any) -> dict[str, Any]:
        key = jax.random.key(0)
        return {name: (m.apply(params[name], X, rng=key) ** 2).sum() for name, m in models.items()}

    gradients = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            gradients.append(jax.jit(jax.grad(lambda params: sum(losses(params).values())))(params))
    for name, given in params.items():
        found, expected = (g[name] for g in gradients)
        for n in given:
            np.testing.assert_allclose(found[n], expected[n], 1e-4, 1e-4, err_msg=f"{name}: {n}")
            assert found[n].dtype == given[n].dtype and np.isfinite(found[n]).all(), (name, n)
    # Parameters that determine shapes are constants.
    assert [name for name, given in params.items() if not given] == ["Resize", "Upsample", "Range"]
    x, below, above = X, X < -0.5, X > 0.5
    by_hand = {
        "Clip": {"l": -below.sum(), "h": above.sum()},
        "Pad": {"v": 12 * 2 * 2},
        "Pad that reflects": {"v": 0},
        "Dropout": {"r": 0},
        "PRelu by a scalar": {"s": 2 * 0.2 * (x[x < 0] ** 2).sum()},
        "Max": {"m": 0},
    }
    for name, wanted in by_hand.items():
        for n, gradient in wanted.items():
            np.testing.assert_allclose(gradients[0][name][n], gradient, 1e-4, 1e-6, err_msg=f"{name}: {n}")
