"""Every com.microsoft operator against onnxruntime's own schema: what it takes, what it gives, its attributes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

import onnx2jax
from onnx2jax.ir import binding, signatures
from onnx2jax.ops import registry
from onnx2jax.ops.registry import Operator
from tests.ops.test_microsoft import MICROSOFT, onnxruntime_says, real
from tests.ops.test_microsoft_types import BYTES, IMAGE, SCALE, TABLE, ZERO
from tests.support.helpers import run_op

ELSEWHERE = {"SimplifiedLayerNormalization"}
"""Operators that onnxruntime documents in ONNX's own domain; it runs them in both."""
SCHEMAS = {
    s.name: s
    for s in onnxruntime_state.get_all_operator_schema()
    if s.domain == ("" if s.name in ELSEWHERE else MICROSOFT)
}
SUPPORTED = sorted(onnx2jax.supported()[MICROSOFT].keys() & SCHEMAS.keys())
YOUNG = {
    *("ConvStateReplay", "GatedDeltaNetStateReplay", "HyperConnectionLowRankMix", "MatMulNBitsQLoRA"),
    *("MoEGroupRouter", "PackedSparseAttentionIndexerMerge", "RMSNormRotary", "RouterGateUpProj", "SwiGLU"),
}
"""Operators that onnxruntime 1.32 has added."""
KINDS = {"FLOAT": float, "INT": int, "STRING": str, "FLOATS": tuple, "INTS": tuple, "STRINGS": tuple}
FILTERED = ["Attention", "MultiHeadAttention", "QAttention", "DecoderAttention", "DecoderMaskedMultiHeadAttention"]
FILTERED += ["DecoderMaskedSelfAttention", "PackedMultiHeadAttention"]
SPECIAL = ["translate", "no_speech", "transcribe", "start_of_lm", "no_timestamps", "beginning_timestamp"]
TEXT_ALONE = {
    ("DequantizeLinear", "axis"): 1,
    ("QuantizeLinear", "axis"): 1,
    ("RotaryEmbedding", "scale"): 1.0,
    **{(name, "mask_filter_value"): -10000.0 for name in FILTERED},
    ("MRotaryEmbedding", "scale"): 1.0,
    ("PagedAttention", "qk_norm_epsilon"): 1e-6,
    **{("WhisperBeamSearch", f"{name}_token_id"): -1 for name in SPECIAL},
}
"""Defaults that only the text of the schema or the kernel says; all others there are 0, empty, or none."""


def test_operators_missing_in_the_installed_schemas_are_recent() -> None:
    assert onnx2jax.supported()[MICROSOFT].keys() - SCHEMAS.keys() <= YOUNG


@pytest.mark.parametrize("name", SUPPORTED)
def test_signature(name: str) -> None:
    operator = registry.resolve(MICROSOFT, name, 1)
    assert operator is not None
    assert list(_problems(SCHEMAS[name], operator)) == []


def test_string_operators() -> None:
    takes = {
        name: [i for i, f in enumerate(SCHEMAS[name].inputs) if "tensor(string)" in f.types]
        for name in SUPPORTED
        if name != "GridSample"  # strings are refused, there
    }
    assert {n for n, places in takes.items() if places} == signatures._FIRST_MAY_BE_STRINGS[MICROSOFT]
    assert all(places in ([], [0]) for places in takes.values())


LEFT_OUT = {"CausalConvWithState": {"state_update"}, "DynamicSparseAttention": {"validation_status"}}
"""Outputs that onnxruntime 1.32 has added, for CUDA alone; a node that asks for one is refused."""
NEWER = {
    "DynamicSparseAttention": {"committed_length", "key_scale", "value_scale", "output_bf16"},
    "GatedAdd": {"gate_weight"},
    "GatedDeltaNet": {"gate_lower_bound"},
    "VarlenCausalConvWithState": {"kernel_delta", "previous_mask", "delta_offset", "group_size"},
    "CausalConvWithState": {
        "input_channel_offset",
        "input_channels",
        "state_channels_last",
        "state_length",
        "state_update_capacity",
    },
    "GroupQueryAttention": {"query_seqlens", "q_norm_epsilon", "k_norm_epsilon"},
    "MoE": {"swiglu_limit_after_activation"},
    "QMoE": {"swiglu_limit_after_activation"},
}
"""What onnxruntime 1.32 has added, and an older one does not know."""


