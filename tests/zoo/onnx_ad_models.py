"""onnx-ad: derivatives of graphs as graphs, forward and reverse, beside JAX's own of the same function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from .case import Case, Export

ONNX_AD: Final = "onnx-ad"
UNARY: Final = [
    "Sin",
    "Cos",
    "Tan",
    "Tanh",
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Sigmoid",
    "Softplus",
    "Erf",
    "Abs",
    "Neg",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Relu",
    "Elu",
    "Selu",
    "Softsign",
    "LeakyRelu",
    "Softmax",
    "LogSoftmax",
]
TEXTS: Final = {
    "sum of products": "t = Mul (x, x)  axes = Constant <value_ints = [1]> ()  y = ReduceSum (t, axes)",
    "means": "y = ReduceMean <axes = [1]> (x)",
    "matmul": "t = Transpose (x)  y = MatMul (x, t)",
    "network": "w = Constant <value = float[4, 3] {1, -1, 0.5, 0.1, 2, 0.3, -0.7, 1, 0.2, 0.4, -0.5, 0.6}> ()"
    "  h = MatMul (x, w)  t = Tanh (h)  y = Softmax <axis = 1> (t)",
    "concat, slice": "s = Constant <value_ints = [1]> ()  e = Constant <value_ints = [3]> ()"
    "  t = Slice (x, s, e, s)  u = Mul (t, t)  y = Concat <axis = 1> (t, u)",
    "div, pow": "c = Constant <value = float {2.0}> ()  t = Add (x, c)  u = Div (x, t)  y = Pow (u, c)",
    "where": "z = Constant <value = float {0.5}> ()  m = Less (x, z)  t = Mul (x, x)  y = Where (m, t, x)",
    "maximum": "z = Constant <value = float {0.5}> ()  y = Max (x, z)",
    "gather": "i = Constant <value_ints = [2, 0, 2]> ()  y = Gather <axis = 1> (x, i)",
    "reshape, transpose": "s = Constant <value_ints = [4, 2]> ()  t = Reshape (x, s)  y = Transpose (t)",
}


def _export(text: str, mode: str, folder: Path) -> Export:
    import onnx
    import onnx_ad

    source = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x) => (float[{{}}] y) {{ {text} }}'
    model = onnx.parser.parse_model(source.replace("[{}]", "[?, ?]").replace("[?, ?]", "[M, K]"))
    derived = getattr(onnx_ad, mode)(onnx.shape_inference.infer_shapes(model), layout="onnx")
    onnx.save(derived, folder / "model.onnx")
    rng = np.random.default_rng(0)
    inputs: dict[str, np.ndarray] = {}
    for value in derived.graph.input:
        shape = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
        inputs[value.name] = rng.uniform(0.1, 0.9, shape).astype(np.float32)
    return Export(folder / "model.onnx", [inputs])


def _unary(op: str) -> str:
    return f"y = {op} (x)"


GRAPHS: Final[dict[str, str]] = {**{op: _unary(op) for op in UNARY}, **TEXTS}
KNOWN: Final[dict[str, dict[str, str]]] = {}
REFUSED: Final[dict[str, str]] = {}
CASES: Final = tuple(
    Case("onnx-ad", f"{name}, {mode}", ONNX_AD, partial(_export, text, mode), ("onnx_ad",), known=KNOWN.get(name, {}))
    for name, text in GRAPHS.items()
    for mode in ("forward", "reverse")
)
