"""Repeated layers as a loop, and as calls: what is found, and that results, gradients and errors are the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest

import onnx2jax
from onnx2jax.errors import OperatorError, UnsupportedError
from onnx2jax.ir.layers import repeated
from onnx2jax.model.devices.hlo import collectives
from tests.sharding import networks
from tests.support import decoders
from tests.support.helpers import mesh
from tests.support.models import NP, text_model

WIDTH: Final = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, WIDTH)).astype(np.float32)
MASK = np.triu(np.full((3, 3), -1e9, np.float32), 1)

ATTENTION: Final = """
    n{k} = LayerNormalization <axis = -1> (x{k}, g{k})
    q{k} = MatMul(n{k}, wq{k})  e{k} = MatMul(n{k}, wk{k})  v{k} = MatMul(n{k}, wv{k})
    t{k} = Transpose <perm = [0, 2, 1]> (e{k})  s{k} = MatMul(q{k}, t{k})  m{k} = Add(s{k}, mask)
    p{k} = Softmax(m{k})  c{k} = MatMul(p{k}, v{k})  r{k} = Add(x{k}, c{k})
    u{k} = MatMul(r{k}, wu{k})  h{k} = {activation}(u{k})  d{k} = MatMul(h{k}, wd{k})
    x{next} = Add(r{k}, d{k})
"""
SQUARE = (WIDTH, WIDTH)
SHAPES: Final = {"g": (WIDTH,), "wq": SQUARE, "wk": SQUARE, "wv": SQUARE, "wu": (WIDTH, 16), "wd": (16, WIDTH)}
SMALL: Final = """
    d{k} = MatMul(x{k}, w{k})  h{k} = {activation}(d{k})  s{k} = Mul(h{k}, scale)  x{next} = Add(x{k}, s{k})
