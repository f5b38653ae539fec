"""What operators do not do, or decide where ONNX leaves it open. `make docs` writes it into docs/operators.md.

No limit without a line here: a NotImplementedError in onnx2jax/ops/ that REFUSALS does not name fails the tests.
"""

from __future__ import annotations

ML, MICROSOFT = "ai.onnx.ml", "com.microsoft"

_BOUNDS = "known indices out of range raise; traced ones read NaN (integers: the extreme of their type)"
_SCATTER = "known indices out of range raise; traced ones write nothing"
_PRODUCT = "reduction mul has a gradient only where the indices are known and distinct"
_DATA = "its output's shape depends on data"
_SYMBOLIC = "symbolic dimensions are divided by positive numbers only"
_FLOAT6 = "float6 on the host only: XLA has none"
_NO_BOX = "a loop whose number of trips is traced has neither scan outputs nor states that change type under jit"
_STRINGS = "strings on the host"
_LABELS = "class labels that are strings are looked up on the host"
_GENERATOR = "the stream is JAX's: ONNX fixes no generator, not even for a given seed"
_CLIP = "clip bounds what enters each activation, in LSTM the cell state before h too, as the specification says"
_PROBIT = "PROBIT of a single score for two classes is refused: undefined"
_SHARED = "do_rotary, rotary_embedding_dim and a shared cache buffer are refused: use GroupQueryAttention"
_MASKS = "masks: [batch], [2 * batch], [batch, keys], of rank 3 and 4"
_ACTIVATIONS = "activations: Clip and those of the recurrent operators"
_OPEN = "float: NaN and what leaves the range are undefined in ONNX, here as on x86 and in onnxruntime"
_WITHDRAWN = "experimental, withdrawn by ONNX 1.5"
_NO_TEXT = "no strings, although the schema lists them"

LIMITS: dict[tuple[str, str], str] = {
    ("", "Affine"): _WITHDRAWN,
    ("", "Attention"): "always compiled; a query that may attend to nothing gives zeros",
    ("", "BatchNormalization"): "below opset 14 the number of outputs says whether it trains",
    ("", "Bernoulli"): _GENERATOR,
    ("", "BitCast"): "no strings; types of unlike width are refused",
    ("", "BitShift"): "by the width or more: 0",
    ("", "Cast"): f"{_OPEN}; strings and float6 on the host; complex numbers are not cast",
    ("", "CastLike"): f"{_OPEN}; strings and float6 on the host",
    ("", "Clip"): "an absent bound is the type's own extreme: infinity becomes finite there",
    ("", "Col2Im"): _NO_TEXT,
    ("", "Compress"): f"{_DATA}: `condition` must be known",
    ("", "Crop"): _WITHDRAWN,
    ("", "DequantizeLinear"): f"{_FLOAT6}; a float8e8m0 scale needs output_dtype",
    ("", "Div"): f"integers by zero give -1 (all bits set), as XLA has it; {_SYMBOLIC}",
    ("", "Dropout"): "training draws from the caller's key, or from the stream of `seed`",
    ("", "Einsum"): "the result may not drop the dimensions of an ellipsis",
    ("", "Gather"): _BOUNDS,
    ("", "GatherElements"): _BOUNDS,
    ("", "GatherND"): _BOUNDS,
    ("", "GivenTensorFill"): _WITHDRAWN,
    ("", "GridSample"): _NO_TEXT,
    ("", "GRU"): _CLIP,
    ("", "If"): "a traced condition needs branches of equal types and shapes; strings on the host",
    ("", "ImageDecoder"): "needs the extra `image` (pillow), and decodes what pillow does",
    ("", "ImageScaler"): _WITHDRAWN,
    ("", "Loop"): f"{_NO_BOX}; strings in its states on the host",
    ("", "LSTM"): _CLIP,
    ("", "MelWeightMatrix"): "the edges are spaced as the runtimes space them: ONNX leaves it open",
    ("", "Mod"): f"integers by zero give the dividend, as XLA has it; {_SYMBOLIC}",
    ("", "Multinomial"): _GENERATOR,
    ("", "NonMaxSuppression"): f"{_DATA}; not differentiable",
    ("", "NonZero"): _DATA,
    ("", "Pad"): "without a value float8e8m0, which has no 0, is padded with 2^-127",
    ("", "ParametricSoftplus"): _WITHDRAWN,
    ("", "Pow"): "integers to a negative power truncate; the derivative by Y is 0 where X < 0",
    ("", "QuantizeLinear"): _FLOAT6,
    ("", "RandomNormal"): _GENERATOR,
    ("", "RandomNormalLike"): _GENERATOR,
    ("", "RandomUniform"): _GENERATOR,
    ("", "RandomUniformLike"): _GENERATOR,
    ("", "ReduceMax"): "of nothing: the least of the type, -inf for floats",
    ("", "ReduceMean"): "of nothing: NaN; of no integers it raises",
    ("", "ReduceMin"): "of nothing: the greatest of the type, inf for floats",
    ("", "RegexFullMatch"): "needs the extra `re2` (google-re2)",
    ("", "Resize"): f"linear and cubic interpolate numbers only; {_STRINGS} in nearest",
    ("", "RNN"): _CLIP,
    ("", "Scale"): _WITHDRAWN,
    ("", "ScaledTanh"): _WITHDRAWN,
    ("", "Scan"): "Scan-8 over an empty batch raises",
    ("", "Scatter"): _SCATTER,
    ("", "ScatterElements"): f"{_SCATTER}; {_PRODUCT}",
    ("", "ScatterND"): f"{_SCATTER}; {_PRODUCT}",
    ("", "SequenceAt"): "a traced position needs elements of one shape",
    ("", "SequenceMap"): "unrolled: one copy of the body for each element",
    ("", "SimplifiedLayerNormalization"): "onnxruntime's; stash_type float32 or float64",
    ("", "StringNormalizer"): "Unicode's default case mapping: locales tr, az, lt are refused where case changes",
    ("", "TfIdfVectorizer"): f"{_STRINGS}; an n-gram listed twice raises",
    ("", "TopK"): "sorted=0 sorts as well; NaN counts as greatest",
    ("", "Unique"): f"{_DATA}; NaN are equal to each other",
    ("", "Where"): _STRINGS,
    (ML, "ArrayFeatureExtractor"): _STRINGS,
    (ML, "LabelEncoder"): _STRINGS,
    (ML, "LinearClassifier"): f"{_LABELS}; {_PROBIT}",
    (ML, "OneHotEncoder"): f"{_STRINGS}; with zeros=0 the input must be known, since an unknown category raises",
    (ML, "SVMClassifier"): f"{_LABELS}; {_PROBIT}",
    (ML, "TreeEnsembleClassifier"): f"{_LABELS}; {_PROBIT}; one score a row against several base_values is refused",
    (
        "ai.onnx.preview.training",
        "Gradient",
    ): "the elements of y count as their sum; values it does not name are constants",
    (MICROSOFT, "Attention"): f"{_SHARED}; {_MASKS}",
    (MICROSOFT, "CDist"): "metrics: sqeuclidean and euclidean",
    (MICROSOFT, "FusedConv"): _ACTIVATIONS,
    (MICROSOFT, "FusedGemm"): f"{_ACTIVATIONS}; activation_gamma is refused",
    (MICROSOFT, "GatherBlockQuantized"): "bits: 2, 4 and 8; an index out of range gives zeros",
    (MICROSOFT, "GroupQueryAttention"): "a quantized cache and a sliding one are refused",
    (MICROSOFT, "MatMulNBits"): "bits: 2, 4 and 8; weight_prepacked is refused; accuracy_level is never needed",
    (MICROSOFT, "MultiHeadAttention"): f"past_sequence_length and cache_indirection are refused; {_MASKS}",
    (MICROSOFT, "NhwcFusedConv"): _ACTIVATIONS,
    (MICROSOFT, "QAttention"): f"{_SHARED}; {_MASKS}",
    (MICROSOFT, "RotaryEmbedding"): "is_packed_batching and a scale other than 1 are refused",
    (MICROSOFT, "SimplifiedLayerNormalization"): "stash_type float32 or float64",
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): "the second output (mean) is never given",
    (MICROSOFT, "Tokenizer"): "needs the extra `re2` (google-re2)",
    (MICROSOFT, "Unique"): _DATA,
}
"""(domain, operator) -> what it does not do, or decides itself."""

