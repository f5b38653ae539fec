"""Operator set documents: files that declare operators rather than a model."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from ..ops.registry import normal_domain
from ..proto.messages import OperatorSetProto
from .report import Note

MAGIC: Final = "ONNXOPSET"
HEAD: Final = b"\n\x09" + MAGIC.encode()
"""The magic as field 1, where a model has a number."""


def is_operator_set(source: Any) -> bytes | None:
    """The bytes of a source that begins as such a document, else None."""
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            head = file.read(len(HEAD))
            return head + file.read() if head == HEAD else None
    if type(source).__name__ == "OperatorSetProto":
        return source.SerializeToString()
    return bytes(source) if isinstance(source, bytes | bytearray | memoryview) and source[: len(HEAD)] == HEAD else None


def check_operator_set(data: bytes, note: Note) -> None:
    """The rules of an OperatorSetProto."""
    path = "operator set"
    try:
        document = OperatorSetProto.FromString(data)
    except DecodeError as e:
        note("OD-01", "error", path, f"protobuf cannot parse it ({e})")
        return
    if document.magic != MAGIC:
        note("OD-01", "error", path, f"magic is {document.magic!r}, not {MAGIC!r}")
    if document.ir_version < 1:
        note("OD-01", "error", path, f"ir_version is {document.ir_version}")
    if not document.HasField("domain") or not document.HasField("opset_version"):
        note("OD-03", "error", path, "domain and opset_version identify the set; one of them is missing")
    if document.HasField("opset_version") and document.opset_version < 1:
        note("OD-02", "error", path, f"opset_version is {document.opset_version}")
    for operator in document.operator:
        if not 0 < operator.since_version <= max(document.opset_version, 0):
            text = f"since_version is {operator.since_version}, the set is version {document.opset_version}"
            note("OD-02", "error", f"{path}, operator {operator.op_type!r}", text)
    ids = Counter((o.op_type, o.since_version) for o in document.operator)
    ids += Counter((f.name, f.overload) for f in document.functions)
    for (name, _), times in ids.items():
        if times > 1:
            note("OD-02", "error", f"{path}, operator {name!r}", "the same version is declared twice")
    for function in document.functions:
        if normal_domain(function.domain or document.domain) != normal_domain(document.domain):
            text = f"its domain is {function.domain!r}, that of the set {document.domain!r}"
            note("OD-03", "error", f"{path}, function {function.name!r}", text)
