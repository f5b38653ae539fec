"""Models with training_info for ``onnx2jax.TrainingModel``, made with onnx.

    python -m benchmarks.zoo          writes onnx2jax/data/digits_training.onnx, the bundled model
    python -m benchmarks.zoo FOLDER   writes all of them into a folder

Each function returns an ``onnx.ModelProto``; ``dtype`` is its floating type, float32 or float64.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper, parser

DATA: Final = Path(__file__).resolve().parent.parent / "onnx2jax" / "data"
PREVIEW: Final = "ai.onnx.preview.training"
Tensors = Mapping[str, np.ndarray]


def regression(dtype: Any = np.float32) -> onnx.ModelProto:
    """Linear regression by gradient descent: x [n, 3], target [n] -> y [n]."""
    main = "regression (T[n,3] x) => (T[n] y) { y0 = MatMul(x, w)  y = Add(y0, b) }"
    descent = """descent (T[n] target) => (T loss, T[3] w1, T b1) {
        d = Sub(y, target)  q = Mul(d, d)  loss = ReduceMean <keepdims = 0> (q)
        dw, db = Gradient <xs = ["w", "b"], zs = ["x", "target"], y = "loss"> (w, b, x, target)
        uw = Mul(dw, rate)  w1 = Sub(w, uw)  ub = Mul(db, rate)  b1 = Sub(b, ub) }"""
    model = _model(main, {"w": np.zeros(3, dtype), "b": np.zeros((), dtype)}, dtype)
    _train(model, descent, {"rate": np.array(0.1, dtype)}, {"w": "w1", "b": "b1"}, dtype)
    return model


def digits_mlp(dtype: Any = np.float32, width: int = 128) -> onnx.ModelProto:
    """Handwritten digits by two layers, Adam and random initialization: image [n, 64] in 0..16, label [n] -> logits."""
    main = """digits (T[n,64] image) => (T[n,10] logits) {
        x = Div(image, brightest)  h = Gemm(x, w1, b1)  r = Relu(h)  logits = Gemm(r, w2, b2) }"""
    shapes = {"w1": (64, width), "b1": (width,), "w2": (width, 10), "b2": (10,)}
    weights = {n: np.zeros(s, dtype) for n, s in shapes.items()}
    model = _model(main, {**weights, "brightest": np.array(16, dtype)}, dtype)
    start = f"""start () => (T[64,{width}] first, T[{width},10] second) {{
        first = RandomNormal <shape = [64, {width}], scale = {np.sqrt(2 / 64):.4f}, dtype = D> ()
        second = RandomNormal <shape = [{width}, 10], scale = {np.sqrt(1 / width):.4f}, dtype = D> () }}"""
    adam = f"""adam (int64[n] label) => (T loss, T accuracy, int64 step1, {_list("T {}1", _with(shapes, "VH"))}) {{
        loss = SoftmaxCrossEntropyLoss(logits, label)
        guess = ArgMax <axis = 1, keepdims = 0> (logits)  right = Equal(guess, label)
        hits = Cast <to = D> (right)  accuracy = ReduceMean <keepdims = 0> (hits)
        {_list("G_{}", shapes)} = Gradient <xs = {_names(shapes)}, zs = ["image", "label"], y = "loss">
            ({_list("{}", shapes)}, image, label)
        {_list("{}1", _with(shapes, "VH"))} = Adam <alpha = 0.9, beta = 0.999, epsilon = 1e-8>
            (rate, step, {_list("{}", _with(shapes, "GVH"))})
        step1 = Add(step, one) }}"""
    own = _zeros(shapes, "VH", dtype) | {"rate": np.array(0.003, dtype), "step": np.array(0), "one": np.array(1)}
    updates = {n: f"{n}1" for n in ("step", *_with(shapes, "VH"))}
    _train(model, adam, own, updates, dtype, start, {"w1": "first", "w2": "second"})
    return model


def digits_cnn(dtype: Any = np.float32) -> onnx.ModelProto:
    """Digits by convolution, Nesterov's momentum and weight decay: image [n, 1, 8, 8] in 0..1, label [n] -> logits."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (8, 1, 3, 3), "bias": (8,), "matrix": (128, 10)}
    weights = {n: (rng.normal(size=s) * 0.2).astype(dtype) for n, s in shapes.items()}
    main = """cnn (T[n,1,8,8] image) => (T[n,10] logits) {
        c = Conv <pads = [1, 1, 1, 1]> (image, kernel, bias)  r = Relu(c)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)  f = Flatten(p)  logits = MatMul(f, matrix) }"""
    momentum = f"""momentum (int64[n] label) => (T loss, int64 step1, {_list("T {}1", _with(shapes, "V"))}) {{
        loss = SoftmaxCrossEntropyLoss(logits, label)
        {_list("G_{}", shapes)} = Gradient <xs = {_names(shapes)}, zs = ["image", "label"], y = "loss">
            ({_list("{}", shapes)}, image, label)
        {_list("{}1", _with(shapes, "V"))} =
            Momentum <alpha = 0.9, beta = 1.0, mode = "nesterov", norm_coefficient = 0.001>
            (rate, step, {_list("{}", _with(shapes, "GV"))})
        step1 = Add(step, one) }}"""
    own = _zeros(shapes, "V", dtype) | {"rate": np.array(0.02, dtype), "step": np.array(0), "one": np.array(1)}
    model = _model(main, weights, dtype)
    _train(model, momentum, own, {n: f"{n}1" for n in ("step", *_with(shapes, "V"))}, dtype)
    return model


