"""``model.to_source``: a module that computes what the model computes, as a person would write it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import pytest

import onnx2jax
from onnx2jax.errors import KnownValueError, UnsupportedError
from onnx2jax.model.source.calls import SUPPLIED
from onnx2jax.ops.description import FIXTURES
from tests.support.helpers import ROOT
from tests.support.random_blocks import random_network

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model, and what its source has to show.

    Attributes:
        text: in ONNX's text form, after the header.
        inputs: in order.
        contains: lines, or parts of them.
        lacks: what folds, or is nobody's business.
        weights: initializers that the text cannot hold.
        differentiable: whether reverse mode works.
        mapped: whether ``vmap`` over a new axis of all inputs is compared.
    """

    text: str
    inputs: tuple[np.ndarray, ...]
    contains: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    differentiable: bool = True
    mapped: bool = True
    key: bool = False

    @property
    def proto(self) -> onnx.ModelProto:
        header = '<ir_version: 10, opset_import: ["" : 22, "local" : 1]>\n'
        proto = onnx.parser.parse_model(header + self.text)
        for name, value in self.weights.items():
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        return proto


LAYERS = "\n".join(
    f"""a{i} = MatMul(x{i}, "encoder.{i}.query.weight") b{i} = Add(a{i}, "encoder.{i}.query.bias")
    c{i} = Softmax(b{i}) d{i} = Mul(c{i}, shared) e{i} = Tanh(d{i}) f{i} = Identity(e{i}) x{i + 1} = Add(x{i}, f{i})"""
    for i in range(4)
)
CASES = {
    "plain": Case(
        """plain (float[batch, 3, 8, 8] image) => (float[batch, 5] scores) <float two = {2}> {
        c = Conv<pads = [1, 1, 1, 1]>(image, "conv.weight", "conv.bias")
        r = Relu(c) p = GlobalAveragePool(r) d = Dropout(p) s = Shape<end = 1>(d) m = Constant<value_ints = [-1]>()
        t = Concat<axis = 0>(s, m) f = Reshape(d, t) g = Gemm<transB = 1>(f, "fc.weight", "fc.bias")
        k = Constant<value_float = 0.5>() h = Mul(g, k) unused = Exp(h) scores = Softmax(h) }""",
        (normal(2, 3, 8, 8),),
        (
            'conv(image, params["conv.weight"], params["conv.bias"], pads=(1, 1, 1, 1))',
            "nn.relu(",
            ".mean(axis=(2, 3), keepdims=True)",
            ".reshape(batch, 4)",
            '@ params["fc.weight"].T + params["fc.bias"]',
            "* 0.5",
            "scores = nn.softmax(",
            "    batch = image.shape[0]",
        ),
        ("Dropout", "shape(d", "jnp.exp", "in_64_bits", "concat"),
        {"conv.weight": normal(4, 3, 3, 3), "conv.bias": normal(4), "fc.weight": normal(5, 4), "fc.bias": normal(5)},
    ),
    "repeated layers": Case(
        f"layers (float[n, 6] x0) => (float[n, 6] x4, float[n, 6] e1) <float shared = {{3}}> {{ {LAYERS} }}",
        (normal(2, 6),),
        (
            "for i in range(4):",
            'params[f"encoder.{i}.query.weight"]',
            "def encoder(params, i, x1):",
            "return Outputs(",
        ),
        ("encoder.0",),
        {f"encoder.{i}.query.{n}": normal(*s) for i in range(4) for n, s in (("weight", (6, 6)), ("bias", (6,)))},
    ),
    "sigmoid linear units": Case(
        """silu (float[n] x) => (float[n] y, float[n] z) { a = Sigmoid(x) b = Mul(x, a) c = Sigmoid(b) d = Mul(c, b)
        y = Add(c, d) z = Sigmoid(y) w = Mul(y, z) unused = Relu(w) }""",
        (normal(3),),
        ("nn.silu(x)", "c = nn.sigmoid(b)", "z = nn.sigmoid(y)", " * "),
    ),
    "a traced condition": Case(
        """branches (float[n] x, bool c) => (float[n] y) { y = If(c)
        <then_branch = t () => (float[n] a) { a = Mul(x, w) },
         else_branch = e () => (float[n] b) { r = Relu(x) b = Neg(r) }> }""",
        (normal(3), np.array(True)),
        (
            "lax.cond(c, then_branch, else_branch)",
            "def then_branch():",
            "        r = nn.relu(x)",
            "JAX traces both branches of If 'y'.",
            "convert(..., static={'c': value}).",
        ),
        weights={"w": normal(3)},
    ),
    "a known condition": Case(
        """known (float[n] x) => (float[n] y) { s = Shape(x) r = Size(s) one = Constant<value_int = 1>()
        c = Equal(r, one) y = If(c)
        <then_branch = t () => (float[n] a) { a = Exp(x) }, else_branch = e () => (float[n] b) { b = Log(x) }> }""",
        (normal(3),),
        ("y = jnp.exp(x)",),
        ("log", "cond", "in_64_bits", "both branches"),
    ),
    "a counted loop": Case(
        """counted (float[2] x) => (float[2] y, float[k, 2] rows) {
        n = Constant<value_int = 3>() yes = Constant<value = bool {1}>()
        y, rows = Loop(n, yes, x) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] t, float[2] row)
        { on = Identity(go) f = Cast<to = 1>(i) u = Mul(s, w) t = Add(u, f) row = Sin(t) }> }""",
        (normal(2),),
        ("def body(s, step):", "lax.scan(body, x, np.arange(3))", "return t, "),
        weights={"w": normal(2)},
    ),
    "trips that extents decide": Case(
        """extents (float[k, m] x) => (float[n, k, m] rows) {
        s = Shape(x) most = ReduceMax<keepdims = 0>(s) yes = Constant<value = bool {1}>()
        y, rows = Loop(most, yes, x) <body = b (int64 i, bool go, float[k, m] s) =>
        (bool on, float[k, m] t, float[k, m] row) { on = Identity(go) t = Sin(s) row = Cos(s) }> }""",
        (normal(2, 3),),
        ("lax.scan(body, x, np.arange(int(most)))",),
    ),
    "a loop until": Case(
        """until (float x) => (float y) {
        n = Constant<value_int = 9>() big = Constant<value_float = 50.0>() go = Less(x, big)
        y = Loop(n, go, x) <body = b (int64 i, bool cond, float s) => (bool on, float t)
        { t = Add(s, s) on = Less(t, big) }> }""",
        (np.float32(3),),
        ("lax.while_loop(keep_going, body, (np.int64(0), go, x))",),
        differentiable=False,
    ),
    "a scan": Case(
        """scanned (float[2] s, float[4, 2] xs) => (float[2] last, float[4, 2] sums) {
        last, sums = Scan<num_scan_inputs = 1, scan_input_directions = [1], body = b (float[2] a, float[2] x) =>
        (float[2] c, float[2] d) { p = Mul(a, w) c = Add(p, x) d = Tanh(c) }>(s, xs) }""",
        (normal(2), normal(4, 2)),
        ("lax.scan(body, s, jnp.flip(xs, 0))",),
        weights={"w": normal(2)},
    ),
    "functions": Case(
        """called (float[n, 4] x) => (float[n, 4] y) {
        a = local.Scaled<alpha = 2.0>(x, w) b = local.Scaled<alpha = 2.0>(a, w) y = local.Scaled<alpha = 3.0>(b, w) }
        <domain: "local", opset_import: ["" : 22]> Scaled<alpha>(v, by) => (z) {
        k = Constant<value_float: float = @alpha>() m = Mul(v, k) z = MatMul(m, by) }""",
        (normal(2, 4),),
        ("def scaled(v, by):", "def scaled_2(v, by):", "y = scaled_2("),
        ("def scaled_3",),
        {"w": normal(4, 4)},
    ),
    "optional inputs and outputs of extents": Case(
        """optional (float[batch, tokens] x, float[1] scale) => (float[batch, tokens] y, int64[2] shape)
        <float[1] scale = {2}> { y = Mul(x, scale) shape = Shape(y) }""",
        (normal(2, 3),),
        ("scale: jax.Array | None = None", "is None else", "batch, tokens = x.shape", "np.array((batch, tokens))"),
    ),
    "int64 values": Case(
        """wide (int64[batch, tokens] ids) => (float[batch, tokens, 4] y, int64[batch, tokens] z) {
        table = Gather(w, ids) big = Constant<value_int = 1099511627776>() z = Mul(ids, big) s = Shape(ids)
        m = Constant<value_ints = [-1, 4]>() f = Reshape(table, m)
        d = Constant<value_ints = [4]>() t = Concat<axis = 0>(s, d)
        y = Reshape(f, t) }""",
        (np.array([[1, 2, 0]], np.int32),),
        ("@in_64_bits", "ids = jnp.asarray(ids, jnp.int64)", "jnp.take(params[", ".reshape(batch, tokens, 4)"),
        weights={"w": normal(3, 4)},
    ),
    "half precision": Case(
        """half (float16[2, 4] x) => (float16[2, 4] y) { a = MatMul(x, w) b = Sigmoid(a) y = Softmax(b) }""",
        (normal(2, 4).astype(np.float16),),
        ('resolve("", "Softmax", 13).function',),
        weights={"w": normal(4, 4).astype(np.float16)},
    ),
    "random numbers": Case(
        """drawn (float[3] x) => (float[3] y) { r = RandomNormalLike(x) y = Add(x, r) }""",
        (normal(3),),
        ("rng: jax.Array", "rng=jax.random.fold_in(rng, "),
        mapped=False,
        key=True,
    ),
}


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of all cases."""
    folder = tmp_path_factory.mktemp("sources")
    for name, case in CASES.items():
        onnx2jax.convert(case.proto).to_source(folder / name)
    return folder


def measured(function: Any, case: Case, params: Any, inputs: Any) -> Any:
    """Outputs, gradients with respect to parameters and inputs, and outputs for a batch of calls."""
    key = {"rng": jax.random.key(3)} if case.key else {}

    def outputs(params: Any, *inputs: Any) -> list[Any]:
        return jax.tree.leaves(function(params, *inputs, **key))

    def loss(moving: Any) -> Any:
        given = iter(moving[1])
        values = [next(given) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in inputs]
        floating = (v for v in outputs(moving[0], *values) if jnp.issubdtype(v.dtype, jnp.floating))
        return sum(jnp.sum(jnp.cos(v.astype(jnp.float32))) for v in floating)

    moving = params, [x for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
    gradient = jax.grad(loss)(moving) if case.differentiable else None
    several = [jnp.stack([x, x]) for x in inputs]
    mapped = jax.vmap(outputs, (None, *[0] * len(inputs)))(params, *several) if case.mapped else None
    return outputs(params, *inputs), gradient, mapped


@pytest.mark.parametrize("name", CASES)
def test_source_computes_what_the_model_computes(name: str, folder: Path) -> None:
    """In 32-bit mode, under jit, grad and vmap; one compilation for both."""
    case, model = CASES[name], onnx2jax.convert(CASES[name].proto)
    text = (folder / name / "model.py").read_text()
    assert [part for part in case.contains if part not in text] == [], text
    assert [part for part in case.lacks if part in text] == [], text
    module = imported(folder / name / "model.py")
    params = module.load_params()
    assert {n: (v.dtype, v.shape) for n, v in params.items()} == {n: (t.dtype, t.shape) for n, t in model.types.items()}
    inputs = [jnp.asarray(x) for x in case.inputs]
    ours, theirs = jax.jit(lambda p, x: [measured(f, case, p, x) for f in (module.model, model.apply)])(params, inputs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=1e-6)


def test_source_is_formatted_as_ruff_does(folder: Path) -> None:
    """The default rules of this repository, and isort's for a project that has the package installed."""
    ruff, config = Path(sys.executable).with_name("ruff"), f"--config={ROOT / 'pyproject.toml'}"
    for command in (
        ["format", "--diff"],
        ["check", "--ignore=ARG001", "--config=lint.isort.known-third-party=['onnx2jax']"],
    ):
        done = subprocess.run([ruff, *command, config, folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


BRANCHES = """r (bool c, float[{}] x) => (float[m] y) {{ y = If(c) <then_branch = t () => (float[a] u) {{ u = Neg(x) }},
    else_branch = e () => (float[b] v) {{ v = Concat<axis = 0>(x, x) }}> }}"""
REJECTED = {
    "a shape that depends on values": ("r (float[4] x) => (int64[k, n] y) { y = NonZero(x) }", "NonZero"),
    "strings": ("r (string[2] x) => (string[2] y) { y = Identity(x) }", "takes arrays of numbers"),
    "random numbers in each trip": (
        """r (float[2] x) => (float[2] y) { n = Constant<value_int = 3>() yes = Constant<value = bool {1}>()
        y = Loop(n, yes, x) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] t)
        { on = Identity(go) r = RandomNormalLike(s) t = Add(s, r) }> }""",
        "random numbers in each trip",
    ),
    "trips that are computed, with an output of each": (
        """r (int64 n, float[2] x) => (float[2] y, float[k, 2] rows) { yes = Constant<value = bool {1}>()
        y, rows = Loop(n, yes, x) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] t, float[2] row)
        { on = Identity(go) t = Add(s, s) row = Identity(t) }> }""",
        "number of its trips is computed from inputs",
    ),
    "branches of different extents": (BRANCHES.format("4"), r"static={'c': value}"),
    "branches of different free extents": (BRANCHES.format("n"), r"different shapes or dtypes; fix its condition"),
    "strings in a branch": (
        """r (bool c, float[4] x) => (float[4] y) { y = If(c) <then_branch = t () => (float[4] u)
        { s = Cast<to = 8>(x) u = Cast<to = 1>(s) }, else_branch = e () => (float[4] v) { v = Neg(x) }> }""",
        r"node 's' \(Cast.*JAX has no strings\. The model runs the node on the host",
    ),
    "strings inside": ("r (float[4] x) => (float[4] y) { s = Cast<to = 8>(x) y = Cast<to = 1>(s) }", "node 's'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_has_no_source_is_named(name: str) -> None:
    text, message = REJECTED[name]
    with pytest.raises(UnsupportedError, match=message):
        _ = onnx2jax.convert(Case(text, ()).proto).source


def test_a_branch_that_does_not_fit_raises_with_the_fix(tmp_path: Path) -> None:
    """As a network for 16 and 8 kHz, of which both branches are in the file."""
    text = """rates (float[n, k] x, int64 rate) => (float[n, 2] y) { sixteen = Constant<value_int = 16>()
    c = Equal(rate, sixteen) y = If(c) <then_branch = t () => (float[n, 2] a) { a = MatMul(x, wide) },
    else_branch = e () => (float[n, 2] b) { b = MatMul(x, narrow) }> }"""
    proto = Case(text, (), weights={"wide": normal(4, 2), "narrow": normal(3, 2)}).proto
    x, rate = normal(1, 4), np.int64(16)
    module = imported(onnx2jax.convert(proto).to_source(tmp_path / "both"))
    with pytest.raises(Exception, match=r"matmul|dot") as caught:
        module.model(module.load_params(), x, rate)
    assert any("convert(..., static={'rate': value}).to_source(folder)" in note for note in caught.value.__notes__)
    with pytest.raises(
        KnownValueError, match=r"condition is traced\n.*'rate': convert\(\.\.\., static=\{'rate': value\}\)"
    ):
        jax.jit(onnx2jax.convert(proto))(x, rate)
    model = onnx2jax.convert(proto, static={"rate": rate})
    module = imported(model.to_source(tmp_path / "one"))
    np.testing.assert_allclose(module.model(module.load_params(), x), jax.jit(model)(x), rtol=1e-5)


def test_a_large_default_of_an_input_is_saved(tmp_path: Path) -> None:
    text = "taken (float[30] x, int64[30] k) => (float[30] y) { y = Gather(x, k) }"
    model = onnx2jax.convert(Case(text, (), weights={"k": RNG.permutation(30)}).proto)
    module, x = imported(model.to_source(tmp_path)), normal(30)
    assert 'k = CONSTANTS["k"] if k is None else jnp.asarray(k, jnp.int64)' in model.source
    np.testing.assert_array_equal(module.model({}, x), model(x))


def test_types_that_safetensors_lacks_are_restored(tmp_path: Path) -> None:
    text = """packed (float[2, 4] x) => (float[2, 4] y) <float s = {0.5}>
    { w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    weights = {"q": np.arange(-8, 8).reshape(4, 4).astype("int4")}
    model = onnx2jax.convert(Case(text, (), weights=weights).proto)
    module = imported(model.to_source(tmp_path))
    x = normal(2, 4)
    np.testing.assert_allclose(module.model(module.load_params(), x), model(x), rtol=1e-5)


def test_a_decoder_has_a_loop_and_lists_of_caches(tmp_path: Path) -> None:
    model = onnx2jax.convert(onnx2jax.demo_decoder())
    module = imported(model.to_source(tmp_path))
    assert "for i in range(2):" in model.source and "past_key_values_keys[i]" in model.source
    past = [np.zeros((1, 2, 0, 16), np.float32)] * 4
    inputs = [np.array([[5, 6, 7]]), np.ones((1, 3), np.int64), *past]
    for ours, theirs in zip(module.model(module.load_params(), *inputs), model(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_random_networks_and_their_source_agree(tmp_path: Path) -> None:
    """Two programs for each network, compiled as one; their text is formatted, too."""
    for seed in range(40):
        proto, net = random_network(seed)
        model = onnx2jax.convert(proto)
        module = imported(model.to_source(tmp_path / f"network{seed}"))
        x = np.random.default_rng(seed).normal(size=(3, *net.shape("x")[1:])).astype(np.float32)
        both = jax.jit(lambda p, x, m=model, w=module: [jax.tree.leaves(f(p, x)) for f in (w.model, m.apply)])
        for ours, theirs in zip(*both(module.load_params(), x), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "format", "--diff", f"--config={ROOT / 'pyproject.toml'}", tmp_path], capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()


def test_what_a_line_cannot_supply() -> None:
    """Another fixture needs a default that is right in a module, or an entry here: without, operators have no form."""
    of_graphs = {"max_trips", "loop_cond", "derivatives", "compiled", "forward_only"}
    assert of_graphs == FIXTURES - SUPPLIED


LINES: Final = {
    "Affine": "y = Affine <alpha = 2.0, beta = 1.0> (x)",
    "Crop": "y = Crop <border = [1, 1, 1, 1]> (x)",
    "ImageScaler": "y = ImageScaler <bias = [0.5, 1.0, 1.5, 2.0], scale = 2.0> (x)",
}
"""Nodes of opset 1."""
SPELT: Final = {
    "DepthToSpace": "y = DepthToSpace <blocksize = 2> (x)",
    "Equal": "b = Equal(x, x)  y = Cast <to = 1> (b)",
    "Flatten": "y = Flatten(x)",
    "Greater": "a = Neg(x)  b = Greater(x, a)  y = Cast <to = 1> (b)",
    "LpPool": "y = LpPool <kernel_shape = [2, 2]> (x)",
    "Max": "a = Neg(x)  y = Max(x, a)",
    "Mean": "a = Neg(x)  y = Mean(x, a, a)",
    "Min": "a = Neg(x)  y = Min(x, a)",
    "PRelu": "a = Neg(x)  y = PRelu(x, a)",
    "SpaceToDepth": "y = SpaceToDepth <blocksize = 2> (x)",
    "Sum": "a = Exp(x)  y = Sum(x, a, x)",
}
PLAIN: Final = (
    "Celu Elu Erf GlobalAveragePool GlobalLpPool GlobalMaxPool LeakyRelu LogSoftmax LpNormalization "
    "MeanVarianceNormalization Mish ReduceMax ReduceMean ReduceSum Selu Softplus Softsign"
)


def test_modules_without_64_bits_compute_the_same() -> None:
    lines = LINES | SPELT | {n: f"y = {n}(x)" for n in PLAIN.split()}
    models, sources = {}, {}
    for name, line in lines.items():
        opset = 1 if name in LINES else 22
        text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[1, 4, 4, 4] x) => (y) {{ {line} }}'
        models[name] = onnx2jax.convert(onnx.parser.parse_model(text))
        assert "in_64_bits" not in models[name].source
        names: dict[str, Any] = {"__file__": "model.py"}
        exec(str(models[name].source), names)
        sources[name] = names["model"]
    x = normal(1, 4, 4, 4)
    found = jax.jit(lambda x: {n: source({}, x) for n, source in sources.items()})(x)
    wanted = jax.jit(lambda x: {n: model(x) for n, model in models.items()})(x)
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)
        assert value.dtype == wanted[name].dtype
