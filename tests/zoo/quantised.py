"""Small nets as onnxruntime's tools rewrite them: quantised, in half precision, fused, optimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from tests.support.saturation import saturates

from .case import Case, Export, Inputs
from .float_nets import batch, net

Rewrite = Callable[[onnx.ModelProto, str, Path], None]
"""From a net, its name, and where to write it."""


def _export(name: str, rewrite: Rewrite, opset: int, folder: Path) -> Export:
    path = folder / "model.onnx"
    rewrite(net(name, opset), name, path)
    kind = onnx.load(path).graph.input[0].type.tensor_type.elem_type
    inputs = [{"x": batch(name, rows).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))} for rows in (5, 2)]
    # without its optimisations onnxruntime's DynamicQuantizeLSTM gives other numbers than with them
    return Export(path, inputs, None if name == R else _as_written(path, inputs))


def _as_written(path: Path, inputs: Sequence[Inputs]) -> list[list[Any]]:
    """What onnxruntime makes of a file, node by node, where it fuses nothing."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [session.run(None, dict(x)) for x in inputs]


def _static(model: onnx.ModelProto, name: str, path: Path, *, kinds: str = "u8s8", **options: Any) -> None:
    """``kinds``: element types of activations and weights."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        rows = iter([{"x": batch(name, 8, seed)} for seed in range(2, 6)])

        def get_next(self) -> Any:
            return next(self.rows, None)

    types = {"u8": "QUInt8", "s8": "QInt8", "u16": "QUInt16", "s16": "QInt16", "s4": "QInt4", "u4": "QUInt4"}
    activation, weight = next((a, b) for a in types for b in types if a + b == kinds)
    options["quant_format"] = QuantFormat[options.get("quant_format", "QDQ")]
    if weight in ("u8", "s8"):  # weights of 7 bits, which do not saturate
        options.setdefault("reduce_range", saturates())
    quantize_static(
        model,
        path,
        Reader(),
        activation_type=QuantType[types[activation]],
        weight_type=QuantType[types[weight]],
        **options,
    )


def _dynamic(model: onnx.ModelProto, _name: str, path: Path, *, weight: str = "QInt8", **options: Any) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(model, path, weight_type=QuantType[weight], reduce_range=saturates(), **options)


def _nbits(model: onnx.ModelProto, _name: str, path: Path, **options: Any) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer, QuantFormat

    options["quant_format"] = QuantFormat[options.get("quant_format", "QOperator")]
    quantizer = MatMulNBitsQuantizer(model, **options)
    quantizer.process()
    onnx.save(quantizer.model.model, path)


def _half(model: onnx.ModelProto, _name: str, path: Path, *, common: bool = False, **options: Any) -> None:
    if common:
        from onnxconverter_common.float16 import convert_float_to_float16
    else:
        from onnxruntime.transformers.float16 import convert_float_to_float16
    onnx.save(convert_float_to_float16(model, **options), path)


def _optimised(model: onnx.ModelProto, _name: str, path: Path, *, level: str, rewrite: Rewrite | None = None) -> None:
    """What a session of onnxruntime saves."""
    import onnxruntime

    if rewrite:
        rewrite(model, _name, path)
        model = onnx.load(path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _fused(model: onnx.ModelProto, _name: str, path: Path, *, kind: str, half: bool = False) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    fused = optimize_model(model, model_type=kind, num_heads=4, hidden_size=32, opt_level=0)
    if half:
        fused.convert_float_to_float16(keep_io_types=True)
    fused.save_model_to_file(str(path))


def _brain(model: onnx.ModelProto, _name: str, path: Path) -> None:
    """Weights in bfloat16, cast where they are read."""
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            stored = onnx.numpy_helper.to_array(tensor).astype(
                onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
            )
            cast = onnx.helper.make_node("Cast", [f"{tensor.name}_stored"], [tensor.name], to=onnx.TensorProto.FLOAT)
            tensor.CopyFrom(onnx.numpy_helper.from_array(stored, cast.input[0]))
            model.graph.node.insert(0, cast)
    onnx.save(model, path)


TOOL, OPTIMISER = "onnxruntime.quantization", "onnxruntime session"
P, C, R, T = "perceptron", "convolutions", "recurrence", "transformer"
# what is said of it, the net, how it is rewritten; the opset where it matters
QUANTISED: Final = (
    ("QDQ u8s8", P, partial(_static)),
    ("QDQ u8s8", C, partial(_static)),
    ("QDQ u8s8", T, partial(_static)),
    ("QDQ u8u8", C, partial(_static, kinds="u8u8")),
    ("QDQ s8s8", C, partial(_static, kinds="s8s8")),
    ("QDQ s8s8", T, partial(_static, kinds="s8s8")),
    ("QDQ u8s8, by channel", P, partial(_static, per_channel=True)),
    ("QDQ u8s8, by channel", C, partial(_static, per_channel=True)),
    ("QDQ u8s8, reduced range", C, partial(_static, reduce_range=True)),
    (
        "QDQ s8s8, symmetric, by channel",
        C,
        partial(_static, kinds="s8s8", per_channel=True, extra_options={"ActivationSymmetric": True}),
    ),
    ("QDQ u8s8, asymmetric weights", P, partial(_static, extra_options={"WeightSymmetric": False})),
    ("QDQ u16s8", C, partial(_static, kinds="u16s8")),
    ("QDQ s16s8", T, partial(_static, kinds="s16s8")),
    ("QDQ u16u16", P, partial(_static, kinds="u16u16")),
    ("QDQ u8s4", P, partial(_static, kinds="u8s4")),
    ("QDQ u8u4, by channel", P, partial(_static, kinds="u8u4", per_channel=True)),
    ("QDQ u8s4", T, partial(_static, kinds="u8s4")),
    ("QOperator u8s8", P, partial(_static, quant_format="QOperator")),
    ("QOperator u8s8", C, partial(_static, quant_format="QOperator")),
    ("QOperator u8u8", C, partial(_static, kinds="u8u8", quant_format="QOperator")),
    ("QOperator s8s8, by channel", C, partial(_static, kinds="s8s8", per_channel=True, quant_format="QOperator")),
    ("QOperator u8s8", T, partial(_static, quant_format="QOperator")),
    ("dynamic s8", P, partial(_dynamic)),
    ("dynamic u8", P, partial(_dynamic, weight="QUInt8")),
    ("dynamic u8", C, partial(_dynamic, weight="QUInt8")),
    ("dynamic s8", R, partial(_dynamic)),
    ("dynamic u8, by channel", R, partial(_dynamic, weight="QUInt8", per_channel=True)),
    ("dynamic s8", T, partial(_dynamic)),
    ("dynamic s8, by channel", T, partial(_dynamic, per_channel=True)),
)
NBITS: Final = (
    ("MatMulNBits 4", P, partial(_nbits, block_size=16, is_symmetric=True)),
    ("MatMulNBits 4, asymmetric", T, partial(_nbits, block_size=32)),
    ("MatMulNBits 8", T, partial(_nbits, bits=8, block_size=32)),
    ("MatMulNBits 4, by QDQ", T, partial(_nbits, block_size=16, quant_format="QDQ")),
)
COMMON_HALVES: Final = (
    ("float16", P, partial(_half, common=True)),
    ("float16, float32 outside", C, partial(_half, common=True, keep_io_types=True)),
)
HALVES: Final = (
    ("float16", T, partial(_half)),
    ("float16, float32 outside", R, partial(_half, keep_io_types=True)),
)
OPTIMISED: Final = (
    *(("basic", name, partial(_optimised, level="BASIC")) for name in (C, T, R)),
    *(("extended", name, partial(_optimised, level="EXTENDED")) for name in (C, T, R)),
    *(("all", name, partial(_optimised, level="ALL")) for name in (T, R)),
    ("extended, of QDQ u8s8", C, partial(_optimised, level="EXTENDED", rewrite=_static)),
    ("extended, of QDQ u8s8", T, partial(_optimised, level="EXTENDED", rewrite=_static)),
    ("extended, of dynamic s8", T, partial(_optimised, level="EXTENDED", rewrite=_dynamic)),
    ("extended, of dynamic s8", R, partial(_optimised, level="EXTENDED", rewrite=_dynamic)),
)


FUSED: Final = (
    ("fused as bert", T, partial(_fused, kind="bert")),
    ("fused as bert, float16", T, partial(_fused, kind="bert", half=True)),
)
SOFTMAX = "onnxruntime's QLinearSoftmax, which it fuses QDQ into, multiplies by floor(1 / y_scale)"
KNOWN: Final[Mapping[str, str]] = {
    "transformer, QDQ u8s8": SOFTMAX,
    "transformer, QDQ s8s8": SOFTMAX,
    "transformer, QDQ u8s4": SOFTMAX,
    "transformer, extended, of QDQ u8s8": SOFTMAX,
    "transformer, MatMulNBits 4, by QDQ": "onnxruntime fuses it into a MatMulNBits that rounds activations to int8",
}
LIGHT: Final = (
    *("perceptron, QDQ u8s8", "convolutions, QDQ u8s8", "perceptron, QDQ u8s8, by channel", "perceptron, QDQ u16u16"),
    *("perceptron, QDQ u8s4", "perceptron, QOperator u8s8", "convolutions, QOperator s8s8, by channel"),
    *("perceptron, dynamic u8", "recurrence, dynamic s8", "transformer, extended"),
)


def _case(family: str, title: str, name: str, rewrite: Rewrite, exporter: str, *needs: str) -> Case:
    full = f"{name}, {title}"
    opset = 21 if "4" in title or "16" in title else 17  # 4 bits and 16 bits are types since 21
    known = {"outputs": KNOWN[full]} if full in KNOWN else {}
    tolerance = 2e-3 if " float16" in full else 1e-4
    make = partial(_export, name, rewrite, opset)
    return Case(family, full, exporter, make, needs, tolerance, known=known, light=full in LIGHT)


COMMON, FLOAT16 = "onnxconverter-common", "onnxruntime.transformers.float16"
CASES: Final = (
    *(_case("quantised", *row, TOOL) for row in QUANTISED),
    *(_case("quantised", *row, TOOL, "onnx_ir") for row in NBITS),
    *(_case("half precision", *row, COMMON, "onnxconverter_common") for row in COMMON_HALVES),
    *(_case("half precision", *row, FLOAT16) for row in HALVES),
    _case("half precision", "bfloat16 weights", T, _brain, "onnx"),
    *(_case("optimised", *row, OPTIMISER) for row in OPTIMISED),
    *(_case("optimised", *row, "onnxruntime.transformers") for row in FUSED),
)

REFUSED: Final = {
    "convolutions, all / onnxruntime session": "writes com.microsoft.nchwc, for the processor that it ran on",
}
