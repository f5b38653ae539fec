"""Runs a model exported for one batch size at its multiples: ``convert(..., rebatch=True)``.

A call evaluates one node, which maps the graph by ``jax.vmap`` over groups of the model's batch size. So batch sizes
that an exporter wrote into constants stay right, and the graph itself stays that of the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import jax
import jax.numpy as jnp

from ...errors import InputShapeError, KnownValueError, OperatorError, RebatchError
from ...ir import analysis
from ...ir.graph import Graph, Node
from ...ops.arrays import axis_of
from ...ops.registry import Operator
from ...proto.types import Dim, TensorType, ValueInfo

PRIVATE: Final = "onnx2jax.rebatch"


def in_groups(
    *inputs: Any, body: Any, size: int, axes: tuple[int, ...], out_axes: tuple[int | None, ...], named: frozenset[str]
) -> tuple[Any, ...]:
    """The outputs of a graph for each group of ``size`` samples, concatenated along ``out_axes``.

    Outputs that are not in ``named`` must have the samples of a group along that axis. Those whose axis is None are
    stacked along a new first axis, unless their first axis has the samples.
    """
    extent = inputs[0].shape[axes[0]]  # the same for all inputs: they declare one dimension variable
    if size > 1 and extent % size:
        symbolic = "" if isinstance(extent, int) else f": export(dims={{'{extent}': '{size}*{extent}'}})"
        raise InputShapeError(f"a batch of {extent} is no multiple of {size}, the model's batch size{symbolic}")
    groups = extent // size

    def one(group: Any, *parts: Any) -> list[Any]:
        results = body(*parts, step=group)
        for value, result, axis in zip(body.outputs, results, out_axes, strict=True):
            _check_output(value, result, axis, None if value.name in named else size)
        return jax.tree.map(jnp.asarray, results)

    parts = [x.reshape(*x.shape[:a], groups, size, *x.shape[a + 1 :]) for x, a in zip(inputs, axes, strict=True)]
    try:
        results = jax.vmap(one, (0, *axes))(jnp.arange(groups), *parts)
    except OperatorError as e:
        cause = re.sub(r"; if that contains the exporter's batch size.*", "", str(e))  # advises rebatch=
        raise RebatchError(
            f"the model does not run at batch size {size}, {_extents(body, inputs, axes)}: {cause}"
        ) from e
    except KnownValueError as e:
        if analysis.sources(body.graph.nodes, e.values).isdisjoint(v.name for v in body.inputs):
            raise  # The value is the same for all samples: the caller can specialise on it.
        raise RebatchError(
            f"the samples of a batch cannot be compiled as one program: {str(e).splitlines()[0]} Run them one by one; "
            "or, if the input is the same for all samples, leave it out: convert(..., rebatch={'input name': axis})"
        ) from e
    return tuple(jax.tree.map(partial(_joined, size, a), r) for r, a in zip(results, out_axes, strict=True))


def _extents(body: Any, inputs: Sequence[Any], axes: Sequence[int]) -> str:
    """For the message of a call that fails: whether the inputs declare its batch size, and the other free extents."""
    batch, free = "because its inputs leave the batch free", dict[str, Any]()
    for value, x, axis in zip(body.inputs, inputs, axes, strict=True):
        for i, (declared, extent) in enumerate(zip(value.shape, x.shape, strict=True)):
            if i == axis and isinstance(declared, int):
                batch = "which its inputs declare"
            elif i != axis and not isinstance(declared, int):
                free[declared or f"axis {i} of {value.name!r}"] = extent
    if free:
        given = ", ".join(f"{name} = {extent}" for name, extent in free.items())
        return f"{batch}, and {given}, which they leave free; pass the extents that it was exported with"
    return batch if "declare" in batch else f"{batch}; if the model was exported with another, declare it in the file"


def _joined(size: int, axis: int | None, parts: Any) -> Any:
    """Stacked results concatenated along an axis of theirs; scalars as a vector."""
    if axis is None:
        axis = 0 if parts.ndim > 1 and parts.shape[1] == size else None
    if parts.ndim == 1 or axis is None:
        return parts
    shape = jnp.moveaxis(parts, 0, axis).shape
    return jnp.moveaxis(parts, 0, axis).reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _check_output(value: ValueInfo, result: Any, axis: int | None, size: int | None) -> None:
    arrays = [result] if axis is not None else jax.tree.leaves(result)
    if any(not hasattr(v, "shape") or v.dtype == object for v in arrays):
        raise RebatchError(f"output {value} is no tensor of numbers, so it cannot be concatenated along the batch")
    if axis is None or (size == 1 and not result.ndim):
        return
    if axis >= result.ndim or size not in (None, result.shape[axis]):
        raise RebatchError(
            f"output {value} is computed as {list(result.shape)}: its axis {axis} is not the batch. Name the axis "
            f"along which to concatenate: convert(..., rebatch={{'input': axis, {value.name!r}: axis}})"
        )


IN_GROUPS: Final = Operator(
    *(PRIVATE, "InGroups", 1, in_groups, (), "inputs", frozenset({"body", "size", "axes", "out_axes", "named"}))
)


@dataclass(frozen=True, eq=False)
class Groups:
    """The batch of a model that runs for each group of samples.

    Attributes:
        size: number of samples in a group.
        inputs: the batch axis of each input of the model; None if it is the same for all samples.
        outputs: the axis of each output of the model along which groups are concatenated.
        named: outputs whose axis the caller has named.
        variables: names of the batch in declarations.
    """

    size: int
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int]
    named: frozenset[str]
    variables: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, rebatch: bool | Mapping[str, int], static: Collection[str]) -> Self:
        """The groups of a graph; the arguments are those of ``convert``.

        Raises:
            RebatchError: the batch axes are ambiguous.
        """
        inputs = {v.name: v for v in graph.inputs if v.name not in graph.initializers and v.name not in static}
        axes = _input_axes(inputs, {v.name for v in graph.outputs}, rebatch)
        declared = [_shape(inputs[name])[axis] for name, axis in axes.items()]
        sizes = {d for d in declared if isinstance(d, int)} or {1}
        variables = tuple(d for d in declared if isinstance(d, str)) or ("batch",)
        if len(sizes) > 1:
            raise RebatchError(f"the batch has different extents in the inputs: {_listed(inputs.values())}")
        (size,) = sizes
        outputs = {v.name: _output_axis(v, rebatch, variables, size) for v in graph.outputs}
        named = frozenset(rebatch if isinstance(rebatch, Mapping) else ())
        return cls(size, {v.name: axes.get(v.name) for v in graph.inputs}, outputs, named, variables)

    def __str__(self) -> str:
        return f"rebatch=: jax.vmap over groups of {self.size} sample{'s' * (self.size > 1)}"

    def multiples(self, dims: Collection[str]) -> dict[str, int]:
        """The number of samples of which the free batch of an exported program is a multiple, by its dimension."""
        return {self.variables[0]: self.size} if self.size > 1 and self.variables[0] not in dims else {}

    def over(self, graph: Graph) -> Graph:
        """One node that maps a graph of the model over groups of samples.

        Args:
            graph: the model's, or one that was derived from it. Its other inputs must have the batch as first axis; of
                its other outputs, groups are concatenated along the first axis if that is the batch, otherwise stacked.

        Raises:
            RebatchError: the batch axis of an input is unknown, or no input has one.
        """
        axes = {v.name: axis for v in graph.inputs if (axis := self._axis(graph, v)) is not None}
        if not axes:
            raise RebatchError(
                f"no input has the batch that rebatch= divides: {_listed(graph.inputs) or 'no inputs'}. Use the model "
                "converted without rebatch="
            )
        out_axes = tuple(self.outputs.get(v.name) for v in graph.outputs)
        batched = tuple(v for v in graph.inputs if v.name in axes)
        body = replace(graph, inputs=batched, initializers={}, lifted=frozenset())
        attributes: dict[str, Any] = {"body": body, "size": self.size, "axes": tuple(axes.values())}
        attributes |= {"out_axes": out_axes, "named": self.named}
        outputs = tuple(v.name for v in graph.outputs)
        node = Node("rebatch", "InGroups", PRIVATE, 1, tuple(axes), outputs, attributes, IN_GROUPS)
        return replace(
            graph,
            nodes=(node,),
            inputs=tuple(self._freed(v, axes.get(v.name), {None}) if v.name in axes else v for v in graph.inputs),
            outputs=tuple(map(self._joined, graph.outputs)),
        )

    def _axis(self, graph: Graph, value: ValueInfo) -> int | None:
        if value.name in graph.initializers:
            return None
        if value.name in self.inputs:
            return self.inputs[value.name]
        if value.shape and value.shape[0] in (self.size, *self.variables):
            return 0
        fix = f"cut the model converted without rebatch=, then name it: with_options(rebatch={{{value.name!r}: axis}})"
        if value.shape is None:
            fix = f"declare the shape of {value.name!r} in the file: onnx.shape_inference.infer_shapes(proto)"
        raise RebatchError(f"the batch axis of input {value} is unknown: {fix}")

    def _freed(self, value: ValueInfo, axis: int | None, batch: Collection[Dim] = ()) -> ValueInfo:
        """The declaration with a dimension variable for the batch, or an unknown extent where it is one factor."""
        shape, batch = list(value.shape or ()), {self.size, *self.variables, *batch}
        if axis is not None and axis < len(shape):
            shape[axis] = self.variables[0] if shape[axis] in batch else None
        return value.reshaped(shape or [self.variables[0]])

    def _joined(self, value: ValueInfo) -> ValueInfo:
        """The declaration of an output of all groups."""
        if value.name in self.outputs:
            return self._freed(value, self.outputs[value.name], () if value.name in self.named else {None})
        if value.shape is None:
            return value
        is_batch = value.shape and value.shape[0] in (self.size, *self.variables)
        return self._freed(value, 0) if is_batch else value.reshaped([None, *value.shape])


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


def _output_axis(value: ValueInfo, rebatch: bool | Mapping[str, int], variables: Sequence[str], size: int) -> int:
    """The batch axis of an output: the one named, the only one that declares the batch, or else the first."""
    if isinstance(rebatch, Mapping) and value.name in rebatch:
        return _axis(value, rebatch[value.name])
    dims = list(enumerate(value.shape or ()))
    axes = [i for i, d in dims if d in variables] or [i for i, d in dims if d == size]
    if len(axes) == 1:
        return axes[0]
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


def _listed(values: Iterable[ValueInfo]) -> str:
    return ", ".join(map(str, values))