def factorization(dtype: Any = np.float32) -> onnx.ModelProto:
    """Matrix factorization, with an alternating algorithm for each factor: target [12, 9] -> product."""
    rng = np.random.default_rng(0)
    weights = {"left": rng.normal(size=(12, 3)).astype(dtype), "right": rng.normal(size=(3, 9)).astype(dtype)}
    model = _model("factorization () => (T[12,9] product) { product = MatMul(left, right) }", weights, dtype)
    for name in weights:
        improve = f"""improve_{name} (T[12,9] target) => (T loss_{name}, T better) {{
            d = Sub(product, target)  q = Mul(d, d)  loss_{name} = ReduceMean <keepdims = 0> (q)
            g = Gradient <xs = ["{name}"], zs = ["target"], y = "loss_{name}"> ({name}, target)
            u = Mul(g, rate)  better = Sub({name}, u) }}"""
        _train(model, improve, {"rate": np.array(2, dtype)}, {name: "better"}, dtype)
    return model


def called(dtype: Any = np.float32) -> onnx.ModelProto:
    """Logistic regression in the style of ONNX 1.7, whose algorithm calls the main graph: X [n, 4], Z [n] in {0, 1}."""
    main = "logistic (T[n,4] X, T[4] W) => (T[n] P) { S = MatMul(X, W)  P = Sigmoid(S) }"
    descent = """descent (T[n,4] X_1, T[n] Z_1) => (T L, T[4] W_1) {
        P_1 = GraphCall <graph_name = "logistic"> (X_1)
        Q = Sub(one, P_1)  Y = Sub(one, Z_1)  A = Log(P_1)  B = Log(Q)  C = Mul(Z_1, A)  D = Mul(Y, B)
        E = Add(C, D)  F = ReduceMean <keepdims = 0> (E)  L = Neg(F)
        G = Gradient <xs = ["W"], zs = ["X_1", "Z_1"], y = "L"> (W, X_1, Z_1)
        U = Mul(G, rate)  W_1 = Sub(W, U) }"""
    model = _model(main, {"W": np.zeros(4, dtype)}, dtype, ir_version=7, opset=12)
    _train(model, descent, {"rate": np.array(0.5, dtype), "one": np.array(1, dtype)}, {"W": "W_1"}, dtype)
    return model


