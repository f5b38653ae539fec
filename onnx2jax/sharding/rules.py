"""Placements of arrays as NamedShardings over a mesh, and checks of a user's rules over names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import ShardingError, nearest
from ..ops.arrays import is_traced
from ..ops.registry import Shards
from .processes import in_agreement
from .put import Devices, from_process, mesh_axes, put, to_process

Rules = Mapping[str, PartitionSpec]
"""fnmatch pattern over names -> the PartitionSpec of the arrays that match."""


def check_patterns(rules: Rules, names: Iterable[str]) -> None:
    """Raise if a pattern matches none of the names: a typo would silently replicate the array.

    Raises:
        ShardingError: with the pattern and the closest names.
    """
    names = list(names)
    for pattern in rules:
        if not any(pattern == n or fnmatchcase(n, pattern) for n in names):
            raise ShardingError(
                f"shardings: {pattern!r} matches none of the {len(names)} names; the closest are "
                f"{nearest(pattern, names)}. Patterns are those of fnmatch: * matches any text, ? one character, "
                "[ab] one of these"
            )


def own_rules(shardings: Any) -> Rules:
    """The user's rules, validated.

    Raises:
        ShardingError: they are not a mapping.
    """
    if not isinstance(shardings, Mapping | None):
        raise ShardingError(
            f"shardings={shardings!r:.60} does not map patterns to specs: {{'*.weight': PartitionSpec('model')}}. "
            "Plans are for convert(..., mesh=mesh, shardings='tensor'); finetune keeps the placement of its model"
        )
    return shardings or {}


def fitting(name: str, shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, source: str) -> NamedSharding:
    """The NamedSharding of a spec that fits the shape.

    Raises:
        ShardingError: it does not fit; ``source`` names the origin of the spec in the message.
    """
    what = f"{name!r} of shape {list(shape)}, {source}: {spec} over {_described(mesh)}"
    axes = _axes(what, mesh, spec)
    if len(axes) > len(shape):
        raise ShardingError(f"{what}: the spec has {len(axes)} entries, the array {len(shape)} axes")
    for axis, (extent, names) in enumerate(zip(shape, axes, strict=False)):
        parts = math.prod(mesh.shape[n] for n in names)
        if extent % parts:
            raise ShardingError(
                f"{what}: axis {axis} of {extent} cannot be divided evenly over {parts} devices. Pad it to "
                f"{-(-extent // parts) * parts}, or replicate it: None at that place of the spec"
            )
    return NamedSharding(mesh, spec)


def _axes(what: str, mesh: Mesh, spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each entry of the spec; raises unless they exist and are distinct."""
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{what}: {spec!r} is not a PartitionSpec; write jax.sharding.PartitionSpec(...)")
    axes = [mesh_axes(e) for e in spec]
    flat = [a for names in axes for a in names]
    for a in flat:
        if a not in mesh.axis_names:
            raise ShardingError(f"{what}: {spec} names axis {a!r}; the mesh has {list(mesh.axis_names)}")
        if flat.count(a) > 1:
            raise ShardingError(f"{what}: {spec} uses axis {a!r} twice; a mesh axis can shard one axis of an array")
    return axes


def _described(mesh: Mesh) -> str:
    return "mesh " + " x ".join(f"{n}: {size}" for n, size in mesh.shape.items())


Arrays = Mapping[str, Any]
Shardings = Mapping[str, NamedSharding]


