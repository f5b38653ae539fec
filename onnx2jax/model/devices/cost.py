"""The cost of a model on many devices, from programs compiled ahead of time, without reading weights."""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Unpack

import jax

from ... import compat
from ...errors import ExternalDataError, ExternalDataNotFoundError, ShardingError
from ...ir.file import Reading, check_keywords
from ...proto.external import ExternalFiles
from ...proto.files import path_of, read_model
from ...proto.mapped import File
from ...proto.messages import tensors
from ...proto.origin import nbytes
from ...proto.tensors import EXTERNAL
from ...proto.types import TensorType
from ...sharding.plans import Plan
from ...sharding.rules import Placement
from ...sharding.stages import AXIS, Staged
from ..caches import step_extents
from ..calls.dims import checked_dims, named_dims, variables
from ..changes.parts import with_graph
from ..convert import convert
from ..reports.summary import feeds_of, mark, node_of, traced
from . import hlo
from .chips import MAX_DEVICES, Slice, slice_of
from .explained import Stage, as_zeros, bytes_held, programs, sizes_by_kind
from .pipeline import batch_axes

COSTLIEST: Final = 5
"""Nodes that are named."""


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a step: their number, and the bytes of their results on one device."""

    kind: str
    number: int
    bytes: int


@dataclass(frozen=True)
class NodeCost:
    """What the kernels of a node cost in a step, on one device; a fused kernel counts for the node of its result.

    Attributes:
        name, operator: of the node.
        share: of the program's cycles where XLA estimates them (TPU), of its bytes elsewhere.
    """

    name: str
    operator: str
    share: float


@dataclass(frozen=True)
class OnChip:
    """A program compiled for an accelerator, per chip.

    Attributes:
        chip: as its vendor names it.
        memory: of the chip, bytes.
        needed: bytes of weights, inputs, outputs, temporary memory and code; None where XLA refused to compile.
        temporary: bytes of it that are neither weights, inputs, outputs nor code; None likewise.
        fits: whether the program fits into the chip's memory.
        moved: bytes that its kernels read and write in a step.
        kernels: number of kernels in a step.
        cycles: XLA's estimate of a step's cycles; 0 where it makes none (CUDA).
        least_seconds: lower bound of a step by the chip's published peaks: its FLOPs, or the bytes of its weights,
            inputs and outputs, whichever takes longer.
        nodes: those that cost most.
        refused: why XLA could not compile it; empty where it could.
    """

    chip: str
    memory: int
    needed: int | None = None
    temporary: int | None = None
    fits: bool = False
    moved: int = 0
    kernels: int = 0
    cycles: int = 0
    least_seconds: float = 0.0
    nodes: tuple[NodeCost, ...] = ()
    refused: str = ""


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
        on_chip: the program for an accelerator; None for a CPU.
        sharded: whether the devices divide weights or inputs among them, rather than each holding all.
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
    on_chip: OnChip | None = None
    sharded: bool = True

    def facts(self) -> dict[str, Any]:
        """The cost as a dict for JSON."""
        return asdict(self)


def cost(
    source: str | Path,
    axes: Mapping[str, int] | None = None,
    plan: str = "",
    dims: Mapping[str, int] | None = None,
    compiled: bool = True,
    chips: str = "",
    dtype: str | None = None,
    **reading: Unpack[Reading],
) -> Cost:
    """The cost of a step. Allocates nothing, and external data need not exist.

    Args:
        source: the path of an ONNX file.
        axes: the mesh; an axis "stage" cuts the model into stages. All chips along "data" when left out.
        plan: as ``convert(shardings=)`` takes one by name.
        dims: extents of dimension variables: where they are left out that of the batch is the number of devices that
            share it, those of a decoder's caches and mask are inferred, and any other is 1.
        compiled: whether programs are compiled, for all but the bytes of weights and inputs.
        chips: accelerators to compile for, such as "v5e:2x2" or "h100"; the devices of this process when empty.
        dtype: as ``convert(dtype=)`` takes it.
        **reading: the keywords of ``read``.

    Raises:
        InputNameError: the model has no such dimension variable.
        ShardingError: there are fewer devices than the mesh has, or no such chips.
        ImportError: XLA's compiler for the chips is not installed.

    >>> import onnx2jax
    >>> step = onnx2jax.cost(onnx2jax.demo_model(), {"data": 1}, dims={"batch": 32})
    >>> step.parameters, step.input_bytes
    (33882, 8192)
    """
    check_keywords(reading, cost)
    source, target = path_of(source), slice_of(chips) if chips else None
    devices = target.devices if target else jax.devices()
    axes = dict(axes or {"data": len(devices)})
    if min(axes.values()) < 1:
        raise ShardingError(f"the mesh {axes} has an axis without devices: each has 1 or more")
    if (count := math.prod(axes.values())) > len(devices):
        fix = (
            f"name a larger slice than {chips!r}"
            if chips
            else "use a smaller mesh"
            if count > MAX_DEVICES
            else (
                'compile for accelerators, chips="v5e:2x2", or give the CPU as many: '
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        )
        raise ShardingError(f"the mesh {axes} has {count} devices; there are {len(devices)}: {fix}")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices[:count])
    with present(source, reading) as found:
        model = convert(source, mesh=mesh, shardings=plan or None, stages=axes.get(AXIS), dtype=dtype, **found)
        placement = model.placement
        assert placement is not None
        of_weights = axes.get(Plan(plan).model, 1) if plan and Plan(plan).tensor else 1
        extents, inputs = _inputs(model, dims or {}, mesh.size // of_weights)
        last = getattr(placement, "parts", [placement])[-1]
        shardings = last.of_inputs(inputs, False)
        stages: list[Stage] = []
        on_chip = None
        if compiled and target:
            stages, on_chip = _on_chip(target, model, inputs)
        elif compiled:
            stages = programs(model, (), inputs)
        types: Mapping[str, Any] = model.types
        return Cost(
            axes,
            plan,
            extents,
            sum(math.prod(t.shape) for t in types.values()),
            max(_held(types, placement).values(), default=0),
            sum(bytes_held(t, shardings[n]) for n, t in inputs.items()),
            max((s.compiled.memory_analysis().temp_size_in_bytes for s in stages), default=None),
            max((int(_flops(s)) for s in stages), default=None),
            tuple(Exchange(kind, len(sizes), sum(sizes)) for kind, sizes in sorted(sizes_by_kind(stages).items())),
            on_chip,
            isinstance(placement, Staged) or _divides((*placement.params.values(), *shardings.values()), mesh),
        )


def _flops(stage: Stage) -> float:
    """The FLOPs of a program on one device, by XLA's count."""
    return compat.cost_analysis(stage.compiled).get("flops", 0.0)


