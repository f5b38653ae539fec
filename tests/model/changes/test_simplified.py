"""``model.simplified()``: a smaller graph that computes the same, in the model and in the saved file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import onnx2jax
from onnx2jax import Model
from onnx2jax.errors import UnsupportedError
from tests.support import decoders
from tests.support.models import model, text_model, value

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def statistics(channels: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """scale, bias, mean and var of a BatchNormalization."""
    made = {n: normal(channels, dtype=dtype) for n in ("scale", "bias", "mean")}
    return made | {"var": RNG.uniform(0.5, 2, channels).astype(dtype)}


def check(proto: onnx.ModelProto, tmp_path: Path, rtol: float = 0, **feeds: np.ndarray) -> tuple[Model, Any]:
    """The simplified model and its file; both, in onnxruntime too, compute what the model computes."""
    plain = onnx2jax.convert(proto)
    small = plain.simplified()
    path = onnx2jax.save(small, tmp_path / "small.onnx")
    onnx.checker.check_model(path, full_check=True)
    want = plain.run(None, feeds)
    for ours in (small.run(None, feeds), onnx2jax.convert(path).run(None, feeds)):
        close(ours, want, rtol)
    theirs = [onnxruntime.InferenceSession(p).run(None, feeds) for p in (proto.SerializeToString(), path)]
    close(theirs[1], theirs[0], max(rtol, 1e-6))
    return small, onnx.load(path)


def close(ours: Any, want: Any, rtol: float) -> None:
    for a, b in zip(ours, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=0) if rtol else 0)


def operators(small: Model) -> list[str]:
    return [n.op_type for n in small.graph.nodes]


NORMALIZED = "(float[n, 4, 8, 8] x) => (float[n, 6, p, q] y)"


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        ("Conv<pads = [1, 1, 1, 1]>", (6, 4, 3, 3)),
        ("Conv<group = 2, strides = [2, 2]>", (6, 2, 3, 3)),
        ("ConvTranspose<strides = [2, 2]>", (4, 6, 3, 3)),
        ("ConvTranspose<group = 2>", (4, 3, 2, 2)),
    ],
)
def test_batch_norm_after_a_convolution_is_folded(
    convolution: str, shape: tuple[int, ...], bias: str, tmp_path: Path
) -> None:
    weights = {"w": normal(*shape), **statistics(6)} | ({"b": normal(6)} if bias else {})
    text = f"g {NORMALIZED} {{ c = {convolution}(x, w{bias}) y = BatchNormalization(c, scale, bias, mean, var) }}"
    small, file = check(text_model(text, **weights), tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == [convolution.partition("<")[0]]
    assert set(small.params) == {"w", "b" if bias else "bias"}
    assert {t.name for t in file.graph.initializer} == set(small.params)


def test_float64_weights_are_not_rounded_to_float32() -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = BatchNormalization(c, scale, bias, mean, var) }}"
    weights = {"w": normal(6, 4, 3, 3, dtype=np.float64), **statistics(6, np.float64)}
    plain, x = onnx2jax.convert(text_model(text.replace("float", "double"), **weights)), normal(1, 4, 8, 8)
    small = plain.simplified()
    assert operators(small) == ["Conv"]
    np.testing.assert_allclose(small(x.astype(np.float64)), plain(x.astype(np.float64)), rtol=1e-10, atol=1e-12)


def test_the_epsilon_attribute_is_used(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = BatchNormalization<epsilon = 0.5>(c, scale, bias, mean, var) }}"
    small, _ = check(text_model(text, w=normal(6, 4, 3, 3), **statistics(6)), tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv"]


@pytest.mark.parametrize(
    ("attributes", "left"),
    [
        ("", ["Conv"]),
        ("<group = 2>", ["Conv"]),
        ('<auto_pad = "VALID">', ["Conv"]),
        ("<pads = [0, 0, 1, 0]>", ["BatchNormalization", "Conv"]),
        ('<auto_pad = "SAME_UPPER">', ["BatchNormalization", "Conv"]),
    ],
)
def test_batch_norm_before_a_padded_convolution_is_not_folded(attributes: str, left: list[str], tmp_path: Path) -> None:
    """The padding is zero behind the normalisation, not in front of it."""
    weight = normal(6, 2 if "group" in attributes else 4, 3, 3)
    text = f"g {NORMALIZED} {{ c = BatchNormalization(x, scale, bias, mean, var) y = Conv{attributes}(c, w) }}"
    small, _ = check(text_model(text, w=weight, **statistics(4)), tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == left


@pytest.mark.parametrize("transposed", [0, 1])
def test_batch_norm_after_gemm_is_folded(transposed: int, tmp_path: Path) -> None:
    weights = {"w": normal(6, 4) if transposed else normal(4, 6), "b": normal(6), **statistics(6)}
    text = (
        f"g (float[n, 4] x) => (float[n, 6] y) {{ c = Gemm<alpha = 0.5, transB = {transposed}>(x, w, b) "
        "y = BatchNormalization(c, scale, bias, mean, var) }"
    )
    small, _ = check(text_model(text, **weights), tmp_path, 1e-5, x=normal(3, 4))
    assert operators(small) == ["Gemm"]


def test_per_channel_constants_after_a_convolution_are_folded(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) d = Mul(two, c) e = Div(d, scale) f = Sub(e, shift) y = Add(f, two) }}"
    weights = {
        "w": normal(6, 4, 3, 3),
        "two": np.float32(2),
        "scale": 1 + normal(6, 1, 1) ** 2,
        "shift": normal(1, 6, 1, 1),
    }
    small, _ = check(text_model(text, **weights), tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv"]


def test_constants_that_round_are_not_folded(tmp_path: Path) -> None:
    """(c + 1.5 * 2**23) - 1.5 * 2**23 rounds c to integers."""
    text = f"g {NORMALIZED} {{ c = Conv(x, w) d = Add(c, magic) y = Sub(d, magic) }}"
    proto = text_model(text, w=normal(6, 4, 1, 1), magic=np.float32(1.5 * 2**23))
    small, _ = check(proto, tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv", "Sub"]


def test_scales_that_make_sums_overflow_are_not_folded(tmp_path: Path) -> None:
    """The terms of a sum leave float32 where the sum, which is zero, does not."""
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = Mul(c, k) }}"
    weight = np.tile(np.float32([1, -1, 1, -1]).reshape(1, 4, 1, 1), (6, 1, 1, 1))
    proto = text_model(text, w=weight, k=np.float32([[[3e38]]]))
    small, _ = check(proto, tmp_path, x=np.full((1, 4, 8, 8), 2, np.float32))
    assert operators(small) == ["Conv", "Mul"]


@pytest.mark.parametrize("shape", [(8,), (1, 6, 8, 8), (1, 1, 1, 1, 1), (6, 8, 1)])
def test_constants_over_other_axes_are_not_folded(shape: tuple[int, ...], tmp_path: Path) -> None:
    text = "g (float[n, 4, 8, 8] x) => (float y) { c = Conv(x, w) d = Mul(c, k) y = ReduceSum<keepdims = 0>(d) }"
    proto = text_model(text, w=normal(6, 4, 1, 1), k=normal(*shape))
    small, _ = check(proto, tmp_path, 1e-5, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv", "Mul", "ReduceSum"]


def test_a_weight_with_two_readers_is_not_scaled(tmp_path: Path) -> None:
    text = (
        "g (float[n, 4, 8, 8] x) => (float[n, 4, 8, 8] y) { a = Conv(x, w) "
        "b = BatchNormalization(a, scale, bias, mean, var) c = Conv(b, w) y = Relu(c) }"
    )
    small, _ = check(text_model(text, w=normal(4, 4, 1, 1), **statistics(4)), tmp_path, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv", "BatchNormalization", "Conv", "Relu"]


@pytest.mark.parametrize("other", ["w", "c"])
def test_weights_and_results_that_are_outputs_are_kept(other: str, tmp_path: Path) -> None:
    shape = {"w": "6, 4, 3, 3", "c": "n, 6, 6, 6"}[other]
    text = (
        f"g (float[n, 4, 8, 8] x) => (float[n, 6, 6, 6] y, float[{shape}] {other}) "
        "{ c = Conv(x, w) y = BatchNormalization(c, scale, bias, mean, var) }"
    )
    proto = text_model(text, w=normal(6, 4, 3, 3), **statistics(6))
    small, _ = check(proto, tmp_path, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv", "BatchNormalization"]


def test_batch_norm_in_training_mode_is_not_folded(tmp_path: Path) -> None:
    text = (
        "g (float[n, 4, 8, 8] x) => (float[n, 6, 6, 6] y) { c = Conv(x, w) "
        "y, m, v = BatchNormalization<training_mode = 1>(c, scale, bias, mean, var) }"
    )
    proto = text_model(text, w=normal(6, 4, 3, 3), **statistics(6))
    small, _ = check(proto, tmp_path, 1e-4, x=normal(2, 4, 8, 8))
    assert operators(small) == ["Conv", "BatchNormalization"]


@pytest.mark.parametrize(("name", "number"), [("var", -1), ("var", 0), ("scale", np.inf), ("mean", np.nan)])
@pytest.mark.parametrize("body", ["c = Conv(x, w) y = {}(c, {})", "c = {}(x, {}) y = Conv(c, w)"])
def test_batch_norm_that_is_not_finite_is_not_folded(name: str, number: float, body: str) -> None:
    """Nor does NumPy warn."""
    body = body.format("BatchNormalization<epsilon = 0.0>", "scale, bias, mean, var")
    weights = {"w": normal(4, 4, 3, 3), **statistics(4), name: np.full(4, number, np.float32)}
    plain = onnx2jax.convert(text_model(f"g (float[n, 4, 8, 8] x) => (float[n, 4, 6, 6] y) {{ {body} }}", **weights))
    assert sorted(operators(plain.simplified())) == ["BatchNormalization", "Conv"]


def test_float16_weights_are_rounded_once(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = BatchNormalization(c, scale, bias, mean, var) }}"
    weights = {"w": normal(6, 4, 3, 3, dtype=np.float16), **statistics(6, np.float16)}
    proto = text_model(text.replace("float", "float16"), **weights)
    small, _ = check(proto, tmp_path, 5e-3, x=normal(2, 4, 8, 8, dtype=np.float16))
    scale = weights["scale"].astype(float) / np.sqrt(weights["var"].astype(float) + 1e-5)
    want = (weights["w"] * scale[:, None, None, None]).astype(np.float16)
    np.testing.assert_array_equal(small.params["w"], want)


def test_a_scale_outside_float16_is_not_folded(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = Mul(c, k) }}"
    weights = {"w": np.full((6, 4, 3, 3), 1e-3, np.float16), "k": np.float16([[[1e-6]]])}
    proto = text_model(text.replace("float", "float16"), **weights)
    small, _ = check(proto, tmp_path, 1e-2, x=np.full((1, 4, 8, 8), 1e4, np.float16))
    assert operators(small) == ["Conv", "Mul"]


def test_values_of_with_params_are_folded(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = BatchNormalization(c, scale, bias, mean, var) }}"
    plain = onnx2jax.convert(text_model(text, w=normal(6, 4, 3, 3), **statistics(6)))
    changed = plain.with_params({"w": plain.params["w"] * 2, "scale": plain.params["scale"] * 3})
    small, x = changed.simplified(), normal(1, 4, 8, 8)
    np.testing.assert_allclose(small(x), changed(x), rtol=1e-4, atol=1e-4)
    again = onnx2jax.convert(onnx2jax.save(small, tmp_path / "small.onnx"))
    np.testing.assert_array_equal(again(x), small(x))
    halved = small.with_params({"w": small.params["w"] / 2})
    np.testing.assert_allclose(
        onnx2jax.convert(onnx2jax.save(halved, tmp_path / "small.onnx"))(x), halved(x), rtol=1e-6
    )


def test_gradients_with_respect_to_scaled_weights() -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) y = BatchNormalization(c, scale, bias, mean, var) }}"
    plain = onnx2jax.convert(text_model(text, w=normal(6, 4, 3, 3), **statistics(6)))
    small, x = plain.simplified(), normal(1, 4, 8, 8)
    ours = jax.grad(lambda p: small.apply(p, x).sum())(small.params)
    theirs = jax.grad(lambda p: plain.apply(p, x).sum())(plain.params)
    scale = plain.params["scale"] / np.sqrt(plain.params["var"] + np.float32(1e-5))
    np.testing.assert_allclose(ours["w"] * scale[:, None, None, None], theirs["w"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours["bias"], theirs["bias"], rtol=1e-4)


def test_folded_weights_are_bitwise_equal(tmp_path: Path) -> None:
    text = "g (float[n, 4] x) => (float[n, 6] y) { t = Transpose<perm = [1, 0]>(w) k = Mul(t, two) y = MatMul(x, k) }"
    proto = text_model(text, w=normal(6, 4), two=np.float32(2))
    small, file = check(proto, tmp_path, x=normal(3, 4))
    assert operators(small) == ["MatMul"]
    assert [t.name for t in file.graph.initializer] == ["k"] == list(small.params)


def test_tied_weights_are_not_duplicated(tmp_path: Path) -> None:
    text = (
        "g (int64[n] i) => (float[n, 50] y) { e = Gather(table, i) t = Transpose<perm = [1, 0]>(table) "
        "y = MatMul(e, t) }"
    )
    small, _ = check(text_model(text, table=normal(50, 8)), tmp_path, 1e-6, i=np.array([3, 1]))
    assert operators(small) == ["Gather", "Transpose", "MatMul"]


def test_large_results_of_small_operands_are_not_folded(tmp_path: Path) -> None:
    shape = np.array([512, 512])
    text = "g (float[512, 512] x) => (float[512, 512] y) { o = ConstantOfShape(shape) t = Trilu(o) y = Add(x, t) }"
    small, file = check(text_model(text, shape=shape), tmp_path, x=normal(512, 512))
    assert operators(small) == ["ConstantOfShape", "Trilu", "Add"]
    assert file.ByteSize() < 1000


def test_dequantized_weights_stay_packed(tmp_path: Path) -> None:
    text = "g (float[n, 64] x) => (float[n, 64] y) { w = DequantizeLinear(q, s) y = MatMul(x, w) }"
    proto = text_model(text, q=RNG.integers(-99, 99, (64, 64), np.int8), s=np.float32(0.1))
    small, _ = check(proto, tmp_path, x=normal(2, 64))
    assert operators(small) == ["DequantizeLinear", "MatMul"]
    assert small.params["q"].dtype == np.int8


def test_a_scalar_of_constant_nodes_is_no_parameter(tmp_path: Path) -> None:
    text = (
        "g (float[n] x) => (float[n] y) { a = Constant<value = float {4}>() r = Sqrt(a) h = Mul(x, r) y = Mul(h, w) }"
    )
    small, file = check(text_model(text, w=np.float32(3)), tmp_path, x=normal(3))
    assert operators(small) == ["Mul", "Mul"]
    assert list(small.params) == ["w"] == list(onnx2jax.convert(file).params)


def test_shapes_that_are_declared_are_constants(tmp_path: Path) -> None:
    text = (
        "g (float[2, 3, 4] x) => (float[m, 4] y) { s = Shape(x) c = Gather(s, last) k = Concat<axis = 0>(minus, c) "
        "y = Reshape(x, k) }"
    )
    proto = text_model(text, last=np.array([2]), minus=np.array([-1]))
    small, _ = check(proto, tmp_path, x=normal(2, 3, 4))
    assert operators(small) == ["Reshape"]


def test_the_fixed_extents_beside_a_symbolic_one_are_constants(tmp_path: Path) -> None:
    text = (
        "g (float[n, 3, 4] x, float[m, 4] z) => (float[p, 4] y) { s = Shape(x) c = Gather(s, last) "
        "k = Concat<axis = 0>(minus, c) r = Reshape(x, k) y = Add(r, z) }"
    )
    proto = text_model(text, last=np.array([2]), minus=np.array([-1]))
    small, _ = check(proto, tmp_path, x=normal(5, 3, 4), z=normal(1, 4))
    assert operators(small) == ["Reshape", "Add"]


@pytest.mark.parametrize("comparison", ["Equal", "Less"])
@pytest.mark.parametrize("extent", [1, 2, 5])
def test_values_depending_on_symbolic_extents_are_not_folded(comparison: str, extent: int, tmp_path: Path) -> None:
    """A symbol equals no number, but the extents of a call may."""
    text = (
        f"g (float[n, 3] x) => (float[n, 3] y) {{ s = Shape<end = 1>(x) e = {comparison}(s, two) "
        "y = Where(e, x, zero) }"
    )
    proto = text_model(text, two=np.array([2]), zero=np.float32(0))
    small, _ = check(proto, tmp_path, x=normal(extent, 3))
    assert operators(small) == ["Shape", comparison, "Where"]


def test_extents_of_dims_are_in_the_file(tmp_path: Path) -> None:
    text = "g (float[n, 3] x) => (float[n, 3] y) { s = Shape(x) o = ConstantOfShape(s) y = Add(x, o) }"
    small = onnx2jax.convert(text_model(text), dims={"n": 2}).simplified()
    assert operators(small) == ["Add"]
    file = onnx.load(onnx2jax.save(small, tmp_path / "small.onnx"))
    for v in (*file.graph.input, *file.graph.output):
        assert v.type.tensor_type.shape.dim[0].dim_value == 2
    proto = text_model("g (float[n, m] x) => (float[m, n] y) { y = Transpose(x) }")
    for v in (*proto.graph.input, *proto.graph.output):
        for d in v.type.tensor_type.shape.dim:
            d.dim_param = "?"  # not one dimension variable
    fixed = onnx2jax.convert(proto, dims={"x_0": 2, "x_1": 3}).simplified()
    file = onnx.load(onnx2jax.save(fixed, tmp_path / "fixed.onnx"))
    assert [d.dim_value for d in file.graph.input[0].type.tensor_type.shape.dim] == [2, 3]
    assert [d.dim_param for d in file.graph.output[0].type.tensor_type.shape.dim] == ["?", "?"]


def test_no_ops_are_removed_and_outputs_keep_their_names(tmp_path: Path) -> None:
    text = (
        "g (float[n, 3] x) => (float[n, 3] y, float[n, 3] z) { a = Identity(x) b = Dropout(a) c = Cast<to = 1>(b) "
        "d = Transpose<perm = [1, 0]>(c) e = Transpose<perm = [1, 0]>(d) f = Reshape(e, shape) r = Relu(f) "
        "p = Pad(r, none) h = Slice(p, zero, far, zero) s = Sum(h) m = Max(s) y = Identity(m) "
        "z = Concat<axis = 0>(y) }"
    )
    constants = {"shape": [-1, 3], "none": [0, 0, 0, 0], "zero": [0], "far": [2**62]}
    proto = text_model(text, **{n: np.array(v) for n, v in constants.items()})
    small, file = check(proto, tmp_path, x=normal(4, 3))
    assert operators(small) == ["Relu", "Concat"]
    assert [v.name for v in file.graph.output] == ["y", "z"]
    assert not file.graph.initializer


def test_near_no_ops_are_kept(tmp_path: Path) -> None:
    text = (
        "g (float[3, 3] x) => (float[3, 3] y) { a = Transpose(x) b = Slice(a, last, far, zero, back) "
        "c = Reshape(b, wide) d = Reshape(c, square) e = Pad(d, moved) y = Relu(e) }"
    )
    constants = {"last": [2], "far": [-9], "zero": [0], "back": [-1], "wide": [9, 1], "square": [3, 3]}
    constants["moved"] = [1, 0, -1, 0]
    proto = text_model(text, **{n: np.array(v) for n, v in constants.items()})
    small, _ = check(proto, tmp_path, x=normal(3, 3))
    assert operators(small) == ["Transpose", "Slice", "Reshape", "Reshape", "Pad", "Relu"]


def test_an_identity_between_input_and_output_is_kept(tmp_path: Path) -> None:
    small, _ = check(text_model("g (float[n] x) => (float[n] y) { y = Identity(x) }"), tmp_path, x=normal(3))
    assert operators(small) == ["Identity"]


def test_transposes_of_three_axes_become_one(tmp_path: Path) -> None:
    text = (
        "g (float[2, 3, 4] x) => (float[a, b, c] y) "
        "{ t = Transpose<perm = [1, 2, 0]>(x) y = Transpose<perm = [0, 2, 1]>(t) }"
    )
    small, _ = check(text_model(text), tmp_path, x=normal(2, 3, 4))
    assert operators(small) == ["Transpose"]


def test_graphs_inside_nodes_capture_values_by_their_names(tmp_path: Path) -> None:
    text = (
        "g (bool c, float[2, 2] x) => (float[2, 2] y) { k = Mul(w, w) i = Identity(x) y = If (c) <"
        "then_branch = t () => (float[2, 2] p) { p = MatMul(i, k) }, "
        "else_branch = e () => (float[2, 2] q) { q = Sub(i, k) }> }"
    )
    for chosen in (True, False):
        small, file = check(text_model(text, w=normal(2, 2)), tmp_path, c=np.array(chosen), x=normal(2, 2))
        assert operators(small) == ["Identity", "If"]
        assert [t.name for t in file.graph.initializer] == ["k"]


def test_initializers_that_callers_may_override_are_not_folded(tmp_path: Path) -> None:
    proto = text_model("g (float[n] x, float[1] k) => (float[n] y) { m = Mul(k, k) y = Mul(x, m) }", k=np.float32([2]))
    small, file = check(proto, tmp_path, x=normal(3), k=np.float32([5]))
    assert operators(small) == ["Mul", "Mul"]
    assert [v.name for v in file.graph.input] == ["x", "k"]
    np.testing.assert_array_equal(small(np.float32([1])), [4])


def test_weights_of_ir_3_that_are_listed_as_inputs_are_constants(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    ends = [value("x", np.float32, ["n", 4]), value("w", np.float32, [6, 4]), value("b", np.float32, [6])]
    weights = {"w": normal(6, 4), "b": normal(6)}
    proto = model(nodes, ends, [value("y", np.float32, ["n", 6])], weights, opset=8, ir_version=3)
    small, file = check(proto, tmp_path, x=normal(3, 4))
    assert operators(small) == ["MatMul", "Add"]
    assert [v.name for v in file.graph.input] == ["x"]


def test_random_numbers_are_drawn_in_every_call() -> None:
    small = onnx2jax.convert(
        text_model("g (float[3] x) => (float[3] y) { r = RandomNormal<shape = [3]>() i = Identity(r) y = Add(x, i) }")
    ).simplified()
    assert operators(small) == ["RandomNormal", "Add"]
    x = np.zeros(3, np.float32)
    assert (np.asarray(small(x, rng=0)) != np.asarray(small(x, rng=1))).all()


def test_dropout_in_training_mode_is_kept() -> None:
    text = "g (float[n] x) => (float[n] y) { y = Dropout(x, half, on) }"
    small = onnx2jax.convert(text_model(text, half=np.float32(0.5), on=np.array(True))).simplified()
    assert operators(small) == ["Dropout"]


def test_strings_and_sequences_pass_through(tmp_path: Path) -> None:
    text = (
        "g (float[n, 3] x, string[n] s) => (float[n, 3] y, string[n] z) { q = SequenceConstruct(w, w) "
        "a = SequenceAt(q, one) b = Add(x, a) y = Identity(b) z = Identity(s) }"
    )
    proto = text_model(text, w=normal(3), one=np.array(1))
    plain = onnx2jax.convert(proto)
    small = onnx2jax.convert(onnx2jax.save(plain.simplified(), tmp_path / "small.onnx"))
    feeds = {"x": normal(2, 3), "s": np.array(["a", "b"], object)}
    for ours, want in zip(small.run(None, feeds), plain.run(None, feeds), strict=True):
        np.testing.assert_array_equal(ours, want)


def test_folded_constants_are_in_the_order_of_the_graph() -> None:
    """Not in that of a set, which differs from process to process, as would the file's bytes."""
    names = [f"c{i}" for i in range(12)]
    nodes = " ".join(f"{n} = Neg (w{i})  y{i} = Add (x, {n})" for i, n in enumerate(names))
    outputs = ", ".join(f"float[n, 2] y{i}" for i in range(12))
    weights = {f"w{i}": np.full(2, i, np.float32) for i in range(12)}
    small = onnx2jax.convert(text_model(f"g (float[n, 2] x) => ({outputs}) {{ {nodes} }}", **weights)).simplified()
    assert [*small.graph.initializers] == names


