"""What a compiled program does, counted from the text of its optimised HLO: memory traffic, kernels, collectives.

XLA's own cost analysis counts the body of a loop once and leaves out calls of libraries on CUDA. Here a kernel's bytes
are those of its operands and results, and what a loop does is multiplied by its number of trips. A
dynamic-update-slice or scatter writes in place, because XLA inserts a copy wherever the old value is needed: of its
buffer only the slice counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE: Final = re.compile(r" ?([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY: Final = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_BRANCHES: Final = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")

KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE: Final = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")

_FREE: Final = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "after-all"),
        *("opt-barrier", "partition-id", "replica-id", "iota"),
    )
)
"""Opcodes that are no kernels."""


class HloInstruction(NamedTuple):
    """One instruction.

    Attributes:
        shape: the type of its result, as text.
        opcode: such as ``fusion``.
        operands: names of instructions of the same computation.
        line: its whole text.
    """

    shape: str
    opcode: str
    operands: Sequence[str]
    line: str


Computation = Mapping[str, HloInstruction]
"""Instructions by name."""
Computations = Mapping[str, Computation]


@dataclass
class Counts:
    """What a run of a program does on one device.

    Attributes:
        kernels: how many run.
        bytes_by_scope, cycles_by_scope: bytes and cycles by ``op_name``, the stack of scopes in which a kernel was
            traced.
    """

    kernels: int = 0
    bytes_by_scope: Counter[str] = field(default_factory=Counter)
    cycles_by_scope: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Operands and results of all kernels; of a buffer updated in place what is written."""
        return self.bytes_by_scope.total()

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate; 0 for other targets."""
        return self.cycles_by_scope.total()

    @property
    def by_scope(self) -> Counter[str]:
        """What a kernel costs, by scope: cycles where the compiler estimates them, bytes elsewhere."""
        return self.cycles_by_scope or self.bytes_by_scope


def count(text: str) -> Counts:
    """The counts of a compiled program, from ``compiled.as_text()``.

    >>> text = '''ENTRY %main (a: f32[8]) -> f32[8] {
    ...   %a = f32[8]{0} parameter(0)
    ...   ROOT %b = f32[8]{0} negate(%a)
    ... }'''
    >>> counts = count(text)
    >>> counts.bytes, counts.kernels
    (64, 1)
    """
    computations, entry = _computations(text)
    counts = Counts()
    _run(entry, 1, computations, counts)
    return counts


def nbytes(shape: str) -> int:
    """The bytes of a type of HLO, of a tuple those of all its elements.

    >>> nbytes("(f32[2,3]{1,0}, bf16[4]{0:T(256)})")
    32
    """
    return _bytes(_ARRAY.findall(shape))


@dataclass(frozen=True)
class Collective:
    """A collective: its kind, as XLA names it, and the bytes of its result on one device."""

    kind: str
    bytes: int


def collectives(text: str) -> Iterator[Collective]:
    """The collectives of a compiled program; one in a loop body counts once.

    >>> list(collectives("%a = f32[2,8]{1,0} all-reduce(%b), channel_id=1"))
    [Collective(kind='all-reduce', bytes=64)]
    """
    for shape, kind, start in _COLLECTIVE.findall(text):
        arrays = _ARRAY.findall(shape)
        # The start of an asynchronous collective returns operands before results, ((a, b), (y, z)) or (a, y, ...);
        # that of an all-reduce returns results alone.
        if start and kind != "all-reduce" and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :] if shape.startswith("((") else arrays[1:2]
        yield Collective(kind, _bytes(arrays))


def _bytes(arrays: Iterable[tuple[str, str]]) -> int:
    """The bytes of arrays, each an element type and its extents."""
    return int(sum(_itemsize(dtype) * math.prod(int(n) for n in extents.split(",") if n) for dtype, extents in arrays))


def _itemsize(dtype: str) -> float:
    """The bytes of an element; 0 of a token."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else float(dtype == "pred")


def _computations(text: str) -> tuple[dict[str, dict[str, HloInstruction]], str]:
    """Instructions by name, by computation; and the name of the entry computation."""
    computations: dict[str, dict[str, HloInstruction]] = {}
    current, entry = dict[str, HloInstruction](), ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            end = _type_end(instruction[2])
            if rest := _OPCODE.match(instruction[2][end:]):
                operands = _NAME.findall(rest[2][: _closing(rest[2])])
                current[instruction[1]] = HloInstruction(instruction[2][:end], rest[1], operands, line)
    return computations, entry


def _type_end(text: str) -> int:
    """Where the type of a result ends: a tuple's is in parentheses, an array's has no space."""
    return 1 + _closing(text[1:]) + 1 if text.startswith("(") else text.find(" ")


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one opened before the text."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def _run(name: str, times: int, computations: Computations, counts: Counts) -> None:
    """Add a computation's counts, times the number of its runs."""
    computation = computations.get(name, {})
    for key, instruction in computation.items():
        line, opcode = instruction.line, instruction.opcode
        if opcode == "while":
            _run(_called(instruction, "body"), times * _trips(instruction, computations), computations, counts)
        elif opcode == "conditional":
            if branches := _BRANCHES.search(line):  # one of them runs
                _run((branches[1] or branches[2]).split(",")[0].lstrip(" %"), times, computations, counts)
        elif opcode == "call":
            _run(_called(instruction, "to_apply"), times, computations, counts)
        elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
            if opcode.endswith("-start") and not opcode.startswith(("all-", "collective-")):
                continue  # a copy between memories of the chip: who reads it is counted
            scope = re.search(r'op_name="([^"]*)"', line)
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            where = scope[1] if scope else key
            counts.kernels += times
            counts.bytes_by_scope[where] += times * _moved(instruction, computation, computations)
            if cycles and int(cycles[1]) < _NO_ESTIMATE:
                counts.cycles_by_scope[where] += times * int(cycles[1])


