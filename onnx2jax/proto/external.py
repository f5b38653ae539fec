"""External tensor data: resolves locations, validates them, and reads the data lazily."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import ExternalDataError, ExternalDataNotFoundError, InputTypeError
from .foreign import HEAD, foreign
from .mapped import LAZY_BYTES, Detached, File, owned, sample
from .types import ELEMENT_TYPES

SHARED_BYTES: Final = 1024
"""raw_data of at least this many bytes is shared with its arrays."""

DENSE_LIMIT: Final = 2**24
"""The most elements of all densified sparse tensors, unless at least one in a thousand is stored."""


class ExternalFiles:
    """The external data files of one model, each opened once.

    Attributes:
        detached: data of tensors that stays in the model's own file.

    Args:
        folder: the folder to which ``location`` is relative (rule EX-01); None if the model was not read from a file.
        follow_links: accept files that symbolic links place outside the folder.
        buffers: bytes or arrays for locations that begin with ``#`` (rule EX-20).
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        follow_links: bool = False,
        buffers: Mapping[str, Any] | None = None,
        detached: Detached | None = None,
    ) -> None:
        self.folder = folder
        self.detached: Detached = detached or Detached()
        self.follow_links = follow_links
        self.buffers: dict[str, np.ndarray] = {
            location: _immutable(location, buffer) for location, buffer in (buffers or {}).items()
        }
        self._files: dict[Path, File] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        """Size and modification time of files that the pickling process had opened."""
        self._maps: dict[File, np.ndarray] = {}
        self._handed_out: list[tuple[Any, bytes]] = []
        self._dense = self._stored = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the paths of the files, with their size and modification time."""
        seen = {**self._seen, **{path: (file.size, file.written) for path, file in self._files.items()}}
        fresh = ExternalFiles(self.folder, follow_links=self.follow_links)
        return vars(fresh) | {"buffers": self.buffers, "_seen": seen}

    def read(self, tensor: Any, nbytes: int, *, lazy: bool = False) -> np.ndarray:
        """The ``nbytes`` bytes of an external TensorProto; many of them with ``lazy`` as a view of the mapped file.

        Raises:
            ExternalDataError: the path leaves the folder, the bounds exceed the file, or the length does not match.
            ExternalDataNotFoundError: the file does not exist.
        """
        source, start = self.locate(tensor, nbytes)
        if isinstance(source, File):
            if not lazy or nbytes < LAZY_BYTES:
                return source.read_runs([start], nbytes)
            if source not in self._maps:
                self._maps[source] = source.mapped()
            source = self._maps[source]
        return source[start : start + nbytes]

    def locate(self, tensor: Any, nbytes: int) -> tuple[File | np.ndarray, int]:
        """The file or buffer that holds a tensor's data, and the offset in it."""
        what = f"external data of tensor {tensor.name!r}"
        entries = _entries(tensor, what)
        offset, length = (_number(entries, key, what) for key in ("offset", "length"))
        location = entries.get("location", "")
        source = self._buffer(tensor, location, what) if location in self.buffers else self._open(location, what)
        if length is not None and length != nbytes:
            text = f"{what}: length is {length} bytes, but its dims and element type need {nbytes}"
            raise ExternalDataError(text, rule="EX-11")
        start = offset or 0
        if start + nbytes > source.size:
            head = source.read_runs([0], min(source.size, HEAD)) if isinstance(source, File) else source[:HEAD]
            raise ExternalDataError(
                f"{what}: bytes {start} to {start + nbytes} are outside {location!r:.80} of {source.size} bytes; "
                f"{foreign(head.tobytes()) or 'the file is truncated or belongs to another model'}",
                rule="EX-10",
            )
        return source, start

    def _buffer(self, tensor: Any, location: str, what: str) -> np.ndarray:
        array = self.buffers[location]
        row = ELEMENT_TYPES.get(tensor.data_type)
        if array.dtype != np.uint8 and (row is None or array.dtype != row.dtype or row.bits < 8):
            raise ExternalDataError(
                f"{what}: buffer {location!r} has type {array.dtype}, the tensor {row.dtype if row else 'none'}; "
                "pass an array of that type, or bytes in the layout of raw_data",
                rule="EX-20",
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def claim(self, elements: int, stored: int) -> bool:
        """Whether a sparse tensor may be densified, counting all sparse tensors of the model."""
        self._dense += elements
        self._stored += stored
        return self._dense <= max(DENSE_LIMIT, 1000 * self._stored)

    def sample(self) -> bytes:
        """Sizes and samples of the open files, for a digest."""
        files = [file for file in self._files.values() if file.size]
        return b"".join(f"{file.size} ".encode() + sample(file.mapped()) for file in files)

    def is_link(self, location: str) -> bool:
        """Whether a location is a symbolic link."""
        return self.folder is not None and os.path.islink(self.folder / location)

    def verify(self, tensor: Any) -> None:
        """Compare the file's SHA1 checksum with the one stored for the tensor; reads the whole file.

        Raises:
            ExternalDataError: they differ, or as for ``read``.
        """
        what = f"external data of tensor {tensor.name!r}"
        entries = _entries(tensor, what)
        if wanted := entries.get("checksum"):
            location = entries.get("location", "")
            if (checksum := self._open(location, what).sha1) != wanted.lower():
                raise ExternalDataError(
                    f"{what}: the checksum of {location!r} is {checksum}, not {wanted}; "
                    "the file is damaged or belongs to another model",
                    rule="EX-12",
                )

    def hand_out(self, tensor: Any, data: bytes) -> None:
        """Record that an array shares the memory of a tensor's raw_data."""
        if len(data) >= SHARED_BYTES:
            self._handed_out.append((tensor, data))

    def take_handed_out(self) -> list[tuple[Any, bytes]]:
        """The tensors whose raw_data is shared with arrays; clears the record."""
        result, self._handed_out = self._handed_out, []
        return result

    def _path(self, location: str, what: str) -> Path:
        if not location:
            raise ExternalDataError(f"{what} has no location", rule="EX-02")
        inside = Path(os.path.normpath(location))
        if location.startswith("#") and (self.folder is None or not os.path.exists(self.folder / inside)):
            text = f"{what} is in memory, as {location!r}; pass convert(..., buffers={{{location!r}: array}})"
            raise ExternalDataNotFoundError(text, rule="EX-20")
        if self.folder is None:
            raise ExternalDataError(
                f"{what} is in file {location!r}, but the model was not read from a file; "
                "pass its folder: convert(..., external_data_dir='folder')"
            )
        if inside.is_absolute() or ".." in inside.parts or "\\" in location or "\0" in location:
            text = f"{what}: location {location!r} is outside the model's folder"
            raise ExternalDataError(text, rule=("EX-03", "EX-04"))
        path = self.folder / inside
        if not os.path.exists(path):
            raise ExternalDataNotFoundError(
                f"{what}: no file {location!r} in {str(self.folder)!r}; "
                "copy it beside the model or pass convert(..., external_data_dir='folder')",
                rule="EX-19",
            )
        self._check_inside(path, what)
        return path

    def _check_inside(self, path: Path, what: str) -> Path:
        """The resolved path; raises unless it is inside the folder."""
        assert self.folder is not None
        real = path.resolve()
        if not self.follow_links and not real.is_relative_to(self.folder.resolve()):
            raise ExternalDataError(
                f"{what}: {path.name!r} is a link to a file outside the model's folder; "
                "if you trust it: convert(..., follow_links=True)",
                rule="EX-05",
            )
        return real

    def _open(self, location: str, what: str) -> File:
        path = self._path(location, what)
        if path not in self._files:
            # Non-blocking, so that opening a FIFO does not hang (rule EX-07).
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            except OSError as e:
                raise ExternalDataError(f"{what}: {path.name!r} cannot be opened: {e.strerror}", rule="EX-07") from None
            file = File(descriptor, path.name)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ExternalDataError(f"{what}: {path.name!r} is not a regular file", rule="EX-07")
            if status.st_nlink > 1 and not self.follow_links:
                raise ExternalDataError(
                    f"{what}: {path.name!r} is a hard link, so the file may be shared with another folder; "
                    "if you trust it: convert(..., follow_links=True)",
                    rule="EX-06",
                )
            # Checked again now that the file is open: the path may have become a link meanwhile.
            if not os.path.samestat(status, os.stat(self._check_inside(path, what))):
                raise ExternalDataError(f"{what}: {path.name!r} changed while it was opened", rule="EX-08")
            if self._seen.get(path, (file.size, file.written)) != (file.size, file.written):
                text = f"{what}: {path.name!r} was changed after the model was pickled"
                raise ExternalDataError(text, rule="EX-10")
            self._files[path] = file
        return self._files[path]


def _immutable(location: str, buffer: Any) -> np.ndarray:
    """An immutable array of the buffer's current values, copied unless its memory is immutable."""
    if isinstance(buffer, np.ma.MaskedArray):
        raise InputTypeError(
            f"buffers[{location!r}] is a masked array, whose mask would be ignored; pass buffer.filled(value)"
        )
    return owned(np.asarray(buffer) if hasattr(buffer, "dtype") else np.frombuffer(buffer, np.uint8))


def _entries(tensor: Any, what: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:
            raise ExternalDataError(f"{what} has {entry.key!r} twice", rule="EX-15")
        entries[entry.key] = entry.value
    return entries


def _number(entries: dict[str, str], key: str, what: str) -> int | None:
    text = entries.get(key)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ExternalDataError(f"{what}: {key} is {text!r}, not a decimal number of bytes", rule="EX-09")
    return int(text)
