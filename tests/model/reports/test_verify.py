"""``Model.verify``: planted bugs are found at their node, also in partitioned models and inner graphs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx2jax
from onnx2jax import Model, cli, errors
from onnx2jax.model.reports import peers
from onnx2jax.model.reports.comparison import compared
from onnx2jax.ops import registry
from tests.support.faults import faults, wrong_model
from tests.support.registered import spoil
from tests.support.saturation import saturates

Plant = Callable[[str], None]


def proto(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Replace an operator by a wrong one for models converted afterwards."""

    def wrong(name: str) -> None:
        operator = registry.resolve("", name)
        assert operator is not None and operator.function is not None
        right = operator.function

        def spoilt(*inputs: Any, **attributes: Any) -> Any:
            return right(*inputs, **attributes) * inputs[0].dtype.type(1.5)

        spoil(monkeypatch, "", name, spoilt)

    return wrong


PLAIN = """g (float[2, 3] x) => (float[2, 3] y) <float[3, 3] w = {2, 0, 1, 0, 3, 0, 0, 1, 4}>
{ h = MatMul(x, w)
  r = Tanh(h)
  s = Exp(r)
  y = Add(s, x) }"""
STAGED = """g (float[n] x) => (float[m] y) <int64[1] flat = {-1}>
{ big = Mul(x, x)
  at = NonZero(big)
  i = Reshape(at, flat)
  some = Gather(x, i)
  y = Exp(some) }"""
LOOP = """g (float[3] x) => (float[3] y, float[k, 3] all)
{ m = Constant<value = int64 {4}>()
  go = Constant<value = bool {1}>()
  start = Neg(x)
  y, all = Loop(m, go, start) <body = inner (int64 i, bool c, float[3] state) => (bool on, float[3] out, float[3] row)
    { on = Identity(c)
      t = Tanh(state)
      e = Exp(t)
      out = Sub(e, x)
      row = Add(out, start) }> }"""
BRANCH = """g (float[3] x) => (float[3] y)
{ total = ReduceSum<keepdims = 0>(x)
  zero = Constant<value = float {0}>()
  up = Greater(total, zero)
  y = If(up) <then_branch = a () => (float[3] p) { q = Exp(x)
 p = Sqrt(q) }, else_branch = b () => (float[3] p) { p = Neg(x) }> }"""


NESTED = """g (float[3] x) => (float[3] y)
{ m = Constant<value = int64 {4}>()
  go = Constant<value = bool {1}>()
  two = Constant<value = int64 {2}>()
  start = Neg(x)
  y = Loop(m, go, start) <body = inner (int64 i, bool c, float[3] state) => (bool on, float[3] out)
    { on = Identity(c)
      late = Equal(i, two)
      out = If(late) <then_branch = a () => (float[3] p) { q = Sinh(state)
 p = Add(q, start) }, else_branch = b () => (float[3] p) { p = Abs(state) }> }> }"""
SCAN = """g (float[3] x, float[5, 3] xs) => (float[3] t, float[5, 3] ys)
{ t, ys = Scan<num_scan_inputs = 1, body = b (float[3] a, float[3] r) => (float[3] c, float[3] d) { c = Add(a, r)
 k = Constant<value = float[3] {1, 2, 3}>()
 d = Div(k, c) }>(x, xs) }"""


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
@pytest.mark.parametrize("text", [PLAIN, STAGED, LOOP, BRANCH], ids=["plain", "staged", "loop", "branch"])
def test_correct_models_verify_node_by_node(text: str, against: str) -> None:
    found = onnx2jax.convert(proto(text)).verify(against=against, each_node=True)
    assert found and found.first is None and not found.notes, str(found)
    assert list(found.nodes) == ["inputs"]