def test_types_are_known_behind_a_function_of_free_extents(tmp_path: Path) -> None:
    text = """g (float[n, 4] x) => (float[n, 4] y) { a = l.f (x)  b = Cast <to = 1> (a)
        shape = Shape (x)  c = Reshape (b, shape)  y = Neg (c) }
        <domain: "l", opset_import: ["" : 21]> f (v) => (w) { u = Neg (v)  w = Cast <to = 1> (u) }"""
    assert operators(check(text_model(text), tmp_path, x=normal(2, 4))[0]) == ["f", "Neg"]


def test_functions_metadata_and_documentation_are_kept(tmp_path: Path) -> None:
    proto = text_model(
        "g (float[n, 2] x) => (float[n, 2] y) { i = Identity(x) k = Mul(w, w) y = l.twice(i, k) }", w=normal(2)
    )
    proto.functions.append(
        onnx.parser.parse_function(
            '<opset_import: ["" : 21], domain: "l"> twice (a, b) => (c) { d = Add(a, b) c = Add(d, d) }'
        )
    )
    proto.doc_string, proto.graph.node[2].doc_string, proto.producer_name = "model", "node", "maker"
    helper.set_model_props(proto, {"key": "text"})
    small, file = check(proto, tmp_path, x=normal(3, 2))
    assert operators(small) == ["twice"]
    assert (file.doc_string, file.graph.node[0].doc_string, file.producer_name) == ("model", "node", "maker")
    assert [(p.key, p.value) for p in file.metadata_props] == [("key", "text")]
    assert file.functions == proto.functions
    assert file.opset_import == proto.opset_import
    assert small.metadata["key"] == "text"


