"""Runs a model exported for one batch size at its multiples: ``convert(..., rebatch=True)``.

The graph becomes one node, which maps it by ``jax.vmap`` over groups of the model's batch size. So batch sizes that an
exporter wrote into constants stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from ...errors import InputShapeError, KnownValueError, OperatorError, RebatchError
from ...ir import analysis
from ...ir.graph import Graph, Imported, Node
from ...ops.arrays import axis_of
from ...ops.registry import Operator
from ...proto.types import Dim, TensorType, ValueInfo

PRIVATE: Final = "onnx2jax.rebatch"


def in_groups(
    *inputs: Any, body: Any, size: int, axes: tuple[int, ...], out_axes: tuple[int, ...], named: frozenset[str]
) -> tuple[Any, ...]:
    """The outputs of a graph for each group of ``size`` samples, concatenated along ``out_axes``.

    Outputs that are not in ``named`` must have the samples of a group along that axis.
    """
    extent = inputs[0].shape[axes[0]]  # the same for all inputs: they declare one dimension variable
    if size > 1 and extent % size:
        raise InputShapeError(f"a batch of {extent} is no multiple of {size}, the model's batch size")
    groups = extent // size

    def one(group: Any, *parts: Any) -> list[Any]:
        results = body(*parts, step=group)
        for value, result, axis in zip(body.outputs, results, out_axes, strict=True):
            _check_output(value, result, axis, None if value.name in named else size)
        return [jnp.asarray(r) for r in results]

    parts = [x.reshape(*x.shape[:a], groups, size, *x.shape[a + 1 :]) for x, a in zip(inputs, axes, strict=True)]
    try:
        results = jax.vmap(one, (0, *axes))(jnp.arange(groups), *parts)
    except OperatorError as e:
        raise RebatchError(f"the model does not run at batch size {size}, which its inputs declare: {e}") from e
    except KnownValueError as e:
        if analysis.sources(body.graph.nodes, e.values).isdisjoint(v.name for v in body.inputs):
            raise  # The value is the same for all samples: the caller can specialise on it.
        raise RebatchError(
            f"the samples of a batch cannot be compiled as one program: {str(e).splitlines()[0]} Run them one by one; "
            "or, if the input is the same for all samples, leave it out: convert(..., rebatch={'input name': axis})"
        ) from e
    return tuple(map(_joined, results, out_axes))


def _joined(parts: Any, axis: int) -> Any:
    """Stacked results concatenated along an axis of theirs; scalars as a vector."""
    if parts.ndim == 1:
        return parts
    shape = jnp.moveaxis(parts, 0, axis).shape
    return jnp.moveaxis(parts, 0, axis).reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _check_output(value: ValueInfo, result: Any, axis: int, size: int | None) -> None:
    if not hasattr(result, "shape") or result.dtype == object:
        raise RebatchError(f"output {value} is no tensor of numbers, so it cannot be concatenated along the batch")
    is_number = size == 1 and not result.ndim
    if not is_number and (axis >= result.ndim or size not in (None, result.shape[axis])):
        raise RebatchError(
            f"output {value} is computed as {list(result.shape)}: its axis {axis} is not the batch. Name the axis "
            f"along which to concatenate: convert(..., rebatch={{'input': axis, {value.name!r}: axis}})"
        )


IN_GROUPS: Final = Operator(
    *(PRIVATE, "InGroups", 1, in_groups, (), "inputs", frozenset({"body", "size", "axes", "out_axes", "named"}))
)


def rebatched(imported: Imported, rebatch: bool | Mapping[str, int], static: Mapping[str, Any]) -> Imported:
    """The model for any batch size; the arguments are those of ``convert``.

    Raises:
        RebatchError: the batch axes are ambiguous.
    """
    graph = imported.graph
    inputs = {v.name: v for v in graph.inputs if v.name not in graph.initializers and v.name not in static}
    axes = _input_axes(inputs, {v.name for v in graph.outputs}, rebatch)
    declared = [_shape(inputs[name])[axis] for name, axis in axes.items()]
    sizes = {d for d in declared if isinstance(d, int)} or {1}
    variables = [d for d in declared if isinstance(d, str)] or ["batch"]
    if len(sizes) > 1:
        raise RebatchError(f"the batch has different extents in the inputs: {_listed(inputs.values())}")
    (size,) = sizes
    out_axes = tuple(_output_axis(v, rebatch, variables, size) for v in graph.outputs)
    body = replace(graph, inputs=tuple(inputs[n] for n in axes), initializers={}, lifted=frozenset())
    named = frozenset(rebatch if isinstance(rebatch, Mapping) else ())
    attributes = {"body": body, "size": size, "axes": tuple(axes.values()), "out_axes": out_axes, "named": named}
    outputs = tuple(v.name for v in graph.outputs)
    node = Node("rebatch", "InGroups", PRIVATE, 1, tuple(axes), outputs, attributes, IN_GROUPS)
    known: set[Dim] = {size, *variables}
    freed = replace(
        graph,
        nodes=(node,),
        inputs=tuple(
            _freed(v, axes[v.name], known | {None}, variables[0]) if v.name in axes else v for v in graph.inputs
        ),
        outputs=tuple(_freed(v, axis, known, variables[0]) for v, axis in zip(graph.outputs, out_axes, strict=True)),
    )
    return replace(imported, graph=freed)


def within_groups(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph changed; of a rebatched model, the graph that runs for each group."""
    inside = group_of(graph)
    if inside is graph:
        return change(graph)
    (node,) = graph.nodes
    return replace(graph, nodes=(replace(node, attributes={**node.attributes, "body": change(inside)}),))


