"""Evaluates a step abstractly for several cache lengths, to find the values that grow with the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from ..eval.abstract import Abstract, Extents, is_typed, without_data
from ..ir import analysis
from ..model.model import Model
from ..proto.types import TensorType, ValueInfo
from .cache import ENCODER_LENGTH

PROBED_LENGTHS: Final = (5, 6, 7)
"""Cache lengths, in tokens, with which a step is evaluated."""

Values = Mapping[str, Any]
"""The values of a step by name: NumPy arrays where they follow from constants and shapes, otherwise types."""


class _Step(Abstract):
    """An evaluation that knows constants of any size, as tables of positions are."""

    largest_known = math.inf


def slopes(probes: Sequence[Values]) -> dict[str, float]:
    """The growth per token of each value that grows linearly over three probes, all elements equally.

    >>> slopes([{"end": np.array([n]), "mask": np.array(-np.inf)} for n in PROBED_LENGTHS])
    {'end': 1}
    """
    growing = {}
    for name in set.intersection(*map(set, probes)) if probes else ():
        a, b, c = (p[name] for p in probes)
        if not all(type(v) is np.ndarray for v in (a, b, c)) or not a.shape == b.shape == c.shape:
            continue
        if a.dtype.kind in "if" and a.size and np.isfinite([a, b, c]).all():
            growth = np.unique(np.stack([b - a, c - b]))
            if growth.size == 1 and growth[0]:
                growing[name] = growth[0].item()
    return growing


def probe(
    model: Model, past: Mapping[str, Any], others: Sequence[ValueInfo], length: int, feeds_of: Callable[..., Any]
) -> Values:
    """The values of a step of one sequence over a cache of ``length`` tokens.

    Args:
        model: of the step.
        past: shapes and dtypes of its caches.
        others: its inputs other than caches and those that ``feeds_of`` computes.
        length: the number of tokens in the cache.
        feeds_of: (model, tokens, positions, mask, slots) -> inputs by name.
    """
    found = dict[str, Any]()
    more = {v.name: _type(v) for v in others if v.name not in past}
    graph, params = model.graph, analysis.parameters(model.graph)
    weights = {
        n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in graph.initializers.items() if graph.key(n) in params
    }
    graph = replace(graph, initializers={n: v for n, v in graph.initializers.items() if n not in weights})

    def run(weights: Any, tokens: Any, mask: Any, given: Any) -> None:
        feeds = feeds_of(model, tokens, tokens, mask, tokens[0])
        for name, value in _Step(Extents(0)).graph(graph, "", {**model.static, **feeds, **given}, weights).items():
            if is_typed(value):
                found[name] = value if type(value) is np.ndarray else _abstract(value)

    tokens, mask = jax.ShapeDtypeStruct((1, 1), np.int32), jax.ShapeDtypeStruct((1, length + 1), bool)
    without_data(run, weights, tokens, mask, {**past, **more})
    return found


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _type(value: ValueInfo) -> jax.ShapeDtypeStruct:
    assert isinstance(value.type, TensorType)
    dims = [d if isinstance(d, int) else ENCODER_LENGTH if i else 1 for i, d in enumerate(value.shape or ())]
    return jax.ShapeDtypeStruct(dims, value.type.dtype)
