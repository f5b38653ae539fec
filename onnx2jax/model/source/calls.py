"""Calls of operators that have no plain form in jax.numpy or jax.nn: imports, operands, attributes, and why."""

from __future__ import annotations

import inspect
import keyword
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...errors import UnsupportedError
from ...ir.graph import Node
from ...ops.registry import Operator
from ...proto.messages import unused_name
from .code import string
from .forms import NodeCall
from .values import constant, python

WHY: Final = {
    "AveragePool": "counts of padded windows, ceil_mode",
    "BatchNormalization": "in inference, with the file's statistics",
    "Cast": "floats to integers truncate, out of range as on x86",
    "Clip": "its gradient is 0 at the bounds",
    "Conv": "lax.conv_general_dilated, in the form that suits the device",
    "ConvTranspose": "output_padding and asymmetric pads",
    "Div": "integers truncate",
    "DynamicQuantizeLSTM": "quantised weights",
    "Gelu": "in half precision rounded once",
    "GRU": "gates in ONNX's order, directions, sequence lengths",
    "HardSigmoid": "its gradient is 0 at the bounds",
    "LSTM": "gates in ONNX's order, directions, sequence lengths",
    "LayerNormalization": "statistics in float32; its mean and inverse deviation are results, too",
    "MaxPool": "pads, dilations and ceil_mode of lax.reduce_window",
    "Pow": "the dtype of the base; no NaN in the derivative with respect to the exponent",
    "Reshape": "extents that are known when JAX traces",
    "Resize": "coordinates and rounding that jax.image has not",
    "RNN": "directions, sequence lengths",
    "ScatterElements": "out-of-range indices write nothing",
    "ScatterND": "out-of-range indices write nothing",
    "Slice": "bounds that are known when it is traced",
    "TopK": "sorted=0 and NaN as in ONNX",
}
"""Operator -> what jax.numpy and jax.nn have no function for."""
DEFAULT_WHY: Final = "no function of jax.numpy has its semantics"
SHAPES_WHY: Final = "with shapes, in NumPy while JAX traces"
SUPPLIED: Final = frozenset(
    {"n_outputs", "opset", "rng", "once", "warn", "double", "dropped", "extents", "wide", "shards"}
)
"""Fixtures that a call can have."""


ATTRIBUTES: Final = 400
"""Characters of attributes that a call may have; longer ones are in a file."""
LONGEST: Final = 100
"""Characters of a single attribute, for which the same holds."""
TUPLES: Final = frozenset({"Expand", "Pad", "Reshape", "Slice", "Squeeze", "Tile", "Unsqueeze"})
"""Operators whose functions take tuples of integers."""
_NARROW: Final = (
    "Abs Add Affine AveragePool BatchNormalization Celu Clip Conv ConvTranspose Crop DepthToSpace DequantizeLinear "
    "Div Elu Equal Erf Exp Expand Flatten GRU Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater "
    "GroupNormalization HardSigmoid HardSwish ImageScaler InstanceNormalization LRN LSTM LayerNormalization "
    "LeakyRelu LogSoftmax LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg "
    "PRelu Pow RMSNormalization ReduceL2 ReduceMax ReduceMean ReduceSum Reshape Resize Selu Sigmoid Softmax "
    "Softplus Softsign SpaceToDepth Sqrt Squeeze Sub Sum Tanh Transpose Unsqueeze"
)
NARROW: Final = frozenset(_NARROW.split())
"""Operators whose functions give the same numbers in 32-bit mode."""
_SEVERAL: Final = (
    "Attention BiasDropout BitmaskBiasDropout BitmaskDropout CausalConvWithState DecoderAttention "
    "DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention Dropout DynamicQuantizeLSTM DynamicQuantizeLinear "
    "EmbedLayerNormalization GRU GatedDeltaNet GemmaRotaryEmbedding GroupQueryAttention LSTM LayerNormalization "
    "LinearAttention LinearClassifier MultiHeadAttention NGramHashMapping PackedSparseAttentionIndexerMerge "
    "PagedAttention QAttention RNN RemovePadding RouterGateUpProj SVMClassifier SimplifiedLayerNormalization "
    "SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization SoftmaxCrossEntropyLoss TopK "
    "TreeEnsembleClassifier Unique VarlenCausalConvWithState VarlenNGramHashMapping"
)
SEVERAL: Final = frozenset(_SEVERAL.split())
"""Operators that return a tuple for a node of one output, too; where its results are unknown, this is asked."""


class Imports:
    """The imports of a module, and the names that they take."""

    def __init__(self) -> None:
        self.members: dict[tuple[str, str], str] = {}
        """(module, name in it) -> local name."""
        self.registered: dict[tuple[str, str, int], str] = {}
        """(domain, operator, since) -> local name."""
        self.whys: dict[str, str] = {}
        """Local name -> why the operator is called."""

    def function(self, operator: Operator, *, plain: bool, on_shapes: bool) -> str:
        """The local name of an operator's function.

        Args:
            operator: the operator.
            plain: whether no operand is of half precision, so that the function is the one of its module.
            on_shapes: whether it computes with shapes.
        """
        function: Any = operator.function
        member = getattr(sys.modules.get(function.__module__), function.__name__, None)
        wrapped = member is not None and inspect.unwrap(member) is inspect.unwrap(function)
        halves = getattr(function, "__code__", None) is not None and function.__code__.co_name == "widened"
        names: dict[Any, str] = self.registered
        key: Any = (operator.domain, operator.name, operator.since)
        name = snake(operator.name)
        if member is function or (wrapped and halves and plain):
            names, key = self.members, (function.__module__, function.__name__)
            name = function.__name__.removesuffix("_op").rstrip("_")
        if key not in names:
            name = f"onnx_{name}" if name in BUILTINS or keyword.iskeyword(name) else name
            names[key] = unused_name(name, self.whys)
            self.whys[names[key]] = SHAPES_WHY if on_shapes else WHY.get(operator.name, DEFAULT_WHY)
        return names[key]


