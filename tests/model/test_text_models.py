"""Strings in, a heavy network, strings out: the network is compiled once per shape, string nodes run on the host."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax import cli
from onnx2jax.errors import (
    InputNameError,
    InputShapeError,
    InputTypeError,
    KnownValueError,
    MissingExtraWarning,
    OnnxError,
)
from tests.support.models import model, one_node, value

RNG = np.random.default_rng(0)
WORDS = ["", "the", "cat", "dog", "sat", "ran", "far", "mat"]
LABELS = ["bad", "good", "unknown"]
ML, MICROSOFT = "ai.onnx.ml", "com.microsoft"
node = helper.make_node


def text(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.STRING, shape)


def weights(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)


def network(features: str, width: int) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """features -> two products -> probabilities and the label's text."""
    nodes = [
        node("MatMul", [features, "w1"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "w2"], ["scores"]),
        node("Softmax", ["scores"], ["probabilities"]),
        node("ArgMax", ["scores"], ["best"], axis=-1, keepdims=0),
        node(
            *("LabelEncoder", ["best"], ["label"]),
            domain=ML,
            keys_int64s=[0, 1],
            values_strings=LABELS[:2],
            default_string=LABELS[2],
        ),
    ]
    return nodes, {"w1": weights(width, 32), "w2": weights(32, 3)}


def bag_of_words() -> onnx.ModelProto:
    """text [n] -> lower case -> tokens -> counts of words and pairs -> the network."""
    nodes, constants = network("counts", 6)
    before = [
        node("StringNormalizer", ["text"], ["lower"], case_change_action="LOWER", locale="C"),
        node(
            *("Tokenizer", ["lower"], ["tokens"]),
            domain=MICROSOFT,
            mark=0,
            mincharnum=1,
            pad_value="#",
            separators=[" "],
        ),
        node(
            *("TfIdfVectorizer", ["tokens"], ["counts"]),
            mode="TF",
            min_gram_length=1,
            max_gram_length=2,
            max_skip_count=0,
            ngram_counts=[0, 4],
            ngram_indexes=list(range(6)),
            pool_strings=["the", "cat", "dog", "sat", "the", "cat", "cat", "sat"],
        ),
    ]
    outputs = [text("label", ["n"]), value("probabilities", np.float32, ["n", 3])]
    return model([*before, *nodes], [text("text", ["n"])], outputs, constants, opsets={ML: 3, MICROSOFT: 1})


def embedded() -> onnx.ModelProto:
    """text [n] -> words -> numbers -> embedding -> attention of all words to all -> the network."""
    nodes, constants = network("mean", 16)
    constants |= {"table": weights(len(WORDS), 16), "q": weights(16, 16), "one": np.array([1])}
    before = [
        node("StringSplit", ["text"], ["words", "lengths"]),
        node(
            *("LabelEncoder", ["words"], ["ids"]),
            domain=ML,
            keys_strings=WORDS,
            values_int64s=list(range(len(WORDS))),
            default_int64=0,
        ),
        node("Gather", ["table", "ids"], ["e"]),
        node("MatMul", ["e", "q"], ["queries"]),
        node("Transpose", ["e"], ["keys"], perm=[0, 2, 1]),
        node("MatMul", ["queries", "keys"], ["pairs"]),
        node("Softmax", ["pairs"], ["weights"]),
        node("MatMul", ["weights", "e"], ["mixed"]),
        node("ReduceMean", ["mixed", "one"], ["mean"], keepdims=0),
    ]
    outputs = [text("label", ["n"]), value("probabilities", np.float32, ["n", 3]), value("lengths", np.int64, ["n"])]
    return model([*before, *nodes], [text("text", ["n"])], outputs, constants, opsets={ML: 4})


def sentences(n: int, length: int) -> np.ndarray:
    """``count`` sentences of equal length, with some unknown words."""
    return np.array([" ".join(RNG.choice([*WORDS[1:], "Zebra"], length)) for _ in range(n)], object)