REFUSALS: dict[str, tuple[tuple[str, str], ...]] = {
    "math._on_dims": (("", "Div"), ("", "Mod")),
    "microsoft.activate": ((MICROSOFT, "FusedConv"), (MICROSOFT, "FusedGemm"), (MICROSOFT, "NhwcFusedConv")),
    "microsoft.fused_gemm": ((MICROSOFT, "FusedGemm"),),
    "microsoft.simplified_layer_normalization": (
        ("", "SimplifiedLayerNormalization"),
        (MICROSOFT, "SimplifiedLayerNormalization"),
    ),
    "microsoft.cdist": ((MICROSOFT, "CDist"),),
    "microsoft_quant.unpack": ((MICROSOFT, "MatMulNBits"), (MICROSOFT, "GatherBlockQuantized")),
    "microsoft_quant.matmul_nbits": ((MICROSOFT, "MatMulNBits"),),
    "text.string_normalizer": (("", "StringNormalizer"),),
    "vision.image_decoder": (("", "ImageDecoder"),),
    "scores.two_scores": ((ML, "LinearClassifier"), (ML, "SVMClassifier"), (ML, "TreeEnsembleClassifier")),
    "microsoft_attention.padding_bias": (
        *((MICROSOFT, name) for name in ("Attention", "MultiHeadAttention", "QAttention")),
    ),
    "microsoft_attention.self_attention": ((MICROSOFT, "Attention"), (MICROSOFT, "QAttention")),
    "microsoft_attention.multi_head_attention": ((MICROSOFT, "MultiHeadAttention"),),
    "microsoft_attention.ms_rotary_embedding": ((MICROSOFT, "RotaryEmbedding"),),
    "microsoft_attention.group_query_attention": ((MICROSOFT, "GroupQueryAttention"),),
}
"""Every function in ops/ that raises NotImplementedError, and the operators whose line above says so."""

HOST_ONLY = {
    "string": "no JAX array holds text",
    "float6": "XLA compiles nothing with them",
}
"""Element types that no compiled function takes."""

TYPES_LEFT_OUT = {("", "Col2Im"): ("string",), ("", "GridSample"): ("string",)}
"""(domain, operator) -> element types of the schema that it does not take."""
