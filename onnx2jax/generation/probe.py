"""Traces a step abstractly for several cache lengths, to find the values that grow with the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..eval.interpreter import Context, evaluate
from ..ir import analysis
from ..ir.graph import Node
from ..model.model import Model
from ..ops.arrays import is_known
from ..ops.registry import Shards
from ..proto.types import TensorType, ValueInfo

PROBED_LENGTHS: Final = (5, 6, 7)
"""Cache lengths, in tokens, with which a step is traced."""
ENCODER_LENGTH: Final = 3
"""Extent of encoder outputs during a probe."""


@dataclass
class Probe:
    """Records compile-time constants while a graph is traced: a ``Place`` that changes nothing.

    Attributes:
        values: constants, by name.
        scores: the shapes of Softmax inputs, by name.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    scores: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        found = dict(zip(names, values, strict=False))
        self.values |= {n: v for n, v in found.items() if n and is_known(v) and isinstance(v, np.ndarray)}
        if node.op_type == "Softmax" and names is node.inputs:
            self.scores[names[0]] = tuple(values[0].shape)
        return list(values)

    def shards(self, node: Node, /) -> Shards:  # noqa: ARG002
        return Shards()


def slopes(probes: Sequence[Probe]) -> dict[str, float]:
    """The growth per token of each value that grows linearly over three probes, all elements equally."""
    found = {}
    for name in set.intersection(*(set(p.values) for p in probes)) if probes else ():
        a, b, c = (p.values[name] for p in probes)
        if a.dtype.kind not in "if" or not a.size or not a.shape == b.shape == c.shape:
            continue
        growth = np.unique(np.stack([b - a, c - b]))
        if growth.size == 1 and growth[0]:
            found[name] = growth[0].item()
    return found


def probe(
    model: Model, past: Mapping[str, Any], others: Sequence[ValueInfo], length: int, feeds_of: Callable[..., Any]
) -> Probe:
    """The constants of a step of one sequence over a cache of ``length`` tokens.

    Args:
        model: of the step.
        past: shapes and dtypes of its caches.
        others: its inputs other than caches and those that ``feeds_of`` computes.
        length: the number of tokens in the cache.
        feeds_of: (model, tokens, positions, mask, slots) -> inputs by name.
    """
    found = Probe()
    settings = replace(model.settings, place=found)
    more = {v.name: _type(v) for v in others if v.name not in past}
    params = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in analysis.parameters(model.graph).items()}

    def run(params: Any, tokens: Any, mask: Any, given: Any) -> Any:
        feeds = feeds_of(model, tokens, tokens, mask, tokens[0])
        return evaluate(model.graph, {**model.static, **feeds, **given}, Context(params, settings=settings))

    tokens, mask = jax.ShapeDtypeStruct((1, 1), np.int32), jax.ShapeDtypeStruct((1, length + 1), bool)
    with compat.enable_x64():
        jax.eval_shape(run, params, tokens, mask, {**past, **more})
    return found


def _type(value: ValueInfo) -> jax.ShapeDtypeStruct:
    assert isinstance(value.type, TensorType)
    dims = [d if isinstance(d, int) else ENCODER_LENGTH if i else 1 for i, d in enumerate(value.shape or ())]
    return jax.ShapeDtypeStruct(dims, value.type.dtype)
