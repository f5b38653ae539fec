"""Traits of operators, in tables: which need float32 in bfloat16 and float16, and which move or compare strings.

Operators of a user's own say it where they are registered: ``op("Norm", domain="com.example", wide=True)``.
"""

from __future__ import annotations

from typing import Any, Final

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
