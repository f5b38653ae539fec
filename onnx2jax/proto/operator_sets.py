"""Operator set documents: files that declare the operators of one version of a domain, some with bodies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from ..errors import ModelError, with_rules
from .external import ExternalFiles
from .files import read_bytes
from .messages import OperatorSetProto, normal_domain

MAGIC: Final = "ONNXOPSET"
STABLE: Final = 1


@dataclass(frozen=True, eq=False)
class OperatorSet:
    """One version of a domain's operator set, as declared by a document."""

    name: str
    """The document's label in messages."""
    ir_version: int
    domain: str
    """The domain; empty for ai.onnx."""
    version: int
    stable: Mapping[tuple[str, int], bool]
    """(op_type, since_version) -> whether the operator is stable rather than experimental (rule OD-04)."""
    functions: Mapping[tuple[str, str], Any]
    """(name, overload) -> FunctionProto, the body of the newest since_version of its operator."""
    files: ExternalFiles

    def since(self, op_type: str) -> int | None:
        """The since_version of an operator in this set; None if the set does not have it.

        That of a function without an operator entry is the set's own version.
        """
        versions = [since for name, since in self.stable if name == op_type]
        if not versions and any(name == op_type for name, _ in self.functions):
            versions = [self.version]
        return max(versions, default=None)


def read_operator_sets(sources: Iterable[Any]) -> list[OperatorSet]:
    """Read several documents, each of another domain or version."""
    if isinstance(sources, str | bytes | os.PathLike):
        sources = [sources]
    documents: dict[tuple[str, int], OperatorSet] = {}
    for source in sources:
        new = read_operator_set(source)
        other = documents.setdefault((new.domain, new.version), new)
        if other is not new:
            title = f"{new.domain or 'ai.onnx'} {new.version}"
            raise ModelError(f"{other.name} and {new.name} are both operator set {title}", rule="OD-02")
    return list(documents.values())


def read_operator_set(source: Any, *, follow_links: bool = False) -> OperatorSet:
    """Parse and validate an operator set document.

    Args:
        source: a path, the bytes of a file, an open binary file, or an OperatorSetProto of the onnx package.
        follow_links: accept external data that symbolic links place outside the document's folder.

    Raises:
        ModelError: the source is not an operator set document, or violates a rule.
    """
    document, label, files = parse(source, follow_links=follow_links)
    for problem in problems(document, label):
        raise problem
    head = label, document.ir_version, normal_domain(document.domain), document.opset_version
    stable = {(o.op_type, o.since_version): o.status == STABLE for o in document.operator}
    return OperatorSet(*head, stable, {(f.name, f.overload): f for f in document.functions}, files)


def parse(source: Any, *, follow_links: bool = False) -> tuple[Any, str, ExternalFiles]:
    """The message of a document, its label, and its external data files."""
    data, label, folder = read_bytes(source)
    try:
        document = OperatorSetProto.FromString(data)
    except DecodeError:
        text = f"{label} is not an operator set document: its bytes are not a protobuf message"
        raise ModelError(text, rule="OD-01") from None
    return document, label, ExternalFiles(folder, follow_links=follow_links)


def problems(document: Any, label: str) -> Iterator[ModelError]:
    """The errors of a document, except for those in the bodies of its functions."""
    fields = {"magic": "OD-01", "ir_version": "OD-01", "domain": "OD-03", "opset_version": "OD-02"}
    present = {field: document.HasField(field) for field in fields}
    for field, rule in fields.items():
        if not present[field]:
            yield ModelError(f"{label} is not an operator set document: it has no {field}", rule=rule)
    if present["magic"] and document.magic != MAGIC:
        yield ModelError(f"{label} is not an operator set document: its magic is {document.magic!r}", rule="OD-01")
    if present["ir_version"] and document.ir_version < 1:
        yield ModelError(f"{label} has ir_version {document.ir_version}; it starts at 1", rule="OD-01")
    if present["opset_version"] and not 0 < document.opset_version < 2**31:
        yield ModelError(f"{label} has opset_version {document.opset_version}", rule="OD-02")
    for operator in document.operator:
        if not operator.op_type or not 0 < operator.since_version <= document.opset_version:
            versions = f"since_version {operator.since_version}, the set is version {document.opset_version}"
            yield ModelError(f"{label}: operator {operator.op_type!r} has {versions}", rule="OD-02")
    for function in document.functions:
        if not function.name or normal_domain(function.domain or document.domain) != normal_domain(document.domain):
            text = (
                f"{label}: function {function.name!r} is of domain {function.domain!r}, the set of {document.domain!r}"
            )
            yield ModelError(text, rule="OD-03")
    for ids in (
        [(o.op_type, f"since {o.since_version}") for o in document.operator],
        [(f.name, f"overload {f.overload!r}") for f in document.functions],
    ):
        for (name, version), times in Counter(ids).items():
            if times > 1:
                yield ModelError(f"{label} declares operator {name!r} ({version}) {times} times", rule="OD-02")


def find(
    sets: Iterable[OperatorSet], domain: str, op_type: str, overload: str, version: int
) -> tuple[OperatorSet, Any] | str:
    """The document and FunctionProto that implement an operator, or the reason why there is none.

    The document is the newest one not above the imported version. If it declares a stable operator without a body,
    the body may come from an older document with the same since_version.
    """
    versions = sorted((s for s in sets if s.domain == domain), key=lambda s: s.version, reverse=True)
    usable = [s for s in versions if s.version <= version]
    if not usable:
        oldest = versions[-1] if versions else None
        text = oldest and f"{oldest.name} is version {oldest.version}, the model imports {version}"
        return with_rules(text, "OR-01") if text else ""
    home = usable[0]
    since = home.since(op_type)
    if since is None:
        return with_rules(f"{home.name}, which is version {home.version}, does not declare it", "OR-08")
    for document in usable if home.stable.get((op_type, since)) else [home]:
        if document.since(op_type) == since and (op_type, overload) in document.functions:
            return document, document.functions[op_type, overload]
    with_overload = f" for overload {overload!r}" if overload else ""
    return with_rules(f"{home.name} declares it without a body{with_overload}", "OD-05")
