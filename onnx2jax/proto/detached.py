"""Tensor data kept outside its protobuf message, in arrays or still in the file."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from .mapped import load, sample


class Detached:
    """Detached bytes of tensors, in the layout of raw_data.

    The last entry of the ``external_data`` of such a tensor is an index into them, under a key that no file has.
    """

    def __init__(self, other: Detached | None = None) -> None:
        """Copies the entries of ``other``, so that its tensors are valid here, too."""
        self._data: list[Any] = list(other._data) if other else []
        self._key: str = other._key if other else f"detached {secrets.token_hex(8)}"

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the bytes themselves rather than their place in a file."""
        return vars(self) | {"_data": list(map(load, self._data))}

    def digest(self, *others: bytes) -> str:
        """A checksum of ``sample`` of the bytes, and of the messages to which they belong."""
        result = hashlib.sha256()
        for data in (*(o.replace(self._key.encode(), b"") for o in others), *map(sample, self._data)):
            result.update(data)
        return result.hexdigest()

    def add(self, tensor: Any, data: Any) -> None:
        """Set the detached bytes of a tensor without data; an array may be lazy."""
        tensor.external_data.add(key=self._key, value=str(len(self._data)))
        self._data.append(data)

    def get(self, tensor: Any) -> Any:
        """The detached bytes of a tensor, as they were added; None if it has none."""
        entries = tensor.external_data
        return self._data[int(entries[-1].value)] if entries and entries[-1].key == self._key else None

    def take(self, tensor: Any) -> Any:
        """Like ``get``, and removes them from the tensor."""
        data = self.get(tensor)
        if data is not None:
            del tensor.external_data[-1]
        return data

    def attach(self, tensor: Any) -> None:
        """Move the detached bytes of a tensor into its message."""
        if (data := self.take(tensor)) is not None:
            tensor.raw_data = bytes(load(data))
