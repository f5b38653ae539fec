"""Tells trainable weights from tables, masks and constants, by how the graph uses them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ..errors import InputNameError, InputTypeError, TrainingFormError, names_list, nearest
from ..eval.values import to_host
from ..ir.graph import Function, Graph, Node
from ..ops import qonnx
from ..proto.mapped import load
from .form import is_onnx

_LAYERS: Final = {
    "A B C": "MatMul Gemm FusedMatMul TransposeMatMul FusedGemm",
    "W B": "Conv ConvTranspose DeformConv FusedConv NhwcConv NhwcFusedConv",
    "W R B P": "RNN GRU LSTM",
    "scale Scale B bias": "LayerNormalization BatchNormalization InstanceNormalization GroupNormalization",
    "scale": "RMSNormalization SimplifiedLayerNormalization RMSNormRotary",
    "gamma beta bias": "SkipLayerNormalization SkipSimplifiedLayerNormalization GroupNorm SkipGroupNorm",
    "bias": "FastGelu BiasAdd BiasSplitGelu MultiHeadAttention",
    "B": "BiasGelu",
    "weights bias": "Attention",
    "weight bias": "CausalConvWithState VarlenCausalConvWithState",
    "W bias": "GemmFastGelu RouterGateUpProj",
    "norm_scale down_weight up_weight inject_weight": "HyperConnectionLowRankMix",
    "Inputs": "Einsum",
    "data": "Gather",
    "slope": "PRelu",
    "word_embedding position_embedding segment_embedding gamma beta": "EmbedLayerNormalization",
    "head_sink q_norm_weight k_norm_weight": "GroupQueryAttention",
}
WEIGHTS: Final = {op: names.split() for names, ops in _LAYERS.items() for op in ops.split()}
"""Layer operator -> the inputs that are weights."""
BIASES_AND_SCALES: Final = {"Add", "Sum", "Mul", "Concat"}
"""Operators that apply weights in layers of several nodes: add a bias, multiply by a scale, prepend a learnt token.
A factor with a single element is not a weight."""
VIEWS: Final = {
    *("Cast", "DequantizeLinear", "Expand", "Flatten", "Identity", "Pad", "QuantizeLinear", "Reshape", "Slice"),
    *("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    *qonnx.ROUNDED,
}
"""Operators whose output is their first input reshaped, cast, quantised or rearranged."""
ANGLE_OPERATORS: Final = {"Add", "Concat", "Einsum", "Gemm", "MatMul", "Mul"}
INTEGERS: Final = {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger"}
TABLES: Final = {"cos_cache", "sin_cache"}
STATISTIC: Final = "a running statistic"
MERGED: Final = f"{STATISTIC}, and the weight of another node, because the exporter merged equal tensors"
SCALAR: Final = "a scalar"


Uses = dict[str, set[str]]
"""The names of values by use, in one graph with its captures; or of initializers in all graphs, by Graph.key.

