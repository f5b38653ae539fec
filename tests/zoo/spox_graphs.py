"""spox: graphs from typed constructors of each operator set, with loops, branches, sequences and optional values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export
from .other_frameworks import LOOP

SPOX: Final = "spox"
Call = Callable[..., Any]
Operands = Sequence[tuple[str, tuple[int | str, ...]]]

MATRIX: Final[Operands] = (("float32", ("N", 4)),)
TWO: Final[Operands] = (("float32", ("N", 4)), ("float32", ("N", 4)))
SERIES: Final[Operands] = (("float32", ("N", 5, 4)),)
IMAGE: Final[Operands] = (("float32", ("N", 4, 6, 6)),)
BYTES: Final[Operands] = (("uint8", ("N", 4)),)
WORDS: Final[Operands] = (("str", ("N",)),)
COUNT: Final[Operands] = (("float32", ("N", 4)), ("int64", ()))
FLAG: Final[Operands] = (("float32", ("N", 4)), ("bool", ()))


def _w(op: Any, *shape: int, dtype: str = "float32") -> Any:
    return op.const((np.cos(np.arange(np.prod(shape))) * 0.5).reshape(shape).astype(dtype))


def _c(op: Any, value: Any, dtype: str = "int64") -> Any:
    return op.const(np.asarray(value, dtype))


def _counted(op: Any, x: Any) -> Any:
    return op.loop(_c(op, 3), v_initial=[x], body=lambda _i, _, y: [_c(op, True, "bool"), op.tanh(op.add(y, x))])


def _collecting(op: Any, x: Any) -> Any:
    def body(_i: Any, _: Any, y: Any) -> Any:
        y = op.mul(y, _c(op, 0.5, "float32"))
        return [_c(op, True, "bool"), y, op.reduce_sum(y, _c(op, [1]))]

    return op.loop(_c(op, 4), v_initial=[x], body=body)


def _breaking(op: Any, x: Any) -> Any:
    def body(_i: Any, _: Any, y: Any) -> Any:
        y = op.add(y, _c(op, 1.0, "float32"))
        return [op.less(op.reshape(op.reduce_mean(y, keepdims=0), _c(op, [1])), _c(op, 3.0, "float32")), y]

    return op.loop(_c(op, 9), _c(op, [True], "bool"), v_initial=[x], body=body)


def _nested(op: Any, x: Any) -> Any:
    def inner(j: Any, _: Any, y: Any) -> Any:
        return [_c(op, True, "bool"), op.sin(op.add(y, op.cast(j, to=np.float32)))]

    def outer(_i: Any, _: Any, y: Any) -> Any:
        return [_c(op, True, "bool"), op.loop(_c(op, 2), v_initial=[y], body=inner)[0]]

    return op.loop(_c(op, 3), v_initial=[x], body=outer)


def _branch(op: Any, x: Any, flag: Any) -> Any:
    return op.if_(flag, then_branch=lambda: [op.exp(x)], else_branch=lambda: [op.neg(x)])


def _branches(op: Any, x: Any) -> Any:
    return op.if_(
        op.greater(op.reduce_sum(x, keepdims=0), _c(op, 0.0, "float32")),
        then_branch=lambda: op.if_(
            op.less(op.reduce_max(x, keepdims=0), _c(op, 1.0, "float32")),
            then_branch=lambda: [op.sin(x)],
            else_branch=lambda: [op.cos(x)],
        ),
        else_branch=lambda: [op.tanh(x)],
    )


def _sequenced(op: Any, x: Any) -> Any:
    parts = op.split_to_sequence(x, axis=1, keepdims=1)
    parts = op.sequence_insert(parts, op.neg(op.sequence_at(parts, _c(op, 0))), _c(op, 1))
    return op.concat_from_sequence(op.sequence_erase(parts, _c(op, -1)), axis=1), op.sequence_length(parts)


def _optional(op: Any, x: Any) -> Any:
    some = op.optional(x)
    return op.optional_get_element(some), op.optional_has_element(some)


def _lstm(op: Any, x: Any) -> Any:
    y, h, c = op.lstm(op.transpose(x, perm=[1, 0, 2]), _w(op, 1, 12, 4), _w(op, 1, 12, 3), _w(op, 1, 24), hidden_size=3)
    return y, h, c


def _gru(op: Any, x: Any) -> Any:
    return op.gru(
        op.transpose(x, perm=[1, 0, 2]),
        _w(op, 2, 9, 4),
        _w(op, 2, 9, 3),
        hidden_size=3,
        direction="bidirectional",
        linear_before_reset=1,
    )


def _sized(op: Any, x: Any) -> Any:
    rows = op.slice(op.shape(x), _c(op, [0]), _c(op, [1]))
    return op.expand(op.reduce_sum(x, _c(op, [0])), op.concat([rows, _c(op, [4])], axis=0)), op.range(
        _c(op, 0), op.squeeze(rows, _c(op, [0])), _c(op, 1)
    )


GRAPHS: Final[dict[str, tuple[Operands, Call]]] = {
    "loop, counted": (MATRIX, _counted),
    "loop, collecting": (MATRIX, _collecting),
    "loop, ended by its condition": (MATRIX, _breaking),
    "loop in a loop": (MATRIX, _nested),
    "loop of a traced count": (
        COUNT,
        lambda op, x, n: op.loop(
            n, v_initial=[x], body=lambda _i, _, y: [_c(op, True, "bool"), op.mul(y, _c(op, 0.5, "float32"))]
        ),
    ),
    "branch by an input": (FLAG, _branch),
    "branches by values": (MATRIX, _branches),
    "sequence, split and edited": (MATRIX, _sequenced),
    "optional": (MATRIX, _optional),
    "LSTM": (SERIES, _lstm),
    "GRU, both ways": (SERIES, _gru),
    "shapes at run time": (MATRIX, _sized),
    "activations": (
        MATRIX,
        lambda op, x: [
            getattr(op, n)(x)
            for n in [
                "elu",
                "relu",
                "selu",
                "sigmoid",
                "softplus",
                "softsign",
                "hard_sigmoid",
                "hard_swish",
                "mish",
                "celu",
                "leaky_relu",
                "thresholded_relu",
            ]
        ],
    ),
    "reductions": (
        MATRIX,
        lambda op, x: [
            getattr(op, f"reduce_{n}")(x, _c(op, [1]))
            for n in ["sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum_exp"]
        ],
    ),
    "trigonometry": (
        MATRIX,
        lambda op, x: [
            getattr(op, n)(x) for n in ["sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh", "erf"]
        ],
    ),
    "arithmetic": (
        TWO,
        lambda op, x, y: [
            op.add(x, y),
            op.sub(x, y),
            op.mul(x, y),
            op.div(x, y),
            op.max([x, y]),
            op.min([x, y]),
            op.mean([x, y]),
            op.sum([x, y, x]),
            op.mod(x, y, fmod=1),
        ],
    ),
    "softmax, hardmax": (MATRIX, lambda op, x: [op.softmax(x, axis=1), op.log_softmax(x, axis=0), op.hardmax(x)]),
    "convolutions": (
        IMAGE,
        lambda op, x: [
            op.conv(x, _w(op, 2, 4, 3, 3)),
            op.conv(x, _w(op, 4, 1, 3, 3), group=4, pads=[1, 1, 1, 1], strides=[2, 2]),
            op.conv_transpose(x, _w(op, 4, 2, 3, 3), strides=[2, 2]),
        ],
    ),
    "pools": (
        IMAGE,
        lambda op, x: [
            *op.max_pool(x, kernel_shape=[2, 2], strides=[2, 2]),
            op.average_pool(x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
            op.global_average_pool(x),
            op.lp_pool(x, kernel_shape=[2, 2]),
        ],
    ),
    "normalisations": (
        IMAGE,
        lambda op, x: [
            op.instance_normalization(x, _w(op, 4), _w(op, 4)),
            op.lrn(x, size=3),
            op.layer_normalization(x, _w(op, 6), _w(op, 6))[0],
            op.mean_variance_normalization(x),
        ],
    ),
    "resize": (
        IMAGE,
        lambda op, x: [
            op.resize(x, None, _c(op, [1, 1, 2, 1.5], "float32"), mode=m) for m in ("nearest", "linear", "cubic")
        ],
    ),
    "grid_sample, affine_grid": (
        IMAGE,
        lambda op, x: op.grid_sample(
            op.slice(x, _c(op, [0]), _c(op, [1]), _c(op, [0])),
            op.affine_grid(_c(op, [[[0.8, 0.1, 0.2], [-0.1, 0.9, 0]]], "float32"), _c(op, [1, 4, 5, 5])),
        ),
    ),
    "depth_to_space, space_to_depth": (
        IMAGE,
        lambda op, x: [op.depth_to_space(x, blocksize=2), op.space_to_depth(x, blocksize=2)],
    ),
    "einsum, gemm": (
        MATRIX,
        lambda op, x: [
            op.einsum([x, x], equation="ij,kj->ik"),
            op.gemm(x, _w(op, 3, 4), _w(op, 3), transB=1, alpha=0.5),
        ],
    ),
    "gathers": (
        MATRIX,
        lambda op, x: [
            op.gather(x, _c(op, [3, 0, -1]), axis=1),
            op.gather_nd(x, _c(op, [[0, 1], [1, 3]])),
            op.gather_elements(x, _c(op, [[1, 0, 1, 1]]), axis=0),
        ],
    ),
    "scatters": (
        MATRIX,
        lambda op, x: [
            op.scatter_elements(x, _c(op, [[1, 0]]), _c(op, [[9, 8]], "float32"), axis=1),
            op.scatter_nd(x, _c(op, [[1], [0]]), _w(op, 2, 4)),
        ],
    ),
    "pads": (MATRIX, lambda op, x: [op.pad(x, _c(op, [0, 1, 0, 2]), mode=m) for m in ("constant", "reflect", "edge")]),
    "top_k, arg_max": (MATRIX, lambda op, x: [*op.top_k(x, _c(op, [2])), op.arg_max(x, axis=1), op.arg_min(x, axis=0)]),
    "cumsum, trilu, tile": (
        MATRIX,
        lambda op, x: [
            op.cumsum(x, _c(op, 1), reverse=1, exclusive=1),
            op.trilu(x, upper=0),
            op.tile(x, _c(op, [2, 1])),
        ],
    ),
    "compress, non_zero, unique": (
        MATRIX,
        lambda op, x: [op.compress(x, _c(op, [1, 0, 1, 1], "bool"), axis=1), op.non_zero(x), *op.unique(op.round(x))],
    ),
    "quantised": (
        MATRIX,
        lambda op, x: [
            op.dequantize_linear(
                op.quantize_linear(x, _c(op, 0.1, "float32"), _c(op, 3, "uint8")),
                _c(op, 0.1, "float32"),
                _c(op, 3, "uint8"),
            ),
            *op.dynamic_quantize_linear(x),
        ],
    ),
    "bits": (
        BYTES,
        lambda op, x: [
            op.bitwise_and(x, _c(op, 6, "uint8")),
            op.bitwise_not(x),
            op.bit_shift(x, _c(op, 1, "uint8"), direction="LEFT"),
            op.bitwise_xor(x, x),
        ],
    ),
    "strings": (WORDS, lambda op, x: [op.equal(x, op.const(np.array(["ab", "b"]))), op.gather(x, _c(op, [1, 0]))]),
    "one_hot, eye_like": (
        MATRIX,
        lambda op, x: [op.one_hot(op.arg_max(x, axis=1), _c(op, 4), _c(op, [0, 2], "float32")), op.eye_like(x, k=1)],
    ),
    "dft, windows": (
        SERIES,
        lambda op, x: [
            op.dft(op.slice(x, _c(op, [0]), _c(op, [1]), _c(op, [2])), onesided=0),
            op.hann_window(_c(op, 6)),
        ],
    ),
    "losses": (MATRIX, lambda op, x: [*op.softmax_cross_entropy_loss(x, op.arg_max(x, axis=1, keepdims=0))]),
    "det, isnan, where": (
        MATRIX,
        lambda op, x: [
            op.det(op.matmul(x, op.transpose(x))),
            op.isnan(op.log(x)),
            op.where(op.less(x, _c(op, 0.0, "float32")), op.neg(x), x),
        ],
    ),
    "shrink, clip, round": (
        MATRIX,
        lambda op, x: [
            op.shrink(x, lambd=0.4, bias=0.1),
            op.clip(x, _c(op, -0.5, "float32")),
            op.round(x),
            op.sign(x),
            op.floor(x),
            op.prelu(x, _c(op, [0.1], "float32")),
        ],
    ),
}
NEWER: Final[dict[str, tuple[Operands, Call]]] = {
    "gelu": (MATRIX, lambda op, x: [op.gelu(x), op.gelu(x, approximate="tanh")]),
    "attention": (SERIES, lambda op, x: op.attention(x, x, x, q_num_heads=2, kv_num_heads=2, is_causal=1)[0]),
    "RMS normalisation": (SERIES, lambda op, x: op.rmsnormalization(x, _w(op, 4))),
}
ML: Final[dict[str, Call]] = {
    "scaler, normalizer": lambda ml, x: ml.normalizer(ml.scaler(x, offset=[0.1] * 4, scale=[2.0] * 4), norm="L2"),
    "binarizer, imputer": lambda ml, x: [
        ml.binarizer(x, threshold=0.2),
        ml.imputer(x, imputed_value_floats=[1.0], replaced_value_float=float("nan")),
    ],
    "linear_classifier": lambda ml, x: ml.linear_classifier(
        x,
        coefficients=[0.1 * i for i in range(12)],
        intercepts=[0.1, 0.2, 0.3],
        classlabels_ints=[3, 5, 9],
        post_transform="SOFTMAX",
    ),
    "linear_regressor": lambda ml, x: ml.linear_regressor(x, coefficients=[0.5, -1.0, 2.0, 0.1], intercepts=[0.3]),
}


def _operand(dtype: str, shape: Sequence[int | str], rows: int, rng: np.random.Generator) -> np.ndarray:
    extents = [rows if isinstance(n, str) else n for n in shape]
    if dtype == "str":
        return np.resize(np.array(["ab", "cd", "a"]), extents)
    if dtype == "bool":
        return np.asarray(rows > 2)
    if dtype == "int64":
        return np.asarray(rows)
    if dtype == "uint8":
        return rng.integers(0, 256, extents).astype(dtype)
    return rng.standard_normal(extents).astype(dtype)


def _export(operands: Operands, call: Call, modules: str, folder: Path) -> Export:
    import onnx
    import spox

    names = [f"x{i}" for i in range(len(operands))]
    args = [spox.argument(spox.Tensor(np.dtype(d) if d != "str" else np.str_, shape)) for d, shape in operands]
    results = call(import_module(f"spox.opset.ai.onnx.{modules}"), *args)
    results = list(results) if isinstance(results, tuple | list) else [results]
    model = spox.build(dict(zip(names, args, strict=True)), {f"y{i}": y for i, y in enumerate(results)})
    onnx.save(model, folder / "model.onnx")
    rng = np.random.default_rng(0)
    sizes = (2, 3) if "str" not in [d for d, _ in operands] else (2,)
    inputs = [
        {n: _operand(d, shape, rows, rng) for n, (d, shape) in zip(names, operands, strict=True)} for rows in sizes
    ]
    return Export(folder / "model.onnx", inputs)


NEW: Final = ("activations", "reductions", "grid_sample, affine_grid", "bits", "strings")
"""Of the graphs those whose operators opset 17 has not, or takes otherwise."""
KNOWN: Final[dict[str, Mapping[str, str]]] = {
    "loop of a traced count": {"grad": LOOP},
    "loop, ended by its condition": {"grad": LOOP},
}
REFUSED: Final = {
    "scan / spox": "InferenceError: it takes the state for one of the scanned operands, of one axis less",
    "sequence_map / spox": "AttributeError: 'Tensor' object has no attribute 'elem_type'",
}
CASES: Final = tuple(
    Case("spox", name, SPOX, partial(_export, *row), ("spox",), known=KNOWN.get(name.split(", opset")[0], {}))
    for name, row in {
        **{f"{n}, opset 17": (*row, "v17") for n, row in GRAPHS.items() if n not in NEW},
        **{f"{n}, opset 24": (*row, "v24") for n, row in (GRAPHS | NEWER).items()},
        **{f"{n}, ai.onnx.ml 3": (MATRIX, call, "ml.v3") for n, call in ML.items()},
    }.items()
)
