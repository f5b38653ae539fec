"""What the signature of an operator's function declares, and traits of operators, in tables.

Traits are which operators need float32 in bfloat16 and float16, and which move or compare strings. Operators of a
user's own say it where they are registered: ``op("Norm", domain="com.example", wide=True)``.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from inspect import Parameter, signature
from types import CodeType
from typing import Any, Final, Literal

FIXTURES: Final = frozenset(
    {"rng", "n_outputs", "opset", "max_trips", "loop_cond", "derivatives", "compiled", "forward_only", "warn", "once"}
    | {"shards", "extents", "wide", "double", "dropped"}
)
"""Keyword-only parameters whose arguments the interpreter supplies, to operators that declare them."""

POSITIVE: Final = frozenset(
    {"blocksize", "chunk_size", "clip", "dilation", "dilations", "group", "hidden_size", "kernel_shape", "num_groups"}
    | {"max_output_entries", "ngram_size", "output_height", "output_width", "p", "pooled_shape", "size", "step"}
    | {"strides"}
)
"""Attributes of ONNX's and onnxruntime's operators whose numbers are positive."""
POSITIVE_IF_REQUIRED: Final = frozenset({"block_size", "kv_num_heads", "num_heads", "q_num_heads"})
"""Attributes of which 0 stands for none where an operator does not require them."""


@functools.cache
def _compiled(annotation: str) -> CodeType:
    return compile(annotation, "<annotation>", "eval")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, evaluated. ``typing.get_type_hints`` took a fifth of this package's import."""
    inner = inspect.unwrap(function)
    scope = getattr(inner, "__globals__", {})
    hints = getattr(function, "__annotations__", {})
    return {k: eval(_compiled(hint), scope) if isinstance(hint, str) else hint for k, hint in hints.items()}


def described(domain: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The fields of an Operator that the signature of its function declares."""
    hints = _hints(function)
    names: dict[Any, list[str]] = {}
    positive = set()
    for p in signature(function).parameters.values():
        names.setdefault(p.kind, []).append(p.name)
        if p.name in POSITIVE or (p.name in POSITIVE_IF_REQUIRED and p.default is p.empty):
            positive.add(p.name)

    def marked(mark: str) -> frozenset[str]:
        return frozenset(k for k, hint in hints.items() if mark in getattr(hint, "__metadata__", ()))

    keywords = frozenset(names.get(Parameter.KEYWORD_ONLY, ()))
    return {
        "inputs": (*names.get(Parameter.POSITIONAL_ONLY, ()), *names.get(Parameter.POSITIONAL_OR_KEYWORD, ())),
        "variadic": names.get(Parameter.VAR_POSITIONAL, [None])[0],
        "attributes": keywords - FIXTURES,
        "static": marked("static"),
        "may_be_traced": marked("may be traced"),
        "relative": marked("relative"),
        "shaped": marked("shaped"),
        "may_be_empty": marked("may be empty"),
        "fixtures": keywords & FIXTURES,
        "choices": {k: typing.get_args(hint) for k, hint in hints.items() if typing.get_origin(hint) is Literal},
        "positive": frozenset(positive) & keywords if domain in ("", "com.microsoft") else frozenset(),
        "together": getattr(function, "together", None),
    }


WIDE: Final = {
    "": """
        BitCast Cosh CumProd CumSum DFT Det DynamicQuantizeLinear Erf Exp GroupNormalization InstanceNormalization LRN
        LayerNormalization Log LogSoftmax LpNormalization LpPool GlobalLpPool MeanVarianceNormalization
        NegativeLogLikelihoodLoss Pow RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
        ReduceMean ReduceProd ReduceSum ReduceSumSquare STFT SimplifiedLayerNormalization Sinh Softmax
        SoftmaxCrossEntropyLoss Softplus Sqrt Tanh""",
    "ai.onnx.ml": """
        ArrayFeatureExtractor Binarizer FeatureVectorizer Imputer LabelEncoder LinearClassifier LinearRegressor
        Normalizer OneHotEncoder SVMClassifier SVMRegressor Scaler TreeEnsemble TreeEnsembleClassifier
        TreeEnsembleRegressor""",
    "com.microsoft": """
        BiasSoftmax BranchwiseRMSNorm CDist DynamicQuantizeLSTM DynamicQuantizeMatMul GatedRMSNorm GroupNorm Irfft Rfft
        SampleOp Sampling SimplifiedLayerNormalization SkipGroupNorm SkipLayerNormalization
        SkipSimplifiedLayerNormalization""",
}
"""Operators by domain whose operands and results are float32.

Norms, long sums, losses, exponentials and logarithms, and operators that quantize activations by their range, where
rounding would flip 8-bit codes.
"""

EXACT: Final = {
    **{("", name): ("A", "B") for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod")},
    **{("", name): ("X",) for name in ("Ceil", "Floor", "IsInf", "NonZero", "Round", "TopK")},
    **{("", name): ("data",) for name in ("ArgMax", "ArgMin")},
    **{("", name): ("input",) for name in ("BitCast", "CastLike", "Cos", "Hardmax", "Sin", "Tan")},
    ("", "DequantizeLinear"): ("x_scale",),
    ("", "GridSample"): ("grid",),
    ("", "MaxRoiPool"): ("rois",),
    ("", "NonMaxSuppression"): ("boxes", "scores"),
    ("", "OneHot"): ("indices",),
    ("", "QuantizeLinear"): ("y_scale",),
    ("", "RoiAlign"): ("rois",),
    **{("ai.onnx.ml", name): ("X",) for name in ("Binarizer", "Imputer", "LabelEncoder", "OneHotEncoder")},
    **{("ai.onnx.ml", f"TreeEnsemble{end}"): ("X",) for end in ("", "Classifier", "Regressor")},
    ("com.microsoft", "CropAndResize"): ("rois", "crop_size"),
    ("com.microsoft", "GatherBlockQuantized"): ("scales",),
    ("com.microsoft", "GridSample"): ("Grid",),
    ("com.microsoft", "MatMulNBits"): ("scales",),
}
"""Inputs that stay float32, with what they are computed from: angles, coordinates, scales of quantisation, and what is
compared, ranked, looked up or truncated, where a rounded 257 would be another position or id.

So do all inputs whose values decide shapes (``Static``) and what is cast to an integer or a string.
"""

MOVES: Final = {
    "": "Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze",
    "ai.onnx.ml": "ArrayFeatureExtractor",
}
"""Operators by domain that move elements, strings too, and compute nothing."""

STRINGS: Final = {"LabelEncoder": "keys_strings", "OneHotEncoder": "cats_strings"}
"""Operators of ai.onnx.ml that compare strings, with the attribute that lists those."""

TRAITS: Final[dict[tuple[str, str], dict[str, Any]]] = {}
"""(domain, operator) -> traits of these tables, beside those that the operator's registration sets."""

for _tables, _trait in ((WIDE, "wide"), (MOVES, "moves")):
    for _domain, _names in _tables.items():
        for _name in _names.split():
            TRAITS.setdefault((_domain, _name), {})[_trait] = True
for _name, _attribute in STRINGS.items():
    TRAITS.setdefault(("ai.onnx.ml", _name), {})["strings"] = _attribute
for _key, _inputs in EXACT.items():
    TRAITS.setdefault(_key, {})["exact"] = _inputs