def test_unread_nodes_and_initializers_are_removed(tmp_path: Path) -> None:
    text = "g (float[n] x) => (float[n] y) { a = Exp(x) b = Mul(a, v) y = Relu(x) }"
    small, file = check(text_model(text, v=normal(1), u=normal(1000)), tmp_path, x=normal(3))
    assert operators(small) == ["Relu"]
    assert not file.graph.initializer


def test_a_simplified_model_has_nothing_more_to_simplify(tmp_path: Path) -> None:
    text = f"g {NORMALIZED} {{ c = Conv(x, w) i = Identity(c) y = BatchNormalization(i, scale, bias, mean, var) }}"
    small = onnx2jax.convert(text_model(text, w=normal(6, 4, 3, 3), **statistics(6))).simplified()
    files = [onnx2jax.save(m, tmp_path / "m.onnx").read_bytes() for m in (small, small.simplified())]
    assert files[0] == files[1]


def test_external_data_stays_outside(tmp_path: Path) -> None:
    proto = text_model("g (float[n, 64] x) => (float[n, 64] y) { i = MatMul(x, w) y = Identity(i) }", w=normal(64, 64))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    plain = onnx2jax.convert(tmp_path / "m.onnx")
    path = onnx2jax.save(plain.simplified(), tmp_path / "small.onnx")
    assert path.stat().st_size < 1000
    x = normal(2, 64)
    np.testing.assert_array_equal(onnx2jax.convert(path)(x), plain(x))