"""


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 3).astype(np.float32)


def stack(
    depth: int,
    layer: str = SMALL,
    shapes: Mapping[str, tuple[int, ...]] = {"w": SQUARE},
    *,
    declared: str = "float[b, l, 8] x0, float scale",
    outputs: Mapping[str, str] | None = None,
    odd: Mapping[int, str] | None = None,
    **others: Any,
) -> onnx.ModelProto:
    """A model of ``depth`` layers with weights of their own; ``odd`` are activations of some of them, not Relu."""
    text = "".join(layer.format(k=k, next=k + 1, activation=(odd or {}).get(k, "Relu")) for k in range(depth))
    results = outputs or {f"x{depth}": "float[b, l, 8]"}
    rng = np.random.default_rng(depth)  # so that equal stacks have equal weights, and share their models
    weights: NP = {
        f"{n}{k}": (rng.normal(size=shape) / 3).astype(np.float32) for k in range(depth) for n, shape in shapes.items()
    }
    signature = ", ".join(f"{t} {n}" for n, t in results.items())
    return text_model(f"stack ({declared}) => ({signature}) {{ {text} }}", **weights | others)


How = bool | Literal["calls"]
FORM: Final[dict[How, str]] = {True: "rolled", "calls": "called"}


@pytest.fixture(params=[True, "calls"], ids=["loop", "calls"])
def how(request: pytest.FixtureRequest) -> How:
    """Values of ``scan_layers``."""
    return request.param  # type: ignore[no-any-return]


@cache
def converted(data: bytes, **options: Any) -> onnx2jax.Model:
    return onnx2jax.convert(onnx.load_from_string(data), **options)


def both(proto: onnx.ModelProto, how: How, **options: Any) -> tuple[onnx2jax.Model, onnx2jax.Model]:
    """The model, and the same with its layers rolled: each is shared by the tests of equal files."""
    data = proto.SerializeToString(deterministic=True)
    return converted(data, **options), converted(data, scan_layers=how, **options)


def assert_close(ours: Any, expected: Any, rtol: float = 1e-5) -> None:
    def close(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1e-6, float(np.abs(np.asarray(b)).max(initial=0))))

    jax.tree.map(close, ours, expected)


def rolled(model: onnx2jax.Model) -> list[tuple[int, int]]:
    """For each loop of a model the number of layers, and of nodes in each; that it ran so is in ``explain``."""
    explained = " ".join(model.explain().split())
    assert "not rolled" not in explained and "not called" not in explained, explained
    return [(run.count, len(run.template)) for run in repeated(model.graph)]


def transformer(depth: int) -> onnx.ModelProto:
    return stack(depth, ATTENTION, SHAPES, declared="float[b, l, 8] x0, float[l, l] mask")


def test_a_transformer_matches_unrolled_in_every_kind_of_call(how: How) -> None:
    plain, model = both(transformer(3), how)
    (expected,) = plain.run(None, {"x0": X, "mask": MASK})
    assert_close(model(X, MASK), expected)
    assert_close(model.run(None, {"x0": X, "mask": MASK}), [expected])
    assert_close(jax.jit(jax.vmap(model.apply, (None, 0, None)))(model.params, X[:, None], MASK)[:, 0], expected)
    assert rolled(model) == [(3, 14)]
    assert f"{FORM[how]}: 3 layers of 14 nodes" in " ".join(model.explain().split())


def gradients(model: onnx2jax.Model, *args: Any) -> Any:
    return jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x, *args[1:]) ** 2), (0, 1)))(
        model.params, args[0]
    )


def test_gradients_have_the_names_of_the_file_and_match(how: How) -> None:
    plain, model = both(stack(3), how)
    ours, expected = gradients(model, X, 0.5), gradients(plain, X, 0.5)
    assert ours[0].keys() == plain.params.keys()
    assert_close(ours, expected)


def test_program_size_hardly_grows_with_depth() -> None:
    def sizes(depth: int) -> tuple[int, int]:
        model = onnx2jax.convert(transformer(depth), scan_layers=True)
        traced = jax.jit(model.apply).trace(model.params, X, MASK)
        return len(traced.jaxpr.eqns), traced.lower().as_text().count("stablehlo.dot_general")

    (few, products), (many, also) = sizes(3), sizes(12)
    assert products == also == 6 + 1  # of a layer
    assert many - few <= (12 - 3) * len(SHAPES)  # one to stack each weight


def test_what_is_compiled_has_the_same_size_for_every_depth() -> None:
    def size(depth: int) -> int:
        model = onnx2jax.convert(transformer(depth), scan_layers=True)
        model(X, MASK)
        (subprogram,) = model._runtime.program._compiled.values()  # type: ignore[union-attr]
        (executable,) = subprogram.executables.values()
        hoisted = executable.hoisted(model.weights)
        assert len(hoisted) == len(SHAPES)  # stacked once, outside of the program
        return str(executable._whole.lower(hoisted, [MASK, X]).as_text()).count("\n")

    assert size(3) == size(9)


def test_caches_of_layers_are_inputs_and_outputs(how: How) -> None:
    layer = """
        e{k} = MatMul(x{k}, w{k})  now{k} = Concat <axis = 1> (past{k}, e{k})
        t{k} = Transpose <perm = [0, 2, 1]> (now{k})
        s{k} = MatMul(x{k}, t{k})  p{k} = Softmax(s{k})  c{k} = MatMul(p{k}, now{k})  x{next} = Add(x{k}, c{k})"""
    pasts = ", ".join(f"float[b, p, 8] past{k}" for k in range(3))
    outputs = {"x3": "float[b, l, 8]"} | {f"now{k}": "float[b, t, 8]" for k in range(3)}
    plain, model = both(stack(3, layer, declared=f"float[b, l, 8] x0, {pasts}", outputs=outputs), how)
    given = [normal(2, 2, WIDTH) for _ in range(3)]
    assert_close(tuple(model(X, *given)), tuple(plain(X, *given)))
    assert rolled(model) == [(3, 7)]


def test_packed_weights(how: How) -> None:
    types = {"declared": "float[b, l, 32] x0, float scale", "outputs": {"x3": "float[b, l, 32]"}}
    proto = stack(3, shapes={"w": (32, 32)}, **types)  # type: ignore[arg-type]
    for k in range(3):
        node = proto.graph.node[4 * k]
        packed, scales, _ = decoders.in_four_bits(normal(32, 32), asymmetric=False)
        weights = {f"packed{k}": packed, f"scales{k}": scales}
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in weights.items())
        sizes = {"K": 32, "N": 32, "bits": 4, "block_size": 32}
        operands = [node.input[0], *weights]
        node.CopyFrom(onnx.helper.make_node("MatMulNBits", operands, node.output, domain=decoders.MS, **sizes))
    proto.opset_import.add(domain=decoders.MS, version=1)
    plain, model = both(proto, how)
    x = normal(2, 3, 32)
    assert_close(model(x, 0.5), plain(x, 0.5))
    assert rolled(model) == [(3, 4)]


@pytest.mark.long  # compiles the loops of two decoders
def test_decoders_generate_the_same_tokens() -> None:
    proto = decoders.group_query(layers=3).proto
    plain, model = (onnx2jax.decoder(proto, scan_layers=how) for how in (False, True))
    np.testing.assert_array_equal(*(np.asarray(d.generate([[5, 17, 3]], 4).tokens) for d in (plain, model)))


def test_residual_blocks_of_convolutions(how: How) -> None:
    layer = """a{k} = Conv <pads = [1, 1, 1, 1]> (x{k}, w{k}, b{k})  r{k} = Relu(a{k})
               c{k} = Conv <pads = [1, 1, 1, 1]> (r{k}, v{k}, d{k})  x{next} = Add(x{k}, c{k})"""
    shapes = {"w": (4, 4, 3, 3), "b": (4,), "v": (4, 4, 3, 3), "d": (4,)}
    proto = stack(4, layer, shapes, declared="float[b, 4, 5, 5] x0", outputs={"x4": "float[b, 4, 5, 5]"})
    plain, model = both(proto, how)
    image = normal(2, 4, 5, 5)
    assert_close(model(image), plain(image))
    assert rolled(model) == [(4, 4)]


def test_a_layer_that_differs_divides_a_run(how: How) -> None:
    plain, model = both(stack(7, odd={3: "Tanh"}), how)
    assert_close(model(X, 0.5), plain(X, 0.5))
    assert rolled(model) == [(3, 4), (3, 4)]


def test_values_inside_of_layers_can_be_read_and_replaced(how: How) -> None:
    outputs = {"x4": "float[b, l, 8]", "h1": "float[b, l, 8]", "x2": "float[b, l, 8]"}
    plain, model = both(stack(4, outputs=outputs), how)
    assert_close(tuple(model(X, 0.5)), tuple(plain(X, 0.5)))
    assert rolled(model) == [(4, 4)]
    assert_close(model.values(X, 0.5, names=["s*", "x2"]), plain.values(X, 0.5, names=["s*", "x2"]))
    silent = {"s2": jnp.zeros_like}
    assert_close(tuple(model.replace(silent)(X, 0.5)), tuple(plain.replace(silent)(X, 0.5)))
    part = {"inputs": ["x1"], "outputs": ["x3"]}
    assert_close(model.cut(**part)(x1=X, scale=0.5), plain.cut(**part)(x1=X, scale=0.5))


def test_parameters_tied_between_layers(how: How) -> None:
    """Of all layers, and of two out of three."""
    tied = SMALL.replace("s{k} = Mul(h{k}", "o{k} = MatMul(h{k}, same)  s{k} = Mul(o{k}")
    proto = stack(3, tied, same=normal(*SQUARE))
    for node in proto.graph.node:
        node.input[:] = ["w0" if n == "w1" else n for n in node.input]
    plain, model = both(proto, how)
    assert_close(model(X, 0.5), plain(X, 0.5))
    assert_close(gradients(model, X, 0.5), gradients(plain, X, 0.5))
    changed = {"w0": normal(*SQUARE)}
    assert_close(model.with_params(changed)(X, 0.5), plain.with_params(changed)(X, 0.5))
    assert rolled(model) == [(3, 5)]


def test_shapes_computed_in_layers_stay_known(how: How) -> None:
    layer = """
        f{k} = Shape(x{k})  i{k} = Gather(f{k}, two)  z{k} = Unsqueeze(i{k}, zero)
        o{k} = Concat <axis = 0> (less, z{k})  y{k} = Reshape(x{k}, o{k})  d{k} = MatMul(y{k}, w{k})
        a{k} = Relu(d{k})  r{k} = Reshape(a{k}, f{k})  x{next} = Add(x{k}, r{k})"""
    constants = {"two": np.int64(2), "zero": np.array([0]), "less": np.array([-1])}
    outputs = {"x3": "float[b, l, 8]", "f1": "int64[3]"}
    plain, model = both(stack(3, layer, declared="float[b, l, 8] x0", outputs=outputs, **constants), how)
    ours, expected = model(X), plain(X)
    assert_close(tuple(ours), tuple(expected))
    assert rolled(model) == [(3, 9)]


def test_constants_that_shapes_depend_on_divide_a_run(how: How) -> None:
    layer = """y{k} = Reshape(x{k}, to{k})  d{k} = MatMul(y{k}, w{k})  a{k} = Relu(d{k})
               r{k} = Reshape(a{k}, back)  x{next} = Add(x{k}, r{k})"""
    to = {f"to{k}": np.array([6, 8] if k < 3 else [2, 3, 8]) for k in range(6)}
    proto = stack(6, layer, declared="float[2, 3, 8] x0", back=np.array([2, 3, 8]), **to)
    plain, model = both(proto, how)
    assert_close(model(X), plain(X))
    assert rolled(model) == [(3, 5), (3, 5)]


def test_extents_known_of_one_layer_are_not_taken_for_those_of_others(how: How) -> None:
    """The ends of slices lie 2 apart in two of three layers, computed from a traced start."""
    before = "".join(
        f"c{k} = Add(start, a{k})  lo{k} = Clip(c{k}, none, four)  hi{k} = Add(lo{k}, b{k}) " for k in range(3)
    )
    layer = """t{k} = Slice(table, lo{k}, hi{k}, zero)  u{k} = ReduceSum(t{k}, zero)
               d{k} = MatMul(x{k}, w{k})  r{k} = Relu(d{k})  x{next} = Add(r{k}, u{k})"""
    constants = {f"{n}{k}": np.array([i]) for k in range(3) for n, i in (("a", k), ("b", 2 + k // 2))}
    constants |= {"none": np.int64(0), "four": np.int64(4)}
    proto = text_model(
        "slices (float[3, 8] x0, int64[1] start) => (float[3, 8] x3) {"
        + before + "".join(layer.format(k=k, next=k + 1) for k in range(3)) + "}",
        table=normal(8, WIDTH), zero=np.array([0]), **constants, **{f"w{k}": normal(*SQUARE) for k in range(3)},
    )  # fmt: skip
    plain, model = both(proto, how)
    assert repeated(model.graph)
    start = jnp.array([1], jnp.int32)
    ours, expected = (jax.jit(m.apply)(m.params, X[0], start) for m in (model, plain))
    assert_close(ours, expected)
    assert f"not {FORM[how]}: 3 layers of 5 nodes" in " ".join(model.explain().split())


def test_layers_of_growing_values_run_unrolled(how: How) -> None:
    layer = "d{k} = MatMul(x{k}, w{k})  a{k} = Relu(d{k})  x{next} = Concat <axis = 1> (x{k}, a{k})"
    plain, model = both(stack(4, layer, declared="float[b, l, 8] x0"), how)
    assert_close(model(X), plain(X))
    explained = " ".join(model.explain().split())
    if how == "calls":  # each of a program of its own
        assert "called: 4 layers of 3 nodes" in explained
    else:
        assert "not rolled: 4 layers of 3 nodes" in explained
        assert "float32[2,3,8]" in explained


def test_an_error_names_the_node_of_its_own_layer() -> None:
    layer = SMALL.replace("h{k} =", "m{k} = Add(d{k}, b{k})  h{k} =").replace("(d{k})", "(m{k})")
    declared = "float[b, l, 8] x0, float scale, float[n] b0, float[n] b1, float[m] b2"
    model = onnx2jax.convert(stack(3, layer, declared=declared), scan_layers=True)
    with pytest.raises(OperatorError, match="d2: float32"):
        model(X, 0.5, *(np.ones(n, np.float32) for n in (8, 8, 7)))


def test_nothing_to_roll_is_an_error_with_the_first_difference() -> None:
    with pytest.raises(UnsupportedError, match=r"the operators of node .*Relu.* and node .*Tanh.* differ"):
        onnx2jax.convert(stack(2, odd={1: "Tanh"}), scan_layers=True)


def test_layers_that_draw_random_numbers_stay_unrolled() -> None:
    layer = SMALL.replace("s{k} =", "z{k} = RandomNormalLike(h{k})  s{k} =").replace("Mul(h{k}", "Mul(z{k}")
    with pytest.raises(UnsupportedError):
        onnx2jax.convert(stack(3, layer), scan_layers=True)


def test_files_and_exports_are_those_of_layers(how: How, tmp_path: Path) -> None:
    plain, model = both(stack(3), how)
    changed = model.with_params({"w1": normal(*SQUARE)})
    onnx2jax.save(changed, tmp_path / "model.onnx")
    again = onnx2jax.convert(tmp_path / "model.onnx")
    assert [n.op_type for n in again.graph.nodes] == [n.op_type for n in plain.graph.nodes]
    expected = changed(X, 0.5)
    assert_close(again(X, 0.5), expected)
    changed.export(tmp_path / "exported", dims={"l": 3})
    assert_close(onnx2jax.load_exported(tmp_path / "exported")(X, np.float32(0.5)), expected)


def test_compute_dtype(how: How) -> None:
    plain, model = both(stack(6), how, dtype="bfloat16")
    assert_close(model(X, 0.5), plain(X, 0.5), 2e-2)
    assert rolled(model) == [(4, 4)]  # the first reads an input, and the last computes an output: in float32


def test_64_bits(how: How) -> None:
    double = SMALL.replace("MatMul(x{k}, w{k})", "MatMul(x{k}, w{k})  q{k} = Shape(x{k})")
    with jax.enable_x64(True):
        plain, model = both(stack(3, double), how)
        assert_close(model(X, 0.5), plain(X, 0.5))
        assert rolled(model) == [(3, 5)]


def test_finetuning_matches_unrolled_and_recomputes_layers(how: How) -> None:
    tuned = []
    for model in both(stack(3), how):
        remat = bool(model.settings.scan_layers)
        training = onnx2jax.finetune(model, lambda y, _: jnp.mean(y**2), optax.sgd(0.1), remat=remat)
        state, _ = training.step(training.init(), {"x0": X, "scale": np.float32(0.5)})
        tuned.append(training.params(state))
    assert_close(tuned[1], tuned[0])
    batch = {"x0": X, "scale": np.float32(0.5)}
    with jax.enable_x64(True):
        assert "remat" in str(jax.make_jaxpr(training._train_step)(training.init(), training._frozen, batch))


@pytest.mark.parametrize(
    ("plan", "axes"),
    [("tensor", {"model": 2}), pytest.param("fsdp", {"data": 4}, marks=pytest.mark.extended)],
)
def test_a_mesh_has_the_collectives_of_one_layer(plan: str, axes: dict[str, int]) -> None:
    written = networks.bert()
    counts, outputs = list[int](), list[Any]()
    for how in (False, True):
        model = onnx2jax.convert(written.proto, mesh=mesh(**axes), shardings=plan, scan_layers=how)
        assert model.placement is not None
        with jax.enable_x64(True):
            operands = model.placement.put_params(model.params), model.placement.put_inputs(written.inputs)
            program = (
                jax.jit(lambda params, inputs, model=model: model.apply(params, **inputs)).lower(*operands).compile()
            )
            counts.append(len(list(collectives(program.as_text()))))
            outputs.append(jax.tree.leaves(program(*operands)))
    assert_close(*outputs[::-1])
    assert counts[1] <= counts[0] // networks.LAYERS + 2
