"""Bytes of tensors that lie apart from their message: in arrays that were made of it, or still in its file."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from .mapped import load, sample


class Apart:
    """The bytes of some tensors, in the layout of raw_data.

    A tensor whose bytes are apart says where in its last entry of ``external_data``, under a key that no file has.
    """

    def __init__(self, other: Apart | None = None) -> None:
        """``other``: begin with the same bytes, for tensors that say where they are there."""
        self._data: list[Any] = list(other._data) if other else []
        self._key: str = other._key if other else f"apart {secrets.token_hex(8)}"

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps: the bytes themselves, not where in a file they are."""
        return vars(self) | {"_data": list(map(load, self._data))}

    def digest(self, *others: bytes) -> str:
        """A checksum of the bytes, as far as ``sample`` takes them, and of messages to which they belong."""
        result = hashlib.sha256()
        for data in (*(o.replace(self._key.encode(), b"") for o in others), *map(sample, self._data)):
            result.update(data)
        return result.hexdigest()

    def add(self, tensor: Any, data: Any) -> None:
        """Keep the bytes of a tensor that has none: bytes, or an array of them, which may still be in a file."""
        tensor.external_data.add(key=self._key, value=str(len(self._data)))
        self._data.append(data)

    def in_place(self, tensor: Any) -> Any:
        """The bytes of a tensor as they were added; None where they are not apart."""
        entries = tensor.external_data
        return self._data[int(entries[-1].value)] if entries and entries[-1].key == self._key else None

    def take(self, tensor: Any) -> Any:
        """The same, and the tensor forgets them."""
        data = self.in_place(tensor)
        if data is not None:
            del tensor.external_data[-1]
        return data

    def join(self, tensor: Any) -> None:
        """Bring the bytes of a tensor back into the message."""
        if (data := self.take(tensor)) is not None:
            tensor.raw_data = bytes(load(data))