_SLICES: Final = ("slice", "dynamic-slice", "gather")
_NO_ESTIMATE: Final = 2**63
"""What XLA writes for a kernel whose cycles it can't estimate is a negative number, shown without its sign."""


class _Update(NamedTuple):
    """A buffer that an instruction updates in place.

    Attributes:
        operand: the position of the buffer among the operands.
        written: bytes of the slices written, and of those read to be combined with them.
        read: bytes of the buffer that are read besides.
    """

    operand: int
    written: int
    read: int = 0


def _moved(instruction: HloInstruction, computation: Computation, computations: Computations) -> int:
    """The bytes that a kernel reads and writes: of operands that are only sliced, the slices."""
    sizes, written = _sizes(instruction, computation), nbytes(instruction.shape) - _workspace(instruction)
    read = _parts_read(instruction, sizes, computations)
    for update in _updates(instruction, computation, computations):
        written += update.written - sizes[update.operand]  # the result is as large as the buffer
        read[update.operand] = update.read
    return written + sum(read.get(operand, size) for operand, size in enumerate(sizes))


def _workspace(instruction: HloInstruction) -> int:
    """The bytes of the memory that a call of cuBLAS or cuDNN may use on its way: the last of its results."""
    if instruction.opcode != "custom-call" or not re.search(r'custom_call_target="__cu(blas|dnn)', instruction.line):
        return 0
    last = re.search(r", ([su]8\[\d+\])\{0\}\)$", instruction.shape)
    return nbytes(last[1]) if last else 0


def _sizes(instruction: HloInstruction, computation: Computation) -> list[int]:
    """The bytes of each operand."""
    return [nbytes(computation[n].shape) if n in computation else 0 for n in instruction.operands]


def _parts_read(instruction: HloInstruction, sizes: Sequence[int], computations: Computations) -> dict[int, int]:
    """The bytes that a kernel reads of operands, by position, where instructions of it say which."""
    if instruction.opcode in _SLICES:
        return {0: min(sizes[0], nbytes(instruction.shape))}
    inside = _fused(instruction, computations)
    parts = ((_position(i), _read(i, None, inside)) for i in inside.values() if i.opcode == "parameter")
    return {position: read for position, read in parts if position is not None and read}


def _updates(instruction: HloInstruction, computation: Computation, computations: Computations) -> list[_Update]:
    """The buffers that a kernel updates in place."""
    sizes = _sizes(instruction, computation)
    if instruction.opcode == "dynamic-update-slice":
        return [_Update(0, sizes[1])]
    if instruction.opcode == "scatter":
        count = len(sizes) // 2  # buffers, indices, and an update for each buffer
        combiner = computations.get(_called(instruction, "to_apply"), {})
        times = 1 if combiner and _source(_root(combiner), combiner).opcode == "parameter" else 2
        return [_Update(i, times * sizes[count + 1 + i]) for i in range(count)]
    inside, updates = _fused(instruction, computations), list[_Update]()
    if not inside:
        return []
    root = _root(inside)
    for result in [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]:
        writer = _source(result, inside)
        for update in _updates(writer, inside, computations):
            buffer = _source(inside[writer.operands[update.operand]], inside)
            if (position := _position(buffer)) is not None:
                updates.append(update._replace(operand=position, read=_read(buffer, writer, inside)))
    return updates


def _position(instruction: HloInstruction) -> int | None:
    """Which parameter of its computation an instruction is; None if it is none."""
    position = re.search(r" parameter\((\d+)\)", instruction.line)
    return int(position[1]) if position else None


def _fused(instruction: HloInstruction, computations: Computations) -> Computation:
    """The instructions of a fusion; of other instructions none."""
    return computations.get(_called(instruction, "calls"), {}) if instruction.opcode == "fusion" else {}


def _called(instruction: HloInstruction, attribute: str) -> str:
    name = re.search(rf"{attribute}=%?([\w.\-]+)", instruction.line)
    return name[1] if name else ""


def _root(computation: Computation) -> HloInstruction:
    return next(i for i in computation.values() if i.line.lstrip().startswith("ROOT "))


def _source(instruction: HloInstruction, computation: Computation) -> HloInstruction:
    """What a chain of bitcasts comes from."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands[0]]
    return instruction


def _read(buffer: HloInstruction, writer: HloInstruction | None, inside: Computation) -> int:
    """The bytes of a buffer that a fusion reads, apart from the instruction that updates it, if one does."""
    read = 0
    for reader in inside.values():
        if reader.opcode != "bitcast" and any(_source(inside[n], inside) is buffer for n in reader.operands):
            sliced = reader.opcode in _SLICES and _source(inside[reader.operands[0]], inside) is buffer
            read += 0 if reader is writer else nbytes(reader.shape if sliced else buffer.shape)
    return min(read, nbytes(buffer.shape))


def _trips(loop: HloInstruction, computations: Computations) -> int:
    """How often the body of a loop runs; 1 where nobody knows."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(known[1])
    return max(_constants(_called(loop, "condition"), computations), default=1)


def _constants(name: str, computations: Computations) -> Iterator[int]:
    """The positive integers in a computation and in those that it calls."""
    for instruction in computations.get(name, {}).values():
        yield from map(int, re.findall(r" constant\(([1-9]\d*)\)", instruction.line))
        for called in re.findall(r"calls=%?([\w.\-]+)", instruction.line):
            yield from _constants(called, computations)