@pytest.mark.parametrize(
    "text, operator, value, inside",
    [
        (PLAIN, "Exp", "s", ()),
        (PLAIN, "Tanh", "r", ()),
        (STAGED, "Gather", "some", ()),
        (STAGED, "Exp", "y", ()),
        (LOOP, "Exp", "e", ("Loop", "Exp")),
        (LOOP, "Neg", "start", ()),
        (BRANCH, "Sqrt", "p", ("If", "Sqrt")),
        (NESTED, "Sinh", "q", ("Loop", "If", "Sinh")),  # in the third trip
        (SCAN, "Div", "d", ("Scan", "Div")),
    ],
)
def test_a_planted_bug_is_found_at_its_node(
    plant: Plant, tmp_path: Path, text: str, operator: str, value: str, inside: Any
) -> None:
    plant(operator)
    given = [np.ones(3, np.float32) * 0.3] if text not in (PLAIN, SCAN) else []
    found = onnx2jax.convert(proto(text)).verify(*given, against="onnxruntime")
    assert not found and found.first is not None
    assert found.first.value == value and not found.first.accumulated
    assert operator in found.first.node and all(name in found.first.node for name in inside)
    assert found.first.comparison.relative == pytest.approx(0.5, rel=1e-3)
    assert found.first.node in str(found)
    with np.load(found.first.save(tmp_path / "operands.npz")) as saved:
        np.testing.assert_allclose(saved[f"ours|{value}"], 1.5 * saved[f"theirs|{value}"], rtol=1e-4)
        assert len(saved.files) > 2
        assert operator != "Div" or saved["k"].tolist() == [1, 2, 3]


def test_operands_are_saved_under_any_name(plant: Plant, tmp_path: Path) -> None:
    """``np.savez`` has a parameter of this name."""
    plant("Tanh")
    found = onnx2jax.convert(proto("g (float[2] file) => (float[2] y) { y = Tanh(file) }")).verify(
        against="onnxruntime"
    )
    assert found.first is not None
    with np.load(found.first.save(tmp_path / "operands.npz")) as saved:
        assert {*saved.files} == {"file", "ours|y", "theirs|y"}


def test_only_the_wrong_node_differs(plant: Plant) -> None:
    """Its consumers read the other implementation's values."""
    plant("Tanh")
    found = onnx2jax.convert(proto(PLAIN)).verify(against="reference")
    assert [c.value for c in found.nodes["inputs"] if not c.ok] == ["r"]
    facts = json.loads(found.to_json())
    assert (facts["ok"], facts["first"]["value"]) == (False, "r")


def test_verify_uses_the_models_present_weights() -> None:
    model = onnx2jax.convert(proto(PLAIN)).with_params({"w": np.eye(3, dtype=np.float32)})
    assert model.verify(against="onnxruntime").ok


def with_data(folder: Path, scale: float = 1.0) -> Path:
    """A model's file next to a set of test data."""
    onnx.save(proto(PLAIN), folder / "model.onnx")
    data = folder / "test_data_set_0"
    data.mkdir()
    x = np.float32([[1, -1, 2], [0.5, 1, -3]])
    (y,) = onnx2jax.convert(proto(PLAIN)).run(None, {"x": x})
    (data / "input_0.pb").write_bytes(numpy_helper.from_array(x).SerializeToString())
    (data / "output_0.pb").write_bytes(numpy_helper.from_array(y * np.float32(scale), "y").SerializeToString())
    return folder / "model.onnx"


def test_test_data_next_to_the_file_is_used(tmp_path: Path) -> None:
    model = onnx2jax.convert(with_data(tmp_path))
    found = model.verify()
    assert found.ok and found.against == str(tmp_path) and list(found.outputs) == ["test_data_set_0"]
    assert list(model.verify(against="onnxruntime").outputs) == ["test_data_set_0"]  # its inputs
    assert model.verify(against=tmp_path / "test_data_set_0").ok


def test_differing_expected_outputs_are_reported(tmp_path: Path) -> None:
    model = onnx2jax.convert(with_data(tmp_path, 1.01))
    found = model.verify()
    assert not found and not any(c.ok for c in found.outputs["test_data_set_0"])
    assert all(c.ok for c in found.nodes["test_data_set_0"])  # onnxruntime agrees with us


def test_random_numbers_are_compared_by_type() -> None:
    found = onnx2jax.convert(
        proto("g (float[50] x) => (float[50] y) { r = RandomNormalLike(x)\n y = Add(x, r) }")
    ).verify(against="onnxruntime", each_node=True)
    assert found.ok and "random numbers" in found.notes[0]


def refused(model: Model, **how: Any) -> str:
    with pytest.raises((errors.OnnxError, ImportError, FileNotFoundError)) as caught:
        model.verify(**how)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