def test_a_bucket_and_static_values_are_kept() -> None:
    text = "g (float[n] x, int64[1] s) => (float[m] y) { i = Identity(x) y = Reshape(i, s) }"
    plain = onnx2jax.convert(text_model(text), static={"s": np.array([2])})
    small = plain.simplified()
    assert [v.name for v in small.inputs] == ["x"]
    np.testing.assert_array_equal(small(np.float32([1, 2])), [1, 2])


def test_training_info_and_options_that_change_the_graph_are_refused() -> None:
    proto = text_model("g (float[1, 2] x) => (float[1, 2] y) { y = Mul(x, w) }", w=normal(2))
    with pytest.raises(UnsupportedError, match="converted with dtype= cannot be simplified"):
        onnx2jax.convert(proto, dtype="bfloat16").simplified()
    proto.training_info.add()
    with pytest.raises(UnsupportedError, match="training_info"):
        onnx2jax.convert(proto).simplified()


def test_a_sparse_initializer_is_folded_as_a_dense_one(tmp_path: Path) -> None:
    proto = text_model("g (float[n, 2] x) => (float[n, 2] y) { k = Mul(w, two) y = MatMul(x, k) }", two=np.float32(2))
    sparse = proto.graph.sparse_initializer.add(dims=[2, 2])
    sparse.values.CopyFrom(numpy_helper.from_array(np.float32([3]), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1]), "w_at"))
    plain = onnx2jax.convert(proto)
    path = onnx2jax.save(plain.simplified(), tmp_path / "small.onnx")
    assert not onnx.load(path).graph.sparse_initializer
    np.testing.assert_array_equal(onnx2jax.convert(path).params["k"], [[0, 6], [0, 0]])


