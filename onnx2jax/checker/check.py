"""The rules of the ONNX format, all at once: what is wrong with a file, where, and how to mend it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from ..errors import ModelError, OnnxError
from ..ir.binding import NEWEST
from ..ir.file import Reading, opened
from ..ir.graph import Missing
from ..ir.importer import NEWEST_IR, Importer
from ..ir.training_info import read_training
from ..ops.registry import supported
from ..proto.external import ExternalFiles
from ..proto.messages import ModelProto
from ..proto.names import normal_domain
from ..proto.operator_sets import MAGIC, OperatorSet, parse, problems
from ..proto.walk import tensors
from .graphs import check_graphs
from .model import check_header, not_text
from .report import Collector, Finding, Report
from .types import check_types

__all__ = ["Finding", "Report", "check"]


def check(source: Any, **reading: Unpack[Reading]) -> Report:
    """Find everything in a file that breaks the ONNX specification.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, or what ``read`` returned; an
            operator set document too.
        **reading: how to read the file: the keywords of ``read``.

    Returns:
        A Report. ``report.ok`` says whether there is no error, ``print(report)`` what was found.

    Raises:
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> print(onnx2jax.check(onnx2jax.demo_model()))
    no findings
    """
    collector = Collector()
    try:
        if _is_operator_set(source):
            return check_document(*parse(source, follow_links=reading.get("follow_links", False)), collector)
        file, model, files = opened(source, reading)
        for tensor in model.graph.initializer:
            files.apart.join(tensor)
    except ModelError as e:
        collector.error(e, "file")
        return collector.report()
    if file.verify_checksums:
        for tensor, _ in tensors(model):
            try:
                files.verify(tensor)
            except ModelError as e:
                collector.error(e, f"tensor {tensor.name!r}")
    newer = file.allow_newer_opset
    return check_message(model, files, allow_newer_opset=newer, documents=file.documents, collector=collector)


def _is_operator_set(source: Any) -> bool:
    """Whether a source begins as an operator set document: with its magic as field 1, where a model has a number."""
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            source = file.read(64)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source[:64]).startswith(b"\n\x09" + MAGIC.encode())
    return type(source).__name__ == "OperatorSetProto"


def check_document(document: Any, what: str, files: ExternalFiles, collector: Collector) -> Report:
    """An OperatorSetProto of this package, with the bodies of its functions."""
    if (broken := not_text(document)) is not None:
        collector.note("GR-23", "error", what, f"{broken[:40]!r} is no UTF-8 text, so nothing else was checked")
        return collector.report()
    for problem in problems(document, what):
        collector.error(problem, what)
    # A model that has the functions and nothing else; bodies need no more of it than its IR version.
    model = ModelProto(ir_version=min(max(document.ir_version, 1), NEWEST_IR), functions=document.functions)
    model.opset_import.add(domain=document.domain, version=max(document.opset_version, 1))
    for function in model.functions:
        function.domain = document.domain
    importer = Importer(model, files, True, False, collector.error)
    try:
        importer.unused_functions()
        check_graphs(model, importer.opsets, files, collector.note)
        check_types(model, importer.opsets, collector.note)
    except OnnxError as e:
        collector.error(e, what)
    for missing in importer.missing:
        _missing(missing, model, collector)
    return collector.report()


def check_message(
    model: Any,
    files: ExternalFiles,
    *,
    allow_newer_opset: bool = False,
    documents: Iterable[OperatorSet] = (),
    collector: Collector | None = None,
) -> Report:
    """As ``check``, for a ModelProto of this package."""
    collector = collector or Collector()
    if (broken := not_text(model)) is not None:
        collector.note("GR-23", "error", "model", f"{broken[:40]!r} is no UTF-8 text, so nothing else was checked")
        return collector.report()
    importer = Importer(model, files, True, allow_newer_opset, collector.error, documents)
    for domain, newest in NEWEST.items() if allow_newer_opset else ():
        if (version := importer.opsets.get(domain, 0)) > newest:
            text = f"opset {version} of {domain or 'ai.onnx'} is checked as {newest}, the newest known"
            collector.note("OR-12", "warning", "model", text)
    check_header(model, collector.note)
    try:
        imported = importer.model()
        importer.unused_functions()
        read_training(model, imported.graph, importer)
        check_graphs(model, importer.opsets, files, collector.note)
        check_types(model, importer.opsets, collector.note)
    except OnnxError as e:
        collector.error(e, "model")
    for missing in importer.missing:
        _missing(missing, model, collector)
    return collector.report()


def _missing(missing: Missing, model: Any, collector: Collector) -> None:
    """An operator that nothing serves is an error where the domain is known, else nobody can tell."""
    title = ".".join(filter(None, (missing.domain, missing.op_type, missing.overload)))
    path = f"node {missing.node!r}"
    versions = supported().get(missing.domain, {}).get(missing.op_type)
    if any(normal_domain(f.domain) == missing.domain for f in model.functions):
        collector.note("FN-02", "error", path, f"the model has no function {title!r} with this overload")
    elif versions:
        collector.note("OR-09", "error", path, f"{title} begins at opset {min(versions)}, not {missing.opset}")
    elif missing.domain in STANDARD and missing.op_type not in TRAINING:
        collector.note("OR-08", "error", path, f"{title} is no operator of opset {missing.opset}")
    else:
        collector.note("MV-10", "warning", path, f"nothing here serves {title}, so the node was not checked")


STANDARD = frozenset({"", "ai.onnx.ml"})
TRAINING = frozenset({"GraphCall"})
