"""Buckets: padding that changes results is rejected with the node's name; masked padding is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import BucketError, InputShapeError, InputTypeError, OperatorError, RecompilationWarning
from onnx2jax.model.calls import buckets
from tests.support.models import model, value

RNG = np.random.default_rng(0)
F = np.float32


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F)


def growing() -> onnx.ModelProto:
    """A step of a decoder: past [1, past, 4] and key [1, 1, 4] -> present, and the keys that mask [1, total] counts."""
    nodes = [
        helper.make_node("Concat", ["past", "key"], ["present"], "grow", axis=1),
        helper.make_node("Unsqueeze", ["mask", "two"], ["m"]),
        helper.make_node("Mul", ["present", "m"], ["live"], "live"),
        helper.make_node("ReduceSum", ["live", "one"], ["y"], "sum", keepdims=0),
    ]
    ends = [value("past", F, [1, "past", 4]), value("key", F, [1, 1, 4]), value("mask", F, [1, "total"])]
    outputs = [value("y", F, [1, 4]), value("present", F, [1, "total", 4])]
    return model(nodes, ends, outputs, {"one": np.array([1]), "two": np.array([2])})


def over(*nodes: Any, **constants: np.ndarray) -> onnx.ModelProto:
    """x [batch, seq, 4] -> y of the same declared type."""
    return model(nodes, [value("x", F, ["b", "n", 4])], [value("y", F, ["b", "n", 4])], constants)


def node(op_type: str, inputs: str, name: str = "", output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op_type, inputs.split(), [output], name or op_type.lower(), **attributes)


@pytest.mark.parametrize("total", [{}, {"total": [16]}])
def test_padding_that_breaks_a_node_names_the_bucket(total: dict[str, list[int]]) -> None:
    m = onnx2jax.convert(growing(), bucket={"past": [8]} | total)
    with pytest.raises(BucketError, match=r"node 'live' \(Mul(.|\n)*bucket= pads 'past'"):
        m(real(1, 5, 4), real(1, 1, 4), np.ones((1, 6), F))


def test_bucketing_a_concatenated_cache_is_rejected() -> None:
    m = onnx2jax.convert(growing(), bucket={"past": [8], "total": [9]})
    said = r"'past', 'total', and output 'y'.*differs by .*begins at node 'grow' \(Concat.*remove 'past', 'total' from"
    with pytest.raises(BucketError, match=said):
        m(real(1, 5, 4), real(1, 1, 4), np.ones((1, 6), F))


FLAT = {"rows": np.array([-1, 4]), "back": np.array([2, -1, 4])}
MIXED = {
    "a mean": (over(node("ReduceMean", "x one"), one=np.array([1])), "'reducemean'"),
    "a softmax": (over(node("Softmax", "x", axis=1)), "'softmax'"),
    "two convolutions": (
        over(
            node("Transpose", "x", output="t", perm=[0, 2, 1]),
            node("Conv", "t w b", "first", "c", pads=[1, 1]),
            node("Conv", "c w b", "second", "d", pads=[1, 1]),
            node("Transpose", "d", perm=[0, 2, 1]),
            w=real(4, 4, 3),
            b=real(4),
        ),
        "'second'",
    ),
    "behind rows that lie elsewhere": (
        over(
            node("Reshape", "x rows", output="r"),
            node("Relu", "r", output="s"),
            node("Reshape", "s back", output="t"),
            node("Softmax", "t", axis=1),
            **FLAT,
        ),
        "'softmax'",
    ),
    "a place in the sequence": (
        model(
            [node("ReduceSum", "x two", output="s", keepdims=0), node("ArgMin", "s", axis=1, keepdims=0)],
            [value("x", F, ["b", "n", 4])],
            [value("y", np.int64, ["b"])],
            {"two": np.array([2])},
        ),
        "values differ.*'argmin'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("proto", "said"), MIXED.values(), ids=MIXED)
def test_unmasked_padding_is_rejected(proto: onnx.ModelProto, said: str) -> None:
    m = onnx2jax.convert(proto, bucket={"n": [8]})
    with pytest.raises(BucketError, match=said):
        m(np.abs(real(2, 5, 4)))


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin", "ArgMax", "GlobalMaxPool"])
def test_padding_is_verified_with_negated_inputs(op_type: str, turned: int) -> None:
    """Padding with zeros does not change the maximum of positive numbers, but that of negative ones."""
    dtype = np.int64 if op_type == "ArgMax" else F
    how: dict[str, Any] = {} if op_type == "GlobalMaxPool" else {"keepdims": 0}
    how |= {"axis": 2} if op_type == "ArgMax" else {}
    proto = model(
        [node(op_type, "x axes" if op_type.startswith("Reduce") else "x", **how)],
        [value("x", F, ["b", 2, "n"])], [value("y", dtype, None)], {"axes": np.array([2])},
    )  # fmt: skip
    m = onnx2jax.convert(proto, bucket={"n": [8]})
    with pytest.raises(BucketError, match=f"'{op_type.lower()}'"):
        m(turned * (np.abs(real(1, 2, 5)) + 1))


def attention(masked: bool) -> onnx.ModelProto:
    bias = [node("Log", "mask", output="m"), node("Unsqueeze", "m one", output="bias")]
    nodes = [
        node("Transpose", "x", output="k", perm=[0, 2, 1]),
        node("MatMul", "x k", "scores", "s"),
        *(bias if masked else []),
        *([node("Add", "s bias", "masked", "t")] if masked else []),
        node("Softmax", "t" if masked else "s", output="w"),
        node("MatMul", "w x", "mix"),
    ]
    inputs = [value("x", F, ["b", "n", 4])] + [value("mask", F, ["b", "n"])] * masked
    return model(nodes, inputs, [value("y", F, ["b", "n", 4])], {"one": np.array([1])} if masked else {})


@pytest.mark.parametrize("masked", [True, False])
def test_attention_without_a_mask_is_rejected(masked: bool) -> None:
    plain, padded = (onnx2jax.convert(attention(masked), **o) for o in ({}, {"bucket": {"n": [8]}}))
    feeds = [real(2, 5, 4)] + [np.ones((2, 5), F)] * masked
    if masked:
        np.testing.assert_allclose(padded(*feeds), plain(*feeds), rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(BucketError, match="'softmax'"):
            padded(*feeds)


def test_a_dimension_without_a_name_is_padded() -> None:
    """It is called by its input and axis, as in ``dims``; the outputs that have it are inferred."""
    proto = model(
        [node("Relu", "x"), node("Transpose", "x", output="z", perm=[1, 0])],
        [value("x", F, [None, 4])], [value("y", F, [None, 4]), value("z", F, [4, None])],
    )  # fmt: skip
    m = onnx2jax.convert(proto).with_options(bucket={"x_0": [8, 4]})
    x = real(3, 4)
    y, z = m(x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(z, x.T)
    with pytest.raises(InputTypeError, match=r"bucket has 'x_0': 8; it takes a list of sizes, \{'x_0': \[64, 128\]\}"):
        m.with_options(bucket={"x_0": 8})


def test_outputs_that_declare_another_variable_are_sliced() -> None:
    """PaddlePaddle's exporter gives each output axis a name of its own; others declare no shape."""
    turned = node("Transpose", "x", output="t", perm=[1, 0, 2])
    proto = model(
        [node("Relu", "x"), turned, node("Concat", "x x", axis=2, output="u")],
        [value("x", F, ["b", "n", "c"])],
        [value("y", F, ["b.1", "n.1", "c.1"]), value("t", F, None), value("u", F, ["b.2", "n.2", "c.2"])],
    )  # fmt: skip
    m = onnx2jax.convert(proto, bucket={"b": [8], "n": [8, 4]})
    for shape in [(3, 3, 4), (2, 3, 4)]:  # padded to [8, 4, 4]: one axis is 4 by chance
        x = real(*shape)
        y, t, u = m(x)
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        np.testing.assert_array_equal(t, x.transpose(1, 0, 2))
        np.testing.assert_array_equal(u, np.concatenate([x, x], 2))
    assert m.compilations == 1


