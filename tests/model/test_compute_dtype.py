"""convert(..., dtype="bfloat16"): what is computed in it, what stays float32, and where models of such a type go."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

import onnx2jax
from benchmarks.accuracy import accuracy
from onnx2jax.errors import InputNameError, InputTypeError, UnsupportedError
from onnx2jax.ir.precision import computed_in, narrow_parameters
from onnx2jax.model.model import Model
from tests.support.helpers import mesh
from tests.support.models import mlp, text_model

DTYPES = ("bfloat16", "float16")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype(np.float32)


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def primitives(model: Model, *args: Any) -> list[Any]:
    """The equations of a model's program, those inside other programs included."""
    found = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found.append(equation)
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(lambda p, *a: model.apply(p, *a))(model.params, *args).jaxpr)
    return found


def types_of(model: Model, name: str, *args: Any) -> list[tuple[Any, ...]]:
    """Of each equation of a primitive the types of its operands, and of its result."""
    return [
        (*(str(v.aval.dtype) for v in e.invars), str(e.outvars[0].aval.dtype))
        for e in primitives(model, *args)
        if e.primitive.name == name
    ]


NORM = """agraph (float[b,4] x) => (float[b,4] y) {
    h = MatMul(x, w)
    r = Add(h, x)
    mean = ReduceMean<axes = [1]>(r)
    centred = Sub(r, mean)
    two = Constant<value_float = 2.0>()
    square = Pow(centred, two)
    variance = ReduceMean<axes = [1]>(square)
    epsilon = Constant<value_float = 1e-6>()
    shifted = Add(variance, epsilon)
    deviation = Sqrt(shifted)
    normal = Div(centred, deviation)
    s = MatMul(normal, w)
    y = MatMul(s, w)
}"""


def norm() -> onnx.ModelProto:
    proto = text_model(NORM, w=weights(4, 4))
    proto.opset_import[0].version = 13
    return proto


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_read_the_compute_dtype_and_accumulate_in_float32(dtype: str) -> None:
    model = onnx2jax.convert(norm(), dtype=dtype)
    on_cpu, elsewhere = (dtype, dtype, "float32"), (dtype, dtype, dtype)  # rounded inside of the unit
    found = types_of(model, "dot_general", X)
    assert found == [on_cpu, elsewhere] * 2 + [on_cpu]


def test_recurrent_layers_multiply_the_compute_dtype_and_keep_their_state_in_float32() -> None:
    """Each of 64 steps adds 2^-10 to a state of 1: bfloat16 would lose it."""
    text = "agraph (float[64,1,4] x, float[1,1,3] h0, float[1,1,3] c0) => (float[1,1,3] c) { "
    text += ", ".join(("y", "h", "c")) + " = LSTM<hidden_size = 3>(x, w, r, b, , h0, c0) }"
    bias = np.repeat(np.float32([20, 0, 20, 2**-10]), 3)[None]
    operands = {"w": np.zeros((1, 12, 4)), "r": np.zeros((1, 12, 3)), "b": np.concatenate([bias, 0 * bias], 1)}
    proto = text_model(text, **{n: v.astype(np.float32) for n, v in operands.items()})
    model = onnx2jax.convert(proto, dtype="bfloat16")
    args = np.zeros((64, 1, 4), np.float32), np.zeros((1, 1, 3), np.float32), np.ones((1, 1, 3), np.float32)
    np.testing.assert_allclose(model(*args), 1 + 64 / 1024, rtol=1e-3)
    assert model.params["r"].dtype == jnp.bfloat16
    half, on_cpu, recurrent = ("bfloat16",) * 3, ("float32",) * 3, ("bfloat16", "bfloat16", "float32")
    assert sorted(types_of(model, "dot_general", *args)) == [half, recurrent, recurrent, on_cpu]


