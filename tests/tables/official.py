"""The official cases that fail, are no one program, or cannot be traced, to which the tests hold them; and lanes."""

from __future__ import annotations

FAILS: dict[str, str] = {}
"""Cases that fail, each with its reason. One that starts to pass fails the suite until it leaves."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"test_{name}" for name in text.split())


_STRINGS = _names(
    """
        ai_onnx_ml_label_encoder_string_int ai_onnx_ml_label_encoder_string_int_no_default
        ai_onnx_ml_label_encoder_tensor_mapping ai_onnx_ml_label_encoder_tensor_value_only_mapping equal_string
        equal_string_broadcast regex_full_match_basic regex_full_match_email_domain regex_full_match_empty
        string_concat string_concat_broadcasting string_concat_empty_string string_concat_utf8
        string_concat_zero_dimensional string_split_basic string_split_consecutive_delimiters
        string_split_empty_string_delimiter string_split_empty_tensor string_split_maxsplit
        string_split_no_delimiter strnorm_model_monday_casesensintive_lower
        strnorm_model_monday_casesensintive_nochangecase strnorm_model_monday_casesensintive_upper
        strnorm_model_monday_empty_output strnorm_model_monday_insensintive_upper_twodim
        strnorm_model_nostopwords_nochangecase strnormalizer_export_monday_casesensintive_lower
        strnormalizer_export_monday_casesensintive_nochangecase strnormalizer_export_monday_casesensintive_upper
        strnormalizer_export_monday_empty_output strnormalizer_export_monday_insensintive_upper_twodim
        strnormalizer_nostopwords_nochangecase
    """
)
_COUNTED_BY_DATA = _names(
    """
        image_decoder_decode_bmp_rgb image_decoder_decode_jpeg2k_rgb image_decoder_decode_jpeg_bgr
        image_decoder_decode_jpeg_grayscale image_decoder_decode_jpeg_rgb image_decoder_decode_png_rgb
        image_decoder_decode_pnm_rgb image_decoder_decode_tiff_rgb image_decoder_decode_webp_rgb
        nonmaxsuppression_center_point_box_format nonmaxsuppression_flipped_coordinates
        nonmaxsuppression_identical_boxes nonmaxsuppression_iou_threshold_boundary
        nonmaxsuppression_limit_output_size nonmaxsuppression_single_box nonmaxsuppression_suppress_by_IOU
        nonmaxsuppression_suppress_by_IOU_and_scores nonmaxsuppression_two_batches nonmaxsuppression_two_classes
        nonzero_example unique_sorted_with_axis unique_sorted_with_axis_3d unique_sorted_with_negative_axis
    """
)
STAGED = _STRINGS | _COUNTED_BY_DATA
"""Cases of which a call is no single program: strings, images, and counts that data decide."""

NOT_IN_JIT = {
    "all of its inputs must be known": _COUNTED_BY_DATA
    | _names(
        """
            blackmanwindow blackmanwindow_expanded blackmanwindow_symmetric
            blackmanwindow_symmetric_expanded constantofshape_float_ones constantofshape_int_shape_zero
            constantofshape_int_zeros hammingwindow hammingwindow_expanded hammingwindow_symmetric
            hammingwindow_symmetric_expanded hannwindow hannwindow_expanded hannwindow_symmetric
            hannwindow_symmetric_expanded if_opt loop11 loop13_seq loop16_seq_none
            range_bfloat16_type_positive_delta range_float16_type_positive_delta
            range_float_type_positive_delta range_int32_type_negative_delta
            range_int32_type_negative_delta_expanded unique_bfloat16_sorted_without_axis unique_length_1
            unique_not_sorted_without_axis unique_sorted_without_axis
        """
    ),
    "strings or maps, which no JAX array holds": _STRINGS,
    "no inputs": _names(
        """
            constant optional_has_element_empty_no_input_name_optional_input
            optional_has_element_empty_no_input_name_tensor_input optional_has_element_empty_no_input_optional_input
            optional_has_element_empty_no_input_tensor_input optional_has_element_empty_optional_input
        """
    ),
    "shapes or trips depend on data": _names(
        """
            range_bfloat16_type_positive_delta_expanded range_float16_type_positive_delta_expanded
            range_float_type_positive_delta_expanded
        """
    ),
}
"""Cases that a `jit` of the caller's cannot hold, by the reason."""

_BY_NUMPY = """
    Abs AffineGrid And ArgMax ArgMin ArrayFeatureExtractor BatchNormalization Binarizer BlackmanWindow Ceil Concat
    ConstantOfShape Cos DepthToSpace Det Elu Exp Expand EyeLike Flatten Floor Gather Gemm GlobalMaxPool
    GroupNormalization HammingWindow HannWindow Hardmax LayerNormalization LeakyRelu Log LogSoftmax Loop
    LpNormalization Mean MeanVarianceNormalization Momentum Neg Not OptionalGetElement OptionalHasElement Or PRelu
    RMSNormalization Range Reciprocal ReduceMean Relu Selu SequenceInsert SequenceMap Shape Shrink Sigmoid Sin Size
    Softmax Softplus Softsign SpaceToDepth Sqrt Squeeze Sum Swish Tanh ThresholdedRelu Transpose Trilu Unsqueeze
    Upsample Where Xor
"""
BY_NUMPY = frozenset(_BY_NUMPY.split())
"""Operators whose cases ``run`` computes in NumPy: alone they compile nothing, and show what the others do not."""
