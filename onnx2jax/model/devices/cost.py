"""The cost of a model on many devices, from programs compiled ahead of time, without reading weights."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from ... import compat
from ...errors import InputNameError, ShardingError
from ...proto.files import read_model
from ...proto.origin import nbytes
from ...proto.tensors import EXTERNAL
from ...proto.types import TensorType
from ...proto.walk import tensors
from ...sharding.rules import Placement
from ...sharding.stages import AXIS
from ..convert import convert
from .explained import bytes_held, programs
from .pipeline import batch_axes


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a step: their number, and the bytes of their results on one device."""

    kind: str
    number: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """The cost of a step of a model on a mesh.

    Attributes:
        mesh: the extents of its axes.
        plan: how the model is sharded; empty where weights are replicated.
        dims: the extents of dimension variables.
        parameters: numbers in all weights.
        weight_bytes: of the weights, on the device that has most.
        input_bytes: of the inputs, caches included, on a device of the last stage.
        scratch_bytes: temporary memory of the CPU program, on the device with most; None without programs.
        flops: of a step on one device, of the stage that has most, by XLA's count; None without programs.
        exchanges: of a step, of all stages.
    """

    mesh: Mapping[str, int]
    plan: str
    dims: Mapping[str, int]
    parameters: int
    weight_bytes: int
    input_bytes: int
    scratch_bytes: int | None
    flops: int | None
    exchanges: tuple[Exchange, ...]

    def facts(self) -> dict[str, Any]:
        """The cost as a dict for JSON."""
        return asdict(self)


def cost(
    source: Path, axes: Mapping[str, int], plan: str = "", dims: Mapping[str, int] | None = None, compiled: bool = True
) -> Cost:
    """The cost of a step. Allocates nothing, and external data need not exist.

    Args:
        source: an ONNX file.
        axes: the mesh; an axis "stage" cuts the model into stages.
        plan: as ``convert(shardings=)`` takes one by name.
        dims: extents of dimension variables: where they are left out that of the batch is the number of devices, and
            that of any other is 1.
        compiled: whether programs are compiled, for all but the bytes of weights and inputs.

    Raises:
        InputNameError: the model has no such dimension variable.
        ShardingError: there are fewer devices than the mesh has.
    """
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    with present(source) as folder:
        model = convert(source, mesh=mesh, shardings=plan or None, stages=axes.get(AXIS), external_data_dir=folder)
        placement = model.placement
        assert placement is not None
        extents, inputs = _inputs(model, dims or {}, mesh.size)
        last = getattr(placement, "parts", [placement])[-1]
        shardings = last.of_inputs(inputs, False)
        found = programs(model, (), inputs) if compiled else []
        types: Mapping[str, Any] = model.types
        exchanges: dict[str, list[int]] = {}
        for exchange in (e for program in found for e in program.exchanges()):
            exchanges.setdefault(exchange.kind, []).append(exchange.bytes)
        return Cost(
            dict(axes),
            plan,
            extents,
            sum(math.prod(t.shape) for t in types.values()),
            max(_held(types, placement).values(), default=0),
            sum(bytes_held(t, shardings[n]) for n, t in inputs.items()),
            max((p.compiled.memory_analysis().temp_size_in_bytes for p in found), default=0) if found else None,
            max(int(compat.cost_analysis(p.compiled).get("flops", 0)) for p in found) if found else None,
            tuple(Exchange(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(exchanges.items())),
        )


def _held(types: Mapping[str, Any], placement: Placement) -> Counter[jax.Device]:
    """The bytes of weights on each device."""
    total: Counter[jax.Device] = Counter()
    for name, kind in types.items():
        sharding = placement.params[name]
        for device in sharding.device_set:
            total[device] += bytes_held(kind, sharding)
    return total


def _inputs(model: Any, dims: Mapping[str, int], devices: int) -> tuple[dict[str, int], dict[str, Any]]:
    """The extents of dimension variables, and the types of inputs."""
    batch = batch_axes(model.inputs)[1]
    names = dict.fromkeys(d for v in model.inputs for d in v.shape or () if isinstance(d, str))
    if unknown := sorted(dims.keys() - names.keys()):
        raise InputNameError(f"dims has {unknown}; the model's dimension variables are {list(names)}")
    extents = {n: dims.get(n, devices if n == batch else 1) for n in names}
    types = {}
    for info in model.inputs:
        if not isinstance(info.type, TensorType) or info.type.shape is None or info.type.dtype.hasobject:
            raise ShardingError(f"input {info} is no tensor of numbers with a declared rank")
        shape = tuple(extents[d] if isinstance(d, str) else d or 1 for d in info.type.shape)
        types[info.name] = jax.ShapeDtypeStruct(shape, info.type.dtype)
    return extents, types


@contextmanager
def present(source: Path) -> Iterator[Path]:
    """A folder with a model's data files, and sparse files in place of missing ones."""
    sizes: dict[str, int] = {}
    for tensor, _ in tensors(read_model(source)):
        if tensor.data_location == EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            end = int(entries.get("offset", 0)) + int(entries.get("length", 0) or nbytes(tensor))
            sizes[entries["location"]] = max(end, sizes.get(entries["location"], 0))
    if all((source.parent / name).exists() for name in sizes):
        yield source.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, size in sizes.items():
            path, original = Path(folder, name), source.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if original.exists():
                path.symlink_to(original.resolve())
            else:
                with path.open("wb") as file:
                    file.truncate(size)  # sparse: takes no disk space
        yield Path(folder)