def test_a_decomposed_norm_is_computed_in_float32() -> None:
    """In float16 squares would overflow from 256 on, and the epsilon would be zero."""
    x, proto = X * 2000, norm()
    expected = onnx2jax.convert(proto).run(None, {"x": x})
    model = onnx2jax.convert(proto, dtype="float16")
    assert accuracy(expected, model.run(None, {"x": x})).largest < 5e-3
    assert set(types_of(model, "integer_pow", X)) == {("float32", "float32")}
    assert set(types_of(model, "sqrt", X)) == {("float32", "float32")}


def test_weights_are_kept_in_the_compute_dtype_and_norms_in_float32() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model(), dtype="bfloat16")
    kinds = {n: str(v.dtype) for n, v in model.params.items()}
    assert {k for n, k in kinds.items() if n.startswith(("conv", "fc"))} == {"bfloat16"}
    assert {k for n, k in kinds.items() if n.startswith("bn")} == {"float32"}
    assert {n: str(v.dtype) for n, v in model.weights.items()} == kinds
    assert narrow_parameters(model.graph) == {n for n, k in kinds.items() if k == "bfloat16"}


def test_a_table_read_by_rows_is_kept_in_the_compute_dtype() -> None:
    text = """agraph (int64[b] i) => (float[b,4] y) {
        h = Gather(table, i)
        turned = Transpose<perm = [1, 0]>(table)
        logits = MatMul(h, turned)
        y = MatMul(logits, table)
    }"""
    model = onnx2jax.convert(text_model(text, table=weights(8, 4)), dtype="bfloat16")
    assert model.params["table"].dtype == jnp.bfloat16
    assert model(np.array([1, 7])).shape == (2, 4)


