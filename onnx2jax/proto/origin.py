"""A model's message kept for writing it again, without a second copy of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ModelError
from .apart import Apart
from .dtypes import ELEMENT_TYPES
from .external import ExternalFiles
from .mapped import load
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

    def digest(self) -> str:
        """What tells files apart: a checksum of the message, and of bytes all over those that wait in files."""
        return self._opened.digest(self._serialized, self._opened.files.sample())

    def open(self) -> Opened:
        """A fresh copy of the message, to be changed and written."""
        message = ModelProto.FromString(self._serialized)
        for change in self._changes:
            change(message)
        return self._opened.copy(message)


class Opened(Apart):
    """A message of which the bytes of some tensors lie apart, until it is written."""

    def __init__(self, message: Any, files: ExternalFiles, apart: Apart | None = None) -> None:
        super().__init__(apart or files.apart)
        self.message, self.files = message, files

    def copy(self, message: Any) -> Opened:
        """The same for a copy of the message."""
        return Opened(message, self.files, self)

    def data(self, tensor: Any) -> Any:
        """The elements of a tensor in the layout of raw_data: bytes, or an array of them."""
        if (data := self.in_place(tensor)) is not None:
            return load(data)
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
        if tensor.data_location == EXTERNAL or tensor.HasField("raw_data") or self.in_place(tensor) is not None:
            self.put(tensor, from_array(array)["raw_data"])
        else:
            field = ELEMENT_TYPES[tensor.data_type].field
            tensor.ClearField(field)
            getattr(tensor, field).extend(to_field(array))

    def put(self, tensor: Any, data: bytes) -> None:
        """Keep the bytes of a tensor apart, in place of those that it had."""
        self.take(tensor)
        tensor.ClearField("raw_data")
        self.add(tensor, data)

    def join(self, tensor: Any) -> None:
        """Bring the bytes of a tensor back into the message, unless they belong into a file."""
        if tensor.data_location != EXTERNAL:
            super().join(tensor)


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