def test_branches_are_simplified_with_what_they_capture(tmp_path: Path) -> None:
    text = (
        "g (bool c, float[2, 2, 4, 4] x) => (float[2, 2, p, p] y) { one = Identity(x) y = If (c) <"
        "then_branch = t () => (float[2, 2, p, p] p) <float[2, 2, 1, 1] w = {1, 2, 3, 4}> "
        "{ s = Shape(one) z = ConstantOfShape(s) i = Identity(x) v = Conv(i, w) "
        "n = BatchNormalization(v, scale, bias, mean, var) p = Add(n, z) }, "
        "else_branch = e () => (float[2, 2, p, p] q) { k = Mul(table, table) m = MatMul(x, k) q = MatMul(m, table) }> }"
    )
    proto = text_model(text, table=normal(4, 4), **statistics(2))
    for chosen in (True, False):
        small, file = check(proto, tmp_path, 1e-5, c=np.array(chosen), x=normal(2, 2, 4, 4))
        then, other = ([n.op_type for n in g.nodes] for g in small.graph.nodes[-1].graphs)
        assert then == ["Conv", "Add"]
        assert other == ["Mul", "MatMul", "MatMul"]  # table would be there twice
        assert {t.name for t in file.graph.initializer} == {"table"}
    assert [n.rpartition("/")[2] for n in small.params] == ["table", "w", "z", "w.bias"]


