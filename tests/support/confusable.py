"""Small models for the state machine, each with a NumPy implementation of every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view

import onnx2jax
from tests.support.models import text_model, value

F: Final = np.float32
Steps = Mapping[str, Callable[[Any], Any]]
Rng = np.random.Generator


def real(rng: Rng, *shape: int) -> np.ndarray:
    """Small non-zero integers, so that sums are exact."""
    return (rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)).astype(F)


class Values(dict[str, Any]):
    """Values of a graph by name, computed when first read.

    ``functions`` replace some of them, as in ``Model.replace``.
    """

    def __init__(self, given: Mapping[str, Any], steps: Steps, functions: Steps) -> None:
        super().__init__(given)
        self.steps, self.functions = steps, functions

    def __missing__(self, name: str) -> Any:
        made = self.steps[name](self)
        self[name] = self.functions[name](made) if name in self.functions else made
        return self[name]


@dataclass(frozen=True)
class Case:
    """A model and its NumPy implementation.

    Attributes:
        proto: the model.
        feeds: returns inputs of a size.
        steps: each node's output, as a function of the values before it.
        sizes: valid sizes of the inputs.
        decides: inputs that must be ``static=`` under the caller's jit.
        transforms: whether it is one program once these are static.
        differentiable: whether its gradient matches that of the steps.
        options: keywords of ``convert`` that do not change its results.
        draws: whether it draws random numbers.
    """

    proto: onnx.ModelProto
    feeds: Callable[[Rng, int], dict[str, Any]]
    steps: Steps
    sizes: tuple[int, ...] = (0, 1, 2, 3, 5, 40)
    decides: tuple[str, ...] = ()
    transforms: bool = True
    differentiable: bool = True
    options: tuple[dict[str, Any], ...] = ()
    draws: bool = False
    params: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        arrays = {t.name: onnx.numpy_helper.to_array(t) for t in self.proto.graph.initializer}
        object.__setattr__(self, "params", arrays)

    @property
    def outputs(self) -> list[str]:
        return [v.name for v in self.proto.graph.output]


W4: Final = np.arange(1, 5, dtype=F)

BUCKET: Final = {"bucket": {"n": [4, 16]}}
BFLOAT16: Final = {"dtype": "bfloat16"}
"""In which small integers, their products and sums are exact."""


def vector(rng: Rng, n: int) -> dict[str, Any]:
    return {"x": real(rng, n)}


def matrix(rng: Rng, n: int) -> dict[str, Any]:
    return {"x": real(rng, n, 4)}


def square(rng: Rng, n: int) -> dict[str, Any]:
    return {"x": real(rng, n, n)}


def mean_case(*, optional: bool) -> Case:
    """A statistic of the weights, which is hoisted; ``optional``: a call may pass other weights by name."""
    proto = text_model("g (float[n] x) => (float[n] y) { m = ReduceMean<keepdims = 0>(W)  y = Mul(x, m) }", W=W4)
    if optional:
        proto.graph.input.append(value("W", F, [4]))

    def feeds(rng: Rng, n: int) -> dict[str, Any]:
        return vector(rng, n) | ({"W": real(rng, 4)} if optional and rng.integers(2) else {})

    steps: Steps = {"m": lambda v: v["W"].mean(), "y": lambda v: v["x"] * v["m"]}
    return Case(proto, feeds, steps, options=() if optional else (BUCKET, BFLOAT16))


def reshaped() -> Case:
    text = """g (float[n] x, int64[k] shape) => (float[a, b] r, float[a] y)
        { r = Reshape(x, shape)  s = ReduceSum<keepdims = 0>(r, axis)  y = Mul(s, W) }"""

    def feeds(rng: Rng, n: int) -> dict[str, Any]:
        shapes = [[2, 3 * n], [3, 2 * n], [6 * n, 1], [2, -1], [1, 6 * n]]
        return {"x": real(rng, 6 * n), "shape": np.array(shapes[rng.integers(len(shapes))])}

    steps: Steps = {
        "r": lambda v: v["x"].reshape(v["shape"]),
        "s": lambda v: v["r"].sum(1),
        "y": lambda v: v["s"] * v["W"],
    }
    proto = text_model(text, axis=[1], W=F([3]))
    return Case(proto, feeds, steps, sizes=(1, 2, 5, 40), decides=("shape",))


def branches() -> Case:
    text = """g (float[n] x, bool flag) => (float[n] y) { t = If(flag)
        <then_branch = a () => (float[n] p) { p = Add(x, W) }, else_branch = b () => (float[n] q) { q = Mul(x, W) }>
        y = Neg(t) }"""
    steps: Steps = {"t": lambda v: v["x"] + v["W"] if v["flag"] else v["x"] * v["W"], "y": lambda v: -v["t"]}
    return Case(
        text_model(text, W=F([3])), lambda rng, n: vector(rng, n) | {"flag": np.array(rng.integers(2) == 1)}, steps
    )


def trips() -> Case:
    text = """g (float[n] x, int64 k) => (float[n] t, float[n] y) { t = Loop(k, , x) <body = b
        (int64 i, bool c, float[n] v) => (bool d, float[n] w) { d = Identity(c)  u = Add(v, v)  w = Add(u, W) }>
        y = Neg(t) }"""

    def looped(v: Values) -> np.ndarray:
        x = v["x"]
        for _ in range(int(v["k"])):
            x = x + x + v["W"]
        return x

    steps: Steps = {"t": looped, "y": lambda v: -v["t"]}
    feeds = lambda rng, n: vector(rng, n) | {"k": np.array(rng.integers(4))}  # noqa: E731
    options: tuple[dict[str, Any], ...] = ({"loop_cond": "onnxruntime"}, {"max_trips": 3})
    return Case(text_model(text, W=F([1])), feeds, steps, decides=("k",), options=options)


def found() -> Case:
    text = """g (float[n, 4] x) => (int64[2, k] where, float[n, 3] y)
        { h = MatMul(x, W)  h2 = Relu(h)  where = NonZero(h2)  y = MatMul(h2, V) }"""
    weights = {"W": np.diag(F([1, 0, 2, -1])), "V": np.arange(12, dtype=F).reshape(4, 3)}
    steps: Steps = {
        "h": lambda v: v["x"] @ v["W"],
        "h2": lambda v: np.maximum(v["h"], 0),
        "where": lambda v: np.stack(np.nonzero(v["h2"])),
        "y": lambda v: v["h2"] @ v["V"],
    }
    return Case(text_model(text, **weights), matrix, steps, transforms=False, options=({"max_size": {"where": 160}},))


def texts() -> Case:
    text = "g (string[n] s, float[n] x) => (string[n] t, float[n] y) { t = StringConcat(s, s)  y = Mul(x, W) }"

    def feeds(rng: Rng, n: int) -> dict[str, Any]:
        return {"s": np.array([f"t{rng.integers(100)}" for _ in range(n)], object), **vector(rng, n)}

    steps: Steps = {"t": lambda v: v["s"] + v["s"], "y": lambda v: v["x"] * v["W"]}
    return Case(text_model(text, W=F([3])), feeds, steps, transforms=False)


def without_weights() -> Case:
    proto = text_model("g (float[n, n] x) => (float[n, n] y) { s = Mul(x, x)  y = Add(s, x) }")
    return Case(proto, square, {"s": lambda v: v["x"] ** 2, "y": lambda v: v["s"] + v["x"]}, sizes=(0, 1, 3, 40, 1200))


def views() -> Case:
    text = """g (float[n, n] x) => (float[n, n] y, float[n, n] t, float[k, n] s, float[m] r)
        { y = Identity(x)  t = Transpose(x)  s = Slice(x, zero, one)  r = Reshape(x, all) }"""
    steps: Steps = {
        "y": lambda v: v["x"],
        "t": lambda v: v["x"].T,
        "s": lambda v: v["x"][:1],
        "r": lambda v: v["x"].reshape(-1),
    }
    return Case(text_model(text, zero=[0], one=[1], all=[-1]), square, steps, sizes=(1, 3, 40, 1200))


def signed() -> Case:
    text = """g (float[n] x) => (float[n] y, float[n] z) { y = l.f<a: float = 0.0>(x)  z = l.f<a: float = -0.0>(x) }
        <domain: "l", opset_import: ["" : 21]>
        f <a> (x) => (y) { c = Constant<value_float: float = @a>()  y = Div(x, c) }"""
    steps: Steps = {"y": lambda v: v["x"] / F(0.0), "z": lambda v: v["x"] / F(-0.0)}
    return Case(text_model(text), vector, steps, differentiable=False)


def convolution() -> Case:
    text = """g (float[n, 2, 5, 5] x) => (float[n, 3, 3, 3] y)
        { c = Conv(x, w, b)  y = BatchNormalization<epsilon = 0.0>(c, scale, shift, mean, var) }"""
    rng = np.random.default_rng(0)
    weights = {"w": real(rng, 3, 2, 3, 3), "b": real(rng, 3), "scale": real(rng, 3), "shift": real(rng, 3)}

    def convolved(v: Values) -> np.ndarray:
        windows = sliding_window_view(v["x"], (3, 3), (2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, v["w"]) + v["b"][:, None, None]

    def normal(v: Values) -> np.ndarray:
        scale, shift, mean, var = (v[n][:, None, None] for n in ("scale", "shift", "mean", "var"))
        return (v["c"] - mean) / np.sqrt(var) * scale + shift

    proto = text_model(text, **weights, mean=real(rng, 3), var=F([1, 4, 16]))
    return Case(proto, lambda r, n: {"x": real(r, n, 2, 5, 5)}, {"c": convolved, "y": normal}, sizes=(0, 1, 2, 5))


def quantised() -> Case:
    text = """g (float[n, 4] x) => (float[n, 3] y) { q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
        f = DequantizeLinear(w, t)  y = MatMul(d, f) }"""
    weights = np.arange(-6, 6, dtype=np.int8).reshape(4, 3)
    steps: Steps = {
        "q": lambda v: np.clip(np.rint(v["x"] / v["s"]) + v["z"], -128, 127).astype(np.int8),
        "d": lambda v: (v["q"].astype(F) - v["z"]) * v["s"],
        "f": lambda v: v["w"].astype(F) * v["t"],
        "y": lambda v: v["d"] @ v["f"],
    }
    proto = text_model(text, w=weights, s=F(0.5), z=np.int8(0), t=F(2))
    return Case(proto, matrix, steps, differentiable=False, options=({"weights": "packed"},))


def scalars() -> Case:
    text = "g (float[n] x) => (float[n] y) { p = Mul(x, a)  y = Add(p, b) }"
    steps: Steps = {"p": lambda v: v["x"] * v["a"], "y": lambda v: v["p"] + v["b"]}
    return Case(text_model(text, a=F(3), b=F([2])), vector, steps, options=(BUCKET, BFLOAT16))


def several() -> Case:
    """Equal outputs, a parameter-only output, and an output computed from the shape."""
    text = """g (float[n] x) => (float[n] y, float[n] again, float[4] c, int64[1] s, float[4] W)
        { y = Neg(x)  again = Identity(y)  c = Mul(W, W)  s = Shape(x) }"""
    steps: Steps = {
        "y": lambda v: -v["x"],
        "again": lambda v: v["y"],
        "c": lambda v: v["W"] * v["W"],
        "s": lambda v: np.array(v["x"].shape),
    }
    return Case(text_model(text, W=W4), vector, steps)


NOISY: Final = text_model(
    "g (float[n] x) => (float[n] y) { p = Mul(x, W)  r = RandomNormalLike(x)  y = Add(p, r) }", W=F([3])
)


@cache
def noise(seed: int, n: int) -> np.ndarray:
    """The random numbers of a new model."""
    return np.asarray(onnx2jax.convert(NOISY, optimize=False)(np.zeros(n, F), rng=seed))


def noisy() -> Case:
    steps: Steps = {
        "p": lambda v: v["x"] * v["W"],
        "r": lambda v: noise(v["rng"], len(v["x"])),
        "y": lambda v: v["p"] + v["r"],
    }
    return Case(NOISY, vector, steps, sizes=(1, 3), draws=True)


def wide() -> Case:
    """64-bit numbers that 32 bits cannot represent."""
    text = "g (int64[n] x, double[n] d) => (int64[n] y, double[n] z) { y = Add(x, W)  z = Mul(d, D) }"
    steps: Steps = {"y": lambda v: v["x"] + v["W"], "z": lambda v: v["d"] * v["D"]}

    def feeds(rng: Rng, n: int) -> dict[str, Any]:
        return {"x": rng.integers(2**40, 2**41, n), "d": rng.integers(1, 9, n) + 2.0**-40}

    return Case(text_model(text, W=[2**40], D=[3.0]), feeds, steps, differentiable=False)


def single() -> Case:
    """A batch of one, for ``rebatch``."""
    text = "g (float[1, 4] x) => (float[1, 4] y) { m = ReduceMean(x)  p = Mul(x, m)  y = Add(p, W) }"
    steps: Steps = {
        "m": lambda v: v["x"].mean(keepdims=True),
        "p": lambda v: v["x"] * v["m"],
        "y": lambda v: v["p"] + v["W"],
    }
    return Case(text_model(text, W=W4), matrix, steps, sizes=(1,))


CASES: Final[dict[str, Case]] = {
    "hoisted": mean_case(optional=False),
    "optional": mean_case(optional=True),
    "reshaped": reshaped(),
    "branches": branches(),
    "trips": trips(),
    "found": found(),
    "texts": texts(),
    "without weights": without_weights(),
    "views": views(),
    "signed": signed(),
    "convolution": convolution(),
    "quantised": quantised(),
    "scalars": scalars(),
    "several": several(),
    "noisy": noisy(),
    "wide": wide(),
    "single": single(),
}