def test_outputs_computed_from_strings_are_sliced() -> None:
    """As skl2onnx exports a pipeline: labels are strings, scores a list of maps, and no axis has a name."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 15, "ai.onnx.ml" : 2]>
        pipeline (string[N, 1] s) => (string[M] y, seq(map(string, float)) p, int64[K] c)
        <int64[2] rows = {-1, 2}> {
            h = ai.onnx.ml.OneHotEncoder <cats_strings = ["a", "b"]> (s)
            r = Reshape(h, rows)
            y, z = ai.onnx.ml.LinearClassifier <coefficients = [1.0, 2.0, 3.0, -1.0, 0.5, 4.0],
                classlabels_strings = ["yes", "no", "?"]> (r)
            p = ai.onnx.ml.ZipMap <classlabels_strings = ["yes", "no", "?"]> (z)
            c = ai.onnx.ml.LabelEncoder <keys_strings = ["yes", "no", "?"], values_int64s = [3, 4, 5]> (y) }""")
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    plain, padded = onnx2jax.convert(proto), onnx2jax.convert(proto, bucket={"s_0": [4, 8]})
    for texts in (["b", "a", "c"], ["a"], ["a", "b", "b", "a", "c"], ["b"] * 4):
        x = np.array(texts, object)[:, None]
        for found, wanted in zip(padded(x), plain(x), strict=True):
            assert len(found) == len(texts) and list(found) == list(wanted)


def test_an_axis_of_another_extent_is_not_sliced() -> None:
    """The first results are those without padding, but which axis has them only an extent of a variable tells."""
    proto = model([node("Pad", "x pads")], [value("x", F, ["n"])], [value("y", F, ["m"])], {"pads": np.array([0, 1])})
    said = r"'n', and output 'y' differs .*: its shape is \[5\] instead of \[4\]\. Only an axis of .* is sliced: remove"
    with pytest.raises(BucketError, match=said):
        onnx2jax.convert(proto, bucket={"n": [4]})(real(3))


