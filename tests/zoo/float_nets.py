"""Four small nets to be quantised, in ONNX's own text: nothing but onnx makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx

SHAPES: Final[Mapping[str, str]] = {
    "perceptron": "float[N,32] x",
    "convolutions": "float[N,4,12,12] x",
    "recurrence": "float[9,N,8] x",
    "transformer": "float[N,7,32] x",
}
"""Each net's input."""

WEIGHTS: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "perceptron": {"a": (32, 64), "b": (64,), "c": (64, 16), "d": (16,)},
    "convolutions": {
        **{"a": (16, 4, 3, 3), "b": (16,), "c": (16, 1, 3, 3), "d": (16,), "e": (16, 16, 1, 1), "f": (16,)},
        **{"g": (16, 10), "h": (10,)},
    },
    "recurrence": {"w": (1, 64, 8), "r": (1, 64, 16), "b": (1, 128), "c": (16, 8), "d": (8,)},
    "transformer": {
        **{"q": (32, 32), "k": (32, 32), "v": (32, 32), "o": (32, 32), "qb": (32,), "vb": (32,), "ob": (32,)},
        **{"scale": (32,), "shift": (32,), "u": (32, 64), "ub": (64,), "w": (64, 32), "wb": (32,)},
    },
}
_BODIES: Final[Mapping[str, str]] = {
    "perceptron": """
        xa = MatMul(x, a)
        xb = Add(xa, b)
        xr = Relu(xb)
        y = Gemm(xr, c, d)
    """,
    "convolutions": """
        c1 = Conv<pads = [1, 1, 1, 1]>(x, a, b)
        r1 = Relu(c1)
        c2 = Conv<pads = [1, 1, 1, 1], group = 16>(r1, c, d)
        r2 = Clip(c2, zero, six)
        c3 = Conv(r2, e, f)
        s = Add(c3, r1)
        m = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(s)
        p = GlobalAveragePool(m)
        l = Flatten(p)
        y = Gemm(l, g, h)
    """,
    "recurrence": """
        all, last = LSTM<hidden_size = 16>(x, w, r, b)
        squeezed = Squeeze(last, first)
        z = MatMul(squeezed, c)
        y = Add(z, d)
    """,
    "transformer": """
        qm = MatMul(x, q)
        qa = Add(qm, qb)
        qr = Reshape(qa, heads)
        qt = Transpose<perm = [0, 2, 1, 3]>(qr)
        km = MatMul(x, k)
        kr = Reshape(km, heads)
        kt = Transpose<perm = [0, 2, 3, 1]>(kr)
        vm = MatMul(x, v)
        va = Add(vm, vb)
        vr = Reshape(va, heads)
        vt = Transpose<perm = [0, 2, 1, 3]>(vr)
        qk = MatMul(qt, kt)
        scaled = Mul(qk, half)
        weights = Softmax<axis = -1>(scaled)
        mixed = MatMul(weights, vt)
        back = Transpose<perm = [0, 2, 1, 3]>(mixed)
        flat = Reshape(back, width)
        om = MatMul(flat, o)
        oa = Add(om, ob)
        sum = Add(oa, x)
        n = LayerNormalization(sum, scale, shift)
        um = MatMul(n, u)
        ua = Add(um, ub)
        g1 = Div(ua, root)
        g2 = Erf(g1)
        g3 = Add(g2, one)
        g4 = Mul(ua, g3)
        gelu = Mul(g4, half)
        wm = MatMul(gelu, w)
        wa = Add(wm, wb)
        y = Add(wa, n)
    """,
}
_CONSTANTS: Final[Mapping[str, np.ndarray]] = {
    "zero": np.float32(0),
    "one": np.float32(1),
    "six": np.float32(6),
    "half": np.float32(0.5),
    "root": np.float32(2**0.5),
    "first": np.array([0]),
    "heads": np.array([0, 0, 4, 8]),
    "width": np.array([0, 0, 32]),
}


def net(name: str, opset: int = 17) -> onnx.ModelProto:
    """With seeded weights of a size that keeps what flows through it about one."""
    rng = np.random.default_rng(0)
    output = {"perceptron": "N,16", "convolutions": "N,10", "recurrence": "N,8", "transformer": "N,7,32"}[name]
    head = f'<ir_version: 8, opset_import: ["" : {opset}]> net ({SHAPES[name]}) => (float[{output}] y)'
    model = onnx.parser.parse_model(f"{head} {{ {_BODIES[name]} }}")
    values = {n: rng.standard_normal(s).astype(np.float32) / _fan_in(s) ** 0.5 for n, s in WEIGHTS[name].items()}
    read = {i for node in model.graph.node for i in node.input}
    values |= {n: v for n, v in _CONSTANTS.items() if n in read}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in values.items())
    return model


def _fan_in(shape: tuple[int, ...]) -> int:
    """Of a convolution [out, in, ...], a product [in, out], a recurrence [1, gates, in]; 10 for a vector."""
    if len(shape) == 4:
        return int(np.prod(shape[1:]))
    return {1: 10, 2: shape[0], 3: shape[-1]}[len(shape)]


def batch(name: str, rows: int, seed: int = 1) -> np.ndarray:
    """Standard normal."""
    shape = {"perceptron": (rows, 32), "convolutions": (rows, 4, 12, 12), "recurrence": (9, rows, 8)}
    return np.random.default_rng(seed).standard_normal(shape.get(name, (rows, 7, 32))).astype(np.float32)
