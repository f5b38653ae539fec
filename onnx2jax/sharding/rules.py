"""Where arrays lie: a user's rules by name, as NamedShardings over a mesh."""

from __future__ import annotations

import difflib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import ShardingError
from ..ops.arrays import is_traced
from ..ops.registry import Shards
from .processes import together
from .put import from_process, put, to_process


class ShardingWarning(UserWarning):
    """Something about where arrays should lie was not followed. Results are the same."""


Rules = Mapping[str, PartitionSpec]
"""Patterns over names, as fnmatch reads them, each with the mesh axes over which an array is divided."""


def by_name(values: Mapping[str, Any], mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """A sharding for each array: that of the first rule whose pattern is or matches its name, else replicated.

    Args:
        values: anything with a shape, by name.
        mesh: the devices and their axes. Its axes are taken as Auto: the compiler places what is between.
        rules: patterns (``"*.weight"``; fnmatch) with specs; the first that matches counts.

    Raises:
        ShardingError: a spec names an axis that the mesh does not have, or does not fit the shape.

    >>> import jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
    >>> params = {"fc.weight": np.zeros((4, 8)), "fc.bias": np.zeros(8)}
    >>> shardings = by_name(params, mesh, {"*.weight": P(None, "model")})
    >>> [s.spec for s in shardings.values()]
    [P(None, 'model'), P()]
    """
    mesh = compat.auto(mesh)
    found = {name: next((p for p in rules if p == name or fnmatchcase(name, p)), None) for name in values}
    specs = {name: PartitionSpec() if p is None else rules[p] for name, p in found.items()}
    return {n: fitting(n, np.shape(v), mesh, specs[n], f"rule {found[n]!r}") for n, v in values.items()}


def batch_sharding(mesh: Mesh, spec: PartitionSpec | None = None) -> NamedSharding:
    """The sharding of a batch: its first axis over the mesh's first, unless ``spec`` says otherwise.

    Raises:
        ShardingError: ``spec`` names an axis that the mesh does not have.

    >>> import jax
    >>> batch_sharding(jax.make_mesh((1, 1), ("data", "model"))).spec
    P('data',)
    """
    spec = PartitionSpec(mesh.axis_names[0]) if spec is None else spec
    _axes("batch", mesh, spec)
    return NamedSharding(compat.auto(mesh), spec)


def by_batch(values: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """``batch_sharding`` for each array of a batch; scalars are replicated.

    Raises:
        ShardingError: a first axis is not a multiple of its number of devices.
    """
    mesh, spec = compat.auto(mesh), batch_sharding(mesh).spec
    specs = {n: spec if np.ndim(v) else PartitionSpec() for n, v in values.items()}
    return {n: fitting(n, np.shape(v), mesh, specs[n], "the batch") for n, v in values.items()}


def check_patterns(rules: Rules, names: Iterable[str]) -> None:
    """Refuse rules of which a pattern matches none of the names: a slip of the pen would replicate in silence.

    Raises:
        ShardingError: naming the pattern and the names nearest to it.
    """
    names = list(names)
    for pattern in rules:
        if not any(pattern == n or fnmatchcase(n, pattern) for n in names):
            near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]
            raise ShardingError(
                f"shardings: {pattern!r} matches none of the {len(names)} names; near it are {near}. "
                "Patterns are those of fnmatch: * any text, ? one character, [ab] one of them"
            )


def own_rules(shardings: Any) -> Rules:
    """The rules that a user gives.

    Raises:
        ShardingError: they are no mapping.
    """
    if not isinstance(shardings, Mapping | None):
        raise ShardingError(
            f"shardings={shardings!r:.60} are no patterns with specs: {{'*.weight': PartitionSpec('model')}}. Names "
            "of plans are for convert(..., mesh=mesh, shardings='tensor'), whose model finetune takes as it lies"
        )
    return shardings or {}


def fitting(name: str, shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, source: str) -> NamedSharding:
    """The sharding, when the spec fits the shape.

    Raises:
        ShardingError: it does not; ``source`` says who wants it.
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
                f"{-(-extent // parts) * parts}, or leave it whole: None at that place of the spec"
            )
    return NamedSharding(mesh, spec)


def _axes(what: str, mesh: Mesh, spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each entry; they exist, and none is used twice."""
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{what}: {spec!r} is no PartitionSpec; write jax.sharding.PartitionSpec(...)")
    axes = [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in spec]
    flat = [a for names in axes for a in names]
    for a in flat:
        if a not in mesh.axis_names:
            raise ShardingError(f"{what}: {spec} names axis {a!r}; the mesh has {list(mesh.axis_names)}")
        if flat.count(a) > 1:
            raise ShardingError(f"{what}: {spec} uses axis {a!r} twice; one axis of the mesh divides one of the array")
    return axes


def _described(mesh: Mesh) -> str:
    return "mesh " + " x ".join(f"{n}: {size}" for n, size in mesh.shape.items())


def entries(axes: tuple[str, ...]) -> Any:
    """Mesh axes as an entry of a PartitionSpec."""
    return axes if len(axes) > 1 else axes[0] if axes else None


Arrays = Mapping[str, Any]
Shardings = Mapping[str, NamedSharding]


class Devices:
    """Can be pickled and copied though it holds devices, which JAX does not pickle: they go by platform and number."""

    def __getstate__(self) -> bytes:
        _Pickler(file := io.BytesIO()).dump(vars(self))
        return file.getvalue()

    def __setstate__(self, data: bytes) -> None:
        vars(self).update(pickle.loads(data))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (_device, (value.platform, value.id)) if isinstance(value, jax.Device) else NotImplemented


def _device(platform: str, number: int) -> jax.Device:
    return next(d for d in jax.devices(platform) if d.id == number)


class Constraint(Devices):
    """What the evaluation loop asks about the values at a node: where they lie, never what they are."""

    def __call__(self, node: Any, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The values of the inputs or of the outputs of a node, constrained."""
        raise NotImplementedError

    def shards(self, _node: Any, /) -> Shards:
        """Into how many parts, on devices of their own, the weights of a node are divided."""
        return Shards(spread=True)


@dataclass(frozen=True)
class Placement(Devices):
    """Where a model's arrays lie.

    Attributes:
        mesh: the devices, with axes that the compiler handles.
        params: a sharding for each of ``model.params``.
        of_params: a sharding for each of some arrays that are named as parameters are.
        of_inputs: a sharding for each of some inputs; the second argument says whether they are a batch to train on.
        configuration: the name of the device configuration that is followed.
        stages: the pipeline stage of each node that has one. A hint, kept for you: all nodes run as one program.
        notes: what could not be followed, and why.
        constrain: what the evaluation loop asks about the values at a node.
        reasons: for each parameter that a plan leaves whole, why.
    """

    mesh: Mesh
    params: Shardings
    of_params: Callable[[Arrays], Shardings]
    of_inputs: Callable[[Arrays, bool], Shardings]
    configuration: str | None = None
    stages: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    constrain: Constraint | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def everywhere(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_params(self, params: Arrays) -> dict[str, Any]:
        """Parameters on their devices; tracers as they are."""
        return {n: v if is_traced(v) else put(v, self.params[n]) for n, v in params.items()}

    def put_inputs(self, values: Arrays) -> dict[str, Any]:
        """Inputs on the devices; what JAX cannot hold stays as it is."""
        shardings = self.of_inputs({n: v for n, v in values.items() if _can_lie(v)}, False)
        return {n: put(v, shardings[n]) if n in shardings else self.put_whole(v) for n, v in values.items()}

    def put_batch(self, values: Arrays) -> dict[str, Any]:
        """A batch to train on.

        Raises:
            ShardingError: the first axis of an array is no multiple of its number of devices.
        """
        shardings = self.of_inputs(values, True)
        return {n: put(v, shardings[n]) for n, v in values.items()}

    def put_whole(self, value: Any) -> Any:
        """An array, or a list of such, on every device."""
        if isinstance(value, list):
            return [self.put_whole(v) for v in value]
        return put(value, self.everywhere) if _can_lie(value) else value

    def from_process(self, values: Arrays) -> dict[str, jax.Array]:
        """Inputs or a batch of which each process gives its own part, as arrays over the devices of all.

        Args:
            values: by name, the rows along the first axis that lie on devices of this process, as many in each; where
                the first axis is not divided over processes, all rows. Numbers alone are the same in all processes.

        Raises:
            ShardingError: rows cannot be divided over the devices.
            ProcessError: processes give other names, shapes or types.

        >>> import jax, numpy as np, onnx2jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = onnx2jax.convert(onnx2jax.demo_model(), mesh=mesh)
        >>> inputs = model.placement.from_process({"image": np.zeros((2, 1, 8, 8), np.float32)})
        >>> model(**inputs).shape
        (2, 10)
        """

        def of(name: str) -> Callable[[Any], NamedSharding]:
            return lambda whole: self.of_inputs({name: whole}, True)[name]

        with together(self.mesh, "arrays from processes") as said, compat.enable_x64():
            said.same({n: _said(v) for n, v in values.items()})
            rows = {n: v for n, v in values.items() if np.ndim(v)}
            return {n: from_process(n, v, of(n)) if n in rows else self.put_whole(v) for n, v in values.items()}

    def to_process(self, value: jax.Array) -> np.ndarray:
        """The part of an output that lies in this process: the rows that ``from_process`` took there, as NumPy."""
        return to_process(value)

    def __str__(self) -> str:
        """A table: the mesh, how each parameter is divided, pipeline stages, and what could not be followed."""
        rows = [f"{n}  {s.spec}" for n, s in self.params.items()]
        stages = [f"stage {stage}  node {node!r}" for node, stage in self.stages.items()]
        devices = ", ".join(str(d.id) for d in self.mesh.devices.flat)
        return "\n".join([f"{_described(self.mesh)} over devices {devices}", *rows, *stages, *self.notes])


def _said(value: Any) -> str:
    """The type and shape of an array, or what is no array."""
    return f"{value.dtype}{list(value.shape)}" if np.ndim(value) else repr(value)


def _can_lie(value: Any) -> bool:
    """Whether a value is an array that can be moved: no tracer, no strings, not missing."""
    return hasattr(value, "dtype") and value.dtype != object and not is_traced(value)


def by_rules(params: Arrays, inputs: Iterable[str], mesh: Mesh, rules: Rules) -> Placement:
    """The placement that a user's rules ask for.

    Raises:
        ShardingError: a rule does not fit an array or the mesh, or matches nothing.
    """
    check_patterns(rules, [*params, *inputs])
    mesh = compat.auto(mesh)
    of_params = partial(by_name, mesh=mesh, rules=rules)
    return Placement(mesh, of_params(params), of_params, partial(_inputs_by_rules, mesh, rules))


def _inputs_by_rules(mesh: Mesh, rules: Rules, values: Arrays, batch: bool) -> Shardings:
    """A batch over the mesh's first axis. Another input goes by the rule for its name; without one its first axis lies
    over the mesh's first where that divides it."""
    if batch:
        return by_batch(values, mesh)
    everywhere, over = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), mesh.axis_names[:1]))
    parts = mesh.shape[mesh.axis_names[0]]
    divided = [n for n, v in values.items() if v.ndim and v.shape[0] % parts == 0]
    named = {n: v for n, v in values.items() if any(n == p or fnmatchcase(n, p) for p in rules)}
    return dict.fromkeys(values, everywhere) | dict.fromkeys(divided, over) | by_name(named, mesh, rules)


def bytes_per_device(tree: Any) -> dict[jax.Device, int]:
    """What the arrays of a pytree take in the memory of each device.

    >>> import jax.numpy as jnp
    >>> sum(bytes_per_device({"a": jnp.zeros(4, "float32")}).values())
    16
    """
    total: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    return total