@pytest.mark.parametrize("build", [bag_of_words, embedded])
def test_the_network_is_compiled_once_per_shape(build: Any) -> None:
    proto = build()
    m = onnx2jax.convert(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for _ in range(3):
        for n, length in ((1, 4), (3, 4), (2, 6)):
            batch = sentences(n, length)
            ours, theirs = m.run(None, {"text": batch}), session.run(None, {"text": batch})
            assert ours[0].tolist() == theirs[0].tolist()
            np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-6)
            for a, b in zip(ours[2:], theirs[2:], strict=True):
                np.testing.assert_array_equal(a, b)
    assert [row[0] for row in m._runtime.program.rows()] == ["host", "jit", "host"]
    assert m.compilations == 3
    (compiled,) = [row for row in m._runtime.program.rows() if row[0] == "jit"]
    assert "MatMul" in compiled[1] and "Softmax" in compiled[1]


def greeting(**options: Any) -> onnx2jax.Model:
    """1 where the word is the greeting, times x."""
    nodes = [
        node("Equal", ["word", "hello"], ["same"]),
        node("Cast", ["same"], ["one"], to=TensorProto.FLOAT),
        node("Mul", ["one", "x"], ["y"]),
    ]
    inputs = [text("word", ["n"]), value("x", np.float32, ["n"])]
    hello = {"hello": np.array("hello", object)}
    return onnx2jax.convert(model(nodes, inputs, [value("y", np.float32, ["n"])], hello), **options)


def test_string_inputs_in_transformations() -> None:
    words, x = np.array(["hello", "you"], object), np.array([2, 3], np.float32)
    cure = r"static=\{'word': strings\}"
    m = greeting()
    with pytest.raises(KnownValueError, match=cure):
        jax.grad(lambda x: m.apply({}, words, x).sum())(x)
    with pytest.raises(KnownValueError, match=cure):
        jax.jit(lambda x: m.apply({}, words, x))(x)
    with pytest.raises(InputTypeError, match=cure):
        jax.jit(m.apply)({}, np.arange(2), x)
    for refused in (lambda: jax.jit(m.apply)({}, words, x), lambda: jax.vmap(m.apply, (None, 0, 0))({}, words, x)):
        with pytest.raises(TypeError) as caught:  # raised by JAX, before the model is called
            refused()
        assert not isinstance(caught.value, OnnxError)
    fixed = greeting(static={"word": words})
    np.testing.assert_array_equal(jax.jit(fixed.apply)({}, x), [2, 0])
    np.testing.assert_array_equal(jax.grad(lambda x: fixed.apply({}, x).sum())(x), [1, 0])


TEXTS = [
    ["é", "b"],
    np.array(["é", "b"]),
    np.array(["é", "b"], object),
    np.array(["é", "b"], np.dtypes.StringDType()),
    [b"\xc3\xa9", "b"],
    np.array([b"\xc3\xa9", b"b"]),
]
NO_TEXTS = [["a", 1], [1.5, "a"], ["a", None], ["a", np.nan], [True, "a"], [b"\xff", "a"], [["a"], "b"]]


def test_strings_are_str_or_bytes() -> None:
    """By each way of calling, and whatever a call before has bound; numbers and missing values come from pandas."""
    copied = onnx2jax.convert(one_node("Identity", {"x": (np.object_, ["n"])}))
    for given in TEXTS:
        for found in (copied.run(None, {"x": given})[0], copied(given)):
            assert found.dtype == object and found.tolist() == ["é", "b"], given
    for given in NO_TEXTS:
        array = np.empty(2, object)
        array[:] = given
        for call in (lambda: copied.run(None, {"x": array}), lambda: copied(array), lambda: copied(list(array))):  # noqa: B023
            with pytest.raises(InputTypeError, match=r"input 'x'|input x: string\[n\]") as caught:
                call()
            assert "astype(str)" in str(caught.value) or "UTF-8" in str(caught.value), given


