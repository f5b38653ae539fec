"""Reads a model file once, for several uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from inspect import getmembers, isfunction, signature
from typing import Any, TypedDict, Unpack

from ..errors import InputValueError, unknown_keywords
from ..proto.external import ExternalFiles
from ..proto.files import label_of, parse, path_of, read_bytes, skeleton
from ..proto.mapped import Detached
from ..proto.operator_sets import OperatorSet, read_operator_sets


class Reading(TypedDict, total=False):
    """The keywords of ``read``."""

    strict: bool
    external_data_dir: str | os.PathLike[str] | None
    follow_links: bool
    allow_newer_opset: bool
    buffers: Mapping[str, Any] | None
    operator_sets: Iterable[Any]
    verify_checksums: bool


class OnnxFile:
    """A model file that has been read, by ``read``. ``convert``, ``TrainingModel`` and ``check`` accept it as a path.

    Attributes:
        label: the file's name in messages.
        strict, allow_newer_opset, verify_checksums: as given to ``read``.
        documents: the operator set documents.
    """

    def __init__(self, source: Any, **reading: Unpack[Reading]) -> None:
        if isinstance(source, str | os.PathLike) and "\0" in os.fsdecode(source):
            raise InputValueError(f"the path {os.fsdecode(source)!r} contains a NUL, which no path of a file may")
        self.strict: bool = reading.get("strict", False)
        self.allow_newer_opset: bool = reading.get("allow_newer_opset", False)
        self.verify_checksums: bool = reading.get("verify_checksums", False)
        path = path_of(source) if isinstance(source, str | os.PathLike) else None
        parts = skeleton(path) if path is not None and os.path.isfile(path) and not self.strict else None
        self._data, label, folder = read_bytes(source) if parts is None else (parts[0], *label_of(source))
        self.label: str = label
        self._detached = None if parts is None else parts[1]
        self._message: Any = parse(self._data, self.label)
        data_dir = reading.get("external_data_dir")
        self._folder = folder if data_dir is None else path_of(data_dir)
        self._follow_links, self._buffers = reading.get("follow_links", False), reading.get("buffers")
        self.documents: tuple[OperatorSet, ...] = tuple(read_operator_sets(reading.get("operator_sets", ())))

    def _open(self, *, last: bool = False) -> tuple[Any, ExternalFiles]:
        """The message, owned by the caller, and the external data files. ``last`` releases the bytes."""
        message, self._message = self._message or parse(self._data, self.label), None
        if last:
            self._data = b""
        files = ExternalFiles(
            self._folder, follow_links=self._follow_links, buffers=self._buffers, detached=Detached(self._detached)
        )
        return message, files

    def __repr__(self) -> str:
        return f"OnnxFile({self.label})"


def read(source: Any, **reading: Unpack[Reading]) -> OnnxFile:
    """Read a model file once, for several calls of ``convert``, ``TrainingModel`` and ``check``.

    Given a path, these accept the same keywords and read the file themselves.

    Args:
        source: a path, the bytes of a file, an open binary file, or an ``onnx.ModelProto``.
        strict: reject every violation of a rule of the format (see ``check``), even where common runtimes accept it.
        external_data_dir: the folder of the external data, if not the model's own.
        follow_links: accept external data that symbolic links place outside that folder.
        allow_newer_opset: run operator sets newer than the newest supported one as that one.
        buffers: bytes or arrays of weights that are in memory: required where the ``location`` begins with ``#``
            (``{"#w": array}``); elsewhere they replace reading the file.
        operator_sets: operator set documents (paths, bytes, binary files). An operator that one of them declares
            with a body needs no Python code. Of several versions of one domain the newest not above the imported one
            applies. The first of these implements an operator: ONNX's own here, a function in the model, a function
            registered with ``onnx2jax.ops.op``, a document.
        verify_checksums: compare external data with the checksums stored in the file; reads all of it.

    Raises:
        ModelError: the file is not an ONNX model.
        FileNotFoundError: the file does not exist.

    >>> import onnx2jax
    >>> file = onnx2jax.read(onnx2jax.demo_model())
    >>> onnx2jax.check(file).ok
    True
    >>> model = onnx2jax.convert(file)
    """
    check_keywords(reading)
    return OnnxFile(source, **reading)


def check_keywords(keywords: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Raise if a keyword is one of neither ``read`` nor the functions that it was passed to.

    Raises:
        TypeError: unknown keywords.
    """
    if not (other := set(keywords) - Reading.__annotations__.keys()):
        return  # as nearly always: signatures are not read
    accepted = [p.name for f in functions for p in signature(f).parameters.values() if p.default is not p.empty]
    valid = [*dict.fromkeys((*accepted, *Reading.__annotations__))]
    if unknown := sorted(other - {*valid}):
        methods = [
            f"{f.__name__}.{n}"
            for f in functions
            if isinstance(f, type)
            for n, method in getmembers(f, isfunction)
            if n[0] != "_" and unknown[0] in signature(method).parameters
        ]
        belongs = f"unknown keyword {unknown[0]}, which is one of {' and '.join(methods)}"
        raise TypeError(belongs if methods else unknown_keywords(unknown, valid))


def opened(source: Any, reading: Reading) -> tuple[OnnxFile, Any, ExternalFiles]:
    """The source as an OnnxFile, its message, and its external data files.

    Raises:
        TypeError: unknown keywords, or keywords of ``read`` with a file that has been read already.
    """
    check_keywords(reading)
    if not isinstance(source, OnnxFile):
        file = OnnxFile(source, **reading)
        return file, *file._open(last=True)
    if reading:
        raise TypeError(f"{source} has been read already; pass {', '.join(reading)} to onnx2jax.read(...) instead")
    return source, *source._open()