BRANCHES = (
    "then_branch = t () => (float[n, 2] t) <float[2] w = {1, 2}, float[2] d = {3, 4}> "
    "{ u = Add(x, w) k = Mul(d, d) v = Mul(u, k) t = If (yes) <"
    "then_branch = tt () => (float[n, 2] w2) { e = Exp(v) w2 = Loop (trips, yes, e) <"
    "body = b (int64 i, bool go, float[n, 2] a) => (bool on, float[n, 2] l) <float[2] wb = {5, 6}> "
    "{ on = Identity(go) h = Mul(a, wb) l = Sub(h, v) }> }, "
    "else_branch = te () => (float[n, 2] o) { o = Neg(v) }> }, "
    "else_branch = e () => (float[n, 2] q) { u = Sub(x, other) q = Relu(u) }"
)
INLINED = (
    "g (float[n, 2] x) => (float[n, 2] y) { s = Shape(x) r = Size(s) c = Equal(r, rank) z = If (c) <"
    f"{BRANCHES}> m = MatMul(z, f) y = If (yes) <"
    "then_branch = t2 () => (float[n, 2] p) <float[2] d = {7, 8}> { u = Mul(m, d) p = Sub(u, x) }, "
    "else_branch = e2 () => (float[n, 2] p) { p = Neg(m) }> }"
)


