"""What a page of a model's graph shows: costs, findings, types, values of a call, times, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ...checker.check import check_message
from ...checker.report import Finding
from ...errors import InputTypeError, OnnxError
from ...eval.known_values import inferred_types
from ...eval.values import to_host
from ...ir.graph import Graph
from ...proto.messages import tensors
from ..changes.parts import node_outputs
from .profile import Profile
from .summary import Summary, feeds_of, summary
from .verification import Verification

MOST_BYTES: Final = 1 << 31
"""Parameters of more bytes in all have no histograms: they would all be read."""


@dataclass(frozen=True)
class PageFacts:
    """What a page shows beside the graph.

    Attributes:
        costs: FLOPs, bytes and parameters of each node of the main graph.
        findings: violations of the ONNX specification.
        types: types of values of the main graph, as text by name.
        values: values of a call by name.
        profile: the time of nodes.
        verification: the comparison with another implementation.
        statistics: whether parameters have figures and histograms.
        notes: what the page lacks, and why.
    """

    costs: Summary | None = None
    findings: Sequence[Finding] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    verification: Verification | None = None
    statistics: bool = False
    notes: Sequence[str] = ()


def facts(
    model: Any, inputs: Any, dims: Mapping[str, int] | None, profile: Profile | None, verification: Verification | None
) -> PageFacts:
    """Everything that is known about a model; with ``inputs`` also what its nodes compute for them.

    Raises:
        InputError: ``inputs`` or ``dims`` do not match the model.
    """
    notes = []
    costs = None
    if inputs is not None and not isinstance(inputs, Mapping):
        if len(model.inputs) != 1:
            raise InputTypeError(f"inputs takes a dict by name: the model's are {[v.name for v in model.inputs]}")
        inputs = {model.inputs[0].name: inputs}
    if inputs or dims:
        feeds_of(model, inputs or {}, dims or {}, abstract=True)  # raises for wrong names
    nodes = [node for graph in model.graph.walk() for node in graph.nodes]
    if unsupported := sorted({n.op_type for n in nodes if n.target is None}):
        notes.append(f"Unsupported: {', '.join(unsupported)}")
    else:
        try:
            costs = summary(model, inputs or {}, dims)
        except (OnnxError, TypeError, ValueError) as e:  # the graph can be shown without
            lines = str(e).splitlines() or [type(e).__name__]
            hint = "".join(f". {line}" for line in lines[1:] if line.startswith("Extents"))
            hint = hint.replace("model.summary(", "model.draw(path, ")
            notes.append(f"FLOPs and bytes are not known: {lines[0]}{hint}")
    values: dict[str, Any] = {}
    if inputs:
        args, named = by_position(model, inputs)
        names, rng = node_outputs(model.graph), 0 if model.graph.draws else None
        results = model.values(*args, names=names, rng=rng, **named) if names else {}
        values = {**inputs, **{n: to_host(v) for n, v in results.items()}}
    findings: Sequence[Finding] = ()
    if model.origin is not None:
        opened = model.origin.open()
        for tensor, _ in tensors(opened.message):
            opened.attach(tensor)
        findings = check_message(opened.message, opened.files, allow_newer_opset=True).findings
    size = sum(t.dtype.itemsize * int(np.prod(t.shape)) for t in model.types.values())
    if size > MOST_BYTES:
        notes.append(f"parameters of {size:,} bytes are not read, so they have no histograms")
    types = _types(model, costs)
    return PageFacts(costs, findings, types, values, profile, verification, size <= MOST_BYTES, notes)


def by_position(model: Any, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call: by position as far as they are given in order, as a name may be that of an argument."""
    required = [v.name for v in model.inputs]
    first = required if inputs.keys() >= {*required} else []
    return [inputs[n] for n in first], {n: v for n, v in inputs.items() if n not in first}


def _types(model: Any, costs: Summary | None) -> dict[str, str]:
    """The types of values that the file does not declare, as text by name, as far as they are known."""
    if declared_types(model.graph).keys() >= {*node_outputs(model.graph)}:
        return {}
    free = any(not isinstance(d, int) for v in (*model.inputs, *model.optional.values()) for d in v.shape or (None,))
    if costs is not None and not free:
        return {n: t for node in costs.nodes for n, t in node.outputs.items()}
    return {name: str(kind) for name, kind in inferred_types(model.graph).items()}


def declared_types(graph: Graph) -> dict[str, str]:
    """The types of the values that a graph declares, as text by name."""
    every = (*graph.value_info.values(), *graph.inputs, *graph.outputs)
    return {v.name: str(v.type) for v in every if v.type is not None}
