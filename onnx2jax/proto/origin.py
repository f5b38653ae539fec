"""A model's message kept for writing it again, without a second copy of its weights."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ModelError
from .dtypes import ELEMENT_TYPES
from .external import ExternalFiles
from .messages import ModelProto
from .tensors import EXTERNAL, from_array, to_array, to_field


class Origin:
    """What a file said. Bytes that the importer handed out as arrays are shared with them, not kept twice.

    Args:
        message: a ModelProto; its weights are taken out of it, so nobody should use it any more.
        files: where its external data lies, with which it was imported.
    """

    def __init__(self, message: Any, files: ExternalFiles) -> None:
        self._opened = opened = Opened(message, files)
        for tensor, data in reversed(files.take_handed_out()):  # the last array made of a tensor is the one in use
            if tensor.HasField("raw_data"):
                opened.put(tensor, data)
        self._serialized = message.SerializeToString()
        opened.message = None
        self._changes: tuple[Callable[[Any], None], ...] = ()

    def changed(self, change: Callable[[Any], None]) -> Origin:
        """The same with a change that is made to each message opened; it can be pickled."""
        new = copy.copy(self)
        new._changes = (*self._changes, change)
        return new

    def open(self) -> Opened:
        """A fresh copy of the message, to be changed and written."""
        message = ModelProto.FromString(self._serialized)
        for change in self._changes:
            change(message)
        return self._opened.copy(message)


class Opened:
    """A message of which the bytes of some tensors lie apart, until it is written."""

    def __init__(self, message: Any, files: ExternalFiles) -> None:
        self.message, self.files = message, files
        self._apart: list[bytes] = []
        # A tensor whose bytes are apart says where in an entry of `external_data` under a key that no file has.
        self._key = f"apart {secrets.token_hex(8)}"

    def copy(self, message: Any) -> Opened:
        """The same for a copy of the message."""
        result = Opened(message, self.files)
        result._apart, result._key = list(self._apart), self._key
        return result

    def data(self, tensor: Any) -> Any:
        """The elements of a tensor in the layout of raw_data: bytes, or a view of its file."""
        if (i := self.place(tensor)) is not None:
            return self._apart[i]
        if tensor.data_location == EXTERNAL:
            return self.files.read(tensor, nbytes(tensor))
        return tensor.raw_data if tensor.HasField("raw_data") else from_array(to_array(tensor))["raw_data"]

    def array(self, tensor: Any) -> np.ndarray:
        """The elements of a tensor."""
        self.join(tensor)
        return to_array(tensor, self.files)

    def assign(self, tensor: Any, array: np.ndarray) -> None:
        """New elements, written as the old ones were: raw, in the typed field, or in a file."""
        del tensor.dims[:]
        tensor.dims.extend(array.shape)
        if tensor.data_location == EXTERNAL or tensor.HasField("raw_data") or self.place(tensor) is not None:
            self.put(tensor, from_array(array)["raw_data"])
        else:
            field = ELEMENT_TYPES[tensor.data_type].field
            tensor.ClearField(field)
            getattr(tensor, field).extend(to_field(array))

    def put(self, tensor: Any, data: bytes) -> None:
        """Keep the bytes of a tensor apart."""
        self.take_place(tensor)
        tensor.ClearField("raw_data")
        tensor.external_data.add(key=self._key, value=str(len(self._apart)))
        self._apart.append(data)

    def join(self, tensor: Any) -> None:
        """Bring the bytes of a tensor back into the message, unless they belong into a file."""
        if tensor.data_location != EXTERNAL and (i := self.take_place(tensor)) is not None:
            tensor.raw_data = self._apart[i]

    def place(self, tensor: Any) -> int | None:
        """Which of the bytes apart are a tensor's."""
        entries = tensor.external_data
        return int(entries[-1].value) if entries and entries[-1].key == self._key else None

    def take_place(self, tensor: Any) -> int | None:
        """The same, and the tensor forgets it."""
        place = self.place(tensor)
        if place is not None:
            del tensor.external_data[-1]
        return place


def nbytes(tensor: Any) -> int:
    """The size of a tensor's elements in the layout of raw_data; 0 for strings."""
    row = ELEMENT_TYPES.get(tensor.data_type)
    if row is None or any(d < 0 for d in tensor.dims):
        raise ModelError(
            f"tensor {tensor.name!r} has element type {tensor.data_type} and dims {list(tensor.dims)}, which are not "
            "both legal",
            rule=("TY-01", "TY-24"),
        )
    return -(-math.prod(tensor.dims) * row.bits // 8)
