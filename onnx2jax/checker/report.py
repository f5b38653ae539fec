"""The findings of a check, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from ..errors import ModelError, OnnxError
from .fixes import FIXES

Severity = Literal["error", "warning"]
LIMIT = 1000
"""The most findings of a report; a corrupt file can have millions."""


@dataclass(frozen=True)
class Finding:
    """A violation of a rule of the ONNX format, or a legal but suspicious construct."""

    rule: str
    """Its number in docs/conformance.md."""
    severity: Severity
    """Errors violate the specification; warnings are legal, but rarely intended."""
    path: str
    """The location: graph, node, attribute."""
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.rule} {self.path}: {self.message}. {self.fix}"


@dataclass(frozen=True)
class Report:
    """The findings of ``check``."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that violate the specification, without warnings."""
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
"""Receives rule, severity, path and message of a finding."""


class Collector:
    """Collects findings without duplicates."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str, str], Finding] = {}

    def note(self, rule: str, severity: Severity, path: str, message: str) -> None:
        message = message.removeprefix(path).lstrip(":, ")
        if len(self._findings) < LIMIT:
            self._findings.setdefault(
                (rule, path, message), Finding(rule, severity, path, message, FIXES.get(rule, FIXES[""]))
            )

    def error(self, error: OnnxError, path: str) -> None:
        """Note an exception of the importer, under the first of its rules."""
        self.note(next(iter(error.rules), "MV-12"), "error", path, error.message)

    def report(self) -> Report:
        order = {"error": 0, "warning": 1}
        return Report(tuple(sorted(self._findings.values(), key=lambda f: order[f.severity])))