def test_verify_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx2jax.convert(proto(PLAIN))
    assert "pass 'onnxruntime' or 'reference', or a folder" in refused(model, against="onnx-runtime")
    assert "no test data" in refused(model, against=tmp_path)
    assert "no file to compare" in refused(model.replace({"h": lambda h: h}))
    assert model.cut(outputs=["h"]).verify(against="onnxruntime").ok
    assert "computes something else than its file" in refused(onnx2jax.convert(proto(PLAIN), rebatch=True))
    cast = onnx2jax.convert(proto("g (float[2] x) => (bfloat16[2] y) { c = Cast<to = 16>(x)\n y = Sinh(c) }"))
    assert "onnxruntime does not take the model" in (said := refused(cast, against="onnxruntime"))
    assert "verify(against='reference')" in said
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "needs the extra verify " in refused(model, against="onnxruntime")


F = np.float32


@pytest.mark.parametrize(
    "ours, theirs, ok, said",
    [
        (F([1, np.nan, np.inf]), F([1, np.nan, np.inf]), True, ""),
        (F([1, np.nan]), F([1, 0]), False, "1 of 2 numbers differ, by up to inf absolutely"),
        (F([1, 0]), F([1, np.nan]), False, "1 of 2 numbers differ, by up to inf absolutely"),
        (F([np.inf]), F([-np.inf]), False, "1 of 1 numbers"),
        (F([1, 1e-7]), F([1, 0]), True, ""),  # small relative to the largest
        (F([1.001]), F([1]), False, r"by up to 0.001 absolutely and 0.001 relatively; at \[0\]"),
        (np.float16([1.001]), np.float16([1]), True, ""),
        (np.array([1.02], ml_dtypes.bfloat16), np.array([1], ml_dtypes.bfloat16), True, ""),
        (F([1]), np.float64([1]), False, r"float32\[1\] instead of float64\[1\]"),
        (F([1]), F([[1]]), False, r"float32\[1\] instead of float32\[1, 1\]"),
        (np.array([2**62 + 1]), np.array([2**62]), False, "1 of 1 numbers differ"),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), False, "1 of 2 texts"),
        ([F([1])], [F([1]), F([2])], False, "list of 1"),
        ([F([1]), F([3])], [F([1]), F([2])], False, "1 of 1 numbers"),
        ({"a": F(1)}, {"b": F(1)}, False, "other keys"),
        (None, None, True, ""),
        (None, F(1), False, "nothing instead of"),
        (F([]), F([]), True, ""),
    ],
)
def test_comparisons(ours: Any, theirs: Any, ok: bool, said: str) -> None:
    found = compared("y", ours, theirs)
    assert found.ok is ok
    assert re.search(said, found.why) if said else not found.why


def test_tolerances_may_be_given() -> None:
    assert compared("y", F([1.5]), F([1]), atol=1).ok
    assert not compared("y", F([1 + 1e-6]), F([1]), rtol=0, atol=0).ok
    assert compared("y", np.int8([3]), np.int8([4]), atol=1).ok


def test_inputs_are_given_as_in_a_call() -> None:
    model = onnx2jax.convert(proto("g (float[2] x, float[2] z) => (float[2] y) { y = Add(x, z) }"))
    x, z = F([1, 2]), F([3, 4])
    for found in (model.verify(x, z), model.verify(x, z=z), model.verify({"x": x, "z": z}, against="onnxruntime")):
        assert found.ok
    with pytest.raises(errors.InputNameError, match=r"there is no input 'agianst'.*did you mean 'against'\?"):
        model.verify(x, z, agianst="onnxruntime")


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
def test_peers_get_arrays_of_the_declared_types(against: str) -> None:
    model = onnx2jax.convert(
        proto("g (float[2] x, int64 n, float f) => (float[2] y, int64 m) { y = Mul(x, f)\nm = Add(n, n) }")
    )
    found = model.verify({"x": jnp.ones(2), "n": 3, "f": 2.0}, against=against)
    assert found and {c.value: c.theirs for c in found.outputs["inputs"]} == {"y": "float32[2]", "m": "int64[]"}


def test_sequence_inputs_must_be_given() -> None:
    model = onnx2jax.convert(proto("g (seq(float[2]) s) => (int64 n) { n = SequenceLength(s) }"))
    with pytest.raises(errors.InputTypeError, match=re.escape("give the inputs, {'s': ...}")):
        model.verify(against="onnxruntime")
    assert model.verify({"s": [np.ones(2, np.float32)]}, against="onnxruntime")