- ``weights``: inputs that are weights of a layer operator.
- ``operands``: operands of ``BIASES_AND_SCALES``.
- ``angles``: rotary frequencies, and tables of angles, cosines and sines.
- ``statistics``: running means and variances of BatchNormalization.
"""


def _visit(graph: Graph, outside: Collection[str], keys: Uses) -> Uses:
    """The uses of the names in a graph, also added to ``keys``; ``outside``: its inputs and captures that are fixed."""
    fixed = {*graph.initializers, *outside}
    integer_results: set[str] = set()
    for node in graph.nodes:
        if node.inputs and fixed.issuperset(node.reads):
            fixed.update(node.outputs)
        if node.op_type in INTEGERS or (node.op_type == "Cast" and not integer_results.isdisjoint(node.inputs)):
            integer_results.update(node.outputs)
    variances = {n.inputs[0] for n in graph.nodes if n.op_type == "Sqrt"}  # with an epsilon added
    cosines, sines = ({n.inputs[0] for n in graph.nodes if n.op_type == op} for op in ("Cos", "Sin"))
    uses: Uses = {"weights": set(), "operands": set(), "angles": cosines & sines, "statistics": set()}
    for node in reversed(graph.nodes):
        for use, names in uses.items():
            if not names.isdisjoint(node.outputs):
                names.update(_same_use(node, fixed, use))
        operands = {name: node.operator.parameter(i) for i, name in enumerate(node.inputs) if name}
        uses["weights"].update(n for n, o in operands.items() if o in WEIGHTS.get(node.op_type, ()))
        uses["angles"].update(n for n, o in operands.items() if o in TABLES)
        if is_onnx(node, "BatchNormalization"):
            uses["statistics"].update(node.inputs[3:5])
        if (
            node.op_type in BIASES_AND_SCALES
            and integer_results.isdisjoint(node.inputs)
            and variances.isdisjoint(node.outputs)
        ):
            one = {n for n in node.inputs if node.op_type == "Mul" and np.size(graph.initializers.get(n, (0, 0))) == 1}
            uses["operands"].update(n for n in node.inputs if n not in one)
        for body, outer in _bodies(node):
            inner = _visit(body, {n for n, name in outer.items() if name in fixed}, keys)
            for use, names in inner.items():
                uses[use].update(outer[n] for n in names if n in outer)
    for use, names in uses.items():
        keys.setdefault(use, set()).update(graph.key(n) for n in names if n in graph.initializers)
    return uses


def _same_use(node: Node, fixed: Collection[str], use: str) -> tuple[str, ...]:
    """The inputs of a node that share the use of its outputs."""
    if use == "statistics":  # exporters share a tensor through Identity nodes
        return node.inputs[:1] if is_onnx(node, "Identity") else ()
    if node.op_type in VIEWS:
        return node.inputs[:1]
    every = set(node.outputs) <= set(fixed) or (use == "angles" and node.op_type in ANGLE_OPERATORS)
    return node.inputs if every else ()


def _bodies(node: Node) -> Iterator[tuple[Graph, dict[str, str]]]:
    """The graphs in a node, each with inner name -> outer name for captures and inputs."""
    yield from ((g, {n: n for n in g.captures}) for g in node.graphs)
    if isinstance(node.target, Function):
        body = node.target.body
        yield body, {v.name: n for v, n in zip(body.inputs, node.inputs, strict=False)}


def reasons_untrained(graph: Graph, params: Mapping[str, Any]) -> dict[str, str]:
    """Parameter (by Graph.key) -> why it is trained only if named, for all that are not weights."""
    uses: Uses = {}
    _visit(graph, (), uses)
    constants = {g.key(n) for g in graph.walk() for n in g.lifted}
    rotations = _rotations({n: v for n, v in params.items() if n not in uses["angles"]})

    def why(name: str, value: Any) -> str:
        if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize == 1:
            return f"{value.dtype}, which has no gradient"
        if name in uses["statistics"]:
            return MERGED if name in uses["weights"] else STATISTIC
        if not np.ndim(value):
            return SCALAR
        if name in uses["angles"] or name in rotations:
            return "a table of angles by position, or of their cosines or sines"
        if name in uses["weights"]:
            return ""
        if name in uses["operands"] and name not in constants:
            return "a mask" if _is_mask(_values(value)) else ""
        return "not a weight of a linear map, embedding, convolution, normalisation or recurrence"

    return {name: reason for name, value in params.items() if (reason := why(name, value))}


def _values(value: Any, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """A parameter, or a slice of it, as a NumPy array."""
    return np.asarray(to_host(load(value, index)))


def _is_mask(value: np.ndarray) -> bool:
    """Whether a table is an additive attention mask, or a binary one."""
    return bool((value < -999).any()) or (value.ndim > 1 and set(np.unique(value).tolist()) == {0.0, 1.0})


def _rotations(params: Mapping[str, Any]) -> set[str]:
    """Pairs of cosine and sine tables: ones and zeros at position 0, and squares that sum to 1 everywhere."""
    first: dict[float, list[str]] = {0.0: [], 1.0: []}
    for name, value in params.items():
        if np.ndim(value) > 1 and value.size and jnp.issubdtype(value.dtype, jnp.floating):
            first_row = (*(slice(1),) * (value.ndim - 1), slice(None))
            row = _values(value, first_row).ravel()
            if float(row[0]) in first and (row == row[0]).all():
                first[float(row[0])].append(name)
    pairs = ((c, s) for c in first[1.0] for s in first[0.0] if params[c].shape == params[s].shape)
    return {n for pair in pairs if _is_circle(*(_values(params[n]).astype(np.float32) for n in pair)) for n in pair}


def _is_circle(cosines: np.ndarray, sines: np.ndarray) -> bool:
    return bool(np.allclose(cosines**2 + sines**2, 1, atol=2e-2))


def select_trainable(
    graph: Graph, params: Mapping[str, Any], trainable: Any, adapters: Collection[str] = ()
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the parameters to train, in the model's order, and for each other parameter why it is not trained.

    The parameters of ``adapters`` are always trained; without ``trainable``, no others are.

    Raises:
        InputNameError: a pattern matches no parameter.
        InputTypeError: a pattern matches only parameters that are not floating-point weights.
        TrainingFormError: nothing is selected.
    """
    reasons = reasons_untrained(graph, params)
    floating = [n for n, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize > 1]
    usual = [n for n in floating if reasons.get(n) not in (STATISTIC, MERGED, SCALAR)]
    if trainable is None:
        names = set() if adapters else params.keys() - reasons
    elif callable(trainable):
        names = {n for n in usual if trainable(n, load(params[n]))}
    else:
        names = set()
        for pattern in names_list(trainable):
            matches = {pattern} if pattern in floating else {n for n in usual if fnmatchcase(n, pattern)}
            names |= matches or _no_match(params, pattern)
    names |= set(adapters)
    if not names and not params:
        raise TrainingFormError(f"nothing to train: the model has no parameters{_in_attributes(graph)}")
    if not names:
        dtypes = sorted({str(v.dtype) for v in params.values()})
        raise TrainingFormError(
            f"nothing to train: {len(usual)} of the model's {len(params)} parameters ({', '.join(dtypes)}) "
            f"have a floating dtype, and trainable={trainable!r} selects none of them; parameters that are not weights "
            f"of layers must be named: {dict(list(reasons.items())[:3])}"
        )
    trained = tuple(n for n in params if n in names)
    frozen = "frozen: adapters are trained" if adapters else "not selected by trainable="
    return trained, {n: reasons.get(n, frozen) for n in params if n not in names}