def test_what_is_compared_or_truncated_is_not_rounded() -> None:
    """bfloat16 has no 257 and no 259, which would be other ids."""
    text = """agraph (int64[b] i) => (bool[b,1] same, bool[b,1] less, float[b,1] odd, float[b,1] half, float[b,1] up) {
        id = Gather(table, i)
        same = Equal(id, some)
        less = Less(id, some)
        odd = Mod<fmod = 1>(id, two)
        ratio = Div(id, two)
        half = Floor(ratio)
        up = Ceil(ratio)
    }"""
    constants = {"table": np.float32([[257], [258], [259]]), "some": np.float32(257), "two": np.float32(2)}
    results = [
        y.ravel().tolist() for y in onnx2jax.convert(text_model(text, **constants), dtype="bfloat16")(np.arange(3))
    ]
    assert results == [[True, False, False], [False] * 3, [1, 0, 1], [128, 129, 129], [129, 129, 130]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_and_ids_in_tables_are_exact_for_every_reader(dtype: str) -> None:
    """Neither type has 2049: a difference, sum or flag of rounded positions is another one."""
    text = """agraph (int64[b] i) => (float[b,2] less, float[b,2] sum, float[b,2] copy, bool[b,2] same, bool[b] any) {
        id = Gather(table, i)
        less = Sub(id, some)
        minus = Neg(some)
        sum = Add(id, minus)
        copy = Identity(id)
        same = Equal(id, some)
        column = Slice(same, zero, one, one)
        any = Squeeze(column, one)
    }"""
    table = np.float32([[2049, 2050], [2051, 4099], [0, -4097]])
    constants = {"table": table, "some": np.float32(2049), "zero": np.int64([0]), "one": np.int64([1])}
    model, i = onnx2jax.convert(text_model(text, **constants), dtype=dtype), np.array([2, 0, 1])
    expected = (table[i] - 2049, table[i] - 2049, table[i], table[i] == 2049, (table[i] == 2049)[:, 0])
    for got, want in zip(model(i), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    embeddings = onnx2jax.convert(text_model(text, **constants | {"table": table + 0.5}), dtype=dtype)
    assert embeddings.params["table"].dtype == np.dtype(dtype)
    small = onnx2jax.convert(text_model(text, **constants | {"table": table % 3}), dtype=dtype)
    assert small.params["table"].dtype == np.dtype(dtype), "integers that the type has are not kept in float32"


DISCRETE = {
    "Sub": "y = Sub(row, near)",
    "Sub behind views": "turned = Transpose(row) near_row = Identity(turned) y = Sub(near_row, near)",
    "Round": "r = Mul(row, thousand) y = Round(r)",
    "ArgMax": "y = ArgMax(row)",
    "ArgMin": "y = ArgMin(row)",
    "TopK": "v, y = TopK(row, one)",
    "Hardmax": "y = Hardmax(row)",
    "OneHot": "scaled = Mul(row, thousand) y = OneHot(scaled, depth, off_on)",
    "CastLike": "scaled = Mul(row, thousand) y = CastLike(scaled, i)",
    "BitCast": "y = BitCast<to = 6>(row)",
    "Cast to string": "y = Cast<to = 8>(row)",
    "IsInf": "big = Mul(row, huge) y = IsInf(big)",
    "LabelEncoder": "y = ai.onnx.ml.LabelEncoder<keys_floats = [2.001], values_int64s = [7]>(row)",
    "Binarizer": "y = ai.onnx.ml.Binarizer<threshold = 2.0005>(row)",
    "Imputer": "y = ai.onnx.ml.Imputer<imputed_value_floats = [5.0], replaced_value_float = 2.001>(row)",
}
"""What the last node computes jumps, or cancels, where its operand is rounded."""


@pytest.mark.parametrize("what", DISCRETE)
def test_rows_of_a_table_are_exact_where_a_reader_jumps(what: str) -> None:
    body = DISCRETE[what]
    kind = {"BitCast": "int32", "Cast to string": "string", "IsInf": "bool", "LabelEncoder": "int64"}.get(what, "float")
    kind = "int64" if what in ("ArgMax", "ArgMin", "TopK", "CastLike") else kind
    text = f"agraph (int64[b] i) => ({kind}[m, n] y) {{ row = Gather(table, i) {body} }}"
    constants = {
        "table": np.float32([[2.0, 2.001, 1.999]]),
        "near": np.float32(2.0),
        "thousand": np.float32(1000),
        "huge": np.float32(1.6e38),
        "one": np.int64([1]),
        "depth": np.int64([2002]),
        "off_on": np.float32([0, 1]),
    }
    proto = text_model(text, **{n: v for n, v in constants.items() if n in text})
    del proto.opset_import[1:]
    proto.opset_import[0].version = 26
    proto.ir_version = 12
    proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    if what == "ArgMax":
        proto.graph.node[-1].attribute.append(onnx.helper.make_attribute("axis", 1))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    i = np.array([0])
    got = onnx2jax.convert(proto, dtype="bfloat16").run(None, {"i": i})[0]
    np.testing.assert_array_equal(got, onnx2jax.convert(proto).run(None, {"i": i})[0])


def test_constants_of_a_float16_file_are_compared_with_float32() -> None:
    """What a wide operator returns is not rounded for a comparison; the constant, which is narrow, is widened."""
    text = """agraph (float16[b,4] x) => (bool[b,4] same, bool[b,4] less, float16[b,4] rest) {
        h = MatMul(x, w)
        p = Softmax(h)
        same = Equal(p, quarter)
        less = Less(quarter, p)
        rest = Mod<fmod = 1>(p, quarter)
    }"""
    constants = {"w": np.eye(4, dtype=np.float16), "quarter": np.float16(0.25)}
    model = onnx2jax.convert(text_model(text, **constants), dtype="float16")
    same, less, rest = model(np.float16([[0, 0, 0, 0], [9, 0, 0, 0]]))
    assert np.asarray(same).tolist() == [[True] * 4, [False] * 4]
    assert np.asarray(less).tolist() == [[False] * 4, [True, False, False, False]]
    assert rest.dtype == np.float16


ROTARY = """agraph (int64[s] positions, float[s,8] x) => (float[s,8] y) {
    column = Unsqueeze(positions, one)
    floats = Cast<to = 1>(column)
    angles = MatMul(floats, frequencies)
    c = Cos(angles)
    h = MatMul(x, w)
    y = Mul(h, c)
}"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_beyond_256_are_exact(dtype: str) -> None:
    constants = {"one": np.array([1]), "frequencies": weights(1, 8), "w": np.eye(8, dtype=np.float32)}
    model = onnx2jax.convert(text_model(ROTARY, **constants), dtype=dtype)
    assert model.params["frequencies"].dtype == np.float32
    positions, x = np.array([3, 257, 4099]), np.ones((3, 8), np.float32)
    expected = np.cos(positions[:, None].astype(np.float32) * constants["frequencies"])
    np.testing.assert_allclose(model(positions, x), expected, atol=1e-2)


def test_integers_are_untouched() -> None:
    text = """agraph (int64[n] i, float[n,4] x) => (int64[n] y, int64[n] top) {
        big = Constant<value_int = 16777217>()
        y = Add(i, big)
        h = MatMul(x, w)
        top = ArgMax<axis = 1, keepdims = 0>(h)
    }"""
    model = onnx2jax.convert(text_model(text, w=weights(4, 4)), dtype="bfloat16")
    y, top = model.run(None, {"i": np.array([2**40, 1, 2]), "x": X})
    assert y.dtype == top.dtype == np.int64
    assert y.tolist() == [2**40 + 16777217, 16777218, 16777219]


ATTENTION = """agraph (float[s,4] q, float[s,4] k, float[s,4] v, {mask}) => (float[s,4] y) {
    turned = Transpose<perm = [1, 0]>(k)
    scores = MatMul(q, turned)
    {steps}
    p = Softmax<axis = -1>(masked)
    y = MatMul(p, v)
}"""
MASKS = {
    "added twice": (
        "bool[s,s] mask",
        """floats = Cast<to = 1>(mask)
        one = Constant<value_float = 1.0>()
        kept = Sub(one, floats)
        least = Constant<value_float = -1e9>()
        bias = Mul(kept, least)
        once = Add(scores, bias)
        copied = Identity(once)
        masked = Add(copied, bias)""",
    ),
    "an input": ("float[s,s] mask", "masked = Add(scores, mask)"),
    "chosen": (
        "bool[s,s] mask",
        """least = Constant<value_float = -1e9>()
        masked = Where(mask, scores, least)""",
    ),
    "read by two": (
        "float[s,s] mask",
        """summed = Add(scores, mask)
        highest = ReduceMax<axes = [1]>(summed)
        masked = Sub(summed, highest)""",
    ),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_give_no_nan(kind: str) -> None:
    """A row of the mask is all masked; infinities there would be NaN."""
    declared, steps = MASKS[kind]
    proto = text_model(ATTENTION.replace("{mask}", declared).replace("{steps}", steps))
    proto.opset_import[0].version = 13
    mask = np.tril(np.ones((3, 3), bool))
    mask[0] = False
    given = mask if "bool" in declared else np.where(mask, 0, -3e38).astype(np.float32)
    expected = onnx2jax.convert(proto)(X, X * 3, X, given)
    for dtype in DTYPES:
        y = onnx2jax.convert(proto, dtype=dtype)(X, X * 3, X, given)
        assert np.isfinite(y).all()
        np.testing.assert_allclose(y[1:], expected[1:], atol=0.05)


def test_softmax_is_computed_in_float32() -> None:
    declared, steps = MASKS["an input"]
    proto = text_model(ATTENTION.replace("{mask}", declared).replace("{steps}", steps))
    model = onnx2jax.convert(proto, dtype="bfloat16")
    args = X, X, X, np.zeros((3, 3), np.float32)
    assert types_of(model, "exp", *args) == [("float32", "float32")]
    assert types_of(model, "dot_general", *args)[-1] == ("bfloat16", "bfloat16", "float32")


def quantized_twice(op_type: str) -> onnx.ModelProto:
    """A product, an operator that quantizes activations by their range, another one, and a product."""
    rng = np.random.default_rng(0)
    matrix = op_type == "DynamicQuantizeMatMul"
    call = "<hidden_size = 4>(steps, codes, recurrence, , , , , , scales, zeros, scales, zeros)"
    text = f"""agraph (float[b,4] x) => (y) {{
        h = MatMul(x, w)
        steps = Unsqueeze(h, first)
        q = com.microsoft.{op_type}{"(steps, matrix, scale)" if matrix else call}
        r = com.microsoft.DynamicQuantizeMatMul(q, matrix, scale)
        y = MatMul(r, identity)
    }}"""
    constants = {
        "w": rng.integers(-3, 3, (4, 4)).astype(np.float32),
        "first": np.array([0]),
        "matrix": rng.integers(-99, 99, (4, 4)).astype(np.int8),
        "scale": np.float32(0.001),
        "codes": rng.integers(-99, 99, (1, 4, 16)).astype(np.int8),
        "recurrence": rng.integers(-99, 99, (1, 4, 16)).astype(np.int8),
        "scales": np.float32([0.0001]),
        "zeros": np.zeros(1, np.int8),
        "identity": np.eye(4, dtype=np.float32),
    }
    proto = text_model(text, **{n: v for n, v in constants.items() if n in text})
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return proto


@pytest.mark.parametrize("op_type", ["DynamicQuantizeMatMul", "DynamicQuantizeLSTM"])
def test_operators_that_quantize_activations_by_their_range_compute_in_float32(op_type: str) -> None:
    """The first product, of small integers, is exact in all types, and the last one multiplies by one."""
    x = np.random.default_rng(1).integers(-9, 9, (5, 4)).astype(np.float32)
    proto = quantized_twice(op_type)
    expected = np.asarray(onnx2jax.convert(proto)(x))
    for dtype in DTYPES:
        found = onnx2jax.convert(proto, dtype=dtype)(x)
        np.testing.assert_array_equal(found, expected.astype(dtype).astype(np.float32))


def test_named_nodes_stay_in_float32() -> None:
    plain, model = onnx2jax.convert(mlp()), onnx2jax.convert(mlp(), dtype="bfloat16", float32=["hid*", "head"])
    np.testing.assert_array_equal(model(X), plain(X))
    assert {str(v.dtype) for v in model.params.values()} == {"float32"}
    first = onnx2jax.convert(mlp(), dtype="bfloat16", float32="hidden")
    assert types_of(first, "dot_general", X) == [("float32",) * 3, ("bfloat16", "bfloat16", "float32")]
    assert {n: str(v.dtype) for n, v in first.params.items() if n[0] == "w"} == {"w1": "float32", "w2": "bfloat16"}
    # Rewritten graphs are narrowed again, which keeps the choice.
    assert [n.casts for n in computed_in(first.graph, jnp.bfloat16).nodes] == [n.casts for n in first.graph.nodes]


def test_a_node_in_float32_reads_values_that_are_not_rounded() -> None:
    """A residual stream is rounded in memory, unless a node named in float32= reads it."""
    text = """agraph (float[b,4] x) => (float[b,4] y) {
        h = MatMul(x, w)
        e = Exp(h)
        s = Add(e, h)
        z = Log(s)
        y = MatMul(z, w)
    }"""
    proto = text_model(text, w=weights(4, 4))
    for node, name in zip(proto.graph.node, "abcde", strict=True):
        node.name = name
    pinned = onnx2jax.convert(proto, dtype="bfloat16", float32="c")
    kinds = {n.name: str(n.casts.result) for n in pinned.graph.nodes if n.casts}
    assert kinds == {"a": "float32", "b": "float32", "c": "float32", "d": "bfloat16", "e": "float32"}


def test_what_is_inside_of_a_node_in_float32_stays_in_float32() -> None:
    text = """agraph (float[b,4] x, bool c) => (float[b,4] y) {
        h = MatMul(x, w)
        y = If(c) <
            then_branch = t () => (float[b,4] a) { a = MatMul(h, w) },
            else_branch = e () => (float[b,4] d) { d = Identity(h) }
        >
    }"""
    proto = text_model(text, w=weights(4, 4))
    for node, name in zip(proto.graph.node, ("first", "choice"), strict=True):
        node.name = name
    plain, model = onnx2jax.convert(proto), onnx2jax.convert(proto, dtype="float16", float32=["first", "choice"])
    np.testing.assert_array_equal(model(X, np.True_), plain(X, np.True_))


def test_errors_of_nodes_in_float32() -> None:
    with pytest.raises(InputNameError, match=r"named 'hiden'; did you mean 'hidden'\?"):
        onnx2jax.convert(mlp(), dtype="bfloat16", float32=["hiden", "act"])
    with pytest.raises(InputTypeError, match="add dtype='bfloat16'"):
        onnx2jax.convert(mlp(), float32="hidden")


def test_outputs_and_inputs_come_in_either_type() -> None:
    plain, model = onnx2jax.convert(mlp()), onnx2jax.convert(mlp(), dtype="bfloat16")
    narrow = onnx2jax.convert(mlp(), dtype="bfloat16", outputs="compute")
    assert [m.outputs[0].type.dtype for m in (model, narrow)] == [np.float32, jnp.bfloat16]  # type: ignore[union-attr]
    for m in (model, narrow):
        for x in (X, X.astype(jnp.bfloat16), jnp.asarray(X)):
            y = m(x)
            assert y.dtype == m.outputs[0].type.dtype  # type: ignore[union-attr]
            np.testing.assert_allclose(y.astype(np.float32), plain(X), atol=0.2)
            assert m.run(None, {"x": x})[0].dtype == y.dtype
    with pytest.raises(InputTypeError, match="nothing is cast silently"):
        model(X.astype(np.float16))


def test_float64_stays() -> None:
    text = """agraph (double[b,4] x) => (double[b,4] y) {
        y = MatMul(x, w)
    }"""
    proto = text_model(text, w=weights(4, 4).astype(np.float64))
    x = X.astype(np.float64)
    model = onnx2jax.convert(proto, dtype="bfloat16")
    np.testing.assert_array_equal(model(x), onnx2jax.convert(proto)(x))


def test_overflow_in_float16_is_not_hidden() -> None:
    """Activations beyond 65504 become infinite, and values() tells where first."""
    model = onnx2jax.convert(mlp(), dtype="float16")
    large = X * 1e5
    assert not np.isfinite(model(X * 1e5)).all()
    found = model.values(large)
    assert next(n for n, v in found.items() if not np.isfinite(v.astype(np.float32)).all()) == "h"


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformations(dtype: str) -> None:
    plain, model = onnx2jax.convert(mlp()), onnx2jax.convert(mlp(), dtype=dtype)

    def gradients(m: Model, params: Any) -> Any:
        return jax.grad(lambda p: (m.apply(p, X) ** 2).sum())(params)

    @jax.jit
    def results(masters: Any, params: Any) -> Any:
        rows = jax.vmap(lambda x: model.apply(params, x[None])[0])(X)
        return gradients(plain, masters), gradients(model, masters), gradients(model, params), rows

    expected, *found, rows = results(plain.params, model.params)  # float32 masters, and the model's own
    for gradient, params in zip(found, (plain.params, model.params), strict=True):
        assert {n: v.dtype for n, v in gradient.items()} == {n: v.dtype for n, v in params.items()}
        for name, value in expected.items():
            np.testing.assert_allclose(gradient[name].astype(np.float32), value, atol=0.05 * abs(value).max())
    np.testing.assert_allclose(rows, model(X), atol=1e-2)


def test_a_mesh_shards_the_weights_of_the_compute_dtype() -> None:
    with_mesh = onnx2jax.convert(
        mlp(), dtype="bfloat16", mesh=mesh(data=2), shardings={"w1": PartitionSpec(None, "data")}
    )
    assert with_mesh.weights["w1"].dtype == jnp.bfloat16
    assert with_mesh.weights["w1"].sharding.spec == PartitionSpec(None, "data")
    x = np.concatenate([X, X])
    np.testing.assert_allclose(with_mesh(x), onnx2jax.convert(mlp(), dtype="bfloat16")(x), atol=1e-2)


def test_save_writes_float32(tmp_path: Path) -> None:
    model = onnx2jax.convert(mlp(), dtype="bfloat16")
    kept = onnx2jax.convert(onnx2jax.save(model, tmp_path / "same.onnx"))
    assert all((kept.params[n] == v).all() for n, v in onnx2jax.convert(mlp()).params.items())
    master = RNG.normal(size=(4, 8)).astype(np.float32)
    changed = model.with_params({"w1": master, "w2": model.params["w2"] * 2})
    assert changed.params["w1"].dtype == changed.params["w2"].dtype == jnp.bfloat16
    saved = onnx2jax.convert(onnx2jax.save(changed, tmp_path / "changed.onnx"))
    np.testing.assert_array_equal(saved.params["w1"], master)
    np.testing.assert_array_equal(saved.params["w2"], changed.params["w2"].astype(np.float32))
    np.testing.assert_allclose(changed(X), saved(X), atol=0.3)


def test_export_holds_weights_of_the_compute_dtype(tmp_path: Path) -> None:
    model = onnx2jax.convert(mlp(), dtype="bfloat16")
    again = onnx2jax.load_exported(model.export(tmp_path / "out", platforms=["cpu"]))
    np.testing.assert_allclose(again(X), model(X), atol=1e-2)
    assert again.params["w1"].dtype == jnp.bfloat16


def test_pickle_keeps_the_type() -> None:
    model = onnx2jax.convert(mlp(), dtype="bfloat16")
    again = pickle.loads(pickle.dumps(model))
    assert again.settings.dtype == jnp.bfloat16
    np.testing.assert_array_equal(again(X), model(X))


def test_programs_of_different_types_are_kept_apart(tmp_path: Path) -> None:
    results = [onnx2jax.convert(mlp(), dtype=d, cache_dir=tmp_path)(X) for d in (None, *DTYPES) * 2]
    assert not np.array_equal(results[0], results[1])
    assert not np.array_equal(results[1], results[2])
    for first, again in zip(results[:3], results[3:], strict=True):
        np.testing.assert_array_equal(first, again)
    assert len(list(tmp_path.glob("*.program"))) in (0, 3)  # several devices keep none


LOOP = """agraph (float[4] x, int64 n) => (float[4] y) {
    go = Constant<value_int = 1>()
    truth = Cast<to = 9>(go)
    row = Unsqueeze(x, zero)
    start = MatMul(row, w)
    last, every = Loop(n, truth, start) <
    body = b (int64 i, bool c, float[1,4] s) => (bool again, float[1,4] t, float[1,4] s) {
        again = Identity(c)
        moved = MatMul(s, w)
        t = Add(s, moved)
    }>
    y = ReduceSum<keepdims = 0>(last, zero)
}"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_loops_are_float32(dtype: str) -> None:
    proto = text_model(LOOP, w=weights(4, 4) / 4, zero=np.array([0]))
    n = np.array(5)
    expected = onnx2jax.convert(proto)(X[0], n)
    model = onnx2jax.convert(proto, dtype=dtype)
    assert accuracy([np.asarray(expected)], [np.asarray(model(X[0], n))]).largest < 2e-2
    assert model.params["w"].dtype == dtype


def test_branches_and_functions() -> None:
    text = """agraph (float[b,4] x, bool c) => (float[b,4] y) {
        h = l.linear(x, w)
        chosen = If(c) <then_branch = t () => (float[b,4] a) { a = MatMul(h, w) },
                        else_branch = e () => (float[b,4] h) { }>
        y = l.linear(chosen, w)
    }
    <opset_import: ["" : 21], domain: "l">
    linear (v, weight) => (z) {
        m = MatMul(v, weight)
        z = Relu(m)
    }"""
    proto = text_model(text, w=weights(4, 4))
    plain, model = onnx2jax.convert(proto), onnx2jax.convert(proto, dtype="bfloat16")
    assert model.params["w"].dtype == jnp.bfloat16
    for choice in (True, False):
        c = np.array(choice)
        assert accuracy([plain.run(None, {"x": X, "c": c})[0]], [model.run(None, {"x": X, "c": c})[0]]).largest < 2e-2
        traced = jax.jit(lambda c: model.apply(model.params, X, c))(c)
        np.testing.assert_allclose(traced, model(X, c), atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.extended)])