def chain(*, steps: int = 6) -> onnx.ModelProto:
    """Quantised layers, each of which magnifies the steps of the one before: equal up to one step, then chaos."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(steps):
        w = numpy_helper.from_array((rng.standard_normal((64, 64)) * 2).astype(np.float32), f"w{i}")
        weights += [w, *(numpy_helper.from_array(v, f"{n}{i}") for n, v in [("s", F(0.03)), ("z", np.int8(0))])]
        nodes += [
            onnx.helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"]),
            onnx.helper.make_node("Sin", [f"m{i}"], [f"t{i}"]),
            onnx.helper.make_node("QuantizeLinear", [f"t{i}", f"s{i}", f"z{i}"], [f"q{i}"]),
            onnx.helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", f"z{i}"], [f"d{i}"]),
        ]
        x = f"d{i}"
    nodes.append(onnx.helper.make_node("Softmax", [x], ["y"]))
    graph = onnx.helper.make_graph(
        nodes, "chain", [onnx.helper.make_tensor_value_info("x", 1, [8, 64])],
        [onnx.helper.make_tensor_value_info("y", 1, [8, 64])], weights,
    )  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def test_roundings_that_add_up_are_no_difference(
    shift: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sine whose last digits are others: steps flip, and the layers behind magnify them. ``bench`` times it."""
    shift("Sin", lambda y: y * (1 + 3e-5))
    onnx.save(chain(), tmp_path / "chain.onnx")
    assert cli.main(["bench", str(tmp_path / "chain.onnx"), "--rounds", "1"]) == 0
    assert "output 'y' differs from onnxruntime's: roundings add up over 6 quantised nodes" in capsys.readouterr().err
    found = onnx2jax.convert(chain()).verify(against="onnxruntime")
    assert found and found.first is None, str(found)
    (output,) = found.outputs["inputs"]
    assert output.why == "roundings add up over 6 quantised nodes" and output.relative > 0.01
    assert output.why in str(found) and json.loads(found.to_json())["ok"]


@pytest.mark.parametrize(
    "name, change, value",
    [
        ("Sin", lambda y: y * 1.01, "t0"),
        ("Sin", lambda y: y + 0.01, "t0"),
        ("Sin", lambda y: y.at[3, 5].set(0.5), "t0"),
        ("Sin", lambda y: y * y, "t0"),
        ("MatMul", lambda y: y.astype(jnp.bfloat16).astype(jnp.float32), "m0"),
        ("MatMul", lambda y: jnp.roll(y, 1, 0), "m0"),
        ("QuantizeLinear", lambda y: jnp.roll(y, 1, 1), "q0"),
        ("QuantizeLinear", lambda y: jnp.where(y > 0, y - y.dtype.type(1), y), "q0"),
        ("QuantizeLinear", lambda y: y.at[0, 0].add(2), "q0"),
        ("DequantizeLinear", lambda y: y * 1.004, "d0"),
        ("DequantizeLinear", lambda y: y.at[-1, -1].set(0), "d0"),
        ("Softmax", lambda y: y * 1.001, "y"),
    ],
)  # fmt: skip
def test_faults_in_a_quantised_chain_are_found_at_their_node(shift: Any, name: str, change: Any, value: str) -> None:
    shift(name, change)
    found = onnx2jax.convert(chain(steps=1)).verify(against="onnxruntime")
    assert not found and found.first is not None, str(found)
    assert found.first.value == value and name in found.first.node and not found.first.accumulated


def test_the_last_digit_of_operands_is_no_difference(shift: Any) -> None:
    """onnxruntime's sigmoid is 0 below -18; and a fault beside it is the one that is named."""
    text = """g (float[4] x) => (float[4] y, float[4] z) <float[4] c = {-21, -20, -20, -20}>
    { k = Identity(c)
      y = Sigmoid(k)
      z = Exp(x) }"""
    found = onnx2jax.convert(proto(text)).verify(against="onnxruntime")
    assert found and found.outputs["inputs"][0].relative > 1e-4, str(found)
    shift("Exp", lambda y: y * 1.01)
    found = onnx2jax.convert(proto(text)).verify(against="onnxruntime")
    assert found.first is not None and found.first.value == "z"


PRODUCT = """g (uint8[2, 4] x) => (int32[2, 2] y) <int8[4, 2] w = {127, 127, 127, 127, 127, 127, 127, 127}>
{ h = MatMulInteger(x, w)
  y = Neg(h) }"""
