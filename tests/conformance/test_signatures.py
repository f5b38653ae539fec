"""Rules ND-03, ND-08 and ND-10: attributes and numbers of inputs are those of the operator's version."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import defs, helper

from onnx2jax.errors import DeviationWarning
from onnx2jax.ir.graph import Node
from onnx2jax.ir.signatures import schema_violations
from onnx2jax.ops import registry
from onnx2jax.proto.messages import normal_domain
from tests.support.cases import MAIN, RELU, F, X, parse, refused_when_strict, rule, same


def violations(schema: Any, inputs: int, *attributes: str) -> set[str]:
    """The rules that a node of the schema's operator and version violates."""
    domain, names = normal_domain(schema.domain), ["x"] * inputs
    message = helper.make_node(schema.name, names, ["y"], domain=domain, **dict.fromkeys(attributes, 1))
    operator = registry.resolve(domain, schema.name, schema.since_version)
    assert operator is not None
    values = dict.fromkeys(attributes, 1)
    node = Node("y", schema.name, domain, schema.since_version, tuple(names), ("y",), values, operator)
    return {rule for rule, _ in schema_violations(node, operator, message)}


@rule("ND-03", "ND-08", "ND-10")
def test_every_version_has_the_attributes_and_numbers_of_inputs_of_its_schema() -> None:
    schemas = [s for s in defs.get_all_schemas_with_history() if not s.deprecated]
    known: dict[tuple[str, str], set[str]] = {}
    for s in schemas:
        operator = registry.resolve(s.domain, s.name, s.since_version)
        assert operator is not None, s.name
        names = {*s.attributes, *operator.attributes, *operator.inputs}
        known.setdefault((s.domain, s.name), set()).update(names)
    for s in schemas:
        for name in known[s.domain, s.name]:
            allowed = "ND-10" not in violations(s, s.min_input, name)
            assert allowed == (name in s.attributes), (s.name, s.since_version, name)
        for count in range(10):
            wrong = {"ND-03"} if count < s.min_input else {"ND-08"} if count > s.max_input else set()
            assert violations(s, count) == wrong, (s.name, s.since_version, count)


OFFS = {
    "attribute that became an input": (
        ("ND-10", 13, MAIN + " { y = Clip <min = 0.0> (x) }"),
        "min is an input since opset 11: pass it as input 1",
    ),
    "attribute in place of a required input": (
        ("ND-10", 13, "g (float[2] x) => (float[1, 2] y) { y = Unsqueeze <axes = [0]> (x) }"),
        "axes is an input since opset 13: pass it as input 1",
    ),
    "attribute of a later version": (
        ("ND-10", 12, "g (uint8[2] x, float s) => (float[2] y) { y = DequantizeLinear <axis = 0> (x, s) }"),
        "axis exists from opset 13 on: import opset 13, or remove it",
    ),
    "attribute of an earlier version": (
        ("ND-10", 13, RELU.replace("Relu", "Relu <consumed_inputs = [0]> ")),
        "consumed_inputs was removed in opset 6: remove it",
    ),
    "input that was required": (
        ("ND-03", 7, "g (float[2, 2] x) => (float[2, 2] y) { y = Gemm (x, x) }"),
        "lacks input 2; at opset 7 Gemm needs 3",
    ),
    "input of a later version": (
        ("ND-08", 11, "g (float[2] x, int64[1] a) => (float[1, 2] y) { y = Unsqueeze (x, a) }"),
        "has 2 inputs; at opset 11 Unsqueeze takes at most 1",
    ),
}
"""What the function of an operator computes, and the operator's version does not have."""


@rule("ND-03", "ND-08", "ND-10")
@pytest.mark.parametrize("name", OFFS)
def test_an_operator_has_the_attributes_and_inputs_of_its_version(name: str) -> None:
    (broken, version, text), match = OFFS[name]
    proto = parse(text, lambda m: setattr(m.opset_import[0], "version", version))
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(proto)
    with pytest.raises(Exception, match=r"INVALID_GRAPH|Unrecognized attribute|not in range"):
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.warns(DeviationWarning, match=f"{match}.*it is computed all the same"):
        refused_when_strict(proto, broken)


def test_nodes_that_deviate_alike_cause_one_warning() -> None:
    text = MAIN + " { a = Clip <min = 0.0> (x)  y = Clip <min = 1.0> (a) }"
    with pytest.warns(DeviationWarning) as caught:
        model = refused_when_strict(parse(text), "ND-10")
    assert len(caught) == 1
    same(model(X), F([1, 2]))
