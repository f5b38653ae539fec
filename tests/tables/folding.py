"""Operands for the operators that fold: products, norms, quantization, ai.onnx.ml; and the table of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from onnx2jax.proto.types import ELEMENT_TYPES
from tests.support.drawing import (
    SIDES,
    SOME,
    Case,
    Draw,
    axis,
    broadcast_shapes,
    dtype_of,
    indices,
    is_float,
    shapes,
    values,
    vector,
)
from tests.support.folding import (
    along,
    bit_cast,
    blocks,
    broadcasting,
    cast,
    cast_like,
    center_crop_pad,
    clip,
    compress,
    concat,
    cumulative,
    expand,
    flatten,
    gather,
    gather_elements,
    gather_nd,
    one_hot,
    pad,
    power,
    reduction,
    reshape,
    reverse_sequence,
    scatter_elements,
    scatter_nd,
    slice_,
    split,
    squeeze,
    tensor_scatter,
    tile,
    top_k,
    transpose,
    trilu,
    unary,
    unidirectional,
    unsqueeze,
    variadic,
    where,
)


def mat_mul(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, (m, k, n) = dtype_of(draw, types), (draw(SIDES) for _ in range(3))
    lead = broadcast_shapes(draw, draw(shapes(high=2)), 2)
    a, b = values(draw, dtype, (*lead[0], m, k), 0), values(draw, dtype, (*lead[1], k, n), 0)
    a = a.reshape(-1, k)[0] if a.size and draw(st.booleans()) else a
    return (a, b), {}


def gemm(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, (m, k, n) = dtype_of(draw, types), (draw(SIDES) for _ in range(3))
    flags = {f: draw(st.integers(0, 1)) for f in ("transA", "transB")}
    a = values(draw, dtype, (k, m) if flags["transA"] else (m, k), 0)
    b = values(draw, dtype, (n, k) if flags["transB"] else (k, n), 0)
    c = values(draw, dtype, draw(st.sampled_from([(), (n,), (m, 1), (m, n)])), 0)
    return (a, b, draw(st.sampled_from([None, c]))), {**flags, "alpha": 2.0, "beta": 3.0}


def einsum(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, (b, i, j, k) = dtype_of(draw, types), (draw(SIDES) for _ in range(4))
    equation, forms = draw(
        st.sampled_from(
            [("bij,bjk->bik", ((b, i, j), (b, j, k))), ("ij,j", ((i, j), (j,))), ("...ii->...i", ((b, i, i),))]
        )
    )
    return [values(draw, dtype, s, 0) for s in forms], {"equation": equation}


def square(draw: Draw, types: list[np.dtype]) -> Any:
    n = draw(SOME)
    return (values(draw, dtype_of(draw, types), (*draw(shapes(high=2)), n, n), -2, 2),), {}


def channels(*more: str, **options: st.SearchStrategy[Any]) -> Case:
    """[batch, channels, ...] and vectors of channels; "positive" ones for variances."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        x = values(draw, dtype_of(draw, types), (draw(SOME), 4, *draw(shapes(1, 3, SOME))))
        vectors = [values(draw, x.dtype, (4,), 0.5 if kind == "positive" else -2) for kind in more]
        return (x, *vectors), {k: draw(v) for k, v in options.items()}

    return case


def normalized_tail(count: int) -> Case:
    def case(draw: Draw, types: list[np.dtype]) -> Any:
        x = values(draw, dtype_of(draw, types), draw(shapes(1, sides=SOME)))
        a = axis(draw, x.ndim)
        weights = [values(draw, x.dtype, x.shape[a % x.ndim :], -2) for _ in range(count)]
        return (x, *weights), {"axis": a}

    return case


INT8 = [np.dtype(np.int8), np.dtype(np.uint8)]


def scales(draw: Draw, count: int) -> list[np.ndarray]:
    return [np.float32(2.0 ** draw(st.integers(-3, 0))).reshape(()) for _ in range(count)]