BUILTINS: Final = frozenset(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__) | {"params"}


def snake(name: str) -> str:
    """An operator's name as that of a function.

    >>> snake("QLinearConv"), snake("LSTM"), snake("ReduceL2"), snake("MatMul")
    ('q_linear_conv', 'lstm', 'reduce_l2', 'mat_mul')
    """
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def unsupported(node: Node, why: str) -> UnsupportedError:
    """The error for a node that has no form in source."""
    return UnsupportedError(f"{node} has no form in source: {why}")


def check_callable(node: Node) -> None:
    """Raise UnsupportedError for an operator that only the compiler can call.

    Raises:
        UnsupportedError: naming the node.
    """
    operator = node.target
    if not isinstance(operator, Operator) or operator.function is None or node.differentiates:
        raise unsupported(node, "it differentiates other nodes of the graph")
    if node.graphs:
        raise unsupported(node, "the operator itself calls its graph")
    if node.is_private:
        raise unsupported(node, "it stands for a function given to convert or replace")
    if beyond := operator.fixtures - SUPPLIED:
        raise unsupported(node, f"it needs {sorted(beyond)} of the compiler")


def called(call: NodeCall, imports: Imports, files: dict[str, dict[str, Any]], key: Callable[[], str]) -> str:
    """The call of an operator's function.

    Args:
        call: the node and its operands.
        imports: what the module imports; the function is added.
        files: attributes that the module reads from a file, by the name of their node; long ones are added.
        key: makes the text of a random key.

    Raises:
        UnsupportedError: an operand must be known, and is not.
    """
    node, operator = call.node, call.node.target
    assert isinstance(operator, Operator)
    name = imports.function(operator, plain=not call.is_half, on_shapes=call.is_host)
    attributes = {n: v for n, v in call.attributes.items() if n in operator.inputs or n in operator.attributes}
    positional: list[str] = []
    named: list[str] = []
    for i, value in enumerate(call.operands):
        parameter = operator.parameter(i) or ""
        if value is None or (value.known is not None and not value.known.size and node.op_type == "Resize"):
            if any(v is not None for v in call.operands[i:]):
                positional.append("None")
        elif parameter in operator.static and not value.host:
            raise unsupported(node, f"{parameter!r} must be known before compiling, and is computed from inputs")
        elif parameter in operator.static and node.op_type in TUPLES and value.known is not None:
            positional.append(value.sequence)
        else:
            positional.append(call.text(i))
    parameters = inspect.signature(operator.function).parameters.values()  # type: ignore[arg-type]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | _implied(call)
    arrays = {n: v for n, v in attributes.items() if isinstance(v, np.ndarray)}
    others = {n: v for n, v in attributes.items() if n not in arrays}
    texts = {n: python(v) for n, v in others.items() if not _equals(v, defaults.get(n))}
    if sum(map(len, texts.values())) > ATTRIBUTES or max(map(len, texts.values()), default=0) > LONGEST:
        files[node.name] = others
        named.append(f"**ATTRIBUTES[{string(node.name)}]")
        texts = {}
    texts |= {n: call.array(constant(v, f"{node.name}.{n}")) for n, v in arrays.items()}
    named += [f"{n}={t}" for n, t in texts.items()]
    fixtures: dict[str, Any] = {"n_outputs": len(node.outputs), "opset": node.opset}
    fixtures |= {"once": "once", "extents": "None", "dropped": "lambda: None"}
    supplied = operator.fixtures - attributes.keys()
    named += [f"{f}={v}" for f, v in fixtures.items() if f in supplied and defaults.get(f) != v]
    if "rng" in supplied:
        named.append(f"rng={key()}")
    return f"{name}({', '.join([*positional, *named])})"


WINDOWS: Final = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3, "MaxPool": 0, "AveragePool": 0}
"""Operators of windows, and which of their inputs is a kernel; 0 where none is."""


def _implied(call: NodeCall) -> dict[str, Any]:
    """Attributes of windows that say what is so without them."""
    rank = call.value(0).rank
    if call.node.op_type not in WINDOWS or call.node.domain or rank is None:
        return {}
    ones = (1,) * (rank - 2)
    implied: dict[str, Any] = {"strides": ones, "dilations": ones, "pads": (0,) * 2 * (rank - 2), "group": 1}
    if call.attribute("auto_pad") == "VALID":
        implied["auto_pad"] = "VALID"
    kernel = WINDOWS[call.node.op_type]
    if kernel and (weight := call.value(kernel)).shape is not None:
        implied["kernel_shape"] = weight.shape[2:]
    return implied


def _equals(value: Any, default: Any) -> bool:
    """Whether an attribute is its default, in the precision of a file."""
    if isinstance(value, float) and isinstance(default, float):
        return bool(np.float32(value) == np.float32(default))
    return type(value) is type(default) and bool(value == default)