def _in_attributes(graph: Graph) -> str:
    """The nodes that keep their numbers as attributes, as the end of a message; empty if there are none."""
    nodes = [node for g in graph.walk() for node in g.nodes if any(map(_is_numbers, node.attributes.values()))]
    if not nodes:
        return ""
    return (
        f". Its numbers are attributes of {', '.join(map(str, nodes[:3]))}, which training does not change: fit it in "
        "the library that made the file"
    )


def _is_numbers(value: Any) -> bool:
    """Whether an attribute is several floating-point numbers."""
    several = value.tolist() if isinstance(value, np.ndarray) else value
    return isinstance(several, tuple | list) and len(several) > 1 and all(isinstance(v, float) for v in several)


def _no_match(params: Mapping[str, Any], pattern: str) -> set[str]:
    other = [n for n in params if n == pattern or fnmatchcase(n, pattern)]
    if other:
        raise InputTypeError(
            f"trainable has {pattern!r}, which matches no floating-point weights, only "
            f"{', '.join(f'{n} ({params[n].dtype}{list(params[n].shape)})' for n in other[:3])}. Quantised "
            "weights cannot be trained; a running statistic or a scalar of rank 0 must be named in full"
        )
    near = nearest(pattern, params)
    raise InputNameError(f"trainable has {pattern!r}, which no parameter matches; similar names are {near}")