PRODUCTS_IN_A_LOOP = """g (uint8[1, 4] x) => (int32 y) <int8[4, 1] w = {127, 127, 127, 127}>
{ n = Constant<value = int64 {2}>()
  go = Constant<value = bool {1}>()
  none = Constant<value = int32 {0}>()
  y = Loop(n, go, none) <body = b (int64 i, bool c, int32 s) => (bool k, int32 t)
    { k = Identity(c)
      r = MatMulInteger(x, w)
      z = ReduceSum<keepdims = 0>(r)
      t = Add(z, s) }> }"""


@pytest.mark.parametrize("text, rows", [(PRODUCT, 2), (PRODUCTS_IN_A_LOOP, 1)])
def test_saturating_products_of_onnxruntime_are_no_fault_of_ours(shift: Any, text: str, rows: int) -> None:
    x = {"x": np.full((rows, 4), 255, np.uint8)}
    found = onnx2jax.convert(proto(text)).verify(x, against="onnxruntime", each_node=True)
    assert found and found.first is None, str(found)
    assert any("onnxruntime saturates here" in note for note in found.notes) == saturates()
    shift("MatMulInteger", lambda y: y + 1)
    found = onnx2jax.convert(proto(text)).verify(x, against="onnxruntime")
    assert found.first is not None and "MatMulInteger" in found.first.node


def test_wrong_weights_are_not_taken_for_saturation() -> None:
    """The model's own wrong weights explain its result, but not that of onnxruntime."""
    right = proto(PRODUCT.replace("{127, 127, 127, 127, 127, 127, 127, 127}", "{1, 2, 3, 4, 5, 6, 7, 8}"))
    (rolled,) = (f for f in faults(right) if f.what == "MatMulInteger: input 1 rolled")
    found = wrong_model(rolled, right).verify(
        {"x": np.full((2, 4), 255, np.uint8)}, against="onnxruntime", each_node=True
    )
    assert found.first is not None and found.first.value == "h", str(found)


def test_sums_of_cancelling_operands_are_exact(shift: Any) -> None:
    """The last digit of the operands is no excuse where these are the same on both sides."""
    text = "g (float16[3] x, float16[3] b) => (float16[3] y) { y = Add(x, b) }"
    x = {"x": np.float16([26.5, 25.5, 26.25]), "b": np.float16([-26, -26, -26])}
    assert onnx2jax.convert(proto(text)).verify(x, against="onnxruntime")
    shift("Add", lambda y: y * np.float16(1.03))
    found = onnx2jax.convert(proto(text)).verify(x, against="onnxruntime")
    assert found.first is not None and found.first.value == "y"


def quantised_recurrence(*, steps: int, batch: int = 1, size: int = 256) -> onnx.ModelProto:
    """A DynamicQuantizeLSTM whose weights are so large that it is chaotic.

    The integers of the weights have 7 bits. Without VNNI, onnxruntime adds pairs of products of uint8 by int8 in
    saturating 16 bits: two of 255 * 64 fit there, so its results are exact on every processor.
    """
    rng = np.random.default_rng(0)
    weights = {n: rng.integers(-64, 65, (1, k, 4 * size)).astype(np.int8) for n, k in (("w", 4), ("r", size))}
    weights |= {"ws": F([0.02]), "rs": F([0.02]), "wz": np.int8([0]), "rz": np.int8([0])}
    inputs = ["x", "w", "r", "", "", "", "", "", "ws", "wz", "rs", "rz"]
    layer = onnx.helper.make_node("DynamicQuantizeLSTM", inputs, ["h"], domain="com.microsoft", hidden_size=size)
    graph = onnx.helper.make_graph(
        [layer, onnx.helper.make_node("Neg", ["h"], ["y"])], "recurrence",
        [onnx.helper.make_tensor_value_info("x", 1, [steps, batch, 4])],
        [onnx.helper.make_tensor_value_info("y", 1, [steps, 1, batch, size])],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )  # fmt: skip
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Multiply the scale of the recurrent weights in models converted afterwards."""

    def scale(factor: float) -> None:
        operator = registry.resolve("com.microsoft", "DynamicQuantizeLSTM")
        assert operator is not None and operator.function is not None
        right = operator.function

        def other(*inputs: Any, **attributes: Any) -> Any:
            return right(*inputs[:10], inputs[10] * F(factor), *inputs[11:], **attributes)

        spoil(monkeypatch, "com.microsoft", "DynamicQuantizeLSTM", other)

    return scale


def test_results_of_added_roundings_are_compared_with_those_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tells whose roundings they are, and not that ours is right: it may be wrong in float64, too."""
    model = onnx2jax.convert(proto("g (float[n] x) => (float[n] y) <float w = {2}> { h = Mul(x, w)\n y = Exp(h) }"))
    right = peers.Peer.run

    def run(self: Any, feeds: Any) -> dict[str, Any]:
        h = feeds["x"] * F(2 * (1 + 5e-5))  # each node is within the tolerance
        return {n: {"h": h, "y": np.exp(h)}.get(n, v) for n, v in right(self, feeds).items()}

    monkeypatch.setattr(peers.Peer, "run", run)
    found = model.verify(np.full(3, 5, F), against="onnxruntime")
    assert not found and found.first is not None and found.first.accumulated
    (note,) = found.notes
    assert re.fullmatch("'y': computed in float64 here, our result is 0.00.* off, and the other one 11", note), note