def group_of(graph: Graph) -> Graph:
    """What runs for each group of samples; the graph itself where they do not run in groups."""
    grouped = [n.target for n in graph.nodes] == [IN_GROUPS]
    body: Graph = graph.nodes[0].attributes["body"] if grouped else graph
    return body


def _input_axes(
    inputs: Mapping[str, ValueInfo], outputs: Iterable[str], rebatch: bool | Mapping[str, int]
) -> dict[str, int]:
    """The axis of the batch in each input that has it."""
    if isinstance(rebatch, Mapping):
        if unknown := rebatch.keys() - inputs.keys() - set(outputs):
            raise RebatchError(f"rebatch has {sorted(unknown)}; the inputs are {_listed(inputs.values())}")
        if inputs.keys().isdisjoint(rebatch):
            raise RebatchError(f"rebatch names no input; they are {_listed(inputs.values())}")
        return {n: _axis(v, rebatch[n]) for n, v in inputs.items() if n in rebatch}
    ranked = {n: s for n, v in inputs.items() if (s := _shape(v))}
    if not ranked:
        raise RebatchError(f"no input has an axis, and so none has a batch: {_listed(inputs.values()) or 'no inputs'}")
    if len({s[0] if isinstance(s[0], int) else None for s in ranked.values()}) != 1:
        raise RebatchError(
            f"which axes are the batch? The first axes of the inputs differ: {_listed(inputs.values())}. Name them: "
            "convert(..., rebatch={'input name': axis}); inputs left out are the same for the whole batch"
        )
    return dict.fromkeys(ranked, 0)


def _output_axis(value: ValueInfo, rebatch: bool | Mapping[str, int], variables: list[str], size: int) -> int:
    """The batch axis of an output: the one named, the only one that declares the batch, or else the first."""
    if isinstance(rebatch, Mapping) and value.name in rebatch:
        return _axis(value, rebatch[value.name])
    dims = list(enumerate(value.shape or ()))
    found = [i for i, d in dims if d in variables] or [i for i, d in dims if d == size]
    if len(found) == 1:
        return found[0]
    if isinstance(rebatch, Mapping) and value.shape != ():
        raise RebatchError(
            f"which axis of output {value} is the batch? Name it as well: convert(..., rebatch={{{value.name!r}: axis, "
            "...})"
        )
    return 0


def _axis(value: ValueInfo, axis: int) -> int:
    try:
        return axis_of(axis, len(_shape(value)))
    except ValueError as e:
        raise RebatchError(f"rebatch has {value.name!r}: {axis}, but that is {value}") from e


def _shape(value: ValueInfo) -> tuple[Dim, ...]:
    if not isinstance(value.type, TensorType) or value.type.shape is None or value.type.dtype == object:
        raise RebatchError(f"{value} is no tensor of numbers with a declared rank, so its batch axis is unknown")
    return value.type.shape


def _freed(value: ValueInfo, axis: int, batch: set[Dim], variable: str) -> ValueInfo:
    """The declaration with a dimension variable for the batch, or an unknown extent where it is one factor."""
    shape = [(variable if d in batch else None) if i == axis else d for i, d in enumerate(value.shape or ())]
    return value.reshaped(shape or [variable])


def _listed(values: Iterable[ValueInfo]) -> str:
    return ", ".join(map(str, values))
