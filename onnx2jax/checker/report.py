"""What a check of a model found, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from ..errors import ModelError, OnnxError
from .mends import MENDS

Severity = Literal["error", "warning"]
LIMIT = 1000
"""Findings that a report keeps; a file can be wrong in as many ways as it has bytes."""


@dataclass(frozen=True)
class Finding:
    """A rule of the ONNX format that a model breaks, or may mean otherwise than it says."""

    rule: str
    """As in docs/conformance.md."""
    severity: Severity
    """Errors break the specification; warnings are legal, but seldom meant."""
    path: str
    """Where: graph, node, attribute."""
    message: str
    mend: str

    def __str__(self) -> str:
        return f"{self.severity} {self.rule} {self.path}: {self.message}. {self.mend}"


@dataclass(frozen=True)
class Report:
    """Everything that ``check`` found."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that break the specification; the others are warnings."""
        return tuple(f for f in self.findings if f.severity == "error")

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no findings"

    def to_json(self) -> str:
        """The report as JSON: ``ok`` and ``findings``, a list of objects with the fields of Finding."""
        return json.dumps({"ok": self.ok, "findings": [asdict(f) for f in self.findings]}, indent=2)

    def raise_errors(self) -> None:
        """Raise a ModelError that lists the errors, if there are any."""
        if self.errors:
            raise ModelError("\n".join(["the model breaks rules of the format:", *map(str, self.errors)]))


Note = Callable[[str, Severity, str, str], None]
"""Takes rule, severity, path and message."""


class Collector:
    """Gathers findings, each once."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, str], Finding] = {}

    def note(self, rule: str, severity: Severity, path: str, message: str) -> None:
        message = message.removeprefix(path).lstrip(":, ")
        if len(self._findings) < LIMIT:
            self._findings.setdefault(
                (rule, path, message), Finding(rule, severity, path, message, MENDS.get(rule, MENDS[""]))
            )

    def error(self, error: OnnxError, path: str) -> None:
        """An exception of the importer, filed under the first of its rules."""
        self.note(next(iter(error.rules), "MV-12"), "error", path, error.message)

    def report(self) -> Report:
        order = {"error": 0, "warning": 1}
        return Report(tuple(sorted(self._findings.values(), key=lambda f: order[f.severity])))
