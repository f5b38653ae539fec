"""What is known while a step is traced, and how it grows with the past: extents, and what a graph makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..ir import analysis
from ..ir.graph import Node
from ..model.model import Model
from ..ops.arrays import is_known
from ..ops.registry import Shards
from ..proto.types import TensorType, ValueInfo
from ..runtime.interpreter import Context, evaluate

TRIED: Final = (5, 6, 7)
"""Tokens of the past with which a step is traced."""
ENCODED: Final = 3
"""Tokens of an encoder, meanwhile."""


@dataclass
class Known:
    """What is known while a graph is traced: a ``Place`` that changes nothing.

    Attributes:
        values: known values, by name.
        scores: the extents of what is given to Softmax, by its name.
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


def slopes(known: Sequence[Known]) -> dict[str, float]:
    """How fast known values grow, in three traces with one token more each; of those that all grow alike."""
    found = {}
    for name in set.intersection(*(set(k.values) for k in known)) if known else ():
        a, b, c = (k.values[name] for k in known)
        if a.dtype.kind not in "if" or not a.size or not a.shape == b.shape == c.shape:
            continue
        growth = np.unique(np.stack([b - a, c - b]))
        if growth.size == 1 and growth[0]:
            found[name] = growth[0].item()
    return found


def traced(
    model: Model, past: Mapping[str, Any], others: Sequence[ValueInfo], length: int, feeds_of: Callable[..., Any]
) -> Known:
    """What is known in a step of one sequence over a past of so many tokens.

    Args:
        model: of the step.
        past: the types of its caches.
        others: its inputs beside caches and those that ``feeds_of`` makes.
        length: the tokens of the past.
        feeds_of: from a model, tokens, positions, mask, and places to inputs by name.
    """
    found = Known()
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
    dims = [d if isinstance(d, int) else ENCODED if i else 1 for i, d in enumerate(value.shape or ())]
    return jax.ShapeDtypeStruct(dims, value.type.dtype)