def test_dimensions_without_a_name_and_with_equal_sizes_are_equal() -> None:
    proto = model(
        [node("Add", "x m")], [value("x", F, [None, 4]), value("m", F, [None, 1])], [value("y", F, [None, 4])], {}
    )
    m = onnx2jax.convert(proto, bucket={"x_0": [4], "m_0": [4]})
    assert m(real(3, 4), real(3, 1)).shape == (3, 4)
    with pytest.raises(InputShapeError, match="equal sizes for 'x_0' and 'm_0', whose extents are 3 and 2"):
        m(real(3, 4), real(2, 1))  # which both are padded to 4


def test_several_names_of_one_dimension_are_padded_together() -> None:
    """The output has a name of its own, and padding one alone breaks the node."""
    proto = model([node("Add", "x m")], [value("x", F, ["b", 4]), value("m", F, ["c", 4])], [value("y", F, ["d", 4])])
    x, m = real(3, 4), real(3, 4)
    said = r"pads 'b' and not 'c', of equal extent: add \{'c': \[4, 8\]\} to bucket="
    with pytest.raises(BucketError, match=said):
        onnx2jax.convert(proto, bucket={"b": [4, 8]})(x, m)
    both = onnx2jax.convert(proto, bucket={"b": [4, 8], "c": [4, 8]})
    np.testing.assert_allclose(both(x, m), x + m)
    assert both(x[:2], m[:2]).shape == (2, 4) and both.compilations == 1
    with pytest.raises(OperatorError, match=r"shapes \(3, 4\) and \(2, 4\) do not broadcast"):
        both(x, m[:2])  # which both are padded to 4


def test_constant_inputs_do_not_verify_padding() -> None:
    """The mean of zeros does not depend on their number: a warm-up call must not disable verification."""
    proto = model(
        [node("ReduceMean", "x one", keepdims=0)], [value("x", F, ["b", "n"])], [value("y", F, ["b"])],
        {"one": np.array([1])},
    )  # fmt: skip
    m = onnx2jax.convert(proto, bucket={"n": [8]})
    assert m(np.zeros((1, 5), F)).tolist() == [0]
    with pytest.raises(BucketError, match="'reducemean'"):
        m(real(1, 5))


def embedding() -> onnx.ModelProto:
    """The sum of the embedded tokens that a mask keeps."""
    nodes = [
        node("Gather", "table ids", output="e"),
        node("Unsqueeze", "mask two", output="m"),
        node("Mul", "e m", output="f"),
        node("ReduceSum", "f one", keepdims=0),
    ]
    inputs = [value("ids", np.int64, ["b", "n"]), value("mask", F, ["b", "n"])]
    return model(nodes, inputs, [value("y", F, ["b", 3])], {"table": real(5, 3), "one": ONE, "two": np.array([2])})


ONE = np.array([1])


def over_ids() -> onnx.ModelProto:
    """The mean of embedded tokens, where that of constant tokens does not depend on their number."""
    nodes = [node("Gather", "table ids", output="e"), node("ReduceMean", "e one", keepdims=0)]
    constants = {"table": real(5, 3), "one": ONE}
    return model(nodes, [value("ids", np.int64, ["b", "n"])], [value("y", F, ["b", 3])], constants)


def test_constant_integers_are_varied_to_verify_padding() -> None:
    """Else each new length would be compiled without padding, too."""
    m = onnx2jax.convert(embedding(), bucket={"n": [8, 16]})
    for n in (3, 4, 5, 6):
        m(np.full((1, n), 4), np.ones((1, n), F))
    assert list(m._runtime._unpadded.values()) == [None]
    with pytest.raises(BucketError, match="'reducemean'"):
        onnx2jax.convert(over_ids(), bucket={"n": [8]})(np.full((1, 5), 0))


def test_compile_verifies_padding() -> None:
    with pytest.raises(BucketError, match="'reducemean'"):
        onnx2jax.convert(over_ids(), bucket={"n": [8]}).compile(dims={"n": 8})
    proven = onnx2jax.convert(embedding(), bucket={"n": [8]}).compile(dims={"n": 8})
    assert list(proven._runtime._unpadded.values()) == [None]


def test_calls_that_verify_nothing_are_said() -> None:
    m = onnx2jax.convert(over(node("Relu", "x")), bucket={"n": [8]})
    with pytest.warns(RecompilationWarning, match=r"compile\(dims=\{'n': n\}\)"):
        for n in (4, 5, 6, 7):
            m(np.zeros((1, n, 4), F))


def test_padding_is_verified_once_per_set_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    verify_padding = buckets.verify_padding
    monkeypatch.setattr(buckets, "verify_padding", lambda *args: seen.append(set(args[-1])) or verify_padding(*args))
    m = onnx2jax.convert(over(node("Relu", "x")), bucket={"b": [2, 4], "n": [4, 8]})
    for shape in [(2, 4, 4), (1, 3, 4), (1, 2, 4), (2, 3, 4), (3, 7, 4), (2, 5, 4)]:
        x = real(*shape)
        np.testing.assert_array_equal(m(x), np.maximum(x, 0))
    assert seen == [{"b", "n"}, {"n"}]