def _divides(shardings: Iterable[Any], mesh: Any) -> bool:
    """Whether some sharding divides an array over the mesh; True for one device, which has nothing to divide."""
    return mesh.size == 1 or not all(s.is_fully_replicated for s in shardings)


def _on_chip(target: Slice, model: Any, inputs: Mapping[str, Any]) -> tuple[list[Stage], OnChip]:
    """The programs of a call, and what a chip does in a step; in a pipeline, in the stage that needs most memory."""
    is_staged = isinstance(model.placement, Staged)
    # Nodes named by position, for the names of kernels.
    marked = model if is_staged else with_graph(model, mark(model.graph), placement=model.placement)
    try:
        stages = programs(marked, (), inputs)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return [], OnChip(target.chip.title, target.chip.memory, refused=str(error).splitlines()[0])
    if is_staged:
        flops = [_flops(stage) for stage in stages]
    else:
        zeros = {n: as_zeros(t) for n, t in inputs.items()}
        counted = traced(marked, dict(model.types), zeros, marked.graph.nodes)[1]
        flops = [counted.total() / model.placement.mesh.size]
    on_chip = [_of_program(target, model, stage.compiled, n) for stage, n in zip(stages, flops, strict=True)]
    return stages, max(on_chip, key=lambda program: program.needed or 0)


def _of_program(target: Slice, model: Any, compiled: Any, flops: float) -> OnChip:
    chip, memory = target.chip, compiled.memory_analysis()
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = ends + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    counts = hlo.count(compiled.as_text() or "")
    nodes, shares = model.graph.nodes, Counter[int]()
    for scope, cost in counts.by_scope.items():
        if (i := node_of(scope)) is not None and i < len(nodes):
            shares[i] += cost
    whole = sum(counts.by_scope.values()) or 1
    return OnChip(
        chip.title,
        chip.memory,
        needed,
        memory.temp_size_in_bytes,
        needed <= chip.memory,
        counts.bytes,
        counts.kernels,
        counts.cycles,
        max(flops / chip.flops, ends / chip.bandwidth),
        tuple(NodeCost(nodes[i].name, nodes[i].op_type, n / whole) for i, n in shares.most_common(COSTLIEST)),
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
    """The extents of dimension variables, and the types of inputs; ``devices`` share the batch."""
    inputs = named_dims(model.inputs)
    dims = checked_dims(dims, inputs)
    axes = batch_axes(model.inputs)[0]
    batch = {v.shape[axes[v.name]] for v in inputs if v.name in axes and v.shape}
    dims |= {n: devices for n in variables(inputs) if n in batch and n not in dims}
    dims |= step_extents(model, dims)
    extents = {n: dims.get(n, 1) for n in variables(inputs)}
    for info in inputs:
        if not isinstance(info.type, TensorType) or info.type.shape is None or info.type.dtype.hasobject:
            raise ShardingError(f"input {info} is no tensor of numbers with a declared rank")
    return extents, feeds_of(model, {}, extents, abstract=True)


@contextmanager
def present(source: Path, reading: Reading) -> Iterator[Reading]:
    """Keywords of ``read`` with which a model finds its data files, and sparse files in place of missing ones."""
    folder = source.parent if (named := reading.get("external_data_dir")) is None else path_of(named)
    files = ExternalFiles(folder, follow_links=reading.get("follow_links", False), buffers=reading.get("buffers"))
    links, sizes = dict[str, Path](), dict[str, int]()
    for tensor, _ in tensors(read_model(source)):
        if tensor.data_location == EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            name = os.path.normpath(entries.get("location", ""))
            try:  # another error, as of a path out of the folder, is raised before anything is written
                if isinstance(files.locate(tensor, nbytes(tensor))[0], File):
                    links[name] = (folder / name).resolve()
            except ExternalDataNotFoundError:
                sizes[name] = max(int(entries.get("offset") or 0) + nbytes(tensor), sizes.get(name, 0))
    if not sizes:
        yield reading
        return
    with tempfile.TemporaryDirectory() as temporary:
        for name in {**links, **sizes}:
            path = Path(temporary, name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if name in links:
                    path.symlink_to(links[name])
                else:
                    with path.open("xb") as file:
                        file.truncate(sizes[name])  # sparse: takes no disk space
            except OSError as e:  # such as of a location inside of another one
                raise ExternalDataError(f"no file of external data can be at {name!r:.80}: {e.strerror}") from None
        yield {**reading, "external_data_dir": temporary, "follow_links": True}
