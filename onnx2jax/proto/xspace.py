"""Reads a profile of XLA's (an XSpace): the operations that ran, how long, and the compiled programs they belong to.

``jax.profiler.ProfileData`` reads the events alone: in JAX 0.10 and 0.12 it hands out no metadata of events, where the
compiled programs are (``Hlo Proto``). Only they say which node of the model an operation, or a fusion, comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS: Final = {
    "XSpace": "planes:1:*XPlane",
    "XPlane": "name:2:string lines:3:*XLine event_metadata:4:*Entry stat_metadata:5:*Entry",
    "Entry": "key:1:int64 value:2:Metadata",
    "Metadata": "name:2:string stats:5:*XStat",
    "XLine": "name:2:string timestamp_ns:3:int64 events:4:*XEvent",
    "XEvent": "metadata_id:1:int64 offset_ps:2:int64 duration_ps:3:int64 stats:4:*XStat",
    "XStat": "metadata_id:1:int64 uint64:3:uint64 int64:4:int64 text:5:string data:6:bytes reference:7:uint64",
    "HloProto": "hlo_module:1:HloModule",
    "HloModule": "name:1:string computations:3:*Computation",
    "Computation": "instructions:2:*Instruction id:5:int64",
    "Instruction": "name:1:string opcode:2:string metadata:7:OpMetadata called_computation_ids:38:*int64",
    "OpMetadata": "op_name:2:string",
}
"""The messages and their fields that are read here: name, number, type; ``*`` where there are several."""


def _message(name: str) -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="xspace.proto", package="xspace", syntax="proto3")
    for message, text in FIELDS.items():
        made = file.message_type.add(name=message)
        for each in text.split():
            own, number, kind = each.split(":")
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            one = made.field.add(name=own, number=int(number), label=label)
            kind = kind.removeprefix("*")
            if kind in FIELDS:
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".xspace.{kind}"
            else:
                one.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"xspace.{name}"))


@dataclass(frozen=True)
class Ran:
    """One run of an operation of a compiled program.

    Attributes:
        program, name: the program, as ``Trace.programs`` has it, and the operation in it.
        start, end: seconds.
    """

    program: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Instruction:
    """An operation of a compiled program.

    Attributes:
        opcode: what XLA calls its kind.
        scope: where in the traced function its result comes from: ``jit(f)/scope/add``.
        inside: the operations of what it calls: those fused into it, or the body of a loop.
    """

    opcode: str
    scope: str
    inside: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """What was recorded.

    Attributes:
        ran: runs of operations.
        named: runs of what the host gave names to: name, start and end in seconds.
        programs: the operations of each program by name.
    """

    ran: list[Ran] = field(default_factory=list)
    named: list[tuple[str, float, float]] = field(default_factory=list)
    programs: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)


def read_trace(data: bytes, mark: str) -> Trace:
    """What a profile says.

    Args:
        data: a file ``*.xplane.pb``.
        mark: what the names of the host begin with.
    """
    trace = Trace()
    for plane in _message("XSpace").FromString(data).planes:
        names = {e.key: e.value.name for e in plane.event_metadata}
        stats = {e.key: e.value.name for e in plane.stat_metadata}
        for entry in plane.event_metadata:
            for stat in entry.value.stats:
                if stat.data and stats.get(stat.metadata_id) == "Hlo Proto":
                    trace.programs[entry.value.name] = _instructions(stat.data)
        for line in plane.lines:
            # Summaries of the lines of a device's streams, on which everything stands once more.
            if not line.name.startswith(("XLA Ops", "XLA Modules", "Framework", "Steps", "Source")):
                _read_line(trace, line, names, stats, mark)
    return trace


def _read_line(trace: Trace, line: Any, names: Mapping[int, str], stats: Mapping[int, str], mark: str) -> None:
    ends: dict[int, float] = {}
    found = []
    for event in line.events:
        name = names.get(event.metadata_id, "")
        start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
        if name.startswith(mark):
            trace.named.append((name, start, start + event.duration_ps * 1e-12))
            continue
        said = {stats.get(s.metadata_id, ""): s for s in event.stats}
        if name.startswith("end: "):
            ends[_number(said["_c"]) if "_c" in said else 0] = start
        elif "hlo_op" in said and "hlo_module" in said:
            found.append((event, said, start))
    for event, said, start in found:
        number = f"({_number(said['program_id'])})" if "program_id" in said else ""
        # What an operation hands to other threads ends later than the call of it.
        end = max(start + event.duration_ps * 1e-12, ends.get(_number(said["_p"]), 0) if "_p" in said else 0)
        program = _text(said["hlo_module"], stats) + number
        trace.ran.append(Ran(program, _text(said["hlo_op"], stats), start, end))


def _number(stat: Any) -> int:
    return int(stat.int64 or stat.uint64)


def _text(stat: Any, stats: Mapping[int, str]) -> str:
    return stat.text or stats.get(stat.reference, "")


def _instructions(data: bytes) -> dict[str, Instruction]:
    computations = _message("HloProto").FromString(data).hlo_module.computations
    members = {c.id: c.instructions for c in computations}

    def inside(ids: Any) -> Iterator[str]:
        for i in ids:
            for inner in members.get(i, ()):
                yield inner.name
                yield from inside(inner.called_computation_ids)

    return {
        i.name: Instruction(i.opcode, i.metadata.op_name, tuple(inside(i.called_computation_ids)))
        for c in computations
        for i in c.instructions
    }
