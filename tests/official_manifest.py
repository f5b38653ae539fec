"""The official cases that fail, each with its reason. A case that starts to pass fails the suite until it leaves."""

from __future__ import annotations

_GRADIENT = "Gradient differentiates the graph around it: a task of the compiler, not done yet"
_ELEMENTS = "a dimension variable in the type of a sequence's element is taken as one extent for all elements"

FAILS = {
    "test_attention_4d_causal_fp16_expanded": "2 of 192 elements are two float16 units off; ours are nearer to the truth",
    "test_gradient_of_add": _GRADIENT,
    "test_gradient_of_add_and_mul": _GRADIENT,
    "test_sequence_map_add_2_sequences": _ELEMENTS,
    "test_sequence_map_add_2_sequences_expanded": _ELEMENTS,
    "test_sequence_map_extract_shapes": _ELEMENTS,
    "test_sequence_map_extract_shapes_expanded": _ELEMENTS,
    "test_sequence_map_identity_1_sequence_1_tensor": _ELEMENTS,
    "test_sequence_map_identity_1_sequence_1_tensor_expanded": _ELEMENTS,
    "test_sequence_map_identity_2_sequences": _ELEMENTS,
    "test_sequence_map_identity_2_sequences_expanded": _ELEMENTS,
}
