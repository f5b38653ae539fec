"""convert(..., dtype="float64") and "float32": all of a narrower file is widened, whatever names or makes its types."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.sharding import PartitionSpec
from onnx import numpy_helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import InputTypeError, UnsupportedError
from onnx2jax.eval.interpreter import Context, evaluate
from onnx2jax.ir import binding, casts
from onnx2jax.ir.casts import DOUBLE, NARROWER, WIDE
from onnx2jax.ir.graph import Graph, Node
from onnx2jax.ir.widening import TYPES, widened
from onnx2jax.model.reports.comparison import compared
from onnx2jax.proto.types import ValueInfo, to_code
from tests.support.helpers import mesh
from tests.support.models import mlp, text_model
from tests.support.violations import every_case
from tests.tables.operators import Row, rows

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
DIGITS = 1e-13
"""Relative to numbers of order one: 29 bits beyond float32's."""


def double(proto: onnx.ModelProto, **options: Any) -> onnx2jax.Model:
    return onnx2jax.convert(proto, dtype="float64", **options)


def mlp_in_numpy(x: np.ndarray, dtype: Any = np.float64) -> np.ndarray:
    w = {t.name: numpy_helper.to_array(t).astype(dtype) for t in mlp().graph.initializer}
    return np.maximum(x.astype(dtype) @ w["w1"] + w["b1"], 0) @ w["w2"] + w["b2"]


def normalised(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + float(np.float32(0.001)))


def hann(size: int) -> np.ndarray:
    return np.sin(np.pi * np.arange(size) / size) ** 2


CODES = np.array([-128, 3, 77], np.int8)
INTEGERS = np.array([2**24 + 1, -3])
Y = X.astype(float) * (1 + 1e-12)
"""No numbers of float32."""
OPERATORS: dict[str, tuple[str, Any]] = {
    "Cast of integers": ("y = Cast<to = 1>(i)", INTEGERS),
    "Cast to float16 and back": ("h = Cast<to = 10>(x) y = Cast<to = 1>(h)", Y),
    "Cast to bfloat16": ("y = Cast<to = 16>(x)", Y),
    "CastLike": ("y = CastLike(i, x)", INTEGERS),
    "Constant": ("c = Constant<value_float = 0.1>() y = Mul(x, c)", Y * float(np.float32(0.1))),
    "ConstantOfShape": ("s = Shape(x) z = ConstantOfShape(s) y = Add(x, z)", Y),
    "EyeLike": ("y = EyeLike<dtype = 1>(x)", np.eye(3, 4)),
    "Range": ("y = Range(zero, one, third)", np.arange(3) * float(np.float32(0.34))),
    "HannWindow": ("y = HannWindow(seven)", hann(7)),
    "LayerNormalization": ("y = LayerNormalization<epsilon = 0.001>(x, ones)", normalised(Y)),
    "Softmax": ("y = Softmax(x)", np.exp(Y) / np.exp(Y).sum(1, keepdims=True)),
    "Gemm": ("y = Gemm<alpha = 0.5>(x, w)", 0.5 * Y @ W.astype(float)),
    "DequantizeLinear": ("y = DequantizeLinear(codes, scale)", CODES * float(np.float32(0.1))),
    "DequantizeLinear to float16": (
        "y = DequantizeLinear<output_dtype = 10>(codes, scale)",
        CODES * float(np.float32(0.1)),
    ),
    "BitCast": ("b = BitCast<to = 6>(x) y = BitCast<to = 1>(b)", X.astype(float)),
    "LinearRegressor": (
        "y = ai.onnx.ml.LinearRegressor<coefficients = [0.1, 0.2, 0.3, 0.4]>(x)",
        Y @ np.float32([[0.1], [0.2], [0.3], [0.4]]).astype(float),
    ),
    "Scaler": (
        "y = ai.onnx.ml.Scaler<offset = [0.1], scale = [0.3]>(x)",
        (Y - float(np.float32(0.1))) * float(np.float32(0.3)),
    ),
    "sequence": (
        "e = SequenceEmpty() s = SequenceInsert(e, x) t = SequenceInsert(s, x) y = ConcatFromSequence<axis = 0>(t)",
        np.concatenate([Y, Y]),
    ),
}
"""What makes a float32 by itself, reads its bits, or names a type; and the value in double."""
CONSTANTS: dict[str, Any] = {
    "zero": np.float32(0),
    "one": np.float32(1),
    "third": np.float32(0.34),
    "seven": np.int64(7),
    "ones": np.ones(4, np.float32),
    "w": W,
    "codes": CODES,
    "scale": np.float32(0.1),
}


