"""String inputs that only reach encoders become codes, and the rest of the graph one program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import KnownValueError
from onnx2jax.runtime.string_codes import with_string_codes
from tests.runtime.test_class_labels import TREE
from tests.support.models import model, value

ML = "ai.onnx.ml"
WORDS = np.array([["a", "x"], ["b", "z"], ["?", "y"], ["x", "a"], ["", "x"]], object)


def encode(kind: str, of: str, out: str, words: list[str], **more: Any) -> onnx.NodeProto:
    keys: dict[str, Any] = {"cats_strings": words, "zeros": 1}
    if kind == "LabelEncoder":
        keys = {"keys_strings": words, "values_floats": [float(i) for i in range(len(words))], "default_float": -2.0}
    return helper.make_node(kind, [of], [out], name=f"encodes {of}", domain=ML, **keys | more)


def tree(of: str, labels: list[str] | None = None) -> list[onnx.NodeProto]:
    names = {"classlabels_strings": labels} if labels else {"classlabels_int64s": [1, 2, 3]}
    return [helper.make_node("TreeEnsembleClassifier", [of], ["label", "scores"], domain=ML, **names, **TREE)]


def pipeline(nodes: list[onnx.NodeProto], outputs: list[onnx.ValueInfoProto] | None = None) -> onnx.ModelProto:
    columns = {"first": np.array([0]), "second": np.array([1]), "shape": np.array([-1, 4])}
    scores = [value("label", np.int64, None), value("scores", np.float32, None)]
    return model(nodes, [value("text", object, ["n", 2])], outputs or scores, columns, opsets={ML: 3}, opset=13)


def columns(*encoders: onnx.NodeProto) -> list[onnx.NodeProto]:
    picked = [
        helper.make_node("ArrayFeatureExtractor", ["text", name], [name + " text"], domain=ML)
        for name in ("first", "second")
    ]
    return [*picked, *encoders, helper.make_node("Concat", ["u", "v"], ["features"], axis=1), *tree("features")]


LABELS = columns(
    encode("LabelEncoder", "first text", "u", ["a", "b", "a"]), encode("LabelEncoder", "second text", "v", ["x", "a"])
)
ONE_HOT = [
    helper.make_node("Transpose", ["text"], ["across"], perm=[0, 1]),
    encode("OneHotEncoder", "across", "hot", ["x", "b"]),
    helper.make_node("Reshape", ["hot", "shape"], ["features"]),
    *tree("features"),
]


def assert_as_in_onnxruntime(proto: onnx.ModelProto, m: onnx2jax.Model) -> None:
    theirs = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"text": WORDS})
    for _ in range(6):  # from the fifth on, steps are bound
        for ours in (m.run(None, {"text": WORDS}), m(WORDS), m.run(None, {"text": WORDS.astype("U")})):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


def host_kinds(m: onnx2jax.Model) -> list[tuple[str, str]]:
    return [(where, kinds) for where, kinds, *_ in m._runtime.program.rows()]  # type: ignore[union-attr]


@pytest.mark.parametrize("nodes", [LABELS, ONE_HOT], ids=["labels", "one hot"])
def test_all_but_the_look_up_is_one_program(nodes: list[onnx.NodeProto]) -> None:
    proto = pipeline(nodes)
    m = onnx2jax.convert(proto)
    assert_as_in_onnxruntime(proto, m)
    (host, kinds), (compiled, _) = host_kinds(m)
    assert (host, compiled) == ("host", "jit") and kinds in ("1 (LabelEncoder)", "1 (OneHotEncoder)")


def test_fixed_strings_leave_one_program() -> None:
    m = onnx2jax.convert(pipeline(LABELS), static={"text": WORDS})
    wanted = onnx2jax.convert(pipeline(LABELS))(WORDS)
    for ours, theirs in zip(jax.jit(m.apply)(m.params), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_strings_inside_jit_are_refused_by_the_encoders_name() -> None:
    m = onnx2jax.convert(pipeline(LABELS))
    with pytest.raises((KnownValueError, TypeError), match="text"):
        jax.jit(m.apply)(m.params, WORDS)


@pytest.mark.parametrize(
    "why", ["an output", "an unknown string is an error", "another operator", "compared with no constants"]
)
@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
def test_strings_that_reach_something_else_stay_strings(why: str) -> None:
    nodes, outputs = LABELS, None
    if why == "an output":
        outputs = [value("first text", object, None), value("label", np.int64, None)]
    if why == "an unknown string is an error":
        nodes = [encode("OneHotEncoder", "text", "hot", sorted({*WORDS.ravel()}), zeros=0), *tree("hot")]
        nodes[1:1] = [helper.make_node("ReduceSum", ["hot", "second"], ["sum"], keepdims=0)]
        nodes[2] = tree("sum")[0]
    if why == "another operator":
        nodes = [*LABELS, helper.make_node("StringNormalizer", ["text"], ["lower"], case_change_action="LOWER")]
        outputs = [value("lower", object, None), value("label", np.int64, None)]
    if why == "compared with no constants":
        nodes = [*LABELS, helper.make_node("Equal", ["first text", "second text"], ["same"])]
        outputs = [value("same", bool, None), value("label", np.int64, None)]
    graph = onnx2jax.convert(pipeline(nodes, outputs)).graph
    assert with_string_codes(graph) is graph


def test_codes_leave_the_saved_file_alone(tmp_path: Any) -> None:
    proto = pipeline(LABELS)
    m = onnx2jax.convert(proto)
    m(WORDS)
    onnx2jax.save(m, tmp_path / "saved.onnx")
    assert [n.op_type for n in onnx.load(tmp_path / "saved.onnx").graph.node] == [n.op_type for n in proto.graph.node]
    assert_as_in_onnxruntime(proto, onnx2jax.convert(tmp_path / "saved.onnx"))


def test_one_of_two_inputs_becomes_codes() -> None:
    nodes = [
        encode("LabelEncoder", "one", "u", ["a", "b"]),
        encode("LabelEncoder", "two", "v", ["x"]),
        helper.make_node("Identity", ["two"], ["same"]),
        helper.make_node("Concat", ["u", "v"], ["features"], axis=1),
        *tree("features"),
    ]
    inputs = [value(n, object, ["n", 1]) for n in ("one", "two")]
    outputs = [value("label", np.int64, None), value("same", object, None)]
    m = onnx2jax.convert(model(nodes, inputs, outputs, opsets={ML: 3}, opset=13))
    feeds = {"one": WORDS[:, :1], "two": WORDS[:, 1:]}
    theirs = onnxruntime.InferenceSession(
        model(nodes, inputs, outputs, opsets={ML: 3}, opset=13).SerializeToString()
    ).run(None, feeds)
    for a, b in zip(m.run(None, feeds), theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    first, *_ = with_string_codes(m.graph).nodes
    assert first.inputs == ("one",) and first.op_type == "LabelEncoder"


def test_a_string_input_that_nothing_reads_is_no_obstacle() -> None:
    proto = pipeline(LABELS)
    proto.graph.input.append(value("unused", object, ["m"]))
    feeds = {"text": WORDS, "unused": np.array(["?"], object)}
    for ours, theirs in zip(
        onnx2jax.convert(proto).run(None, feeds), onnx2jax.convert(pipeline(LABELS))(WORDS), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
