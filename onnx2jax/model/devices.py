"""What lies where on the devices of a mesh, and what they send each other, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..errors import ShardingError
from ..sharding.collectives import KINDS, collectives
from . import arguments
from .table import table

_WIDTH: Final = 160


def explained(model: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The tables of ``Model.explain_sharding``."""
    placement = model.placement
    if placement is None:
        raise ShardingError("the model lies on one device: give it a mesh, convert(..., mesh=mesh, shardings='tensor')")
    rows = [("parameter", "shape", "spec", "bytes a device", "why not divided")]
    for name, kind in model._types.items():
        sharding = placement.params[name]
        shape = tuple(n for n in kind.shape or () if isinstance(n, int))
        held = int(np.prod(sharding.shard_shape(shape), dtype=np.int64)) * np.dtype(kind.dtype).itemsize
        rows.append((name, str(list(shape)), str(sharding.spec), f"{held:,}", placement.reasons.get(name, "")))
    parts = [str(placement).split("\n")[0], table(rows, _WIDTH)]
    if args or named:
        found = list(collectives(program(model, args, named)))
        exchanges = [("collective", "number", "bytes on a device")]
        for kind in KINDS:
            own = [c.bytes for c in found if c.kind == kind]
            exchanges.append((kind, str(len(own)), f"{sum(own):,}"))
        parts.append(table(exchanges, _WIDTH))
    return "\n\n".join(parts)


def program(model: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The compiled program of a call, as text; arguments are arrays, or say a shape and an element type."""
    placement = model.placement
    assert placement is not None

    def filled(value: Any) -> Any:
        return np.zeros(value.shape, value.dtype) if isinstance(value, jax.ShapeDtypeStruct) else value

    with compat.enable_x64():
        given = {n: filled(v) for n, v in named.items()}
        values = arguments.bind(model.inputs, model.optional, [filled(a) for a in args], given)
        inputs, key = placement.put_inputs(values), placement.put_whole(jax.random.key(0))

        def call(params: Any, inputs: Any, key: Any) -> Any:
            return model.apply(params, rng=key, **inputs) if model.graph.draws else model.apply(params, **inputs)

        lowered = jax.jit(call).lower(placement.put_params(model.params), inputs, key)
        return lowered.compile().as_text() or ""