def _problems(schema: Any, operator: Operator) -> Iterator[str]:
    """What the operator's signature says otherwise than the schema."""
    formals = {f.name: f.option.name for f in schema.inputs}
    variadic = [n for n, option in formals.items() if option == "Variadic"]
    newer = NEWER.get(schema.name, set()) - formals.keys() - schema.attributes.keys()
    takes = [n for n in (*operator.inputs, *filter(None, [operator.variadic])) if n not in newer]
    takes = [n.removesuffix("_") for n in takes]  # of what is a word of Python's
    if takes != list(formals) or [operator.variadic] != (variadic or [None]):
        yield f"takes {takes}, in the schema {formals}"
    own = set(inspect.signature(operator.function).parameters) if operator.function else set()
    attributes = operator.attributes | (own & schema.attributes.keys())  # one is called as a fixture is
    if attributes - newer != schema.attributes.keys():
        yield f"has attributes {sorted(attributes)}, in the schema {sorted(schema.attributes)}"
    required = {n for n, option in formals.items() if option == "Single"}
    required |= {n for n, attribute in schema.attributes.items() if attribute.required}
    ours = {n.removesuffix("_") for n in binding.required(operator)} | (required & operator.fixtures)
    if ours != required:
        yield f"requires {sorted(ours)}, the schema {sorted(required)}"
    defaults = {n: p.default for n, p in inspect.signature(operator.function).parameters.items()}
    for attribute in schema.attributes.values():
        ours = defaults.get(attribute.name)
        if attribute.name not in required and not _same(ours, _default(schema.name, attribute)):
            yield f"{attribute.name} is {ours!r} by default, not {_default(schema.name, attribute)!r}"
        if ours not in (None, inspect.Parameter.empty) and type(ours) is not KINDS[attribute.type.name]:
            yield f"{attribute.name} is {ours!r} by default, which is no {attribute.type.name}"


def _default(name: str, attribute: Any) -> Any:
    """The default of an attribute as it would reach the operator; None when there is none, neither in the text."""
    if not attribute._default_value:
        return TEXT_ALONE.get((name, attribute.name))
    value = onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(attribute._default_value))
    return value.decode() if isinstance(value, bytes) else value


def _same(ours: Any, default: Any) -> bool:
    if default is None:
        return not ours
    return bool(np.float32(ours) == np.float32(default)) if isinstance(default, float) else bool(ours == default)


MORE = {"GroupQueryAttention": {"qk_output": 1}, "DecoderMaskedMultiHeadAttention": {"output_qk": 1}}
"""Attributes that all outputs need."""


@pytest.mark.parametrize("name", sorted(TABLE.keys() & SCHEMAS.keys()))
def test_outputs(name: str) -> None:
    """As many as the schema has."""
    inputs, _, attributes = TABLE[name]
    most = SCHEMAS[name].max_output - sum(f.name in LEFT_OUT.get(name, ()) for f in SCHEMAS[name].outputs)
    options = {**attributes, **MORE.get(name, {}), "domain": MICROSOFT, "n_outputs": most}
    results = jax.eval_shape(lambda: run_op(name, *inputs, **options))  # staged, not computed
    assert (len(results) if isinstance(results, tuple) else 1) == most


SIGMOID, SELU = {"activation": "HardSigmoid"}, {"activation": "Selu"}
NONE = np.zeros((), np.uint8)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes"),
    [
        ("FusedConv", [IMAGE, real(4, 4, 3, 3)], {**SIGMOID, "group": 2, "activation_params": (0.3, 0.4)}),
        ("FusedGemm", [real(3, 4), real(4, 5)], {**SIGMOID, "activation_alpha": 0.3, "activation_beta": 0.4}),
        ("FusedGemm", [real(3, 4), real(4, 5)], {**SELU, "activation_alpha": 1.2, "activation_gamma": 0.7}),
        ("QLinearSoftmax", [BYTES, SCALE, None, SCALE, ZERO], {"opset": 13}),
    ],
)
def test_operators_missing_in_the_tables(name: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    """Groups, each parameter of a fused activation, an empty input before others."""
    (expected,) = onnxruntime_says(name, inputs, 1, attributes)
    result = run_op(name, *inputs, domain=MICROSOFT, **attributes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_softmax_of_no_opset_is_rejected() -> None:
    softmax: Any = registry.resolve(MICROSOFT, "QLinearSoftmax", 1)
    with pytest.raises(ValueError, match=r"opset \(0\) has no Softmax"):
        softmax.function(BYTES, SCALE, None, SCALE, ZERO, axis=-1, opset=0)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("MulInteger", [BYTES, None, BYTES, ZERO]),
        ("QLinearAdd", [BYTES, SCALE, None, BYTES, SCALE, None, SCALE, ZERO]),
        ("QLinearSigmoid", [BYTES, SCALE, None, SCALE, ZERO]),
    ],
)
def test_an_empty_zero_point_is_zero(name: str, inputs: list[Any]) -> None:
    spelt = run_op(name, *(NONE if x is None else x for x in inputs), domain=MICROSOFT)
    np.testing.assert_array_equal(run_op(name, *inputs, domain=MICROSOFT), spelt)


def test_omitted_parameters_keep_their_position() -> None:
    """beta alone is not taken for alpha."""
    a = np.array([[1.0]], np.float32)
    y = run_op("FusedGemm", a, a, domain=MICROSOFT, activation_beta=0.25, **SIGMOID)
    np.testing.assert_allclose(y, [[0.2 + 0.25]], rtol=1e-6)
