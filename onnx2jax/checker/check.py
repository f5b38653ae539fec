"""Checks a file against all rules of the ONNX format: what is wrong, where, and how to fix it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Unpack

from ..errors import ModelError, OnnxError
from ..eval.abstract import Abstract, Extents, is_typed, primes, without_data
from ..ir import loops
from ..ir.binding import NEWEST, missing_extras
from ..ir.file import Reading, opened
from ..ir.graph import Graph, Node, Unsupported
from ..ir.importer import NEWEST_IR, Importer
from ..ir.training_info import read_training
from ..ops.registry import supported
from ..proto.external import ExternalFiles
from ..proto.files import path_of
from ..proto.messages import ModelProto, dotted, normal_domain, tensors
from ..proto.operator_sets import MAGIC, OperatorSet, parse, problems
from ..proto.types import TensorType, ValueInfo
from .messages import check_graphs, check_header, is_utf8
from .report import Collector, Finding, Note, Report
from .types import check_types

__all__ = ["Finding", "Report", "check"]


def check(source: Any, **reading: Unpack[Reading]) -> Report:
    """Find every violation of the ONNX specification in a file.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, the result of ``read``, or an
            operator set document.
        **reading: the keywords of ``read``.

    Returns:
        A Report: ``report.ok`` is True if there are no errors; ``print(report)`` lists all findings.

    Raises:
        FileNotFoundError: the file does not exist.

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
            files.detached.attach(tensor)
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
    """Whether a source is an operator set document: its field 1 is the magic string, where a model has a number."""
    if isinstance(source, str | os.PathLike):
        path = path_of(source)
        if not os.path.isfile(path):
            return False  # opening it as a model says why
        with path.open("rb") as file:
            source = file.read(64)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source[:64]).startswith(b"\n\x09" + MAGIC.encode())
    return type(source).__name__ == "OperatorSetProto"


def check_document(document: Any, label: str, files: ExternalFiles, collector: Collector) -> Report:
    """Check an OperatorSetProto of this package, including the bodies of its functions."""
    if not is_utf8(document, label, collector.note):
        return collector.report()
    for problem in problems(document, label):
        collector.error(problem, label)
    # The functions are checked as those of a model without a graph.
    model = ModelProto(ir_version=min(max(document.ir_version, 1), NEWEST_IR), functions=document.functions)
    model.opset_import.add(domain=document.domain, version=max(document.opset_version, 1))
    for function in model.functions:
        function.domain = document.domain
    return _checked(model, Importer(model, files, True, False, collector.error), files, collector, label)


def check_message(
    model: Any,
    files: ExternalFiles,
    *,
    allow_newer_opset: bool = False,
    documents: Iterable[OperatorSet] = (),
    collector: Collector | None = None,
) -> Report:
    """Check a ModelProto of this package."""
    collector = collector or Collector()
    if not is_utf8(model, "model", collector.note):
        return collector.report()
    importer = Importer(model, files, True, allow_newer_opset, collector.error, documents)
    for domain, newest in NEWEST.items() if allow_newer_opset else ():
        if (version := importer.opsets.get(domain, 0)) > newest:
            text = f"opset {version} of {domain or 'ai.onnx'} is checked as {newest}, the newest supported"
            collector.note("OR-12", "warning", "model", text)
    check_header(model, collector.note)
    return _checked(model, importer, files, collector)


def _checked(model: Any, importer: Importer, files: ExternalFiles, collector: Collector, document: str = "") -> Report:
    """The report of a model, or of an operator set ``document``, which has functions but no graph."""
    missing = list[str]()
    try:
        imported = None if document else importer.model()
        importer.unused_functions()
        if imported is not None:
            read_training(model, imported.graph, importer)
        check_graphs(model, importer.opsets, files, collector.note)
        check_types(model, importer.opsets, collector.note)
        if imported is not None:
            missing = missing_extras(imported.graph)
            if collector.report().ok:  # otherwise the graph is incomplete
                check_shapes(imported.graph, collector.note)
            for loop in loops.ignored_conditions(imported.graph):
                collector.note("SC-13", "warning", f"node {loop.name!r}", loops.IGNORED_CONDITION)
    except OnnxError as e:
        collector.error(e, document or "model")
    for node in importer.unsupported:
        _note_unsupported(node, model, collector)
    return collector.report(missing)