def every_operator() -> onnx.ModelProto:
    """All of OPERATORS in one graph, so that they are compiled once."""
    bodies, outputs = [], []
    for n, (text, _) in enumerate(OPERATORS.values()):
        proto = onnx.parser.parse_graph(f"g () => () {{ {text} }}")
        own = {o for node in proto.node for o in node.output}
        for node in proto.node:
            for names in (node.input, node.output):
                names[:] = [f"{v}{n}" if v in own else v for v in names]
        bodies += proto.node
        outputs.append(f"y{n}")
    proto = text_model("g (float[3, 4] x, int64[2] i) => () { }", **CONSTANTS)
    proto.graph.node.extend(bodies)
    for name in outputs:
        proto.graph.output.add(name=name).type.tensor_type.elem_type = 1
    del proto.opset_import[:]
    proto.opset_import.extend([onnx.helper.make_opsetid("", 26), onnx.helper.make_opsetid("ai.onnx.ml", 3)])
    return proto


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeclarationWarning")
def test_operators() -> None:
    found = double(every_operator()).run(None, {"x": Y, "i": INTEGERS})
    for (name, (_, expected)), y in zip(OPERATORS.items(), found, strict=True):
        assert y.dtype == np.float64, name
        np.testing.assert_allclose(y, expected, rtol=DIGITS, atol=DIGITS, err_msg=name)


def _graph(row: Row) -> Graph:
    """A row of the operators' matrix as a graph of one node, at its newest opset."""
    opset = binding.NEWEST.get(row.domain, 1) if row.domain else row.until
    names = tuple("" if x is None else f"in{i}" for i, x in enumerate(row.inputs))
    outputs = tuple(f"out{i}" for i in range(row.outputs))
    node = Node(row.name, row.name, row.domain, opset, names, outputs, row.attributes, None)
    operator = binding.find(node)
    assert operator is not None
    attributes = binding.convert_attributes(operator, row.attributes)
    node = replace(node, attributes=attributes, target=operator)
    return Graph("", "", tuple(ValueInfo(n) for n in names if n), tuple(map(ValueInfo, outputs)), {}, (node,))


def _cast(value: Any, narrower: Collection[np.dtype], dtype: np.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(v, narrower, dtype) for v in value]
    return value.astype(dtype) if getattr(value, "dtype", None) in narrower else value


@pytest.mark.extended
@pytest.mark.parametrize(("narrow", "wide_type"), [(WIDE, DOUBLE), (np.dtype(np.float16), WIDE)])
def test_every_operator_of_the_matrix_computes_what_it_does_on_the_wider_type(
    narrow: np.dtype, wide_type: np.dtype
) -> None:
    """On the row's operands in the narrow type, beside the operator on the same ones widened, its types rewritten."""
    rng, seen = jax.random.key(0), set[tuple[str, str]]()
    with every_case() as case, compat.enable_x64(), np.errstate(all="ignore"):
        for row in rows():
            if row.key in seen or row.name == "BitCast":
                continue
            given = {f"in{i}": x for i, x in enumerate(row.inputs) if x is not None}
            values = {n: _cast(x, {WIDE}, narrow) for n, x in given.items()}
            wide = {n: _cast(x, NARROWER[wide_type], wide_type) for n, x in values.items()}
            if not any(wide[n] is not x for n, x in values.items() if not isinstance(x, list)):
                continue
            seen.add(row.key)
            graph = _graph(row)
            (node,) = graph.nodes
            target: Any = node.target
            code = to_code(wide_type)
            absent = dict.fromkeys(target.attributes & {"stash_type", "output_datatype"}, code)  # float32 by default
            named = {n: code if n in TYPES and v in casts.CODES[wide_type] else v for n, v in node.attributes.items()}
            rewritten = replace(graph, nodes=(replace(node, attributes={**absent, **named}),))
            found = evaluate(widened(graph, wide_type), values, Context({}, rng))
            expected = evaluate(rewritten, wide, Context({}, rng))
            for ours, want in zip(found, expected, strict=True):
                if isinstance(ours, list) or ours.dtype == object:
                    continue
                of_float32 = want.dtype == np.float32 != wide_type  # as ai.onnx.ml defines its results
                with case(row):
                    assert ours.dtype == (wide_type if of_float32 else want.dtype)
                    np.testing.assert_allclose(ours, want, rtol=1e-5 if of_float32 else DIGITS, atol=DIGITS)


