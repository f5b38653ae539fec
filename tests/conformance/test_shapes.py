"""Rules SH: shapes, dimension variables, denotations."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import DeclarationWarning, InputShapeError
from tests.support.cases import RELU, F, X, clean, parse, refused_when_strict, rule, run, same

TWO = "g (float[{0}] x, float[{1}] z) => (float[A] y) {{ y = Identity (x) }}"


def two(first: str, second: str) -> onnx2jax.Model:
    return onnx2jax.convert(parse(TWO.format(first, second)))


def vectors(*sizes: int) -> list[np.ndarray]:
    return [np.ones(n, F) for n in sizes]


@rule("SH-01")
def test_no_shape_is_not_a_scalar() -> None:

    def unrank(m: Any) -> None:
        for v in (m.graph.input[0], m.graph.output[0]):
            v.type.tensor_type.ClearField("shape")

    anything = onnx2jax.convert(parse(edit=unrank))
    assert anything(F(1)).shape == () and anything(np.ones((1, 2), F)).shape == (1, 2)
    scalar = onnx2jax.convert(parse("g (float x) => (float y) { y = Relu (x) }"))
    assert scalar(F(1)).shape == ()
    with pytest.raises(InputShapeError):
        scalar(F([1]))


@rule("SH-02")
def test_a_dimension_is_a_number_a_name_or_nothing() -> None:
    proto = parse("g (float[2, N, ?] x) => (float[2, N, ?] y) { y = Relu (x) }")
    assert clean(proto, np.ones((2, 5, 7), F)).shape == (2, 5, 7)
    assert onnx2jax.convert(proto).inputs[0].type.shape == (2, "N", None)  # type: ignore[union-attr]


@rule("SH-03", "SH-04")
@pytest.mark.parametrize("sizes", [(2, 3), (2, 1)])
def test_one_name_is_one_extent(sizes: tuple[int, int]) -> None:
    # The checker, onnxruntime and the reference evaluator raise no error.
    with pytest.raises(InputShapeError, match=f"'N' is 2 in input 'x' but {sizes[1]} in input 'z'"):
        two("N", "N")(*vectors(*sizes))


@rule("SH-05", "SH-06")
def test_unknown_extents_are_unrelated() -> None:
    for name in ("?", "None"):  # as exporters call every unknown extent
        assert two(name, name)(*vectors(2, 3)).shape == (2,)
    proto = parse(TWO.format("N", "N"))
    for v in proto.graph.input:
        v.type.tensor_type.shape.dim[0].dim_param = ""
    assert run(proto, *vectors(2, 3)).shape == (2,)


@rule("SH-06", "SH-07")
@pytest.mark.parametrize("name", ["*", "s0 // 2", "batch*2 + 1", "größe"])
def test_any_text_is_the_name_of_one_extent(name: str) -> None:
    proto = parse(TWO.format("N", "N"))
    for v in proto.graph.input:
        v.type.tensor_type.shape.dim[0].dim_param = name
    m = onnx2jax.convert(proto)
    assert m(*vectors(2, 2)).shape == (2,)
    with pytest.raises(InputShapeError):
        m(*vectors(2, 3))
    with pytest.raises(InputShapeError):
        m(np.ones((2, 2), F), F([1, 1]))


@rule("SH-09")
def test_the_elements_of_a_sequence_share_the_extents_declared() -> None:
    text = "g (seq(float[{0}, 3]) s) => (float[A, B] y) {{ y = ConcatFromSequence <axis = 0> (s) }}"
    elements = [np.ones((2, 3), F), np.ones((4, 3), F)]
    for extent in ("?", "N"):  # exporters name extents in which elements differ, so names are not checked there
        assert onnx2jax.convert(parse(text.format(extent)))(elements).shape == (6, 3)
    fixed = onnx2jax.convert(parse(text.format("2")))
    assert fixed(elements[:1] * 2).shape == (4, 3)
    with pytest.raises(InputShapeError, match="extent 2 on axis 0"):
        fixed(elements)


@rule("SH-11")
def test_each_extent_is_compiled_once() -> None:
    m = onnx2jax.convert(parse(RELU.replace("float[2]", "float[N]")))
    traces = 0

    def counted(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return m.apply({}, x)

    call = jax.jit(counted)
    for n in (2, 3, 2):
        call(np.ones(n, F))
    assert traces == 2
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(m.apply))({}, jax.ShapeDtypeStruct((n,), F))
    same(exported.call({}, F([-1, 1, 2])), [0, 1, 2])


@rule("SH-12")
def test_shape_arithmetic_is_folded() -> None:
    text = """g (float[N, 4] x) => (float[M, 2] y) <int64[1] two = {2}, int64 zero = {0}, int64[1] first = {0}> {
      s = Shape (x)  n = Gather (s, zero)  n1 = Unsqueeze (n, first)  m = Mul (n1, two)
      shape = Concat <axis = 0> (m, two)  y = Reshape (x, shape) }"""
    m = onnx2jax.convert(parse(text))
    assert jax.jit(m.apply)(m.params, np.ones((3, 4), F)).shape == (6, 2)


@rule("SH-13")
def test_zero_is_an_extent_and_negative_ones_are_unknown() -> None:
    assert clean(parse("g (float[0] x) => (float[0] y) { y = Relu (x) }"), np.zeros(0, F)).shape == (0,)

    def negative(m: Any) -> None:
        m.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1

    m = refused_when_strict(
        parse(RELU.replace("float[2] y", "float[N] y"), negative), "SH-13"
    )  # some exporters write it for "unknown"
    assert m(np.ones(7, F)).shape == (7,)


@rule("SH-14", "SH-15")
def test_denotations_are_kept_and_change_nothing() -> None:
    def denote(m: Any) -> None:
        m.graph.input[0].type.denotation = "IMAGE"
        m.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"

    same(clean(parse(edit=denote), X), [0, 2])
    (x,) = onnx2jax.convert(parse(edit=denote)).inputs
    assert (x.denotations, x.denotation) == (("DATA_BATCH",), "IMAGE")


@rule("GR-18")
@pytest.mark.parametrize("declared", ["double[2]", "float[3]", "float[1, 2]", "float"])
def test_an_output_that_differs_from_its_declaration_is_a_warning(declared: str) -> None:
    # onnxruntime refuses another type and warns of another shape; the reference evaluator looks at neither.
    text = f"g (float[N] x) => ({declared} y) {{ y = Relu (x) }}"
    message = r"output y: .* is computed as float32\[2\] \(rule GR-18\); the computed value is returned"
    m = onnx2jax.convert(parse(text))
    with pytest.warns(DeclarationWarning, match=message):
        same(m(X), [0, 2])
    same(m(X), [0, 2])  # once is enough
    same(m(X[1:]), [2])
    fresh = onnx2jax.convert(parse(text))
    with pytest.warns(DeclarationWarning, match=message):
        same(jax.jit(fresh.apply)({}, X), [0, 2])


@rule("GR-18")
def test_several_outputs_that_differ_are_one_warning() -> None:
    m = onnx2jax.convert(
        parse("g (float[N] x) => (float[3] y, float[N] k, double[N] z) { y = Relu (x) k = Relu (x) z = Relu (x) }")
    )
    with pytest.warns(DeclarationWarning, match=r"output y: .* \(and 1 more\); the") as caught:
        m(X)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


@rule("SH-10", "SH-03")
def test_dimension_variables_of_outputs_are_checked_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Exporters often name dimensions of outputs wrongly, so mismatches are only logged."""
    caplog.set_level("INFO", "onnx2jax")
    grown = "g (float[N] x) => (float[N] y) { y = Concat <axis = 0> (x, x) }"
    same(run(parse(grown), X), [*X, *X])
    two = "g (float[N] x) => (float[M] y, float[M] z) { y = Concat <axis = 0> (x, x)  z = Neg (x) }"
    run(parse(two), X)
    assert "float32[4], and 'N' is 2 in 'x' (rule SH-10)" in caplog.messages[0]
    assert "output z: " in caplog.messages[1] and "'M' is 4 in 'y'" in caplog.messages[1]
    for fine in ("float[K] y", "float[?] y", "float[4] y"):
        run(parse(grown.replace("float[N] y", fine)), X)
    assert len(caplog.messages) == 2


def test_declared_outputs_of_padded_fixed_and_symbolic_extents() -> None:
    text = "g (float[N] x) => (float[N] y) { y = Relu (x) }"
    same(onnx2jax.convert(parse(text), bucket={"N": [4]})(X), [0, 2])
    same(onnx2jax.convert(parse(text), dims={"N": 2})(X), [0, 2])
    same(onnx2jax.convert(parse(text), static={"x": X})(), [0, 2])
    (n,) = jax.export.symbolic_shape("n")
    doubled = onnx2jax.convert(parse(text.replace("Relu (x)", "Concat <axis = 0> (x, x)")))
    jax.export.export(jax.jit(doubled.apply))({}, jax.ShapeDtypeStruct((n,), F))  # symbolic extents cannot be compared
