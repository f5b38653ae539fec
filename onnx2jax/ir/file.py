"""A model's file, opened once for whoever wants it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..proto.apart import Apart
from ..proto.external import ExternalFiles
from ..proto.files import named, parse, read_bytes
from ..proto.operator_sets import OperatorSet, read_operator_sets
from ..proto.skeleton import skeleton


class Reading(TypedDict, total=False):
    """How a file is read: the keywords of ``read``."""

    strict: bool
    external_data_dir: str | os.PathLike[str] | None
    follow_links: bool
    allow_newer_opset: bool
    buffers: Mapping[str, Any] | None
    operator_sets: Iterable[Any]
    verify_checksums: bool


class OnnxFile:
    """A model's file that was read. Made by ``read``; ``convert``, ``TrainingModel`` and ``check`` take it as a path.

    Attributes:
        what: what to call it in messages.
        strict, allow_newer_opset, verify_checksums: as ``read`` was told.
        documents: the operator set documents.
    """

    def __init__(
        self,
        source: Any,
        *,
        strict: bool = False,
        external_data_dir: str | os.PathLike[str] | None = None,
        follow_links: bool = False,
        allow_newer_opset: bool = False,
        buffers: Mapping[str, Any] | None = None,
        operator_sets: Iterable[Any] = (),
        verify_checksums: bool = False,
    ) -> None:
        parts = skeleton(source) if isinstance(source, str | os.PathLike) and not strict else None
        self._data, self.what, folder = read_bytes(source) if parts is None else (parts[0], *named(source))
        self._apart = None if parts is None else parts[1]
        self._message: Any = parse(self._data, self.what)
        self._folder = folder if external_data_dir is None else Path(external_data_dir)
        self._follow_links, self._buffers = follow_links, buffers
        self.strict, self.allow_newer_opset, self.verify_checksums = strict, allow_newer_opset, verify_checksums
        self.documents: tuple[OperatorSet, ...] = tuple(read_operator_sets(operator_sets))

    def _open(self, *, last: bool = False) -> tuple[Any, ExternalFiles]:
        """The message, for the caller to keep, and the files beside the model. ``last`` gives up the bytes."""
        message, self._message = self._message or parse(self._data, self.what), None
        if last:
            self._data = b""
        files = ExternalFiles(
            self._folder, follow_links=self._follow_links, buffers=self._buffers, apart=Apart(self._apart)
        )
        return message, files

    def __repr__(self) -> str:
        return f"OnnxFile({self.what})"


def read(source: Any, **reading: Unpack[Reading]) -> OnnxFile:
    """Read a model's file once, for ``convert``, ``TrainingModel`` and ``check``, which take it as they take a path.

    They take these keywords, too, and read the file themselves.

    Args:
        source: a path, the bytes of a file, an open binary file, or an ``onnx.ModelProto``.
        strict: refuse whatever breaks a rule of the format (see ``check``), also where common runtimes accept it.
        external_data_dir: where the weights lie, when not beside the model.
        follow_links: accept weights that symbolic links place outside that folder.
        allow_newer_opset: run operator sets newer than those known here as the newest known.
        buffers: bytes or arrays for weights that are in memory: those whose ``location`` begins with ``#``
            (``{"#w": array}``), and any other that you would rather give than have read.
        operator_sets: operator set documents (paths, bytes, binary files): an operator that one of them declares
            with a body runs without Python. Of several versions of one domain the newest not above the imported one
            counts. An operator is served by the first of: ONNX's own here, a function in the model, a function
            registered with ``onnx2jax.op``, a document.
        verify_checksums: compare external data with the checksums that the file gives; reads all of it.

    Raises:
        ModelError: the file is no ONNX model.
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> file = onnx2jax.read(onnx2jax.demo_model())
    >>> onnx2jax.check(file).ok
    True
    >>> model = onnx2jax.convert(file)
    """
    return OnnxFile(source, **reading)


def opened(source: Any, reading: Reading) -> tuple[OnnxFile, Any, ExternalFiles]:
    """A source as a file, its message, and the files beside it.

    Raises:
        TypeError: unknown keywords, or keywords of ``read`` beside what was read already.
    """
    if unknown := sorted(reading.keys() - Reading.__annotations__.keys()):
        raise TypeError(
            f"there is no keyword {', '.join(unknown)}; a file is read with {list(Reading.__annotations__)}"
        )
    if not isinstance(source, OnnxFile):
        file = OnnxFile(source, **reading)
        return file, *file._open(last=True)
    if reading:
        raise TypeError(f"{source} was read already; give {', '.join(reading)} to onnx2jax.read(...)")
    return source, *source._open()