def test_random_numbers_have_the_digits_of_float64() -> None:
    text = "g (float[8] x) => (float[8] n, float[8] u) { n = RandomNormal<shape = [8]>() u = RandomUniformLike(x) }"
    for y in double(text_model(text))(np.zeros(8, np.float32), rng=0):
        assert y.dtype == np.float64
        assert (np.asarray(y) != np.asarray(y).astype(np.float32)).all()


def test_either_type_goes_in_and_float64_comes_out() -> None:
    model = double(mlp())
    assert {v.type.dtype for v in (*model.inputs, *model.outputs)} == {np.dtype(np.float64)}  # type: ignore[union-attr]
    assert {v.dtype for v in model.params.values()} == {np.dtype(np.float64)}
    for x in (X, X.astype(np.float64), jnp.asarray(X), X.tolist()):
        y = model(x)
        assert y.dtype == np.float64 == model.run(None, {"x": x})[0].dtype
        np.testing.assert_allclose(y, mlp_in_numpy(X), rtol=DIGITS)
    finer = X + 1e-12
    np.testing.assert_allclose(model(finer), mlp_in_numpy(finer), rtol=DIGITS)
    np.testing.assert_allclose(double(mlp(), static={"x": X})(), mlp_in_numpy(X), rtol=DIGITS)
    with pytest.raises(InputTypeError, match="nothing is cast silently"):
        model(X.astype(np.int32))


def test_a_file_of_half_precision_is_computed_in_float64() -> None:
    w = W.astype(np.float16)
    model = double(text_model("g (float16[b, 4] x) => (float16[b, 4] y) { y = MatMul(x, w) }", w=w))
    x = X.astype(np.float16)
    assert model.params["w"].dtype == np.float64
    np.testing.assert_allclose(model(x), x.astype(float) @ w.astype(float), rtol=DIGITS)


HALVES = """g (float16[3, 4] x, float[3, 4] z, bool c) => (float16[3, 4] y, bfloat16[3, 4] b, float[3, 4] f) {
    s = Shape(x)
    third = Constant<value_float = 0.33333>()
    narrow = Cast<to = 10>(third)
    ones = Expand(one, s)
    h = MatMul(x, w)
    chosen = If(c) <then_branch = t () => (float16[3, 4] a) { a = Mul(h, narrow) },
                    else_branch = e () => (float16[3, 4] x) { }>
    y = l.linear(chosen, ones)
    b = Cast<to = 16>(z)
    g = CastLike(z, ones)
    f = Cast<to = 1>(g)
}
<opset_import: ["" : 21], domain: "l">
linear (v, o) => (r) {
    m = Add(v, o)
    r = Tanh(m)
}"""


def test_a_file_of_half_precision_is_computed_in_float32(tmp_path: Path) -> None:
    """Nothing is rounded to 16 bits: inputs, weights, constants, what branches and functions return, casts."""
    proto = text_model(HALVES, w=W.astype(np.float16), one=np.float16(1))
    model = onnx2jax.convert(proto, dtype="float32")
    narrow = X.astype(np.float16)
    third = np.float32(0.33333)
    for x in (X, narrow):
        wide = x.astype(np.float32)
        y, b, f = model(x, X, np.array(True))
        assert {v.dtype for v in (y, b, f, model.params["w"])} == {np.dtype(np.float32)}
        expected = np.tanh(wide @ W.astype(np.float16).astype(np.float32) * third + 1)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal((b, f), (X, X))
    assert {v.type.dtype for v in (*model.inputs[:2], *model.outputs)} == {np.dtype(np.float32)}  # type: ignore[union-attr]
    finer = model.with_params({"w": model.params["w"] * np.float32(1 + 1e-6)})
    saved = onnx2jax.convert(onnx2jax.save(finer, tmp_path / "saved.onnx"))
    assert saved.params["w"].dtype == np.float16  # a file keeps its types
    np.testing.assert_array_equal(saved.params["w"], W.astype(np.float16))


def test_float64_parts_of_a_file_meet_the_others() -> None:
    text = """g (float[b] x, double[b] d) => (float[b] y, double[b] z) {
        e = Cast<to = 11>(x)
        z = Add(e, d)
        f = Cast<to = 1>(z)
        y = Mul(f, x)
    }"""
    x, d = X[0].astype(float), X[1].astype(float) + 1e-12
    y, z = double(text_model(text))(X[0], d)
    np.testing.assert_array_equal(z, x + d)
    np.testing.assert_array_equal(y, (x + d) * x)