@pytest.mark.parametrize("rank", [2, 3])
def test_branches_that_are_always_taken_are_inlined(rank: int, tmp_path: Path) -> None:
    """With unique names: branches of both Ifs have a value u and an initializer d."""
    constants = {"rank": np.int64(rank), "yes": np.array(True), "trips": np.int64(2)}
    proto = text_model(INLINED, **constants, f=normal(2, 2), other=normal(2))
    small, file = check(proto, tmp_path, 1e-6, x=normal(3, 2) / 9)
    inner = ["Add", "Mul", "Exp", "Loop"] if rank == 2 else ["Sub", "Relu"]
    assert operators(small) == [*inner, "MatMul", "Mul", "Sub"]
    assert [n.op_type for n in file.graph.node] == operators(small)
    params = {"f", "w", "k", "w2.body/wb", "d"} if rank == 2 else {"f", "other", "d"}
    assert set(small.params) == params == set(onnx2jax.convert(tmp_path / "small.onnx").params)
    changed = {n: np.asarray(v) + 1 for n, v in onnx2jax.convert(proto).params.items()}
    x = normal(3, 2) / 9
    wanted = onnx2jax.convert(proto).with_params(changed)
    again = onnx2jax.save(wanted.simplified(), tmp_path / "again.onnx")
    np.testing.assert_allclose(onnx2jax.convert(again)(x), wanted(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("branch", "left"),
    [
        ("<float[2] w = {1, 2}> { k = Constant<value = float[2] {3, 4}>() p = Mul(k, w) }", []),
        ("<float[2] p = {1, 2}> { }", []),
        ("{ p = Constant<value = float[2] {3, 4}>() }", []),
        ("{ p = Identity(x) }", []),
        ("{ p = RandomNormalLike(x) }", ["If"]),  # other numbers would be drawn
    ],
)
def test_branches_of_constants_and_of_random_numbers(branch: str, left: list[str], tmp_path: Path) -> None:
    text = (
        f"g (float[2] x) => (float[2] y, float[2] z) {{ y = If (yes) <then_branch = t () => (float[2] p) {branch}, "
        "else_branch = e () => (float[2] q) { q = Neg(x) }> z = Sub(x, y) }"
    )
    proto, x = text_model(text, yes=np.array(True)), normal(2)
    plain = onnx2jax.convert(proto)
    small = plain.simplified()
    assert [n for n in operators(small) if n == "If"] == left
    path = onnx2jax.save(small, tmp_path / "small.onnx")
    onnx.checker.check_model(path, full_check=True)
    for ours in (small, onnx2jax.convert(path)):
        for a, b in zip(ours(x, rng=0), plain(x, rng=0), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_body_of_a_loop_is_simplified_for_any_trip(tmp_path: Path) -> None:
    text = (
        "g (int64 trips, float[1] x) => (float[m] y) { y = Loop (trips, yes, x) <"
        "body = b (int64 i, bool go, float[1] a) => (bool on, float[m] r) { on = Identity(go) s = Shape(a) "
        "n = Shape(w) k = Add(s, n) f = Cast<to = 1>(k) "
        "d = Identity(a) r = Concat<axis = 0>(d, f) }> }"
    )
    proto = text_model(text, yes=np.array(True), w=normal(3))
    small, _ = check(proto, tmp_path, trips=np.array(3), x=normal(1))
    (loop,) = small.graph.nodes
    assert [n.op_type for n in loop.graphs[0].nodes] == [
        "Identity",
        "Shape",
        "Add",
        "Cast",
        "Concat",
    ]  # the second trip has two elements


def test_with_params_of_a_branch_are_written(tmp_path: Path) -> None:
    text = (
        "g (bool c, float[2] x) => (float[2] y) { i = Identity(x) y = If (c) <"
        "then_branch = t () => (float[2] p) <float[2] w = {1, 2}, float[2] v = {3, 4}> "
        "{ k = Mul(w, w) l = Mul(k, i) p = Add(l, v) }, "
        "else_branch = e () => (float[2] q) { q = Neg(i) }> }"
    )
    plain = onnx2jax.convert(text_model(text))
    changed = plain.with_params({n: v + 1 for n, v in plain.params.items()})
    small = changed.simplified()
    again, x = onnx2jax.convert(onnx2jax.save(small, tmp_path / "small.onnx")), normal(2)
    for chosen in (True, False):
        np.testing.assert_array_equal(again(np.array(chosen), x), changed(np.array(chosen), x))
    assert sorted(n.rpartition("/")[2] for n in small.params) == ["k", "v"]


def test_nodes_and_constants_that_are_equal_become_one(tmp_path: Path) -> None:
    text = (
        "g (float[n, 4] x) => (float[n, 4] y, float[n, 1] z) { a = Slice(x, i, j, k) b = Slice(x, l, j, k) "
        "c = ReduceSum<keepdims = 1>(a, k) d = ReduceSum<keepdims = 1>(b, k) z = ReduceSum<keepdims = 1>(b, k) "
        "e = ReduceSum<keepdims = 0>(b, k) f = Unsqueeze(e, k) g = Add(c, d) h = Add(g, f) y = Add(h, x) }"
    )
    constants = {"i": [1], "l": [1], "j": [3], "k": [1]}
    proto = text_model(text, **{n: np.array(v) for n, v in constants.items()})
    small, file = check(proto, tmp_path, x=normal(3, 4))
    assert operators(small) == ["Slice", "ReduceSum", "ReduceSum", "ReduceSum", "Unsqueeze", "Add", "Add", "Add"]
    assert sorted(t.name for t in file.graph.initializer) == ["i", "j"]  # l is i, and k too


def test_a_constant_node_may_get_a_reader_before_it(tmp_path: Path) -> None:
    text = (
        "g (float[n, 4] x) => (float[n, 1] y) { k = Add(one, one) a = Slice(x, k, big, one) "
        "m = Constant<value = int64[1] {2}>() y = Slice(a, one, m, one) }"
    )
    proto = text_model(text, **{n: np.array([v]) for n, v in {"one": 1, "big": 9}.items()})
    small, file = check(proto, tmp_path, x=normal(3, 4))
    assert [n.inputs[1:] for n in small.graph.nodes] == [("m", "big", "one"), ("one", "m", "one")]
    assert [n.op_type for n in file.graph.node] == ["Constant", "Slice", "Slice"]


def test_equal_weights_stay_parameters_of_their_own(tmp_path: Path) -> None:
    text = "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul(x, w) b = MatMul(x, v) y = Sub(a, b) }"
    weight = normal(4, 4)
    small, _ = check(text_model(text, w=weight, v=weight), tmp_path, x=normal(3, 4))
    assert list(small.params) == ["w", "v"]
    assert operators(small) == ["MatMul", "MatMul", "Sub"]


def test_equal_random_nodes_draw_different_numbers() -> None:
    text = "g (float[3] x) => (float[3] y) { a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b) }"
    small = onnx2jax.convert(text_model(text)).simplified()
    assert (np.asarray(small(np.zeros(3, np.float32), rng=0)) != 0).all()


def test_symbolic_extents_of_reshape_are_copied_or_inferred(tmp_path: Path) -> None:
    text = (
        "g (float[b, s, 8] x) => (float[b, s, 2, 4] y, float[p, 8] z) { f = Shape(x) b1 = Slice(f, zero, one) "
        "s1 = Slice(f, one, two) t = Concat<axis = 0>(b1, s1, heads) y = Reshape(x, t) m = Mul(b1, s1) "
        "u = Concat<axis = 0>(m, eight) z = Reshape(x, u) }"
    )
    constants = {"zero": [0], "one": [1], "two": [2], "heads": [2, 4], "eight": [8]}
    proto = text_model(text, **{n: np.array(v) for n, v in constants.items()})
    for shape in ((1, 1, 8), (3, 5, 8), (0, 5, 8)):
        small, file = check(proto, tmp_path, x=normal(*shape))
    assert operators(small) == ["Reshape", "Reshape"]
    targets = [numpy_helper.to_array(t).tolist() for t in file.graph.initializer]
    assert sorted(targets) == [[-1, 8], [0, 0, 2, 4]]


def test_swapped_extents_of_reshape_are_computed(tmp_path: Path) -> None:
    text = (
        "g (float[b, s] x) => (float[s, b] y) { f = Shape(x) b1 = Slice(f, zero, one) s1 = Slice(f, one, two) "
        "t = Concat<axis = 0>(s1, b1) y = Reshape(x, t) }"
    )
    proto = text_model(text, zero=np.array([0]), one=np.array([1]), two=np.array([2]))
    small, _ = check(proto, tmp_path, x=normal(3, 5))
    assert operators(small) == ["Shape", "Slice", "Slice", "Concat", "Reshape"]


def test_attributes_that_differ_in_the_sign_of_zero_are_not_equal(tmp_path: Path) -> None:
    text = (
        "g (float[n] x) => (float[n] y) { a = Constant<value_floats = [0.0]>() b = Constant<value_floats = [-0.0]>() "
        "c = Div(x, a) d = Div(x, b) y = Concat<axis = 0>(c, d) }"
    )
    check(text_model(text.replace("(float[n] y)", "(float[m] y)")), tmp_path, x=np.float32([1]))


def test_packed_weights_that_were_unpacked_are_refused() -> None:
    proto = decoders.group_query(bits="symmetric").proto
    small = onnx2jax.convert(proto).simplified()
    assert "MatMulNBits" in operators(small)
    with pytest.raises(UnsupportedError, match="converted with weights= cannot be simplified"):
        onnx2jax.convert(proto, weights="bfloat16").simplified()


def test_parameters_take_new_shapes_before_and_after(tmp_path: Path) -> None:
    text = "g (float[n, 4] x) => (float[n, 6] y) { h = MatMul(x, w) i = Identity(h) y = Add(i, b) }"
    plain = onnx2jax.convert(text_model(text, w=normal(4, 6), b=normal(6)))
    head, x = {"w": normal(4, 3), "b": normal(3)}, normal(2, 4)
    for small in (
        plain.with_params(head, new_shapes=True).simplified(),
        plain.simplified().with_params(head, new_shapes=True),
    ):
        assert operators(small) == ["MatMul", "Add"]
        again = onnx2jax.convert(onnx2jax.save(small, tmp_path / "small.onnx"))
        assert again.outputs[0].shape == ("n", 3)
        np.testing.assert_allclose(again(x), x @ head["w"] + head["b"], rtol=1e-5)
