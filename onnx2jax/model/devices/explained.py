"""Placement of parameters on a mesh, and the collectives of a call, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from ... import compat
from ...errors import ShardingError
from ...runtime.dispatch import CallContext, Constants
from ...sharding.rules import Placement
from ...sharding.stages import Staged
from ..calls import arguments
from ..reports.table import table
from .hlo import KINDS, Collective, collectives
from .pipeline import Pipeline, Segment

_WIDTH: Final = 160
BETWEEN_STAGES: Final = "between stages"
"""The kind of transfers between pipeline stages: one for each value, of the whole batch."""


@dataclass(frozen=True)
class Stage:
    """A compiled program: of a whole model, or of one pipeline stage.

    Attributes:
        placement: shardings of its arrays.
        compiled: JAX's compiled program.
        received_bytes: bytes on one device of each value that it reads from other stages.
    """

    placement: Placement
    compiled: Any
    received_bytes: Sequence[int] = ()

    def exchanges(self) -> Iterator[Collective]:
        """The collectives between its devices, and the transfers from other stages."""
        yield from collectives(self.compiled.as_text() or "")
        yield from (Collective(BETWEEN_STAGES, size) for size in self.received_bytes)


def explained(model: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The tables of ``Model.explain_sharding``."""
    placement = model.placement
    if placement is None:
        raise ShardingError("the model is on one device; shard it: convert(..., mesh=mesh, shardings='tensor')")
    staged = int(isinstance(placement, Staged))
    rows = [("parameter", "shape", *["stage"] * staged, "spec", "bytes a device", "why not divided")]
    for name, kind in model.types.items():
        sharding = placement.params[name]
        held = f"{bytes_held(kind, sharding):,}"
        stage = [str(placement.homes[name])] if isinstance(placement, Staged) else []
        rows.append((name, str(list(kind.shape)), *stage, str(sharding.spec), held, placement.reasons.get(name, "")))
    head = str(placement).split("\n")
    count = len(placement.parts) if isinstance(placement, Staged) else 0
    parts = ["\n".join(head[: 1 + count]), table(rows, _WIDTH)]
    if args or named:
        found = [c for stage in programs(model, args, named) for c in stage.exchanges()]
        exchanges = [("collective", "number", "bytes on a device")]
        for kind in (*KINDS, *[BETWEEN_STAGES] * staged):
            own = [c.bytes for c in found if c.kind == kind]
            exchanges.append((kind, str(len(own)), f"{sum(own):,}"))
        parts.append(table(exchanges, _WIDTH))
    return "\n\n".join(parts)


def bytes_held(kind: Any, sharding: Any) -> int:
    """The bytes of an array on one device."""
    return int(np.prod(sharding.shard_shape(tuple(kind.shape)), dtype=np.int64)) * np.dtype(kind.dtype).itemsize


def programs(model: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Stage]:
    """The programs of a call, compiled from types alone: no weight is read, nothing is allocated.

    Args:
        model: a Model on a mesh.
        args, named: the arguments of the call; arrays, or a ``jax.ShapeDtypeStruct`` for each.
    """
    placement = model.placement
    with compat.enable_x64():
        given = _each(_zeros, arguments.by_name(model.inputs, model.optional, args, named))
        given = arguments.bind(model.inputs, model.optional, (), given)
        inputs = _each(_type, given)
        key = jax.eval_shape(lambda: jax.random.key(0))
        if isinstance(placement, Staged):
            return _stage_programs(model, inputs, key)

        def call(params: Any, inputs: Any, key: Any) -> Any:
            return model.apply(params, rng=key, **inputs) if model.graph.draws else model.apply(params, **inputs)

        return [Stage(placement, _compiled(call, placement, model.types, inputs, key)[0])]


def _stage_programs(model: Any, inputs: Mapping[str, Any], key: Any) -> list[Stage]:
    pipeline = Pipeline(model.spec.called, model.settings, model.placement)
    types: dict[str, Any] = dict(inputs)
    fixed: dict[str, np.ndarray] = dict(model.static)
    stage_of: dict[str, int] = {}
    found = []
    for segment in pipeline.segments:
        compiled, results = _lowered(model, segment, types, fixed, key)
        types |= results
        others = {n: types[n] for n in segment.inputs if n in types and stage_of.get(n, segment.stage) != segment.stage}
        shardings = segment.placement.of_inputs(others, False)
        found.append(Stage(segment.placement, compiled, [bytes_held(t, shardings[n]) for n, t in others.items()]))
        stage_of |= {v.name: segment.stage for v in segment.graph.outputs}
    return found


def _lowered(
    model: Any, segment: Segment, types: Mapping[str, Any], fixed: dict[str, np.ndarray], key: Any
) -> tuple[Any, dict[str, Any]]:
    """The program of a stage and its output types; adds outputs computed from shapes alone to ``fixed``."""
    known = Constants({}, {n: fixed[n] for n in segment.inputs if n in fixed})
    names = [v.name for v in segment.graph.outputs]

    def call(params: Any, values: Any, key: Any) -> dict[str, Any]:
        context = CallContext(params, known, key if segment.graph.draws else None, params)
        results = segment.program.outputs(values, context)
        outputs = dict(zip(names, results, strict=True))
        fixed.update((n, r) for n, r in outputs.items() if type(r) is np.ndarray)
        return {n: r for n, r in outputs.items() if n not in fixed}

    own = {n: types[n] for n in segment.inputs if n in types and n not in fixed}
    weights = {n: t for n, t in model.types.items() if n in segment.keys}
    return _compiled(call, segment.placement, weights, own, key)


def _compiled(
    call: Any, placement: Placement, weights: Mapping[str, Any], inputs: Mapping[str, Any], key: Any
) -> tuple[Any, dict[str, Any]]:
    """The program of a call, and its output types."""
    weights = _each(_type, weights)
    params = _sharded(weights, placement.of_params(weights))
    values = _sharded(inputs, placement.of_inputs(inputs, False))
    rng = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=placement.replicated)
    lowered = jax.jit(call).lower(params, values, rng)
    return compat.compile_without_device(lowered), jax.tree.map(_type, lowered.out_info)


def _sharded(types: Mapping[Any, Any], shardings: Mapping[Any, Any]) -> dict[Any, Any]:
    return {n: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=shardings[n]) for n, t in types.items()}


def _type(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _zeros(value: Any) -> Any:
    """Broadcast zeros, which take no memory, in place of a ShapeDtypeStruct: arguments are checked as arrays."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape) if isinstance(value, jax.ShapeDtypeStruct) else value


def _each(function: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: function(v) for n, v in values.items()}