def smooth(dtype: Any = np.float32) -> onnx.ModelProto:
    """A curve with a slope penalty in its loss, a second-order gradient, by Adagrad: x [n], target [n] -> y [n]."""
    rng = np.random.default_rng(0)
    shapes = {"inner": (1, 16), "shift": (16,), "outer": (16, 1)}
    weights = {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}
    main = """smooth (T[n] x) => (T[n] y) { c = Reshape(x, column)  a = MatMul(c, inner)  s = Add(a, shift)
        h = Tanh(s)  o = MatMul(h, outer)  y = Reshape(o, flat) }"""
    adagrad = f"""adagrad (T[n] target) => (T loss, int64 step1, {_list("T {}1", _with(shapes, "H"))}) {{
        d = Sub(y, target)  q = Mul(d, d)  error = ReduceMean <keepdims = 0> (q)
        slope = Gradient <xs = ["x"], zs = {_names(shapes)}, y = "y"> (x, {_list("{}", shapes)})
        k = Mul(slope, slope)  steep = ReduceMean <keepdims = 0> (k)
        penalty = Mul(steep, small)  loss = Add(error, penalty)
        {_list("G_{}", shapes)} = Gradient <xs = {_names(shapes)}, zs = ["x", "target"], y = "loss">
            ({_list("{}", shapes)}, x, target)
        {_list("{}1", _with(shapes, "H"))} = Adagrad <decay_factor = 0.01, epsilon = 1e-6>
            (rate, step, {_list("{}", _with(shapes, "GH"))})
        step1 = Add(step, one) }}"""
    model = _model(main, {**weights, "column": np.array([-1, 1]), "flat": np.array([-1])}, dtype)
    own = _zeros(shapes, "H", dtype) | {n: np.array(v, dtype) for n, v in (("rate", 0.1), ("small", 0.01))}
    own |= {"step": np.array(0), "one": np.array(1)}
    _train(model, adagrad, own, {n: f"{n}1" for n in ("step", *_with(shapes, "H"))}, dtype)
    return model


ZOO: Final[dict[str, Callable[..., onnx.ModelProto]]] = {
    f.__name__: f for f in (regression, digits_mlp, digits_cnn, factorization, called, smooth)
}


def _model(main: str, initializers: Tensors, dtype: Any, ir_version: int = 10, opset: int = 21) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=ir_version, producer_name="onnx2jax zoo")
    for domain, version in (("", opset), (PREVIEW, 1)):
        model.opset_import.add(domain=domain, version=version)
    model.graph.CopyFrom(_graph(main, initializers, dtype))
    return model


def _train(
    model: onnx.ModelProto,
    algorithm: str,
    own: Tensors,
    updates: Mapping[str, str],
    dtype: Any,
    start: str = "",
    starts: Mapping[str, str] | None = None,
) -> None:
    """Add a training_info."""
    info = model.training_info.add()
    info.algorithm.CopyFrom(_graph(algorithm, own, dtype))
    if start:
        info.initialization.CopyFrom(_graph(start, {}, dtype))
    for entries, binding in ((info.update_binding, updates), (info.initialization_binding, starts or {})):
        for key, value in binding.items():
            entries.add(key=key, value=value)


def _graph(text: str, initializers: Tensors, dtype: Any) -> onnx.GraphProto:
    """A graph from text, in which T stands for the floating type and D for its number."""
    name = {np.float32: "float", np.float64: "double"}[dtype]
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = re.sub(r"= D\b", f"= {number}", re.sub(r"\bT\b", name, text))
    for operator in ("Gradient", "GraphCall", "Adam", "Adagrad", "Momentum"):
        text = text.replace(f" {operator} <", f" {PREVIEW}.{operator} <")
    graph = parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in initializers.items())
    return graph


def _with(names: Any, kinds: str) -> list[str]:
    """The names followed by V_name, H_name, ...; gradients G come between."""
    order = [*names]
    for kind in kinds:
        order += [f"{kind}_{n}" for n in names]
    return order


def _zeros(shapes: Mapping[str, tuple[int, ...]], kinds: str, dtype: Any) -> dict[str, np.ndarray]:
    return {f"{kind}_{n}": np.zeros(s, dtype) for kind in kinds for n, s in shapes.items()}


def _list(form: str, names: Any) -> str:
    return ", ".join(form.format(n) for n in names)


def _names(names: Any) -> str:
    return "[" + _list('"{}"', names) + "]"


def main() -> None:
    if len(sys.argv) > 1:
        for name, make in ZOO.items():
            onnx.save(make(), Path(sys.argv[1]) / f"{name}.onnx")
    else:
        onnx.save(digits_mlp(), DATA / "digits_training.onnx")


if __name__ == "__main__":
    main()