def quantize(draw: Draw, types: list[np.dtype]) -> Any:
    del types
    x = values(draw, np.float32, draw(shapes()))
    codes = [row.dtype for c, row in ELEMENT_TYPES.items() if c in (2, 3, 4, 5, 17, 18, 19, 20, 21, 22, 23, 25, 26)]
    return (x, *scales(draw, 1), values(draw, dtype_of(draw, codes), (), 0, 1)), {}


def dequantize(draw: Draw, types: list[np.dtype]) -> Any:
    kept = [d for d in types if d.name not in ("float8_e8m0fnu",)]
    x = values(draw, dtype_of(draw, kept), draw(shapes()))
    zero = None if x.dtype == np.int32 else values(draw, x.dtype, (), 0, 1)
    return (x, *scales(draw, 1), zero), {}


def quantized(count: int, out: bool = True, **options: st.SearchStrategy[Any]) -> Case:
    """So many (tensor, scale, zero point), and the scale and zero point of the result."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        del types
        tensors = broadcasting(count)(draw, [dtype_of(draw, INT8)])[0]
        triples = [v for x in tensors for v in (x, *scales(draw, 1), values(draw, x.dtype, (), 0))]
        last = [*scales(draw, 1), values(draw, tensors[0].dtype, (), 0)] if out else []
        return (*triples, *last), {k: draw(v) for k, v in options.items()}

    return case


def quantized_mean(draw: Draw, types: list[np.dtype]) -> Any:
    (x, *parameters), _ = quantized(1)(draw, types)
    shape = draw(shapes(0, 4, SOME))  # of nothing there is no mean
    axes = [axis for axis in range(len(shape)) if draw(st.booleans())]
    return (values(draw, x.dtype, shape), *parameters), {"axes": axes, "keepdims": draw(st.integers(0, 1))}


def quantized_where(draw: Draw, types: list[np.dtype]) -> Any:
    triples, _ = quantized(2)(draw, types)
    return (values(draw, bool, triples[0].shape), *triples), {}


def quantized_concat(draw: Draw, types: list[np.dtype]) -> Any:
    (x, scale, zero, *last), _ = quantized(1)(draw, types)
    x = x.reshape(1, *x.shape)
    return (*last, x, scale, zero, x, scale, zero), {"axis": axis(draw, x.ndim)}


def integers_product(draw: Draw, types: list[np.dtype]) -> Any:
    a, _, za, b, _, zb = quantized(2, out=False)(draw, types)[0]
    return (a, za, b, zb), {}


def loss(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), (draw(SOME), 3, *draw(shapes(high=2, sides=SOME))), -3)
    labels = np.abs(indices(draw, 3, (x.shape[0], *x.shape[2:])))
    labels = np.minimum(labels, 2)
    weights = values(draw, x.dtype, (3,), 0.5) if draw(st.booleans()) else None
    return (x, labels, weights), {"reduction": draw(st.sampled_from(["none", "sum", "mean"]))}


def dft(draw: Draw, types: list[np.dtype]) -> Any:
    shape = (*draw(shapes(1, 2, SOME)), draw(SOME) + 2, draw(st.integers(1, 2)))
    x = values(draw, dtype_of(draw, types), shape, -2)
    inverse = draw(st.integers(0, 1))
    onesided = 0 if inverse or shape[-1] == 2 else draw(st.integers(0, 1))
    return (x, draw(st.sampled_from([None, vector(4)[0]])), vector(-2)[0]), {"inverse": inverse, "onesided": onesided}


def stft(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), (draw(SOME), 8 + draw(SOME), 1), -2)
    window = values(draw, x.dtype, (4,), 0) if draw(st.booleans()) else None
    return (x, vector(draw(SOME))[0], window, vector(4)[0]), {"onesided": draw(st.integers(0, 1))}


def mel(draw: Draw, types: list[np.dtype]) -> Any:
    del draw, types
    return (*vector(4, 16, 8192), np.float32(0).reshape(()), np.float32(4000).reshape(())), {}


def grams(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1, 2, st.integers(1, 6))), 0)
    counts = {"ngram_counts": (0, 2), "ngram_indexes": (0, 2, 1, 3), "pool_int64s": (2, 3, 1, 4, 0, 2)}
    mode = draw(st.sampled_from(["TF", "IDF", "TFIDF"]))
    return (x,), {
        "max_gram_length": 2, "min_gram_length": 1, "max_skip_count": draw(st.integers(0, 2)), "mode": mode, **counts,
    }  # fmt: skip


def rotary(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, (batch, heads, length) = dtype_of(draw, types), (draw(SOME) for _ in range(3))
    x, cos, sin = (values(draw, dtype, s, -2) for s in ((batch, heads, length, 4), (5, 2), (5, 2)))
    places = np.abs(indices(draw, 5, (batch, length))) % 5
    return (x, cos, sin, places), {"interleaved": draw(st.integers(0, 1))}


def causal_conv(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, (batch, length, taps) = dtype_of(draw, types), (draw(SOME) for _ in range(3))
    x, w, b = (values(draw, dtype, s, -2) for s in ((batch, 2, length), (2, 1, taps), (2,)))
    return (x, w, b), {"activation": draw(st.sampled_from(["none", "silu"])), "n_outputs": 2}


def dynamic(draw: Draw, types: list[np.dtype]) -> Any:
    return (values(draw, dtype_of(draw, types), draw(shapes()), -3),), {"n_outputs": 3}


def sequence(draw: Draw, types: list[np.dtype]) -> Any:
    dtype = dtype_of(draw, types)
    return [values(draw, dtype, draw(shapes(high=3))) for _ in range(draw(st.integers(1, 3)))], {}


def split_to_sequence(draw: Draw, types: list[np.dtype]) -> Any:
    (x, sizes), attributes = split(draw, types)
    return (x, draw(st.sampled_from([sizes, None, vector(2)[0]]))), {"axis": attributes["axis"]}


def joined(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1, 3)))
    return ([x, x[::-1].copy()],), {"axis": axis(draw, x.ndim), "new_axis": draw(st.integers(0, 1))}


def eye(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, [d for d in types if d.kind in "fiu"]), draw(shapes(2, 2)))
    return (x,), {"k": draw(st.integers(-2, 2))}


# ---------------------------------------------------------------------------------------------- ai.onnx.ml


def features(low: float | None = -3, **attributes: Any) -> Case:
    """Rows of four features, and attributes fixed beforehand."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        return (values(draw, dtype_of(draw, types), (draw(SOME), 4), low),), attributes

    return case