def test_keys_and_values_of_maps_are_str_or_bytes() -> None:
    kind = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    ends = [onnx.ValueInfoProto(name="x", type=kind), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    vectorizer = node("DictVectorizer", ["x"], ["y"], domain=ML, string_vocabulary=["é", "b"])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(ML, 1)]
    graph = helper.make_graph([vectorizer], "g", ends[:1], ends[1:])
    counted = onnx2jax.convert(helper.make_model(graph, opset_imports=imports, ir_version=10))
    (y,) = counted.run(None, {"x": {b"\xc3\xa9": 2.0}})
    assert y.tolist() == [[2.0, 0.0]]
    with pytest.raises(InputTypeError, match="its keys takes strings, and element 1 is int"):
        counted.run(None, {"x": {"b": 1.0, 3: 2.0}})


@pytest.mark.parametrize("split", [{"tokenexp": "[a-z]+"}, {"separators": [" "]}, {"separators": [""]}], ids=str)
def test_packages_that_nodes_need_are_named_at_once(
    split: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By convert and by commands, not by the first call."""
    options = {"mark": 0, "mincharnum": 1, "pad_value": "", **split}
    nodes = [node("Tokenizer", ["x"], ["y"], domain=MICROSOFT, **options)]
    proto = model(nodes, [text("x", ["n"])], [text("y", ["n", "k"])], opsets={MICROSOFT: 1})
    onnx.save(proto, tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "re2", None)
    needed = split != {"separators": [""]}
    message = r"this needs the extra re2 \(.*\): pip install 'google-re2"
    warned = pytest.warns(MissingExtraWarning, match=f"'y' .*: {message}") if needed else nullcontext()
    with warned:
        m = onnx2jax.convert(proto)
    with pytest.raises(ImportError, match=message) if needed else nullcontext():
        m(["a b"])
    for command in ("inspect", "check", "operators"):
        assert cli.main([command, str(tmp_path / "m.onnx")]) == 0
        assert bool(re.search(message, capsys.readouterr().out)) == needed
    assert len(json.loads(onnx2jax.check(proto).to_json())["missing"]) == needed


class Table:
    """As a DataFrame of pandas or polars: columns, and no ``dtype``."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self._data = [*columns], columns

    def __getitem__(self, names: Any) -> Table:
        return Table({n: self._data[n] for n in ([names] if isinstance(names, str) else names)})

    def to_numpy(self) -> np.ndarray:
        return np.array([*self._data.values()]).T


def test_columns_of_a_table_are_given_as_the_error_advises() -> None:
    nodes = [node("Concat", ["age", "income"], ["y"], axis=1), node("Identity", ["city"], ["z"])]
    inputs = [text("city", ["n", 1]), *(value(n, np.float32, ["n", 1]) for n in ("age", "income"))]
    m = onnx2jax.convert(model(nodes, inputs, [value("y", np.float32, ["n", 2]), text("z", ["n", 1])]))
    table = Table({"age": [20, 30], "city": ["Bern", "Basel"], "income": [1.5, 2.5]})
    with pytest.raises(InputNameError, match=r"'age', 'income' not given.*a table is one input") as e:
        m(table)
    y, z = eval(str(e.value)[str(e.value).index("model(") :], {"model": m, "table": table})
    np.testing.assert_array_equal(y, [[20, 1.5], [30, 2.5]])
    assert z.tolist() == [["Bern"], ["Basel"]]
    age = np.float32([20, 30])
    with pytest.raises(InputShapeError, match="rank 2, not 1") as e:
        m(z, age, y[:, :1])
    fixed = eval(str(e.value).partition("as a column: ")[2], {"np": np, "age": age})
    np.testing.assert_array_equal(m(z, fixed, y[:, 1:])[0], y)
    with pytest.raises(InputShapeError, match="rank 2, not 0") as e:
        m(city=z[:1], age=20.0, income=y[:1, 1:])
    assert eval(str(e.value).partition("as one row: ")[2], {"np": np, "age": 20.0}).tolist() == [[20]]
