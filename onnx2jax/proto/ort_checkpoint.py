"""Reads checkpoints of onnxruntime's on-device training: FlatBuffers files whose tensors become TensorProto.

Tables are read by slot, the position of a field in onnxruntime's schema (ort_training_checkpoint.fbs, and ort.fbs for
Tensor), so no generated code is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import compat
from ..errors import ModelError
from .files import read_regular
from .messages import TensorProto
from .origin import nbytes
from .tensors import EXTERNAL

IDENTIFIER: Final = b"ODTC"
VERSIONS: Final = (1, 2)
"""Version 2 adds fields for omitted values and for values in a separate file."""


@dataclass(frozen=True)
class Group:
    """The parameters of one optimizer: parameter -> its state tensors, named by role."""

    name: str
    step: int
    learning_rate: float
    moments: dict[str, list[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint; tensors are TensorProto messages, large ones with external data."""

    trained: list[Any]
    frozen: list[Any]
    groups: list[Group]
    properties: dict[str, int | float | str]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ModelError: the file is not a checkpoint, is damaged, has an unsupported version, or has no values.
        FileNotFoundError: the file does not exist.
        ImportError: flatbuffers is not installed.
    """
    library = compat.optional("flatbuffers", "artifacts")
    label = f"checkpoint {str(path)!r}"
    data = read_regular(path, label)
    if data[4:8] != IDENTIFIER:
        text = f"its identifier is {data[4:8]!r}, not {IDENTIFIER!r}"
        raise ModelError(f"{label} is not a checkpoint of onnxruntime: {text}")
    try:
        return _checkpoint(_Table(library, data, int.from_bytes(data[:4], "little")), f"{path.name}.data")
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error
    except (struct.error, ValueError, TypeError, OverflowError) as error:  # reads beyond the file
        raise ModelError(f"{label} is damaged ({error})") from error


def _checkpoint(root: _Table, data: str) -> Checkpoint:
    version, module, bag = root.number(0, "Int32"), root.table(1), root.table(3)
    if version not in VERSIONS:
        raise ModelError(f"its version is {version}; supported are {VERSIONS}")
    if module is None or module.number(2, "Bool"):
        raise ModelError("it has names of parameters without values (a nominal checkpoint); load the full checkpoint")
    groups = [_group(table, data) for table in root.tables(2)]
    trained, frozen = ([_tensor(t, data) for t in module.tables(slot)] for slot in (0, 1))
    properties = {
        entry.text(0): entry.number(1, kind) if kind else entry.text(1)
        for slot, kind in enumerate(("Int64", "Float32", None))
        for entry in (bag.tables(slot) if bag else ())
    }
    return Checkpoint(trained, frozen, groups, properties)


def _group(table: _Table, data: str) -> Group:
    moments = {state.text(0): [_tensor(t, data) for t in state.tables(1)] for state in table.tables(3)}
    return Group(table.text(0), table.number(1, "Int64"), table.number(2, "Float32"), moments)


def _tensor(table: _Table, data: str) -> Any:
    tensor = TensorProto(name=table.text(0), data_type=table.number(3, "Int32"), dims=table.numbers(2, "Int64"))
    size, offset = nbytes(tensor), table.number(6, "Int64", -1)
    if offset >= 0:
        tensor.data_location = EXTERNAL
        for key, value in (("location", data), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor
    tensor.raw_data = table.numbers(4, "Uint8").tobytes()
    if len(tensor.raw_data) != size:
        raise ModelError(
            f"tensor {tensor.name!r} with dims {list(tensor.dims)} needs {size} bytes, but has {len(tensor.raw_data)}"
        )
    return tensor


class _Table:
    """A table of a FlatBuffers file; invalid offsets raise."""

    def __init__(self, library: Any, data: bytes, position: int) -> None:
        self._library, self._data, self._kinds = library, data, library.number_types
        self._table = library.table.Table(data, position)
        # The only signed offset; all others are forward.
        vtable = position - self._table.Get(self._kinds.SOffsetTFlags, position)
        if vtable < 0:
            raise ModelError(f"it is damaged: the table at byte {position} has its fields at byte {vtable}")

    def _at(self, slot: int) -> int:
        """The offset of a field in the table; 0 if it is omitted."""
        return self._table.Offset(4 + 2 * slot)

    def number(self, slot: int, kind: str, default: int = 0) -> Any:
        flags, at = getattr(self._kinds, f"{kind}Flags"), self._at(slot)
        return self._table.Get(flags, self._table.Pos + at) if at else default

    def numbers(self, slot: int, kind: str) -> np.ndarray:
        flags, at = getattr(self._kinds, f"{kind}Flags"), self._at(slot)
        return self._table.GetVectorAsNumpy(flags, at) if at else np.zeros(0, np.uint8)

    def text(self, slot: int) -> str:
        return self.numbers(slot, "Uint8").tobytes().decode()

    def table(self, slot: int) -> _Table | None:
        at = self._at(slot)
        return _Table(self._library, self._data, self._table.Indirect(self._table.Pos + at)) if at else None

    def tables(self, slot: int) -> Iterator[_Table]:
        if at := self._at(slot):
            start = self._table.Vector(at)
            for i in range(self._table.VectorLen(at)):
                yield _Table(self._library, self._data, self._table.Indirect(start + 4 * i))