def picked(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1, 3, SOME)))
    return (x, np.abs(indices(draw, x.shape[-1], (1, 2))) % x.shape[-1]), {}


def imputer(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), (draw(SOME), 4))
    if is_float(x.dtype):
        return (x,), {"imputed_value_floats": (1.0, 2.0, 3.0, 4.0), "replaced_value_float": np.nan}
    return (x,), {"imputed_value_int64s": (7,), "replaced_value_int64": 2}


def encoder(draw: Draw, types: list[np.dtype]) -> Any:
    del types
    x = values(draw, np.int64, draw(shapes(high=3)))
    return (x,), {"keys_int64s": (0, 3, -1), "values_floats": (0.5, 1.5, -2.0), "default_float": 9.0}


LINEAR = {"coefficients": tuple(np.linspace(-1, 1, 8).tolist()), "intercepts": (0.25, -0.5)}
TREE = {
    "nodes_treeids": (0, 0, 0), "nodes_nodeids": (0, 1, 2), "nodes_featureids": (1, 0, 0),
    "nodes_values": (0.5, 0.0, 0.0), "nodes_modes": ("BRANCH_LEQ", "LEAF", "LEAF"),
    "nodes_truenodeids": (1, 0, 0), "nodes_falsenodeids": (2, 0, 0),
}  # fmt: skip
LEAVES = {"target_treeids": (0, 0), "target_nodeids": (1, 2), "target_ids": (0, 0), "target_weights": (1.5, -2.0)}
CLASSES = {"class_treeids": (0, 0), "class_nodeids": (1, 2), "class_ids": (0, 1), "class_weights": (1.5, 2.0)}
SVM = {
    "kernel_type": "RBF", "kernel_params": (0.5, 0.0, 3.0), "coefficients": (1.0, -0.5),
    "rho": (0.25,), "support_vectors": tuple(np.linspace(-2, 2, 8).tolist()),
}  # fmt: skip
NODE = {
    "nodes_featureids": (1,), "nodes_splits": np.float32([0.5]), "nodes_modes": np.uint8([0]), "tree_roots": (0,),
    "nodes_truenodeids": (0,), "nodes_trueleafs": (1,), "nodes_falsenodeids": (1,), "nodes_falseleafs": (1,),
    "leaf_targetids": (0, 0), "leaf_weights": np.float32([1.5, -2.0]), "n_targets": 1,
}  # fmt: skip