def _note_unsupported(node: Unsupported, model: Any, collector: Collector) -> None:
    """Note an unsupported operator: an error in a domain that ONNX or the model defines, elsewhere a warning."""
    title = dotted(node.domain, node.op_type, node.overload)
    path = f"node {node.node!r}"
    versions = supported().get(node.domain, {}).get(node.op_type)
    if any(normal_domain(f.domain) == node.domain for f in model.functions):
        collector.note("FN-02", "error", path, f"the model has no function {title!r} with this overload")
    elif versions:
        text = f"{title} exists from opset {min(versions)} on, the model imports {node.opset}"
        collector.note("OR-09", "error", path, text)
    elif node.domain in ("", "ai.onnx.ml") and node.op_type != "GraphCall":
        collector.note("OR-08", "error", path, f"opset {node.opset} has no operator {title}")
    else:
        collector.note("MV-10", "warning", path, f"{title} is unsupported, so the node was not checked")


LEAST: Final = 199
"""Free extents are prime numbers from here on, larger than what networks halve images to; most position tables are
larger still."""


def check_shapes(graph: Graph, note: Note) -> None:
    """Check the shapes of a model's values, those of its subgraphs and functions included."""
    first = _evaluated(graph, 0)
    second = _evaluated(graph, 1) if first.extents else first
    for key, value in first.shapes.items():
        if (twin := second.shapes.get(key)) is not None and not value.fits(twin):
            pairs = zip(value.value.shape or (), twin.value.shape or (), strict=False)
            constant = TensorType(value.value.dtype, tuple(a if a == b else None for a, b in pairs))
            text = f"{key[1]!r} is declared {value.declared}, but {value.source} gives {constant}"
            note("GR-18" if value.is_output else "GR-20", "warning", key[0], text)
    for path, (title, types, reason) in first.refusals.items():
        other = second.refusals.get(path)
        if other is not None and other.reason == reason:
            fixed = types == other.types  # operands with free extents may fit in a call
            where = types if fixed else "whose extents are partly free"
            note("ND-15", "error" if fixed else "warning", path, f"{title} refuses its operands ({where}): {reason}")


def _evaluated(graph: Graph, first: int) -> _Evaluation:
    evaluation = _Evaluation(Extents(primes(first, LEAST)))
    without_data(lambda: evaluation.graph(graph, f"graph {graph.name[:80]!r}"))
    return evaluation


class _Refusal(NamedTuple):
    """Why a node refuses its operands, and their types."""

    op_type: str
    types: str
    reason: str


@dataclass(frozen=True)
class _Shape:
    """The shape that a node gives a value, and the type that the file declares."""

    source: str
    value: TensorType
    declared: TensorType
    is_output: bool = False

    def fits(self, other: _Shape) -> bool:
        """Whether the declared shape agrees with the constants among the extents of both evaluations."""
        wanted, one, two = self.declared.shape or (), self.value.shape or (), other.value.shape or ()
        if not len(wanted) == len(one) == len(two):
            return False
        return all(a != b or not isinstance(d, int) or a == d for d, a, b in zip(wanted, one, two, strict=True))


class _Evaluation(Abstract):
    """An abstract evaluation that notes what a graph's values are declared, and which nodes refuse their operands."""

    trusts_defaults = False

    def __init__(self, extents: Extents) -> None:
        super().__init__(extents)
        self.shapes: dict[tuple[str, str], _Shape] = {}
        self.refusals: dict[str, _Refusal] = {}

    def compare(self, path: str, declared: ValueInfo, value: Any, source: str, is_output: bool = False) -> None:
        """Note the shape of a value whose type is declared."""
        if is_typed(value) and isinstance(declared.type, TensorType) and declared.type.shape is not None:
            computed = TensorType(declared.type.dtype, tuple(value.shape))
            self.shapes[path, declared.name] = _Shape(source, computed, declared.type, is_output)

    def reject(self, path: str, node: Node, values: Sequence[Any], reason: str) -> None:
        """Note why a node refuses its operands, and their types."""
        types = ", ".join(f"{v.dtype}{list(v.shape)}" for v in values if is_typed(v))
        self.refusals.setdefault(path, _Refusal(node.op_type, types or "none", reason))
