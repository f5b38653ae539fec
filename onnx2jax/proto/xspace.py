"""Reads an XLA profile (an XSpace): executions of operations, their times, and the compiled programs.

``jax.profiler.ProfileData`` reads only events: in JAX 0.10 and 0.12 it does not return the metadata of events, which
contain the compiled programs (``Hlo Proto``). These are needed to map an operation or fusion to the model's node.
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
"""The messages and fields that are read: name, number, type; ``*`` marks repeated fields."""


def _message(name: str) -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="xspace.proto", package="xspace", syntax="proto3")
    for message, text in FIELDS.items():
        descriptor = file.message_type.add(name=message)
        for each in text.split():
            field, number, kind = each.split(":")
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            one = descriptor.field.add(name=field, number=int(number), label=label)
            kind = kind.removeprefix("*")
            if kind in FIELDS:
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".xspace.{kind}"
            else:
                one.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"xspace.{name}"))


@dataclass(frozen=True)
class Execution:
    """One execution of an operation of a compiled program.

    Attributes:
        program, name: the program, a key of ``Trace.programs``, and the operation in it.
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
        opcode: XLA's opcode.
        scope: the name stack of the traced function: ``jit(f)/scope/add``.
        inside: the operations of the computations that it calls: those fused into it, or the body of a loop.
    """

    opcode: str
    scope: str
    inside: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A recorded profile.

    Attributes:
        executions: executions of operations.
        named: annotations of the host: name, start and end in seconds.
        programs: program -> its operations by name.
    """

    executions: list[Execution] = field(default_factory=list)
    named: list[tuple[str, float, float]] = field(default_factory=list)
    programs: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)


def read_trace(data: bytes, mark: str) -> Trace:
    """Parse a profile.

    Args:
        data: the bytes of a file ``*.xplane.pb``.
        mark: the prefix of the host's annotations to read.
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
            # Lines that summarise those of a device's streams.
            if not line.name.startswith(("XLA Ops", "XLA Modules", "Framework", "Steps", "Source")):
                _read_line(trace, line, names, stats, mark)
    return trace


def _read_line(trace: Trace, line: Any, names: Mapping[int, str], stats: Mapping[int, str], mark: str) -> None:
    ends: dict[int, float] = {}
    operations = []
    for event in line.events:
        name = names.get(event.metadata_id, "")
        start = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
        if name.startswith(mark):
            trace.named.append((name, start, start + event.duration_ps * 1e-12))
            continue
        facts = {stats.get(s.metadata_id, ""): s for s in event.stats}
        if name.startswith("end: "):
            ends[_number(facts["_c"]) if "_c" in facts else 0] = start
        elif "hlo_op" in facts and "hlo_module" in facts:
            operations.append((event, facts, start))
    for event, facts, start in operations:
        number = f"({_number(facts['program_id'])})" if "program_id" in facts else ""
        # Work that an operation passes to other threads ends later than its call.
        end = max(start + event.duration_ps * 1e-12, ends.get(_number(facts["_p"]), 0) if "_p" in facts else 0)
        program = _text(facts["hlo_module"], stats) + number
        trace.executions.append(Execution(program, _text(facts["hlo_op"], stats), start, end))


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
