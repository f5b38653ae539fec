"""Changes the shapes of parameters: another number of classes, a larger vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import numpy as np

from ...errors import InputShapeError, KnownValueError, OnnxError, OperatorError
from ...eval.node_errors import LIBRARY_FIX
from ...eval.values import to_host
from ...ir.graph import descendants
from ...ops.arrays import is_traced
from ...proto.messages import keep, weights
from ...proto.types import TensorType, ValueInfo
from .parts import with_rewritten

Shapes = Mapping[str, tuple[int, ...]]
SIZES: Final = (2, 64, 224)
"""Extents for free dimensions when output shapes are inferred."""


def with_new_shapes(model: Any, changes: Mapping[str, Any]) -> Any:
    """The model with parameters of other shapes, in its graph, its declarations and the file that ``save`` writes.

    Raises:
        InputShapeError: a parameter is no initializer of the main graph or is traced, the graph cannot compute with
            the shapes, or the model is on a mesh.
    """
    graph, shapes = model.graph, {n: tuple(v.shape) for n, v in changes.items() if v.shape != model.types[n].shape}
    if inner := sorted(shapes.keys() - graph.initializers.keys()):
        raise InputShapeError(f"only initializers of the main graph can take new shapes, not {', '.join(inner)}")
    if traced := [n for n in shapes if is_traced(changes[n])]:
        raise InputShapeError(
            f"params[{traced[0]!r}] has a new shape, {list(shapes[traced[0]])}, inside a transformation of JAX: change "
            "shapes before, by arrays, and give the traced values to model.apply(params, x)"
        )
    if model.placement is not None:
        raise InputShapeError(
            "parameters on a mesh keep their shapes: change them first, save the model, and convert it with mesh="
        )
    stale = {n for node in descendants(graph.nodes, shapes) for n in node.outputs}
    changed = replace(
        graph,
        inputs=tuple(v.reshaped(shapes[v.name]) if v.name in shapes else v for v in graph.inputs),
        initializers={**graph.initializers, **{n: np.asarray(to_host(changes[n])) for n in shapes}},
        value_info={n: v for n, v in graph.value_info.items() if n not in stale and n not in shapes},
    )
    every = {**model.changed(), **changes}
    undeclared = tuple(_declared(v, None) if v.name in stale else v for v in graph.outputs)
    spec = model.spec.with_graph(replace(changed, outputs=undeclared), changes=every)
    computed = _computed(model._replace(spec.of_group()), shapes)
    outputs = tuple(_declared(v, computed.get(v.name)) if v.name in stale else v for v in graph.outputs)
    write = partial(_write, shapes, {v.name: v.shape for v in outputs if v.name in stale and v.shape}, stale)
    return with_rewritten(model, model.spec, replace(changed, outputs=outputs), write, every)


def _computed(model: Any, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs by name; empty if shapes depend on data.

    Free extents are the first of SIZES that the graph can compute with: a pool does not take an image of 2 pixels.
    """
    for size in SIZES:
        try:
            return _computed_for(model, size)
        except OperatorError as e:
            error = e
    listed = ", ".join(f"{n} {list(s)}" for n, s in shapes.items())
    reason = str(error).removesuffix(f"\n{LIBRARY_FIX}")
    failing = [node for node in model.graph.nodes if reason.startswith(str(node))]
    others = [n for node in failing for n in node.inputs if n in model.types and n not in shapes]
    fixes = [f"\nGive {n!r} a new shape as well: with_params({{..., {n!r}: ...}}, new_shapes=True)" for n in others[:1]]
    raise InputShapeError(
        f"the graph cannot compute with parameters of these shapes ({listed}): {reason}{''.join(fixes)}"
    ) from error


def _computed_for(model: Any, size: int) -> dict[str, tuple[int, ...]]:
    feeds = {}
    for v in model.inputs:
        if not isinstance(v.type, TensorType) or v.type.shape is None or v.type.dtype == object:
            return {}
        extents = [d if isinstance(d, int) else size for d in v.type.shape]
        feeds[v.name] = jax.ShapeDtypeStruct(extents, v.type.dtype)
    params = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in model.types.items()}
    key = {"rng": jax.eval_shape(lambda: jax.random.key(0))} if model.graph.draws else {}
    try:
        results = jax.eval_shape(lambda p, f: jax.tree.leaves(model.apply(p, **f)), params, {**feeds, **key})
    except KnownValueError:
        return {}
    except OperatorError:
        raise
    except OnnxError:
        return {}
    names = [v.name for v in model.outputs]
    return {n: r.shape for n, r in zip(names, results, strict=True)} if len(names) == len(results) else {}


def _declared(output: ValueInfo, shape: tuple[int, ...] | None) -> ValueInfo:
    """The output with fixed extents as computed, or unknown without a computed shape."""
    if output.shape is None:
        return output
    if shape is None or len(shape) != len(output.shape):
        return output.reshaped([None if isinstance(d, int) else d for d in output.shape])
    return output.reshaped([n if isinstance(d, int) else d for d, n in zip(output.shape, shape, strict=True)])


def _write(shapes: Shapes, outputs: Mapping[str, Sequence[Any]], stale: set[str], message: Any) -> None:
    """Write the new shapes into a ModelProto; ``save`` writes the values afterwards."""
    for name, tensor in weights(message):
        if name in shapes:
            del tensor.dims[:]
            tensor.dims.extend(shapes[name])
    graph = message.graph
    for value in (*graph.input, *graph.output):
        extents = shapes.get(value.name, outputs.get(value.name))
        if extents is not None:
            for dim, extent in zip(value.type.tensor_type.shape.dim, extents, strict=False):
                if isinstance(extent, int):
                    dim.dim_value = extent
                elif extent is None:
                    dim.Clear()
    keep(graph.value_info, lambda v: v.name not in stale and v.name not in shapes)
