"""Every differentiable operator under transformations by the caller, with x64 off and on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.ir import binding
from onnx2jax.ops import registry
from tests.ops import test_gradients
from tests.ops.test_microsoft import CASES as OF_MICROSOFT
from tests.ops.test_microsoft import MICROSOFT
from tests.support.cases import parse
from tests.support.models import model, value
from tests.support.tiers import extended, groups
from tests.support.violations import every_case
from tests.tables.operators import f

F32 = np.dtype(np.float32)
ML = "ai.onnx.ml"


class Case(NamedTuple):
    """A model and float32 values for its inputs; its other operands are constants."""

    key: tuple[str, str]
    proto: onnx.ModelProto
    inputs: list[np.ndarray]


def one_node(
    name: str, operands: Any, *, domain: str = "", opset: int | None = None, n_outputs: int = 1, **attributes: Any
) -> Case:
    """A model of one operator on table operands, floating ones as float32, others constant if required."""
    version = opset or binding.NEWEST.get(domain, 1)
    operator = registry.resolve(domain, name, version)
    assert operator is not None
    moving: dict[str, np.ndarray] = {}
    constants: dict[str, np.ndarray] = {}
    for i, x in enumerate(operands):
        array = x.value if isinstance(x, test_gradients.Fixed) else x
        if array is None:
            continue
        known = array is not x or array.dtype.kind != "f" or operator.parameter(i) in operator.static
        (constants if known else moving)[f"x{i}"] = array.astype(F32) if array.dtype.kind == "f" else array
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    outputs = [f"y{i}" for i in range(n_outputs)]
    node = helper.make_node(name, names, outputs, domain=domain, **attributes)
    proto = model(
        [node],
        [value(n, x.dtype, x.shape) for n, x in moving.items()],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        constants,
        **({"opsets": {domain: version}} if domain else {"opset": version}),
    )
    return Case((domain, name), proto, list(moving.values()))


X, Y = f(3, 4), f(3, 4, seed=1)
SVM = {"kernel_type": "RBF", "kernel_params": [0.5, 0.0, 0.0], "n_supports": 2, "coefficients": [1.0, -1.0]}
STEP = {"domain": "ai.onnx.preview.training", "norm_coefficient": 0.1}
MORE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(
        (name, (X,), {})
        for name in ("Ceil", "EyeLike", "Floor", "Round", "Sign", "RandomNormalLike", "RandomUniformLike")
    ),
    ("DequantizeLinear", (np.int8([[1, 2], [3, 4]]), f(2) ** 2), {"axis": 0}),
    ("BitCast", (X,), {"to": onnx.TensorProto.FLOAT}),
    ("FlexAttention", (f(1, 2, 3, 4), f(1, 2, 5, 4), f(1, 2, 5, 4)), {"domain": "ai.onnx.preview"}),
    ("Adagrad", (f(), np.array(2), X, Y, X**2), {"n_outputs": 2, **STEP}),
    ("Adam", (f(), np.array(2), X, Y, Y, X**2), {"n_outputs": 3, **STEP}),
    ("Momentum", (f(), np.array(2), X, Y, Y), {"n_outputs": 2, "alpha": 0.9, "beta": 0.5, "mode": "nesterov", **STEP}),
    ("Imputer", (X,), {"domain": ML, "imputed_value_floats": [1.0], "replaced_value_float": 7.0}),
    ("SVMRegressor", (X,), {"domain": ML, "rho": [0.25], "support_vectors": f(8).tolist(), **SVM}),
]
"""Rows that other tables lack."""

GRAPHS: dict[str, str] = {
    "If": """c = Constant<value = bool {1}>()
        y = If(c) <then_branch = a () => (float[3, 4] p) { p = Sin(x0) },
                   else_branch = b () => (float[3, 4] q) { q = Cos(x1) }>""",
    "Loop": """n = Constant<value = int64 {3}>() t = Constant<value = bool {1}>()
        s, y = Loop(n, t, x0) <body = b (int64 i, bool go, float[3, 4] u) => (bool on, float[3, 4] r, float[3, 4] o)
            { on = Identity(go) r = Mul(u, x1) o = Sin(r) }>""",
    "Scan": """z = Constant<value = int64 {0}>() first = Gather(x0, z)
        s, y = Scan<num_scan_inputs = 1, body = b (float[4] u, float[4] e) => (float[4] r, float[4] o)
            { r = Mul(u, e) o = Sin(r) }>(first, x1)""",
    "SequenceAt": "i = Constant<value = int64 {-1}>() s = SequenceConstruct(x0, x1) y = SequenceAt(s, i)",
    "SequenceErase": """i = Constant<value = int64 {0}>() s = SequenceConstruct(x0, x1) e = SequenceErase(s, i)
        y = ConcatFromSequence<axis = 0>(e)""",
    "SequenceInsert": """i = Constant<value = int64 {0}>() s = SequenceConstruct(x0) e = SequenceInsert(s, x1, i)
        y = ConcatFromSequence<axis = 0>(e)""",
    "ConcatFromSequence": "s = SequenceConstruct(x0, x1) y = ConcatFromSequence<axis = 1, new_axis = 1>(s)",
    "SequenceMap": """s = SequenceConstruct(x0, x1)
        e = SequenceMap(s) <body = b (float[3, 4] p) => (float[3, 4] q) { q = Sin(p) }>
        y = ConcatFromSequence<axis = 0>(e)""",
    "Optional": "o = Optional(x0) p = OptionalGetElement(o) y = Mul(p, x1)",
    "OptionalGetElement": "p = OptionalGetElement(x0) y = Mul(p, x1)",
}

REASONS: dict[str, tuple[str, ...]] = {
    "its result is drawn or chosen, not computed": ("Bernoulli", "LabelEncoder", "OneHotEncoder"),
    "trees are steps": ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    "its floating inputs decide shapes or a table, and are known": ("Range", "MelWeightMatrix"),
    "its shape depends on data": ("NonZero", "Unique"),
    "it is a gradient: tests/training/test_gradient.py": ("Gradient",),
    "its scores are those of SVMRegressor": ("SVMClassifier",),
    "it is made of quantised numbers": ("DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear"),
    "withdrawn before opset 7": ("Affine", "Crop", "GivenTensorFill", "ImageScaler", "ParametricSoftplus", "Scale"),
    "withdrawn": ("ScaledTanh",),
}
"""Operators from floats to floats that are not differentiated."""
REASONS_OF_MICROSOFT = {
    "QGemm": "quantised results",
    "QLinearConcat": "quantised results",
    "QLinearLeakyRelu": "quantised results",
    "Unique": "its shape depends on data",
}


def cases() -> Iterator[tuple[str, Case]]:
    for i, (name, operands, attributes) in enumerate((*test_gradients.TABLE, *MORE)):
        yield f"{name}-{i}", one_node(name, operands, **attributes)
    for row in test_gradients.gradient_rows():
        if test_gradients.WITHOUT.get(row.key) == "integers":
            continue
        options = {"domain": row.domain, "opset": row.opsets()[-1], "n_outputs": row.outputs, **row.attributes}
        yield row.name, one_node(row.name, row.inputs, **options)
    for i, (name, operands, n_outputs, attributes) in enumerate(OF_MICROSOFT):
        case = one_node(name, operands, domain=MICROSOFT, n_outputs=n_outputs, **attributes)
        if case.inputs and name not in REASONS_OF_MICROSOFT:
            yield f"{name}-{MICROSOFT}-{i}", case
    for name, body in GRAPHS.items():
        proto = parse(f"g (float[3, 4] x0, float[3, 4] x1) => (float y) {{ {body} }}")
        yield f"{name}-graph", Case(("", name), proto, [X, Y])


CASES = dict(cases())
FIRST = {case.key: name for name, case in reversed(CASES.items()) if case.key[0] != MICROSOFT}
"""One case for each operator of ONNX."""


def total(case: Case) -> Callable[[list[Any]], Any]:
    """The sum of squares of all floating results, which has second derivatives."""
    converted = onnx2jax.convert(case.proto)
    options = {"rng": jax.random.key(0)} if converted.graph.draws else {}

    def loss(xs: list[Any]) -> Any:
        results = jax.tree.leaves(converted(*xs, **options))
        return sum((y.astype(F32) ** 2).sum() for y in results if jnp.issubdtype(y.dtype, jnp.floating))

    return loss


def of_gradient(loss: Any) -> Any:
    return lambda xs: sum((g**2).sum() for g in jax.grad(loss)(xs))


TRANSFORMATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda loss, xs: jax.grad(loss)(xs),
    "vjp": lambda loss, xs: jax.vjp(loss, xs)[1](np.float32(1)),
    "jvp": lambda loss, xs: jax.jvp(loss, (xs,), (xs,)),
    "vmap(grad)": lambda loss, xs: jax.vmap(jax.grad(loss))([jnp.stack([x, x]) for x in xs]),
    "grad(grad)": lambda loss, xs: jax.grad(of_gradient(loss))(xs),
    "jit(grad)": lambda loss, xs: jax.jit(jax.grad(loss))(xs),
    "jvp of grad": lambda loss, xs: jax.jvp(jax.grad(loss), (xs,), (xs,)),
    "vmap(jvp of grad)": lambda loss, xs: jax.vmap(lambda xs: jax.jvp(jax.grad(loss), (xs,), (xs,)))(
        [jnp.stack([x, x]) for x in xs]
    ),
}


OUTER = ("jvp", "vmap(jvp of grad)")
"""Transformations that contain all others but ``grad(grad)``: what goes wrong in a trace shows in those around it."""
TWICE = {("", name) for name in ("Conv", "Einsum", "Gather", "If", "MaxPool", "Mul", "ReduceProd", "Scan", "Softmax")}
"""Operators whose second derivative in reverse mode is of the main tier."""


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == F32
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, 1e-4, 1e-4 * np.abs(b).max(initial=1))


def check(names: Iterable[str], transformations: Iterable[str], compared_by: str) -> None:
    """Transformations lower. Programs without 64-bit values are the same in both modes; of others, one is compared."""
    losses = {name: total(CASES[name]) for name in names}
    compared = {}
    for name, loss in losses.items():
        try:
            if _lowered_has_64_bits(loss, CASES[name].inputs, transformations):
                compared[name] = CASES[name].inputs
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    narrow, wide = (_computed(losses, compared, compared_by, in_64_bits) for in_64_bits in (False, True))
    with every_case() as case:
        for name in compared:
            with case(name):
                assert_same(narrow[name], wide[name])


def _lowered_has_64_bits(loss: Any, inputs: list[Any], transformations: Iterable[str]) -> bool:
    with jax.enable_x64(False):
        traced = jax.jit(lambda xs: {name: TRANSFORMATIONS[name](loss, xs) for name in transformations}).trace(inputs)
        traced.lower()
    assert {y.dtype for y in jax.tree.leaves(traced.out_info)} == {F32}
    return re.search(r"[iuf]64\[", str(traced.jaxpr)) is not None


def _computed(
    losses: Mapping[str, Any], inputs: dict[str, list[Any]], transformation: str, in_64_bits: bool
) -> dict[str, Any]:
    """The transformation of each loss, compiled as one program."""

    @jax.jit
    def compute(inputs: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: TRANSFORMATIONS[transformation](losses[name], xs) for name, xs in inputs.items()}

    with jax.enable_x64(in_64_bits):
        return jax.tree.map(np.asarray, compute(inputs))


SLOW = [FIRST["", name] for name in ("ConvTranspose", "GRU", "LSTM")]
"""Operators whose traces are long, beside Conv and RNN."""
OTHERS = [name for name in FIRST.values() if name not in SLOW]
EACH = 3
"""Of as many operators one is in the main tier."""
SOME = OTHERS[::EACH]


@pytest.mark.parametrize(
    "names",
    [
        *groups(SOME, 30),
        *(extended(g.values[0], id=f"others {g.id}") for g in groups((n for n in OTHERS if n not in SOME), 30)),
        extended(SLOW, id="slow"),
    ],
)
def test_operators_in_32_bits(names: list[str]) -> None:
    check(names, OUTER, "grad")


@pytest.mark.extended
@pytest.mark.parametrize("names", groups((name for key, name in FIRST.items() if key not in TWICE), 30))
def test_second_derivatives_in_32_bits(names: list[str]) -> None:
    check(names, ["grad(grad)"], "jvp of grad")


def test_second_derivatives_of_some_in_32_bits() -> None:
    check([name for key, name in FIRST.items() if key in TWICE], ["grad(grad)"], "jvp of grad")


@pytest.mark.long
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", CASES)
def test_every_row_under_every_transformation(name: str, transformation: str) -> None:
    case, results = CASES[name], []
    loss = total(case)
    for wide in (False, True):
        with jax.enable_x64(wide):
            results.append(TRANSFORMATIONS[transformation](loss, case.inputs))
    assert_same(*results)


def without(domain: str, name: str) -> str | None:
    """The reason by schema why an operator has no gradient."""
    if not onnx.defs.has(name, domain):
        return None
    schema = onnx.defs.get_schema(name, domain)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}

    def has_floats(formals: Any) -> bool:
        return any("tensor(float)" in kind for p in formals for kind in allowed.get(p.type_str, [p.type_str]))

    if not has_floats(schema.outputs):
        return "gives no floats"
    return None if has_floats(schema.inputs) else "takes no floats"


def test_every_operator_has_a_row_or_a_reason() -> None:
    reasons = {name for names in REASONS.values() for name in names}
    for domain in ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"):
        names = set(onnx2jax.supported()[domain])
        here = {name for where, name in FIRST if where == domain}
        assert {name for name in names - here - reasons if without(domain, name) is None} == set()
        assert here & reasons == set()


BROADCASTS = ("GRU", "LayerNormalization", "AveragePool", "Attention", "PRelu", "Scaler", "Resize", "Hardmax")
"""Operators that add operands of several ranks, in the main tier."""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        [n for (domain, name), n in FIRST.items() if name in BROADCASTS],
        *(extended(some.values[0], id=some.id) for some in groups(CASES, 60)),
    ],
)
def test_operators_broadcast_under_the_callers_rank_promotion(names: list[str], wide: bool) -> None:
    """ONNX broadcasts by rank; a caller who raises for it means his own code."""
    with jax.numpy_rank_promotion("raise"), jax.enable_x64(wide), every_case() as each:
        for name in names:
            case = CASES[name]
            with each(name):
                jax.eval_shape(jax.value_and_grad(total(case)), case.inputs)
