"""A model computed in another type than its file's: ``convert(..., dtype="bfloat16")``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ...errors import InputNameError, InputTypeError, did_you_mean
from ...ir.casts import NARROWER
from ...ir.graph import Graph, Imported
from ...ir.precision import computed_in, pinned
from ...ops.arrays import HALF
from ...proto.types import TensorType, ValueInfo
from .parts import by_pattern

DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
OUTPUTS: Final = ("declared", "compute")


def compute_dtype(dtype: Any, outputs: str) -> np.dtype | None:
    """The type in which a model computes; None for the types of its file.

    Raises:
        InputTypeError: it is another type, or ``outputs`` is neither "declared" nor "compute".
    """
    if outputs not in OUTPUTS:
        raise InputTypeError(
            f"outputs is {outputs!r}; outputs come in the types 'declared' or in that of 'compute'. For some outputs "
            f"alone, or inner values: convert(...).cut(outputs={outputs!r})"
        )
    try:
        computed = None if dtype is None else np.dtype(jnp.dtype(dtype))
    except TypeError:
        computed = np.dtype(object)
    if computed is not None and computed not in HALF and computed not in NARROWER:
        raise InputTypeError(f"dtype is {dtype!r}; a model computes in 'bfloat16', 'float16', 'float32' or 'float64'")
    return computed


def with_dtype(imported: Imported, dtype: np.dtype | None, outputs: bool, float32: Sequence[str]) -> Imported:
    """The model computed in ``dtype``.

    Args:
        outputs: whether its float32 outputs are declared in that type; in a type that widens all are.
        float32: names or patterns of nodes that stay in float32.

    Raises:
        InputNameError: a pattern matches no node of the main graph.
        InputTypeError: ``float32`` names nodes, but ``dtype`` is None.
    """
    if dtype is None:
        if float32:
            raise InputTypeError("float32= keeps nodes of a model that computes in another type: add dtype='bfloat16'")
        return imported
    graph = pinned(imported.graph, _named(imported.graph, float32), dtype)
    if outputs:
        graph = with_declared(graph, [v.name for v in graph.outputs], dtype)
    return replace(imported, graph=computed_in(graph, dtype))


def _named(graph: Graph, patterns: Sequence[str]) -> set[str]:
    """The names of the nodes that match a pattern or equal it."""
    names = [node.name for node in graph.nodes]
    matches, missed = by_pattern(patterns, names)
    if missed:
        raise InputNameError(
            f"float32: no node of the main graph is named {', '.join(map(repr, missed))}"
            f"{did_you_mean(missed, names)}; model.graph.nodes lists them"
        )
    return matches


def with_declared(graph: Graph, names: Collection[str], dtype: np.dtype) -> Graph:
    """The graph with some of its float32 inputs and outputs declared in ``dtype``."""

    inputs, outputs = (tuple(_declared(v, names, dtype) for v in ends) for ends in (graph.inputs, graph.outputs))
    return replace(graph, inputs=inputs, outputs=outputs)


def _declared(info: ValueInfo, names: Collection[str], dtype: np.dtype) -> ValueInfo:
    if info.name not in names or not isinstance(info.type, TensorType) or info.type.dtype != np.float32:
        return info
    return replace(info, type=replace(info.type, dtype=dtype))


def computed_again(model: Any, graph: Graph) -> Graph:
    """A rewritten graph of a model with the casts of its new nodes; the graph itself where the model has no dtype."""
    return graph if model.settings.dtype is None else computed_in(graph, model.settings.dtype)


def with_narrow_ends(model: Any, names: Collection[str]) -> Any:
    """The model with some of its float32 inputs and outputs declared in the compute dtype, where it has one."""
    dtype, spec = model.settings.dtype, model.spec
    if dtype is None:
        return model
    graph = computed_in(with_declared(spec.graph, names, dtype), dtype)
    return model._replace(replace(spec, graph=graph, inputs=tuple(_declared(v, names, dtype) for v in spec.inputs)))
