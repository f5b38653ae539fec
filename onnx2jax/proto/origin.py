"""The source message of a model, kept for saving it again, without a second copy of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ModelError
from .external import ExternalFiles
from .mapped import Detached, load
from .messages import ModelProto
from .tensors import EXTERNAL, from_array, to_array, to_field
from .types import ELEMENT_TYPES


class Origin:
    """The message of an imported file. It shares the memory of weights with the arrays that the importer made.

    Args:
        message: a ModelProto; its weights are detached, so it must not be used afterwards.
        files: its external data files, as used by the importer.
    """

    def __init__(self, message: Any, files: ExternalFiles) -> None:
        self._opened = opened = Opened(message, files)
        for tensor, data in reversed(files.take_handed_out()):  # the array made last is the one in use
            if tensor.HasField("raw_data"):
                opened.put(tensor, data)
        self._serialized = message.SerializeToString()
        opened.message = None
        self._changes: tuple[Callable[[Any], None], ...] = ()

    def changed(self, change: Callable[[Any], None]) -> Origin:
        """A copy that applies ``change``, which must be picklable, to each message that it opens."""
        new = copy.copy(self)
        new._changes = (*self._changes, change)
        return new

    def digest(self) -> str:
        """A checksum of the message, and of samples of its external and detached data."""
        return self._opened.digest(self._serialized, self._opened.files.sample())

    def open(self) -> Opened:
        """A new copy of the message, to be changed and written."""
        message = ModelProto.FromString(self._serialized)
        for change in self._changes:
            change(message)
        return Opened(message, self._opened.files, self._opened)


class Opened(Detached):
    """A message with the detached data of its tensors, until it is written."""

    def __init__(self, message: Any, files: ExternalFiles, detached: Detached | None = None) -> None:
        super().__init__(detached or files.detached)
        self.message: Any = message
        self.files: ExternalFiles = files

    def data(self, tensor: Any) -> Any:
        """The elements of a tensor in the layout of raw_data, as bytes or as an array."""
        if (data := self.get(tensor)) is not None:
            return load(data)
        if tensor.data_location == EXTERNAL:
            return self.files.read(tensor, nbytes(tensor))
        return tensor.raw_data if tensor.HasField("raw_data") else from_array(to_array(tensor))["raw_data"]

    def array(self, tensor: Any) -> np.ndarray:
        """The elements of a tensor as an array."""
        self.attach(tensor)
        return to_array(tensor, self.files)

    def assign(self, tensor: Any, array: np.ndarray) -> None:
        """Replace the elements of a tensor, stored as before: raw, in the typed field, or in a file."""
        tensor.dims[:] = array.shape
        if tensor.data_location == EXTERNAL or tensor.HasField("raw_data") or self.get(tensor) is not None:
            self.put(tensor, from_array(array)["raw_data"])
        else:
            field = ELEMENT_TYPES[tensor.data_type].field
            tensor.ClearField(field)
            getattr(tensor, field).extend(to_field(array))

    def put(self, tensor: Any, data: bytes) -> None:
        """Replace the data of a tensor by detached bytes."""
        self.take(tensor)
        tensor.ClearField("raw_data")
        self.add(tensor, data)

    def attach(self, tensor: Any) -> None:
        """Move the detached bytes of a tensor into its message, unless they belong in a file."""
        if tensor.data_location != EXTERNAL:
            super().attach(tensor)


def nbytes(tensor: Any) -> int:
    """The size of a tensor's elements in the layout of raw_data; 0 for strings."""
    row = ELEMENT_TYPES.get(tensor.data_type)
    if row is None or any(d < 0 for d in tensor.dims):
        raise ModelError(
            f"tensor {tensor.name!r} has element type {tensor.data_type} and dims {list(tensor.dims)}, of which "
            "one is invalid",
            rule=("TY-01", "TY-24"),
        )
    return -(-math.prod(tensor.dims) * row.bits // 8)
