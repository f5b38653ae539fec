"""The module of each operator, so that a look-up imports no others. Written by ``python -m tests.ops.test_index``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

_NAMES: Final[Mapping[tuple[str, ...], str]] = {
    ("activation", ""): """Celu Elu Gelu HardSigmoid HardSwish Hardmax LeakyRelu LogSoftmax Mish PRelu
        ParametricSoftplus Relu ScaledTanh Selu Shrink Sigmoid Softmax Softplus Softsign SwiGLU Swish
        ThresholdedRelu""",
    ("attention", ""): "Attention CausalConvWithState LinearAttention RotaryEmbedding",
    ("attention", "ai.onnx.preview"): "FlexAttention",
    ("cast", ""): "BitCast Cast CastLike",
    ("control", ""): """ConcatFromSequence If Loop Optional OptionalGetElement OptionalHasElement Scan SequenceAt
        SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence""",
    ("conv", ""): "Col2Im Conv ConvTranspose DeformConv",
    ("elementwise", ""): """Abs Acos Acosh Add Affine And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr
        BitwiseXor Ceil Clip Cos Cosh Crop Div Equal Erf Exp Floor GivenTensorFill Greater GreaterOrEqual ImageScaler
        IsInf IsNaN Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal Round Scale Sign Sin Sinh Sqrt
        Sub Sum Tan Tanh Where Xor""",
    ("extensions.images", "ai.onnx.contrib", "com.microsoft.extensions"): "DecodeImage EncodeImage",
    ("extensions.strings", "ai.onnx.contrib", "com.microsoft.extensions"): """Inverse MaskedFill NegPos
        RaggedTensorToSparse SegmentExtraction SegmentSum StringConcat StringEqual StringJoin StringLength StringLower
        StringMapping StringRegexReplace StringRegexSplitWithOffsets StringSplit StringStrip StringToVector StringUpper
        VectorToString""",
    ("extensions.tokenizers", "ai.onnx.contrib", "com.microsoft.extensions"): """BertTokenizer BertTokenizerDecoder
        BpeDecoder GPT2Tokenizer HfBertTokenizer WordpieceTokenizer""",
    ("indexing", ""): """Compress DynamicSlice Gather GatherElements GatherND OneHot ReverseSequence Scatter
        ScatterElements ScatterND Slice TensorScatter Trilu""",
    ("linalg", ""): "Det Einsum Gemm MatMul",
    ("microsoft.attention", "com.microsoft"): """Attention CausalConvWithState LinearAttention LinearAttentionGate
        MultiHeadAttention PackedAttention PackedMultiHeadAttention QAttention RemovePadding RestorePadding""",
    ("microsoft.blocks", "com.microsoft"): """HyperConnectionLowRankMix MatMulNBitsQLoRA MoE MoEGroupRouter
        PackedSparseAttentionIndexerMerge QMoE RMSNormRotary RouterGateUpProj SwiGLU""",
    ("microsoft.fused", ""): "SimplifiedLayerNormalization",
    ("microsoft.fused", "com.microsoft"): """BiasAdd BiasGelu BiasSplitGelu CDist EmbedLayerNormalization ExpandDims
        FastGelu FusedConv FusedGemm FusedMatMul GatherND Gelu GemmFastGelu GroupNorm Inverse NhwcConv NhwcFusedConv
        NhwcMaxPool Pad QuickGelu Range SimplifiedLayerNormalization SkipGroupNorm SkipLayerNormalization
        SkipSimplifiedLayerNormalization TransposeMatMul Trilu Unique""",
    ("microsoft.generation", "com.microsoft"): "BeamSearch GreedySearch Sampling",
    ("microsoft.grouped", "com.microsoft"): """DecoderAttention DecoderMaskedMultiHeadAttention
        DecoderMaskedSelfAttention GroupQueryAttention NGramRepeatBlock""",
    ("microsoft.paged", "com.microsoft"): "DynamicSparseAttention LongformerAttention PagedAttention SparseAttention",
    ("microsoft.position", "com.microsoft"): """GatedRelativePositionBias GemmaRotaryEmbedding MRotaryEmbedding
        RelativePositionBias RotaryEmbedding""",
    ("microsoft.quant", "com.microsoft"): """DequantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul
        GatherBlockQuantized MatMulIntegerToFloat MatMulNBits MulInteger QGemm QLinearAdd QLinearAveragePool
        QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid
        QLinearSoftmax QLinearWhere QuantizeLinear""",
    ("microsoft.ragged", "com.microsoft"): """ConvStateReplay GatedDeltaNet GatedDeltaNetStateReplay
        VarlenCausalConvWithState VarlenNGramHashMapping""",
    ("microsoft.streams", "com.microsoft"): """BranchwiseRMSNorm EngramGate GatedAdd GatedRMSNorm HyperConnectionPostMix
        HyperConnectionPreMix NGramHashMapping ScaledSiLU""",
    ("microsoft.tensors", "com.microsoft"): """BiasDropout BiasSoftmax BitmaskBiasDropout BitmaskDropout ComplexMul
        ComplexMulConj ConvTransposeWithDynamicPads CropAndResize DynamicTimeWarping FusedMatMulActivation GridSample
        Irfft IsAllFinite Rfft SampleOp TorchEmbedding UnfoldTensor""",
    ("microsoft.weights", "com.microsoft"): """GemmFloat8 MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight
        MatMulBnb4 MatMulInteger16 MatMulNBitsMlp MatMulNBitsQkv QEmbedLayerNormalization ReduceSumInteger""",
    ("microsoft.whisper", "com.microsoft"): "WhisperBeamSearch",
    ("ml.features", "ai.onnx.ml"): """ArrayFeatureExtractor Binarizer CastMap CategoryMapper DictVectorizer
        FeatureVectorizer Imputer LabelEncoder LinearClassifier LinearRegressor Normalizer OneHotEncoder Scaler
        ZipMap""",
    ("ml.svm", "ai.onnx.ml"): "SVMClassifier SVMRegressor",
    ("ml.trees", "ai.onnx.ml"): "TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor",
    ("norm", ""): """BatchNormalization Dropout GroupNormalization InstanceNormalization LRN LayerNormalization
        LpNormalization MeanVarianceNormalization RMSNormalization""",
    ("padded", "onnx2jax.padded"): "Compress Loop NonMaxSuppression NonZero Trips Unique",
    ("pool", ""): "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool MaxUnpool",
    ("qonnx", "finn.custom_op.general", "onnx.brevitas", "qonnx.custom_op.general"): """BipolarQuant FloatQuant IntQuant
        Quant Trunc""",
    ("quant", ""): """ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul
        QuantizeLinear""",
    ("random", ""): "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    ("recurrent", ""): "GRU LSTM RNN",
    ("recurrent", "com.microsoft"): "AttnLSTM",
    ("reduce", ""): """ArgMax ArgMin CumProd CumSum NonZero ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
        ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare TopK Unique""",
    ("resize", ""): "Resize Upsample",
    ("shape", ""): """CenterCropPad Concat Constant ConstantOfShape DepthToSpace Expand EyeLike Flatten Identity Pad
        Range Reshape Shape Size SpaceToDepth Split Squeeze Tile Transpose Unsqueeze""",
    ("signal", ""): "BlackmanWindow DFT HammingWindow HannWindow MelWeightMatrix STFT",
    ("text", ""): "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    ("text", "com.microsoft"): "MurmurHash3 Tokenizer",
    ("training", ""): "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    ("training", "ai.onnx.preview.training"): "Adagrad Adam Gradient Momentum",
    ("vision", ""): "AffineGrid GridSample ImageDecoder MaxRoiPool NonMaxSuppression RoiAlign",
}

MODULES: Final[Mapping[tuple[str, str], str]] = {
    (domain, name): module
    for (module, *domains), names in _NAMES.items()
    for domain, name in itertools.product(domains, names.split())
}
"""(domain, operator) -> the module of ``onnx2jax.ops`` that registers all its versions."""