CONTROL = """g (float[b, 4] x, bool c, int64 n) => (float[b, 4] y) {
    h = l.linear(x, w)
    chosen = If(c) <then_branch = t () => (float[b, 4] a) { a = MatMul(h, w) },
                    else_branch = e () => (float[b, 4] x) { }>
    kept = l.as_type<to = 10>(chosen)
    y = Loop(n, c, x) <body = body (int64 i, bool go, float[b, 4] s) => (bool again, float[b, 4] t) {
        again = Not(stop)
        t = Add(s, kept)
    }>
}
<opset_import: ["" : 21], domain: "l">
linear (v, weight) => (z) {
    m = MatMul(v, weight)
    z = Tanh(m)
}
<opset_import: ["" : 21], domain: "l">
as_type <to> (v) => (z) {
    z = Cast<to : int = @to>(v)
}"""


def test_branches_loops_and_functions() -> None:
    """A branch returns an input as it is, a loop starts with one, and a function's attribute names the type."""
    model = double(text_model(CONTROL, w=W, stop=np.bool_(False)))
    x, w = X.astype(float), W.astype(float)
    for c in (True, False):
        kept = np.tanh(x @ w) @ w if c else x
        want = x + 3 * kept if c else x
        found = model(X, np.array(c), np.array(3))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=DIGITS)


def test_derivatives() -> None:
    model = double(text_model("g (float[b, 4] x) => (float[b, 4] y) { h = MatMul(x, w) y = Tanh(h) }", w=W))
    x, step = X[0].astype(float), 1e-5

    def score(x: Any) -> Any:
        return (model(x[None]) ** 2).sum()

    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(score))
        hessian = jax.jit(jax.hessian(score))(x)
        rows = [(slope(x + d) - slope(x - d)) / (2 * step) for d in np.eye(4) * step]
        np.testing.assert_allclose(hessian, rows, atol=1e-8)
        by_weight = jax.grad(lambda params: (model.apply(params, X) ** 2).sum())(model.params)
        assert by_weight["w"].dtype == hessian.dtype == np.float64
        batch = jax.vmap(lambda x: model(x[None])[0])(X)
    np.testing.assert_allclose(batch, np.tanh(X.astype(float) @ W.astype(float)), rtol=1e-12)


def test_a_jit_in_32_bits_keeps_values_and_narrows_derivatives() -> None:
    """As for a float64 file: the model computes in double, but JAX casts the caller's arguments."""
    model = double(mlp())
    y, slope = jax.jit(lambda x: (model(x), jax.grad(lambda x: model(x)[0, 0])(x)))(X)
    assert (y.dtype, slope.dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(y, mlp_in_numpy(X), rtol=DIGITS)


def test_nodes_named_in_float32_stay_in_it() -> None:
    model = double(mlp(), float32=["hidden", "act", "head", "bias"])
    found = model(X)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, mlp_in_numpy(X, np.float32), rtol=1e-6)
    np.testing.assert_array_equal(found, found.astype(np.float32))


def test_parameters_keep_their_digits(tmp_path: Path) -> None:
    """In models, pickles and training; a saved file has its own types."""
    model = double(mlp())
    tiny = {n: np.asarray(v) * (1 + 1e-12) for n, v in model.params.items()}
    changed = model.with_params(tiny)
    again = pickle.loads(pickle.dumps(changed))
    for n, v in tiny.items():
        np.testing.assert_array_equal(changed.params[n], v)
        np.testing.assert_array_equal(again.params[n], v)
    for params in (None, tiny):
        saved = onnx2jax.convert(onnx2jax.save(changed, tmp_path / "saved.onnx", params=params))
        assert {v.dtype for v in saved.params.values()} == {np.dtype(np.float32)}
        np.testing.assert_array_equal(saved.params["w1"], tiny["w1"].astype(np.float32))
    back = changed.with_options(dtype=None)
    assert back(X).dtype == back.params["w1"].dtype == np.float32
    given = model.with_params(onnx2jax.convert(mlp()).params)  # the file's type is accepted, and cast
    np.testing.assert_array_equal(given.params["w1"], model.params["w1"])
    assert given.params["w1"].dtype == np.float64


