"""The domain com.microsoft: operators that onnxruntime's optimizers, quantizers and model builders emit.

The shapes of their operands, in a table: what broadcasting would accept, and onnxruntime does not.

A name is an extent, the same in all operands of a node; a name of an attribute is that attribute's value, a number
itself, and ``name?`` may also be 1. ``|`` separates the shapes that an operand may have. Operands that are not listed
are checked where they are used, or may have any shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..arrays import check_shapes
from ..registry import wrap

MICROSOFT: Final = "com.microsoft"

_ROWS = "rows width|batch tokens width"
_IDS, _VECTOR = "batch tokens", "width"
_EMBEDDED = {"input_ids": _IDS, "segment_ids": _IDS, "mask": _IDS}
_SKIPPED = {"input": "batch tokens width|tokens width", "skip": "batch? tokens width|tokens width"}
_SKIPPED |= {"gamma": _VECTOR, "bias": _VECTOR}
_SCALED = dict.fromkeys(("W_scale", "W_zero_point", "R_scale", "R_zero_point"), "directions|directions gates")

SHAPES: Final[Mapping[str, Mapping[str, str]]] = {
    "BiasGelu": {"B": "width"},
    "BiasSplitGelu": {"X": "batch tokens width", "bias": "width"},
    "CDist": {"A": "rows width", "B": "others width"},
    "ConvTransposeWithDynamicPads": {"Pads": "pads"},
    "CausalConvWithState": {"bias": "channels"},
    "CropAndResize": {"crop_size": "2"},
    "DecoderAttention": {"bias": "size"},
    "DecoderMaskedSelfAttention": {"mask_index": "*|* *|* * *"},
    "DynamicQuantizeLSTM": {
        "X": "steps batch size",
        "W": "directions size gates",
        "R": "directions hidden_size gates",
        "B": "directions biases",
        **_SCALED,
    },
    "EmbedLayerNormalization": _EMBEDDED | {"gamma": _VECTOR, "beta": _VECTOR},
    "FastGelu": {"bias": "width"},
    "GroupQueryAttention": {"total_sequence_length": "|1"},
    "LinearAttention": dict.fromkeys(("query", "key", "value", "decay", "beta"), "batch tokens *"),
    "MatMulNBits": {"B": "N blocks width", "scales": "N blocks|*", "zero_points": "N *|*", "bias": "N"},
    "MatMulNBitsMlp": {"norm_scale": "K", "gate_bias": "N", "up_bias": "N"},
    "MatMulNBitsQkv": {"norm_scale": "K", "q_bias": "Nq", "k_bias": "Nkv", "v_bias": "Nkv"},
    "MoE": {"input": _ROWS},
    "PagedAttention": {"cumulative_sequence_length": "ends", "past_seqlens": "batch"},
    "QAttention": {"input": "batch tokens features", "weight": "features hidden", "bias": "hidden"},
    "QEmbedLayerNormalization": _EMBEDDED | {"gamma_quant": _VECTOR, "beta_quant": _VECTOR},
    "QGemm": {"A": "* *", "B": "* *"},
    "QMoE": {"input": _ROWS},
    "SkipLayerNormalization": _SKIPPED | {"beta": _VECTOR},
    "SkipSimplifiedLayerNormalization": _SKIPPED,
    "SparseAttention": {"total_sequence_length": "|1"},
    "Unique": {"x": "size"},
}
"""Operator -> operand -> its shape. ``*`` is an extent of its own."""


def check_operands(shapes: Mapping[str, str], operands: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """Raise ValueError unless operands have their shapes."""
    extents = {name: value for name, value in attributes.items() if type(value) is int}
    for name, allowed in shapes.items():
        value = operands.get(name)
        if value is None:
            continue
        matches = [shape.split() for shape in allowed.split("|") if len(shape.split()) == value.ndim]
        if not matches:
            wanted = " or ".join(f"[{', '.join(shape.split())}]" for shape in allowed.split("|"))
            raise ValueError(f"{name} must have the shape {wanted} (it has {value.shape})")
        extents |= {n: int(n) for n in matches[0] if n.isdigit()}
        names = [f"{name}_{axis}" if n == "*" else n for axis, n in enumerate(matches[0])]
        check_shapes(extents, **{name: (value, " ".join(names))})


def checked(function: Callable[..., Any], inputs: tuple[str, ...], shapes: Mapping[str, str]) -> Callable[..., Any]:
    """The function of an operator, with its operands checked first."""

    @functools.wraps(function)
    def call(*values: Any, **attributes: Any) -> Any:
        check_operands(shapes, dict(zip(inputs, values, strict=False)), attributes)
        return function(*values, **attributes)

    return call


for _name, _shapes in SHAPES.items():
    wrap(MICROSOFT, _name, functools.partial(checked, shapes=_shapes))
