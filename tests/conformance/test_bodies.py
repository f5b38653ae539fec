"""Rules FN-24 to FN-26: operators that ONNX defines by a body of other operators mean what the body says.

Every operator has a function of its own here, so the bodies never run otherwise. Here they do, as functions of a model.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import defs, helper

from onnx2jax import compat
from onnx2jax.eval.interpreter import Context, evaluate
from onnx2jax.eval.values import to_host
from onnx2jax.ir.graph import Graph
from onnx2jax.ir.importer import Importer
from onnx2jax.proto.external import ExternalFiles
from onnx2jax.proto.messages import ModelProto
from tests.support.cases import rule
from tests.support.official import assert_same, cases
from tests.tables.operators import NEWEST, Row, rows


def bodies() -> list[tuple[defs.OpSchema, int]]:
    """Each schema that has bodies, with the first opset of each."""
    found = []
    for schema in defs.get_all_schemas_with_history():
        versions = {*schema.function_opset_versions, *schema.context_dependent_function_opset_versions}
        found += [(schema, version) for version in sorted(versions) if not schema.deprecated]
    return found


def first(schema: defs.OpSchema, version: int) -> int:
    """The first opset of a body: some are written for an older opset than their schema."""
    return max(schema.since_version, version)


def expansion(schema: defs.OpSchema, version: int, node: onnx.NodeProto, types: list[bytes]) -> onnx.FunctionProto:
    """The body as a function of domain ``l``."""
    if version in schema.function_opset_versions:
        data = schema.get_function_with_opset_version(version)
    else:
        data = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    function = onnx.FunctionProto.FromString(data)
    function.domain = "l"
    made = {*function.input, *(name for node in function.node for name in node.output)}
    while function.output[-1] not in made:  # a body built for this node leaves out what the node does
        function.output.pop()
    if not function.opset_import:
        function.opset_import.append(helper.make_opsetid("", version))
    return function


def models(case: Row, schema: defs.OpSchema, version: int, opset: int) -> list[onnx.ModelProto]:
    """The operator at an opset, and the body that applies from ``version`` on."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    ends = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, case.inputs, strict=True)
        if n
    ]
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.name, names, outputs, **case.attributes)
    declared = {v.name: v.type.SerializeToString() for v in ends}
    function = expansion(schema, version, node, [declared.get(n, b"") for n in names])
    call = helper.make_node(function.name, names, outputs, domain="l")
    parameters = {*function.attribute, *(a.name for a in function.attribute_proto)}
    given = {a.name: a.default_value for a in schema.attributes.values() if a.default_value.name}
    given |= {a.name: a for a in node.attribute}  # the body reads the defaults of the operator's schema
    call.attribute.extend(a for name, a in given.items() if name in parameters)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("l", 1)]
    results = [onnx.ValueInfoProto(name=n) for n in outputs]
    return [
        helper.make_model(helper.make_graph([n], "g", ends, results), functions=f, opset_imports=imports, ir_version=10)
        for n, f in ((node, []), (call, [function]))
    ]


def evaluated(proto: onnx.ModelProto, case: Row) -> list[Any]:
    message = ModelProto.FromString(proto.SerializeToString())
    imported = Importer(message, ExternalFiles(None)).model()
    assert not imported.unsupported, imported.unsupported
    graph: Graph = imported.graph
    values = dict(zip((v.name for v in graph.inputs), (x for x in case.inputs if x is not None), strict=True))
    with compat.enable_x64(), np.errstate(all="ignore"):
        return [to_host(r) for r in evaluate(graph, values, Context({}, jax.random.key(0)))]


RANDOM = {"Bernoulli"}
"""Draws of a body and of an operator are not the same; tests/support/official.py compares their frequencies."""


UNLIKE = {
    "AffineGrid": "the body squeezes all axes of one, a batch of one among them, and then splits an axis that is gone",
    "Clip with infinities": "the prose bounds by the largest number, and so does onnxruntime; the body does not bound",
}
"""Where a body of ONNX differs from its prose, and the operator follows the prose."""


def _marks(case: Row) -> Any:
    special = case.name == "Clip" and len(case.inputs) == 1 and not np.isfinite(case.inputs[0]).all()
    reason = UNLIKE.get("Clip with infinities" if special else case.name)
    return pytest.mark.xfail(strict=True, reason=reason) if reason else ()


def _cases() -> list[Any]:
    known: dict[str, list[Row]] = {}
    for case in rows():
        if not case.domain:
            known.setdefault(case.name, []).append(case)
    return [
        pytest.param(
            schema, version, case, id=f"{schema.name}-{schema.since_version}@{version}-{n}", marks=_marks(case)
        )
        for schema, version in bodies()
        if schema.name not in RANDOM and schema.domain == ""
        for n, case in enumerate(known.get(schema.name, []))
        if case.since <= first(schema, version) <= case.until
    ]


@rule("FN-24", "FN-25", "FN-26")
@pytest.mark.parametrize(("schema", "version", "case"), _cases())
def test_an_operator_means_what_its_body_says(schema: defs.OpSchema, version: int, case: Row) -> None:
    """A body applies from its opset up to the next body's: the operator is compared at both ends."""
    start = first(schema, version)
    later = [s.since_version for s in defs.get_all_schemas_with_history() if s.name == schema.name]
    later += [first(other, v) for other, v in bodies() if other.name == schema.name]
    last = min([NEWEST, case.until, *(v - 1 for v in later if v > start)])
    for opset in sorted({start, last}):
        operator, body = models(case, schema, version, opset)
        assert_same(evaluated(operator, case), evaluated(body, case), 1e-4, 1e-5)


@rule("FN-25", "FN-26")
def test_every_body_is_compared() -> None:
    compared = {(p.values[0].name, first(*p.values[:2])) for p in _cases()}
    missing = {(schema.name, first(schema, version)) for schema, version in bodies()} - compared
    assert len(compared) > 60
    # The others have official cases, as operators and as bodies: the newest, and those of opsets that are not released.
    expanded = {n for case in cases().values() if "_expanded" in case.name for n in _operators_of(case)}
    assert {name for name, _ in missing} <= expanded


def _operators_of(case: Any) -> set[str]:
    """The operators of the case that a case with a body expands."""
    original = cases().get(re.sub(r"_expanded.*", "", case.name))
    return {node.op_type for node in original.model.graph.node} if original and original.model else set()
