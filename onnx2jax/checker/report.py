"""The findings of a check, as text and as JSON, each with how to fix it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final, Literal

from ..errors import ModelError, OnnxError
from ..printed import Printed

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
        end = "" if self.message.endswith("?") else "."
        return f"{self.severity} {self.rule} {self.path}: {self.message}{end} {self.fix}"


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """The findings of ``check``."""

    findings: tuple[Finding, ...]
    missing: tuple[str, ...] = ()
    """Packages that nodes need and that are not installed here: no fault of the file."""

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that violate the specification, without warnings."""
        return tuple(f for f in self.findings if f.severity == "error")

    def __str__(self) -> str:
        return "\n".join([*(map(str, self.findings) if self.findings else ["no findings"]), *self.missing])

    def to_json(self) -> str:
        """The report as JSON: ``ok``, ``findings``, a list of objects with the fields of Finding, and ``missing``."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

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
            finding = Finding(rule, severity, path, message, FIXES.get(rule, FIXES[""]))
            self._findings.setdefault((rule, path, message), finding)

    def error(self, error: OnnxError, path: str) -> None:
        """Note an exception of the importer, under the first of its rules."""
        self.note(next(iter(error.rules), "MV-12"), "error", path, error.message)

    def report(self, missing: Iterable[str] = ()) -> Report:
        """The findings, errors before warnings."""
        return Report(tuple(sorted(self._findings.values(), key=lambda f: f.severity == "warning")), tuple(missing))


FIXES: Final = {
    "": "Export the model again, or correct the file",
    "AT-01": "Give the attribute a name and exactly one value",
    "AT-02": "Set the attribute's type to that of its value",
    "AT-03": "Give the attribute one value, or a type",
    "DV-02": "Give each configuration its own name, num_devices of at least 1, and as many labels or none",
    "DV-04": "Name one of the model's configurations",
    "DV-05": "Name an input or output of the node",
    "DV-06": "List devices 0 to num_devices - 1, or keys of index_to_device_group_map",
    "DV-08": "List as many devices as there are shards",
    "DV-09": "Name each axis once, from -rank to rank - 1",
    "DV-10": "Set num_shards to at least 1, and extents to those of the tensor, or leave them out",
    "DV-16": "Shard the inputs alike, with matching shards on the same device",
    "DV-27": "Set ir_version to 11",
    "EX-01": "Pass external_data_dir",
    "EX-02": "Give the tensor a location",
    "EX-03": "Use a path relative to the model's folder",
    "EX-04": "Put the file beside the model, or below",
    "EX-05": "Replace the link by the file; or, if you trust it, pass follow_links=True",
    "EX-06": "Copy the file; or, if you trust it, pass follow_links=True",
    "EX-07": "Store the data in a regular file",
    "EX-08": "Do not change the folder while the model loads",
    "EX-09": "Write offset and length as decimal numbers of bytes",
    "EX-10": "Download the complete file that belongs to this model",
    "EX-11": "Correct length, dims or element type",
    "EX-12": "Download the file that belongs to this model",
    "EX-15": "Give each key once, and only location, offset, length and checksum",
    "EX-19": "Copy the file beside the model, or pass external_data_dir",
    "EX-20": "Pass the array or its bytes: buffers={'#name': array}",
    "FN-01": "Keep one function of each domain, name and overload",
    "FN-04": "Import the function's domain in opset_import",
    "FN-05": "Give the function the operator sets of its nodes, in opset_import",
    "FN-06": "Let the function import the model's version of the domain",
    "FN-07": "Pass the value to the function as an input",
    "FN-09": "Pass no more operands than the function has",
    "FN-11": "Name each output once",
    "FN-12": "Name each attribute and input once, and give only attributes that the function has",
    "FN-14": "Give the attribute, or a default in the function",
    "FN-15": "Give the attribute the type that the function uses it as",
    "FN-16": "Give the attribute a value; only functions have parameters to refer to",
    "FN-19": "Functions cannot be recursive; use Loop",
    "FN-20": "Use Loop instead of nested functions or graphs",
    "FN-28": "Give the function a name and a domain",
    "GR-01": "Sort the nodes topologically, and remove cycles",
    "GR-02": "Give each value a name of its own",
    "GR-06": "List the initializer among the inputs, or set ir_version to 4",
    "GR-09": "Give each initializer a name of its own",
    "GR-11": "Store int64 indices, ascending and unique, within positive dims",
    "GR-14": "Return values that the graph defines",
    "GR-16": "Declare the element type and rank",
    "GR-18": "Declare the type and shape that the output is computed with",
    "GR-19": "Give the declaration and the data the same type and shape",
    "GR-20": "Declare each value once, with the type and shape it is computed with",
    "GR-22": "Give each node a name of its own",
    "GR-23": "Write names as UTF-8",
    "GR-24": "Give the input a name",
    "GR-28": "Remove the node, or name its outputs",
    "ME-02": "Keep one entry of each key",
    "MV-01": "Set ir_version to the version of the format that the file follows",
    "MV-02": "Update onnx2jax, or export for an older version",
    "MV-03": "Import the operator sets in use; there are no imports below IR 3",
    "MV-04": "Give the model a graph, and the graph a name",
    "MV-10": "Register the operator with @onnx2jax.ops.op before converting",
    "MV-12": "Pass a file that holds an ONNX model",
    "MV-16": "Set ir_version to the version that introduced the field",
    "ND-03": "Name the operand",
    "ND-05": "Name at least one operand",
    "ND-06": "Leave absent operands out of the list",
    "ND-08": "Name no more inputs and outputs than the operator has",
    "ND-09": "Cast the operand, or import an opset whose operator accepts its type",
    "ND-10": "Give only attributes that the operator has, each once, and all required ones",
    "ND-13": "Remove the overload",
    "ND-15": "Change the shapes or the attributes, as the message says",
    "OD-01": "Set magic to ONNXOPSET and write ir_version",
    "OD-02": "Give each operator a version of its own, not above that of the set",
    "OD-03": "Give the set a domain and a version",
    "OR-02": "Import each domain once",
    "OR-04": "Import a version of the default domain",
    "OR-06": "Import the domain in opset_import",
    "OR-08": "Use an operator of the domain; names are case sensitive",
    "OR-09": "Import an opset that has the operator",
    "OR-10": "Use the operator that replaces it, or an older opset",
    "OR-11": "Import a version of at least 1",
    "OR-12": "Update onnx2jax, or pass allow_newer_opset=True",
    "QA-02": "Annotate values of the graph",
    "SC-03": "Give the inner value a name that no enclosing graph uses",
    "SC-06": "Return the outer value through Identity",
    "SC-08": "Keep either the input or the initializer",
    "SC-09": "List the initializer after the inputs that the operator supplies",
    "SC-10": "Name the inputs and outputs",
    "SC-11": "Give the graph the inputs that the operator supplies",
    "SC-12": "Let both branches return the node's outputs, each of the same type",
    "SC-13": "Let the body return the condition, the states, and the scan outputs; give a condition input if it counts",
    "SC-14": "Let the body return the states and the scan outputs, and count the scan inputs right",
    "SH-13": "Leave the extent out when it is unknown",
    "TD-01": "Store the data once",
    "TD-05": "Store values in the range of the element type",
    "TD-12": "Store strings in string_data",
    "TD-13": "Store as many elements as the dims require",
    "TD-14": "Join the segments of the tensor",
    "TR-05": "Let the initialization graph start from constants and random numbers",
    "TR-07": "Add the initialization graph, or remove its binding",
    "TR-08": "Write the state variable as the key and the graph's output as the value",
    "TR-09": "Assign each variable once",
    "TR-10": "Bind an initializer of the main graph or of this algorithm",
    "TR-11": "Bind an output of this graph",
    "TR-17": "Give each value of the combined graph a name of its own",
    "TR-29": "Store the state variable as a dense initializer",
    "TY-01": "Use one of the element types that ONNX defines",
    "TY-14": "Declare the element type",
    "TY-16": "Use integers or strings as keys",
    "TY-20": "Name the opaque type",
    "TY-24": "Store non-negative dims whose product matches the stored data",
}
"""How to fix a violation, by rule."""