def test_caches_of_decoders_are_in_the_compute_dtype(dtype: str) -> None:
    found = onnx2jax.decoder(onnx2jax.convert(onnx2jax.demo_decoder(), dtype=dtype)).generate(list(b"nineteen "), 7)
    assert {v.dtype for v in found.cache.values.values()} == {np.dtype(dtype)}
    assert bytes(found.texts()[0]) == b"twenty "


def test_verify_names_the_node_that_overflows() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model(), dtype="float16")
    image = RNG.normal(size=(1, 1, 8, 8)).astype(np.float32)
    assert model.verify({"image": image}, against="onnxruntime", each_node=True).ok
    found = model.verify({"image": image * 1e5}, against="onnxruntime")
    assert found.first is not None and "'conv1'" in found.first.node


def test_simplified_files_are_converted_to_the_type(tmp_path: Path) -> None:
    """A converted model is refused, with this way to do it."""
    model = onnx2jax.convert(onnx2jax.demo_model(), dtype="bfloat16")
    with pytest.raises(UnsupportedError, match=r"save\(convert\(file\)\.simplified\(\), path\)"):
        model.simplified()
    path = onnx2jax.save(onnx2jax.convert(onnx2jax.demo_model()).simplified(), tmp_path / "simple.onnx")
    simple = onnx2jax.convert(path, dtype="bfloat16")
    assert len(simple.graph.nodes) < len(model.graph.nodes)
    assert simple.params["conv1.weight"].dtype == jnp.bfloat16
    image = RNG.normal(size=(1, 1, 8, 8)).astype(np.float32)
    assert accuracy(model.run(None, {"image": image}), simple.run(None, {"image": image})).largest < 2e-2


