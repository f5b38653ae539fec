"""Rules OR and OD: which meaning an operator has, and documents that declare operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnx2jax
from onnx2jax.errors import DeviationWarning, ModelError, UnsupportedError, UnsupportedOperatorError
from onnx2jax.proto.messages import OperatorSetProto
from onnx2jax.proto.operator_sets import read_operator_set
from tests.support.cases import (
    MAIN,
    RELU,
    F,
    X,
    clean,
    parse,
    refused,
    refused_when_strict,
    rule,
    rules_of,
    run,
    same,
    warned,
)

ONES = np.ones((1, 2, 2), F)
SOFTMAX = "g (float[1, 2, 2] x) => (float[1, 2, 2] y) { y = Softmax (x) }"


def imports(*versions: int, domain: str = "", text: str = SOFTMAX) -> onnx.ModelProto:
    """A model that imports the given versions of a domain, in this order."""

    def edit(m: Any) -> None:
        del m.opset_import[:]
        m.opset_import.extend(onnx.helper.make_opsetid(domain, v) for v in versions)

    return parse(text, edit)


@rule("OR-01", "ND-11")
@pytest.mark.parametrize(("version", "value"), [(11, 0.25), (12, 0.25), (13, 0.5), (28, 0.5)])
def test_the_newest_meaning_not_above_the_import_applies(version: int, value: float) -> None:
    for op_type in ("Softmax", "LogSoftmax", "Hardmax"):
        text = SOFTMAX.replace("Softmax", op_type)
        result = run(imports(version, text=text), ONES)
        flat, last = np.float32([1, 0, 0, 0]).reshape(1, 2, 2), np.float32([[[1, 0], [1, 0]]])
        expected = {"Softmax": value, "LogSoftmax": np.log(value), "Hardmax": flat if version < 13 else last}[op_type]
        np.testing.assert_allclose(result, np.broadcast_to(expected, (1, 2, 2)), rtol=1e-6)


@rule("OR-02")
@pytest.mark.parametrize("versions", [(11, 13), (13, 11)])
def test_the_higher_of_two_imports_applies(versions: tuple[int, int]) -> None:
    # onnxruntime and the checker of the onnx package take the last one.
    np.testing.assert_allclose(warned(imports(*versions), "OR-02")(ONES), np.full((1, 2, 2), 0.5))


@rule("OR-03")
@pytest.mark.parametrize("imported", ["", "ai.onnx"])
@pytest.mark.parametrize("used", ["", "ai.onnx"])
def test_the_default_domain_has_two_names(imported: str, used: str) -> None:
    # The checker refuses import '' with node 'ai.onnx', the reference evaluator both mixtures.
    proto = imports(21, domain=imported, text=RELU)
    proto.graph.node[0].domain = used
    same(clean(proto, X), [0, 2])


@rule("OR-04")
def test_the_default_domain_has_to_be_imported_where_it_is_used() -> None:
    # onnxruntime runs it with its newest set.
    refused(imports(3, domain="ai.onnx.ml", text=RELU), "OR-04", match="OR-04", error=ModelError)


@rule("OR-05")
def test_a_model_of_other_domains_alone_needs_no_default_domain() -> None:
    text = 'g (float[1, 2] x) => (float[1, 2] y) { y = ai.onnx.ml.Normalizer <norm = "L1"> (x) }'
    same(clean(imports(3, domain="ai.onnx.ml", text=text), F([[-1, 3]])), F([[-0.25, 0.75]]))
    momentum = """g (float r, int64 t, float[1] x, float[1] g, float[1] v) => (float[1] a, float[1] b) {
      a, b = ai.onnx.preview.training.Momentum
        <alpha = 0.5, beta = 1.0, norm_coefficient = 0.0, mode = "standard"> (r, t, x, g, v) }"""
    proto = imports(1, domain="ai.onnx.preview.training", text=momentum)
    results = clean(proto, F(1), np.int64(1), F([1]), F([2]), F([4]))
    same(results[0], [-3])


@rule("OR-06")
def test_a_domain_that_is_not_imported_is_refused_though_it_is_known() -> None:
    @onnx2jax.ops.op("Known", domain="foo.bar", replace=True)
    def known(x):  # type: ignore[no-untyped-def]
        return x

    refused(parse(MAIN + " { y = foo.bar.Known (x) }"), "OR-06", match="'foo.bar'.*ai.onnx 21", error=ModelError)


@rule("OR-07")
def test_an_unknown_domain_that_nothing_uses_is_harmless() -> None:
    same(clean(parse(edit=lambda m: m.opset_import.add(domain="foo.baz", version=3)), X), [0, 2])


@rule("OR-08")
def test_names_of_operators_are_case_sensitive() -> None:
    refused(parse(MAIN + " { y = relu (x) }"), "OR-08", match="did you mean Relu", error=UnsupportedOperatorError)


@rule("OR-09")
def test_an_operator_newer_than_the_import_is_refused() -> None:
    # onnxruntime and the reference evaluator run it.
    proto = imports(13, text=MAIN + " { y = HardSwish (x) }")
    refused(proto, "OR-09", match="exists from opset 14 on", error=UnsupportedOperatorError)


OLD_NORMS = {
    "LayerNormalization of an optimised BERT": (12, "LayerNormalization <axis = -1, epsilon = 0.1> (x, s, b)"),
    "the same, statistics only": (1, "LayerNormalization (x, s)"),
    "all axes but the channels": (8, "MeanVarianceNormalization (x)"),
    "all axes": (8, "MeanVarianceNormalization <across_channels = 1> (x)"),
    "not divided": (8, "MeanVarianceNormalization <normalize_variance = 0> (x)"),
}


@rule("OR-09")
@pytest.mark.parametrize("case", OLD_NORMS)
def test_operators_that_onnxruntime_runs_in_older_opsets(case: str) -> None:
    opset, node = OLD_NORMS[case]
    shape = "float[2, 3, 4, 2]"
    proto = imports(opset, text=f"g ({shape} x, float[2] s, float[2] b) => ({shape} y) {{ y = {node} }}")
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 4, 2)).astype(F), "s": F([1, 2]), "b": F([3, -1])}
    with pytest.warns(DeviationWarning, match="ONNX defines .* from opset (9|17) on"):
        model = refused_when_strict(proto, "OR-09")
    proto.ir_version = 4
    (expected,) = ort.InferenceSession(proto.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(model.run(None, feeds)[0], expected, rtol=1e-5, atol=1e-6)


ASSUMED = {
    "ai.onnx.ml": "g (float[2] x) => (float[2] y) { y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x) }",
    "com.microsoft": MAIN + " { z = com.microsoft.QuickGelu (x)  y = com.microsoft.QuickGelu (z) }",
}


@rule("OR-06")
@pytest.mark.parametrize("domain", ASSUMED)
def test_domains_that_files_forget_to_import(domain: str) -> None:
    """onnxruntime assumes the newest version, as lenient mode does; the strict error says so."""
    proto = imports(21, text=ASSUMED[domain])
    with pytest.warns(DeviationWarning) as said:
        model = refused_when_strict(proto, "OR-06")
    assert sum("does not name the domain" in str(w.message) for w in said) == 1
    messages = [f.message for f in onnx2jax.check(proto).findings if f.rule == "OR-06"]
    assert all("strict=False reads it as version" in m for m in messages)
    (expected,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    np.testing.assert_allclose(model.run(None, {"x": X})[0], expected, rtol=1e-6)


@rule("OR-10")
def test_a_deprecated_operator_without_older_versions() -> None:
    text = "g (float[1, 2] x, float[2] s) => (float[1, 2] y) { y = GroupNormalization <num_groups = 2> (x, s, s) }"
    with pytest.raises(ModelError, match=r"use GroupNormalization of opset 21, whose .* per channel \(rule"):
        onnx2jax.convert(imports(18, text=text))


@rule("OR-10")
def test_a_deprecated_operator_is_refused_from_its_deprecation_on() -> None:
    scatter = "g (float[2] x, int64[1] i, float[1] u) => (float[2] y) { y = Scatter (x, i, u) }"
    same(clean(imports(10, text=scatter), X, np.array([0]), F([5])), [5, 2])
    refused(imports(11, text=scatter), "OR-10", match="ScatterElements", error=ModelError)
    upsample = "g (float[2] x, float[1] s) => (float[4] y) { y = Upsample (x, s) }"
    same(clean(imports(9, text=upsample), X, F([2])), [-1, -1, 2, 2])
    refused(imports(10, text=upsample), "OR-10", match="Resize", error=ModelError)


@rule("OR-11")
@pytest.mark.parametrize("version", [0, -1, 2**40])
def test_versions_are_positive_and_of_32_bits(version: int) -> None:
    refused(imports(version), "OR-11", error=ModelError)


@rule("OR-12")
def test_newer_operator_sets_are_refused_unless_allowed() -> None:
    proto = imports(99, text=RELU)  # the checker of the onnx package accepts them
    refused(proto, "OR-12", match="newest supported is 28", error=UnsupportedError)
    same(onnx2jax.convert(proto, allow_newer_opset=True)(X), [0, 2])
    assert onnx2jax.check(proto, allow_newer_opset=True).ok
    assert rules_of(proto, "warning", allow_newer_opset=True) == {"OR-12"}


@rule("OR-13", "OR-15")
def test_operators_of_users_follow_the_same_rule() -> None:
    def result(version: int) -> list[float]:
        return run(parse(text, lambda m: m.opset_import.add(domain="foo.versions", version=version)), X).tolist()

    text = MAIN + " { y = foo.versions.Op (x) }"
    onnx2jax.ops.op("Op", domain="foo.versions", since=1, replace=True)(lambda x: x + 1)
    assert result(1) == result(2) == result(5) == [0, 3]
    onnx2jax.ops.op("Op", domain="foo.versions", since=3, replace=True)(lambda x: x + 3)
    assert result(1) == result(2) == [0, 3]
    assert result(3) == result(5) == [2, 5]


@rule("OR-14")
def test_withdrawn_experimental_operators() -> None:
    text = MAIN + " { y = Affine <alpha = 2.0, beta = 1.0> (x) }"
    same(run(imports(8, text=text), X), [-1, 5])  # supported, because old files contain it
    with pytest.raises(UnsupportedOperatorError, match="ATen"):
        onnx2jax.convert(imports(8, text=MAIN + " { y = ATen (x) }"))


@rule("OR-16")
def test_built_in_operators_win_over_functions_of_the_default_domain_only() -> None:
    body = '\n<domain: "", opset_import: ["" : 21]> Relu (a) => (r) { r = Neg (a) }'
    same(run(parse(RELU + body), X), [0, 2])  # as in onnxruntime and the reference evaluator
    onnx2jax.ops.op("Mine", domain="l", replace=True)(lambda x: x * 100)
    body = '\n<domain: "l", opset_import: ["" : 21]> Mine (a) => (r) { r = Neg (a) }'
    same(run(parse(MAIN + " { y = l.Mine (x) }" + body), X), [1, -2])


# -------------------------------------------------------------------------------- operator set documents


def document(**fields: Any) -> Any:
    values = {"magic": "ONNXOPSET", "ir_version": 10, "domain": "com.example", "opset_version": 3} | fields
    result = OperatorSetProto(**{k: v for k, v in values.items() if v is not None})
    result.operator.add(op_type="A", since_version=1)
    result.operator.add(op_type="A", since_version=3)
    return result


@rule("OD-01", "OD-06")
def test_an_operator_set_document_is_read(tmp_path: Path) -> None:
    for good in (document(), document(ir_version=2**33)):  # the prose says int32, the message int64
        assert onnx2jax.check(good).findings == ()
        assert onnx2jax.check(good.SerializeToString()).ok
        (tmp_path / "a.onnxopset").write_bytes(good.SerializeToString())
        assert onnx2jax.check(tmp_path / "a.onnxopset").ok
    for bad in (document(magic="X"), document(magic=None), document(ir_version=None)):
        assert rules_of(bad) == {"OD-01"}
    with pytest.raises(ModelError, match="operator set document"):
        onnx2jax.convert(document().SerializeToString())


@rule("OD-02")
def test_versions_of_operators_in_a_document() -> None:
    newer, twice = document(opset_version=2), document()
    twice.operator.add(op_type="A", since_version=3)
    assert rules_of(newer) == rules_of(twice) == {"OD-02"}


@rule("OD-03")
@pytest.mark.parametrize(("field", "rule_id"), [("domain", "OD-03"), ("opset_version", "OD-02")])
def test_domain_and_version_identify_a_document(field: str, rule_id: str) -> None:
    assert rules_of(document(**{field: None})) == {rule_id}
    assert onnx2jax.check(document(domain="")).ok  # the default domain, explicit


@rule("OD-04")
def test_a_status_is_part_of_a_document() -> None:
    stable = document()
    stable.operator[0].status = 1
    assert onnx2jax.check(stable).ok
    assert dict(read_operator_set(stable).stable) == {("A", 1): True, ("A", 3): False}
    assert [read_operator_set(document(opset_version=v)).since("A") for v in (3, 7)] == [3, 3]


@rule("OD-05")
def test_an_operator_runs_by_its_body_in_a_document() -> None:
    made = document(opset_version=1)
    del made.operator[1]
    body = parse(
        MAIN + ' { y = Neg (x) }\n<domain: "com.example", opset_import: ["" : 21]> A (a) => (r) { r = Neg (a) }'
    )
    made.functions.add().ParseFromString(body.functions[0].SerializeToString())
    proto = parse(MAIN + " { y = com.example.A (x) }", lambda m: m.opset_import.add(domain="com.example", version=1))
    same(onnx2jax.convert(proto, operator_sets=[made])(X), -X)
    assert onnx2jax.check(proto, operator_sets=[made]).findings == ()