def training(states: int, **attributes: Any) -> Case:
    """A rate, a step, and tensors with their gradients and states."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        del types
        dtype, shape = dtype_of(draw, [np.dtype(np.float32), np.dtype(np.float64)]), draw(shapes())
        tensors = [values(draw, dtype, shape, 0.5) for _ in range(2 + states)]
        rate = np.asarray(0.125, dtype)
        return (rate, vector(3)[0], *tensors), {**attributes, "n_outputs": 1 + states}

    return case


NUMBERS = st.floats(0.125, 2, width=32)
FLAG = st.integers(0, 1)

_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsNaN"),
    *("Log", "Neg", "Reciprocal", "Round", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh", "Not", "BitwiseNot", "Relu"),
    *("Sigmoid", "Softplus", "Softsign", "Mish", "HardSwish", "Identity", "Shape", "Size", "Dropout"),
)
_BINARY = (
    *("Add", "Sub", "Mul", "Div", "And", "Or", "Xor", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
)
ELEMENTWISE: dict[str, tuple[int, tuple[dict[str, Any], ...]]] = {
    **{name: (1, ({},)) for name in _UNARY if name not in ("Not", "Shape", "Size", "Dropout")},
    **{name: (1, ({},)) for name in ("LeakyRelu", "Elu", "Celu", "Selu", "ThresholdedRelu", "Swish", "HardSigmoid")},
    **{name: (2, ({},)) for name in (*_BINARY, "Max", "Min", "Pow", "PRelu")},
    "Gelu": (1, ({}, {"approximate": "tanh"})),
    "IsInf": (1, ({}, {"detect_negative": 0}, {"detect_positive": 0})),
    "Shrink": (1, ({}, {"bias": 1.5, "lambd": 1.0})),
    "Clip": (1, ({},)),
    "Mod": (2, ({"fmod": 0}, {"fmod": 1})),
    "Cast": (
        1,
        tuple({"to": code} for code, row in ELEMENT_TYPES.items() if row.dtype.kind not in "Oc" and row.bits != 6),
    ),
    "BitShift": (2, ({"direction": "LEFT"}, {"direction": "RIGHT"})),
}
"""Operators without attributes that matter to shapes: how many operands, and attributes to try."""

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

CASES: dict[tuple[str, str], Case] = {
    **{("", name): unary() for name in _UNARY},
    **{("", name): broadcasting() for name in _BINARY},
    **{("", name): variadic for name in ("Max", "Min", "Mean", "Sum")},
    **{("", f"Reduce{name}"): reduction(name not in ("Max", "Min")) for name in _REDUCTIONS},
    **{("", name): along() for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{("", name): along(keepdims=FLAG, select_last_index=FLAG) for name in ("ArgMax", "ArgMin")},
    **{("", name): unary(alpha=NUMBERS) for name in ("LeakyRelu", "Elu", "Celu", "ThresholdedRelu", "Swish")},
    **{("", name): cumulative for name in ("CumSum", "CumProd")},
    ("", "Selu"): unary(alpha=NUMBERS, gamma=NUMBERS),
    ("", "HardSigmoid"): unary(alpha=NUMBERS, beta=NUMBERS),
    ("", "Gelu"): unary(approximate=st.sampled_from(["none", "tanh"])),
    ("", "Shrink"): unary(bias=NUMBERS, lambd=NUMBERS),
    ("", "IsInf"): unary(detect_negative=FLAG, detect_positive=FLAG),
    ("", "SwiGLU"): lambda draw, types: ((x := values(draw, dtype_of(draw, types), draw(shapes())), x[...] * x), {}),
    ("", "PRelu"): unidirectional,
    ("", "Mod"): broadcasting(fmod=FLAG),
    ("", "BitShift"): broadcasting(direction=st.sampled_from(["LEFT", "RIGHT"])),
    ("", "Pow"): power,
    ("", "Where"): where,
    ("", "Clip"): clip,
    ("", "Cast"): cast,
    ("", "CastLike"): cast_like,
    ("", "BitCast"): bit_cast,
    ("", "TopK"): top_k,
    ("", "Reshape"): reshape,
    ("", "Transpose"): transpose,
    ("", "Flatten"): flatten,
    ("", "Concat"): concat,
    ("", "Squeeze"): squeeze,
    ("", "Unsqueeze"): unsqueeze,
    ("", "Split"): split,
    ("", "Expand"): expand,
    ("", "Tile"): tile,
    ("", "Slice"): slice_,
    ("", "Pad"): pad,
    ("", "DepthToSpace"): blocks(squares=True),
    ("", "SpaceToDepth"): blocks(squares=False),
    ("", "EyeLike"): eye,
    ("", "Trilu"): trilu,
    ("", "CenterCropPad"): center_crop_pad,
    ("", "ReverseSequence"): reverse_sequence,
    ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements,
    ("", "GatherND"): gather_nd,
    ("", "ScatterElements"): scatter_elements,
    ("", "ScatterND"): scatter_nd,
    ("", "TensorScatter"): tensor_scatter,
    ("", "OneHot"): one_hot,
    ("", "Compress"): compress,
    ("", "MatMul"): mat_mul,
    ("", "Gemm"): gemm,
    ("", "Einsum"): einsum,
    ("", "Det"): square,
    **{("", f"Global{name}Pool"): channels() for name in ("Average", "Max", "Lp")},
    ("", "BatchNormalization"): channels("any", "any", "any", "positive", training_mode=FLAG),
    ("", "InstanceNormalization"): channels("any", "any"),
    ("", "GroupNormalization"): channels("any", "any", num_groups=st.sampled_from([1, 2, 4])),
    ("", "LpNormalization"): along(1, SOME, p=st.sampled_from([1, 2])),
    ("", "MeanVarianceNormalization"): channels(axes=st.sampled_from([(0, 2), (1,), (0, 1, 2)])),
    ("", "LayerNormalization"): normalized_tail(2),
    ("", "RMSNormalization"): normalized_tail(1),
    ("", "QuantizeLinear"): quantize,
    ("", "DequantizeLinear"): dequantize,
    ("", "DynamicQuantizeLinear"): dynamic,
    ("", "SoftmaxCrossEntropyLoss"): loss,
    ("", "NegativeLogLikelihoodLoss"): loss,
    ("", "DFT"): dft,
    ("", "STFT"): stft,
    ("", "MelWeightMatrix"): mel,
    ("", "TfIdfVectorizer"): grams,
    ("", "RotaryEmbedding"): rotary,
    ("", "CausalConvWithState"): causal_conv,
    ("", "SequenceConstruct"): sequence,
    ("", "SplitToSequence"): split_to_sequence,
    ("", "ConcatFromSequence"): joined,
    ("", "Affine"): unary(alpha=NUMBERS, beta=NUMBERS),
    ("", "Scale"): unary(scale=NUMBERS),
    **{("", name): features(alpha=0.5, beta=1.5) for name in ("ScaledTanh", "ParametricSoftplus")},
    ("", "ImageScaler"): channels(scale=NUMBERS),
    ("", "Crop"): lambda draw, types: ((values(draw, dtype_of(draw, types), (1, 2, 4, 5)),), {"border": (1, 0, 2, 1)}),
    ("ai.onnx.ml", "ArrayFeatureExtractor"): picked,
    ("ai.onnx.ml", "Binarizer"): features(None, threshold=0.5),
    ("ai.onnx.ml", "FeatureVectorizer"): lambda draw, types: (
        (*features()(draw, types)[0],),
        {"inputdimensions": (4,)},
    ),
    ("ai.onnx.ml", "Imputer"): imputer,
    ("ai.onnx.ml", "LabelEncoder"): encoder,
    ("ai.onnx.ml", "LinearClassifier"): features(**LINEAR, classlabels_ints=(3, 8), n_outputs=2),
    ("ai.onnx.ml", "LinearRegressor"): features(**LINEAR, targets=2),
    ("ai.onnx.ml", "Normalizer"): features(norm="L2"),
    ("ai.onnx.ml", "OneHotEncoder"): features(0, cats_int64s=(3, 1)),
    ("ai.onnx.ml", "SVMClassifier"): features(**SVM, vectors_per_class=(1, 1), classlabels_ints=(3, 8), n_outputs=2),
    ("ai.onnx.ml", "SVMRegressor"): features(**SVM, n_supports=2),
    ("ai.onnx.ml", "Scaler"): features(offset=(0.5,) * 4, scale=(1.0, 2.0, 3.0, 4.0)),
    ("ai.onnx.ml", "TreeEnsemble"): features(None, **NODE),
    ("ai.onnx.ml", "TreeEnsembleClassifier"): features(
        None, **TREE, **CLASSES, classlabels_int64s=(3, 8), n_outputs=2, opset=3
    ),
    ("ai.onnx.ml", "TreeEnsembleRegressor"): features(None, **TREE, **LEAVES, n_targets=1, opset=3),
    ("ai.onnx.preview.training", "Adagrad"): training(1),
    ("ai.onnx.preview.training", "Adam"): training(2),
    ("ai.onnx.preview.training", "Momentum"): training(1, alpha=0.9, beta=1.0, mode="standard", norm_coefficient=0.125),
    ("com.microsoft", "BiasAdd"): broadcasting(3),
    ("com.microsoft", "ExpandDims"): lambda draw, types: (
        (values(draw, dtype_of(draw, types), draw(shapes(high=4))), np.array(0, np.int32)),
        {},
    ),
    ("com.microsoft", "FusedMatMul"): mat_mul,
    ("com.microsoft", "TransposeMatMul"): mat_mul,
    ("com.microsoft", "GatherND"): gather_nd,
    ("com.microsoft", "Trilu"): trilu,
    ("com.microsoft", "QuantizeLinear"): quantize,
    ("com.microsoft", "DequantizeLinear"): lambda draw, types: dequantize(draw, [d for d in INT8 if d not in types]),
    ("com.microsoft", "MulInteger"): integers_product,
    ("com.microsoft", "QLinearAdd"): quantized(2),
    ("com.microsoft", "QLinearMul"): quantized(2),
    ("com.microsoft", "QLinearLeakyRelu"): quantized(1, alpha=NUMBERS),
    ("com.microsoft", "QLinearWhere"): quantized_where,
    ("com.microsoft", "QLinearConcat"): quantized_concat,
    ("com.microsoft", "QLinearReduceMean"): quantized_mean,
}
"""(domain, operator) -> what to draw for it: all operators that return NumPy for NumPy."""