def test_roundings_inside_a_quantised_recurrence_are_no_difference(scaled: Any, tmp_path: Path) -> None:
    message = quantised_recurrence(steps=100)
    x = np.random.default_rng(1).standard_normal((100, 1, 4)).astype(np.float32)
    scaled(1 + 1e-6)
    model = onnx2jax.convert(message)
    found = model.verify({"x": x}, against="onnxruntime")
    assert found and found.first is None, str(found)
    ((output,), nodes) = found.outputs["inputs"], found.nodes["inputs"]
    assert output.why == "roundings add up over 1 quantised nodes" and output.relative > 0.1
    assert [c.why for c in nodes] == ["roundings inside the node amplify the last digits of its operands", ""]
    (y,) = onnxruntime.InferenceSession(message.SerializeToString()).run(None, {"x": x})
    (tmp_path / "output_0.pb").write_bytes(numpy_helper.from_array(y, "y").SerializeToString())
    assert model.verify({"x": x}, against=tmp_path)
    (tmp_path / "output_0.pb").write_bytes(numpy_helper.from_array(y * F(1.01), "y").SerializeToString())
    assert not model.verify({"x": x}, against=tmp_path)


@pytest.mark.parametrize("factor", [1.01, 0.99, 1.001])
def test_a_wrong_scale_in_a_quantised_recurrence_is_found(scaled: Any, factor: float) -> None:
    scaled(factor)
    x = np.random.default_rng(1).standard_normal((100, 1, 4)).astype(np.float32)
    found = onnx2jax.convert(quantised_recurrence(steps=100)).verify({"x": x}, against="onnxruntime")
    assert found.first is not None and found.first.value == "h" and not found.first.accumulated, str(found)


def test_sequences_that_onnxruntime_quantises_by_thread_are_no_difference() -> None:
    x = {"x": np.random.default_rng(1).standard_normal((3, 4, 4)).astype(np.float32)}
    model = onnx2jax.convert(quantised_recurrence(steps=3, batch=4, size=8))
    found = model.verify(x, against="onnxruntime", each_node=True)
    assert found and found.first is None, str(found)


def test_values_that_nothing_reads_are_left_out() -> None:
    """ONNX leaves open what the mask of Dropout holds before opset 12; onnxruntime fills it with 0, we with 1."""
    text = "g (float[3] x) => (float[3] y) { d, mask = Dropout(x) y = Neg(d) }"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 7]> {text}')
    found = onnx2jax.convert(message).verify(against="onnxruntime", each_node=True)
    (compared,) = found.nodes.values()
    assert found and [c.value for c in compared] == ["d", "y"]


def test_maps_hold_float32() -> None:
    """Runtimes return their values as Python's floats."""
    assert compared("y", [{0: 0.9955077171325684}], [{0: 0.9955076575279236}]).ok
    assert not compared("y", [{0: 0.9955}], [{0: 0.9965}]).ok
    found = compared("y", [{"a": 1.0, "b": 0.0}], [{"b": 1e-7, "a": 1.0}])
    assert found.ok and found.relative is not None and found.relative < 1e-6  # of the largest number of the map
    assert compared("y", [{}], [{}]).ok and not compared("y", [{"a": 1.0}], [{"b": 1.0}]).ok
