"""Placement of parameters on a mesh, and the collectives of a call, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    stages = placement.parts if isinstance(placement, Staged) else ()
    rows = [("parameter", "shape", *["stage"][: len(stages)], "spec", "bytes a device", "why not divided")]
    for name, kind in model.types.items():
        sharding = placement.params[name]
        size = f"{bytes_held(kind, sharding):,}"
        stage = [str(placement.homes[name])] if isinstance(placement, Staged) else []
        rows.append((name, str(list(kind.shape)), *stage, str(sharding.spec), size, placement.reasons.get(name, "")))
    head = str(placement).split("\n")[: 1 + len(stages)]
    texts = ["\n".join(head), table(rows, _WIDTH)]
    if args or named:
        sizes = sizes_by_kind(programs(model, args, named))
        kinds = [*KINDS, BETWEEN_STAGES] if stages else KINDS
        exchanges = [(kind, str(len(sizes[kind])), f"{sum(sizes[kind]):,}") for kind in kinds]
        texts.append(table([("collective", "number", "bytes on a device"), *exchanges], _WIDTH))
    return "\n\n".join(texts)


def sizes_by_kind(stages: Iterable[Stage]) -> defaultdict[str, list[int]]:
    """The bytes of each exchange of some programs, by kind."""
    sizes = defaultdict[str, list[int]](list)
    for exchange in (e for stage in stages for e in stage.exchanges()):
        sizes[exchange.kind].append(exchange.bytes)
    return sizes


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
        feeds = arguments.by_name(model.inputs, model.optional, args, named)
        feeds = arguments.bind(model.inputs, model.optional, (), {n: as_zeros(v) for n, v in feeds.items()})
        inputs = {n: _type(v) for n, v in feeds.items()}
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
    stages = []
    for segment in pipeline.segments:
        compiled, results = _lowered(model, segment, types, fixed, key)
        types |= results
        others = {n: types[n] for n in segment.inputs if n in types and stage_of.get(n, segment.stage) != segment.stage}
        shardings = segment.placement.of_inputs(others, False)
        stages.append(Stage(segment.placement, compiled, [bytes_held(t, shardings[n]) for n, t in others.items()]))
        stage_of |= {v.name: segment.stage for v in segment.graph.outputs}
    return stages


def _lowered(
    model: Any, segment: Segment, types: Mapping[str, Any], fixed: dict[str, np.ndarray], key: Any
) -> tuple[Any, dict[str, Any]]:
    """The program of a stage and its output types; adds outputs computed from shapes alone to ``fixed``."""
    known = Constants({}, {n: fixed[n] for n in segment.inputs if n in fixed})

    def call(params: Any, values: Any, key: Any) -> dict[str, Any]:
        context = CallContext(params, known, key if segment.graph.draws else None, params)
        results = segment.program.outputs(values, context)
        outputs = {v.name: r for v, r in zip(segment.graph.outputs, results, strict=True)}
        fixed.update((n, r) for n, r in outputs.items() if type(r) is np.ndarray)
        return {n: r for n, r in outputs.items() if n not in fixed}

    inputs = {n: types[n] for n in segment.inputs if n in types and n not in fixed}
    weights = {n: t for n, t in model.types.items() if n in segment.keys}
    return _compiled(call, segment.placement, weights, inputs, key)


def _compiled(
    call: Any, placement: Placement, weights: Mapping[str, Any], inputs: Mapping[str, Any], key: Any
) -> tuple[Any, dict[str, Any]]:
    """The program of a call, and its output types."""
    params = _sharded(weights, placement.of_params(weights))
    values = _sharded(inputs, placement.of_inputs(inputs, False))
    rng = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=placement.replicated)
    lowered = jax.jit(call).lower(params, values, rng)
    return compat.compile_without_device(lowered), jax.tree.map(_type, lowered.out_info)


def _sharded(types: Mapping[Any, Any], shardings: Mapping[Any, Any]) -> dict[Any, Any]:
    return {n: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=shardings[n]) for n, t in types.items()}


def _type(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def as_zeros(value: Any) -> Any:
    """Broadcast zeros, which take no memory, in place of a ShapeDtypeStruct: arguments are checked as arrays."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape) if isinstance(value, jax.ShapeDtypeStruct) else value
