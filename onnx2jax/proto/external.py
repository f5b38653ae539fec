"""Tensor data in files beside the model: found, checked, and mapped into memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import ExternalDataError, ExternalDataNotFoundError

WORTH_SHARING: Final = 1024
"""From how many bytes on a tensor's raw_data is not kept a second time."""


DENSE_LIMIT: Final = 2**24
"""Elements that sparse tensors may have when made dense, if fewer than one in a thousand is stored."""


class ExternalFiles:
    """The files beside one model. Each is mapped once; tensors are views of the map.

    Args:
        folder: where ``location`` starts (rule EX-01); None when the model did not come from a file.
        follow_links: accept files that symbolic links place outside the folder.
    """

    def __init__(self, folder: Path | None, *, follow_links: bool = False) -> None:
        self.folder = folder
        self.follow_links = follow_links
        self._maps: dict[Path, np.ndarray] = {}
        self._handed_out: list[tuple[Any, bytes]] = []
        self._sums: dict[Path, str] = {}
        self._dense = self._stored = 0

    def read(self, tensor: Any, nbytes: int) -> np.ndarray:
        """The ``nbytes`` bytes of an external TensorProto, a view of the mapped file.

        Raises:
            ExternalDataError: a path out of the folder, bounds out of the file, or a length that does not fit.
            ExternalDataNotFoundError: no such file.
        """
        what = f"external data of tensor {tensor.name!r}"
        entries = _entries(tensor, what)
        path = self._path(entries.get("location", ""), what)
        offset, length = (_number(entries, key, what) for key in ("offset", "length"))
        if length is not None and length != nbytes:
            raise ExternalDataError(
                f"{what}: length is {length} bytes, but its dims and element type need {nbytes} (rule EX-11)"
            )
        data = self._map(path, what)
        start = offset or 0
        if start + nbytes > data.size:
            raise ExternalDataError(
                f"{what}: bytes {start} to {start + nbytes} lie outside {path.name!r} of {data.size} bytes "
                "(rule EX-10); the file is truncated or belongs to another model"
            )
        return data[start : start + nbytes]

    def claim(self, elements: int, stored: int) -> bool:
        """Whether a sparse tensor may be made dense, all sparse tensors of the model taken together."""
        self._dense += elements
        self._stored += stored
        return self._dense <= max(DENSE_LIMIT, 1000 * self._stored)

    def is_link(self, location: str) -> bool:
        """Whether a location in the folder is a symbolic link."""
        try:
            return self.folder is not None and (self.folder / location).is_symlink()
        except (OSError, ValueError):  # no file system takes such a name
            return False

    def verify(self, tensor: Any) -> None:
        """Compare the SHA1 checksum that a tensor gives with that of the whole file; reads all of it.

        Raises:
            ExternalDataError: they differ, or see ``read``.
        """
        what = f"external data of tensor {tensor.name!r}"
        entries = _entries(tensor, what)
        if wanted := entries.get("checksum"):
            path = self._path(entries.get("location", ""), what)
            if path not in self._sums:
                self._sums[path] = hashlib.sha1(self._map(path, what).data, usedforsecurity=False).hexdigest()
            if self._sums[path] != wanted.lower():
                raise ExternalDataError(
                    f"{what}: the checksum of {path.name!r} is {self._sums[path]}, not {wanted} (rule EX-12); "
                    "the file is damaged or belongs to another model"
                )

    def hand_out(self, tensor: Any, data: bytes) -> None:
        """Note that an array holds these bytes, which are a tensor's raw_data."""
        if len(data) >= WORTH_SHARING:
            self._handed_out.append((tensor, data))

    def take_handed_out(self) -> list[tuple[Any, bytes]]:
        """The tensors whose bytes arrays hold, once."""
        result, self._handed_out = self._handed_out, []
        return result

    def _path(self, location: str, what: str) -> Path:
        if not location:
            raise ExternalDataError(f"{what} has no location (rule EX-02)")
        if self.folder is None:
            raise ExternalDataError(
                f"{what} is in file {location!r}, but the model did not come from a file; "
                "say where: convert(..., external_data_dir='folder')"
            )
        inside = Path(os.path.normpath(location))
        if inside.is_absolute() or ".." in inside.parts or "\\" in location or "\0" in location:
            raise ExternalDataError(
                f"{what}: location {location!r} leads out of the model's folder (rules EX-03, EX-04)"
            )
        path = self.folder / inside
        if not _exists(path):
            raise ExternalDataNotFoundError(
                f"{what}: no file {location!r} in {str(self.folder)!r} (rule EX-19); "
                "copy it beside the model or pass convert(..., external_data_dir='folder')"
            )
        self._check_inside(path, what)
        return path

    def _check_inside(self, path: Path, what: str) -> Path:
        """Where the path really leads, which is inside the folder."""
        assert self.folder is not None
        real = path.resolve()
        if not self.follow_links and not real.is_relative_to(self.folder.resolve()):
            raise ExternalDataError(
                f"{what}: {path.name!r} is a link out of the model's folder (rule EX-05); "
                "if you trust it: convert(..., follow_links=True)"
            )
        return real

    def _map(self, path: Path, what: str) -> np.ndarray:
        if path not in self._maps:
            # Non-blocking, so that a FIFO cannot hold us up before we see that it is one (rule EX-07).
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            except OSError as e:
                raise ExternalDataError(f"{what}: {path.name!r} cannot be opened: {e.strerror} (rule EX-07)") from None
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise ExternalDataError(f"{what}: {path.name!r} is not a regular file (rule EX-07)")
                if status.st_nlink > 1 and not self.follow_links:
                    raise ExternalDataError(
                        f"{what}: {path.name!r} is a hard link, so the file may belong elsewhere (rule EX-06); "
                        "if you trust it: convert(..., follow_links=True)"
                    )
                # The path is checked again now that the file is open: it may have become a link meanwhile.
                if not os.path.samestat(status, os.stat(self._check_inside(path, what))):
                    raise ExternalDataError(f"{what}: {path.name!r} changed while it was opened (rule EX-08)")
                empty = status.st_size == 0
                view = b"" if empty else mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
            self._maps[path] = np.frombuffer(view, np.uint8)
        return self._maps[path]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file system takes such a name
        return False


def _entries(tensor: Any, what: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:
            raise ExternalDataError(f"{what} has {entry.key!r} twice (rule EX-15)")
        entries[entry.key] = entry.value
    return entries


def _number(entries: dict[str, str], key: str, what: str) -> int | None:
    text = entries.get(key)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ExternalDataError(f"{what}: {key} is {text!r}, not a decimal number of bytes (rule EX-09)")
    return int(text)