class Constraint(Devices):
    """Applies sharding constraints to values; the interpreter calls it at each node. Values never change."""

    def __call__(self, node: Any, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The inputs or outputs of a node with constraints applied."""
        raise NotImplementedError

    def shards(self, _node: Any, /) -> Shards:
        """How the weights of a node are sharded."""
        return Shards(spread=True)


@dataclass(frozen=True)
class Placement(Devices):
    """The placement of a model's arrays.

    Attributes:
        mesh: the devices; all axes are Auto.
        params: the shardings of ``model.params``.
        of_params: returns the shardings of arrays that have the names of parameters.
        of_inputs: returns the shardings of inputs; its second argument: whether they are a training batch.
        configuration: the name of the applied device configuration.
        stages: node -> its annotated pipeline stage. Informative only: all nodes run as one program.
        notes: what was not applied, and why.
        constrain: applies sharding constraints to the values of nodes.
        reasons: parameter that a plan does not shard -> why.
    """

    mesh: Mesh
    params: Mapping[str, NamedSharding]
    of_params: Callable[[Arrays], Shardings]
    of_inputs: Callable[[Arrays, bool], Shardings]
    configuration: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    constrain: Constraint | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def replicated(self) -> NamedSharding:
        """Replicated over all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_params(self, params: Arrays) -> dict[str, Any]:
        """Place parameters on their devices; tracers are unchanged."""
        return {n: v if is_traced(v) else put(v, self.params[n]) for n, v in params.items()}

    def put_inputs(self, values: Arrays) -> dict[str, Any]:
        """Place inputs on their devices; values that are not arrays are unchanged."""
        shardings = self.of_inputs({n: v for n, v in values.items() if _is_placeable(v)}, False)
        return {n: put(v, shardings[n]) if n in shardings else self.put_replicated(v) for n, v in values.items()}

    def put_batch(self, values: Arrays) -> dict[str, Any]:
        """Place a training batch.

        Raises:
            ShardingError: the first axis of an array is not a multiple of its number of devices.
        """
        shardings = self.of_inputs(values, True)
        return {n: put(v, shardings[n]) for n, v in values.items()}

    def put_replicated(self, value: Any) -> Any:
        """Replicate an array, or a list of arrays, over all devices."""
        if isinstance(value, list):
            return [self.put_replicated(v) for v in value]
        return put(value, self.replicated) if _is_placeable(value) else value

    def from_process(self, values: Arrays) -> dict[str, jax.Array]:
        """Global arrays of inputs or a batch, of which each process passes its own rows.

        Args:
            values: name -> this process's rows of the first axis, equally many in each process; all rows if the first
                axis is not sharded over processes. Scalars are equal in all processes.

        Raises:
            ShardingError: the rows cannot be divided over the devices.
            ProcessError: names, shapes or types differ between processes.

        >>> import jax, numpy as np, onnx2jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = onnx2jax.convert(onnx2jax.demo_model(), mesh=mesh)
        >>> inputs = model.placement.from_process({"image": np.zeros((2, 1, 8, 8), np.float32)})
        >>> model(**inputs).shape
        (2, 10)
        """

        def of(name: str) -> Callable[[Any], NamedSharding]:
            return lambda whole: self.of_inputs({name: whole}, True)[name]

        with in_agreement(self.mesh, "arrays from processes") as agreement, compat.enable_x64():
            agreement.same({n: _type_of(v) for n, v in values.items()})
            return {n: from_process(n, v, of(n)) if np.ndim(v) else self.put_replicated(v) for n, v in values.items()}

    def to_process(self, value: jax.Array) -> np.ndarray:
        """This process's part of an output as NumPy, the inverse of ``from_process``."""
        return to_process(value)

    def __str__(self) -> str:
        """A table of the mesh, the spec of each parameter, pipeline stages, and notes."""
        rows = [f"{n}  {s.spec}" for n, s in self.params.items()]
        stages = [f"stage {stage}  node {node!r}" for node, stage in self.stages.items()]
        devices = ", ".join(str(d.id) for d in self.mesh.devices.flat)
        return "\n".join([f"{_described(self.mesh)} over devices {devices}", *rows, *stages, *self.notes])


def _type_of(value: Any) -> str:
    """The type and shape of an array, or the repr of a scalar."""
    return f"{value.dtype}{list(value.shape)}" if np.ndim(value) else repr(value)


def _is_placeable(value: Any) -> bool:
    """Whether a value is an array that JAX can place: not a tracer, strings or None."""
    return hasattr(value, "dtype") and value.dtype != object and not is_traced(value)