def test_the_demo_model_classifies_alike() -> None:
    x = RNG.normal(size=(64, 1, 8, 8)).astype(np.float32)
    plain = onnx2jax.convert(onnx2jax.demo_model()).run(None, {"image": x})
    for dtype, limit in zip(DTYPES, (2e-2, 2e-3), strict=True):
        found = accuracy(plain, onnx2jax.convert(onnx2jax.demo_model(), dtype=dtype).run(None, {"image": x}))
        assert found.largest < limit
        assert found.agreement is not None and found.agreement > 0.9


@pytest.mark.parametrize(
    ("options", "match"),
    [({"dtype": "int8"}, "bfloat16"), ({"dtype": "nothing"}, "bfloat16"), ({"outputs": "float16"}, "declared")],
)
def test_other_types_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputTypeError, match=match):
        onnx2jax.convert(mlp(), **options)


def test_float32_of_a_float32_file_is_the_file_as_it_is() -> None:
    """Under float64, too: to_source and simplified, for instance, need the types of the file."""
    model = onnx2jax.convert(mlp(), dtype="float32")
    again = onnx2jax.convert(mlp(), dtype="float64").with_options(dtype="float32")
    assert {m.settings.dtype for m in (model, again)} == {None}
    assert not any(node.casts for m in (model, again) for node in m.graph.nodes)


@pytest.mark.parametrize(("dtype", "says"), [("bfloat16", "dtype"), ("float64", "leave out dtype=")])
def test_graphs_that_differentiate_are_refused(dtype: str, says: str) -> None:
    text = """agraph (float[4] x) => (float[4] g) {
        y = Mul(x, x)
        g = ai.onnx.preview.training.Gradient<xs = ["x"], y = "y">(x)
    }"""
    proto = text_model(text)
    proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.preview.training", 1))
    with pytest.raises(UnsupportedError, match=says):
        onnx2jax.convert(proto, dtype=dtype)