@pytest.mark.usefixtures("standard_promotion")  # optax
@pytest.mark.parametrize("lora", [None, 2])
def test_training_in_float64(lora: int | None, tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    model = double(mlp())
    model = model.with_params({"w1": model.params["w1"] * (1 + 1e-12)})
    options: dict[str, Any] = {"trainable": "w1", "lora": lora, "accumulate": 3}
    tuned = onnx2jax.finetune(model, lambda y, _: (y**2).mean(), optax.sgd(1e-9), **options)
    state, metrics = tuned.step(tuned.init(), {"x": X})
    assert {v.dtype for v in (*state.params.values(), metrics["loss"])} == {np.dtype(np.float64)}
    np.testing.assert_allclose(metrics["loss"], (np.asarray(model(X)) ** 2).mean(), rtol=DIGITS)
    onnx2jax.training.save_checkpoint(tmp_path / "state", state)
    kept, _ = onnx2jax.training.load_checkpoint(tmp_path / "state", state)
    trained = tuned.to_model(kept)
    moved = np.abs(np.asarray(trained.params["w1"]) - model.params["w1"]).max()
    assert trained.params["w1"].dtype == np.float64
    assert moved < 1e-7  # of a step that float32 would round away, or make larger


@pytest.mark.usefixtures("standard_promotion")  # optax
def test_training_a_file_of_half_precision_in_float32() -> None:
    """Its weights start with the digits of float32 and move by less than float16 can tell."""
    optax = pytest.importorskip("optax")
    half = text_model("g (float16[b, 4] x) => (float16[b, 4] y) { y = MatMul(x, w) }", w=W.astype(np.float16))
    model = onnx2jax.convert(half, dtype="float32")
    model = model.with_params({"w": model.params["w"] * np.float32(1 + 1e-6)})
    tuned = onnx2jax.finetune(model, lambda y, _: (y**2).mean(), optax.sgd(1e-5), trainable="w", lora=2)
    state, metrics = tuned.step(tuned.init(), {"x": X})
    assert {v.dtype for v in (*state.params.values(), metrics["loss"])} == {np.dtype(np.float32)}
    np.testing.assert_allclose(metrics["loss"], (np.asarray(model(X)) ** 2).mean(), rtol=1e-6)
    moved = np.abs(tuned.to_model(state).params["w"] - model.params["w"])
    assert 0 < moved.max() < 1e-4


def test_export_and_meshes(tmp_path: Path) -> None:
    model = double(mlp())
    again = onnx2jax.load_exported(model.export(tmp_path / "out", platforms=["cpu"]))
    x = X.astype(np.float64)
    np.testing.assert_allclose(again(x), mlp_in_numpy(X), rtol=DIGITS)
    assert again.params["w1"].dtype == np.float64
    sharded = double(mlp(), mesh=mesh(data=2), shardings={"w1": PartitionSpec(None, "data")})
    assert sharded.weights["w1"].dtype == np.float64
    assert sharded.weights["w1"].sharding.spec == PartitionSpec(None, "data")
    np.testing.assert_allclose(sharded(np.concatenate([X, X])), mlp_in_numpy(np.concatenate([X, X])), rtol=DIGITS)
    np.testing.assert_allclose(double(mlp(), stages=2)(X), mlp_in_numpy(X), rtol=DIGITS)


def test_a_decoder() -> None:
    found = onnx2jax.decoder(double(onnx2jax.demo_decoder())).generate(list(b"nineteen "), 7)
    assert {v.dtype for v in found.cache.values.values()} == {np.dtype(np.float64)}
    assert bytes(found.texts()[0]) == b"twenty "


def test_verify_reads_and_compares_the_numbers_of_the_file() -> None:
    found = double(mlp()).verify(against="onnxruntime", each_node=True)
    assert found.ok, str(found)
    ours, theirs = np.float64([0.1]), np.float32([0.1])
    assert compared("y", ours, theirs, dtype=np.dtype(np.float64)).ok
    assert not compared("y", ours, theirs).ok, "without a compute dtype another type is a difference"
    assert not compared("y", ours + 1e-3, theirs, dtype=np.dtype(np.float64)).ok


def test_bits_of_16_bit_numbers_are_refused() -> None:
    proto = text_model("g (float16[4] x) => (uint16[4] y) { y = BitCast<to = 4>(x) }")
    proto.opset_import[0].version = 26
    with pytest.raises(UnsupportedError, match="no such bits as float64"):
        double(proto)
