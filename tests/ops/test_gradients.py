"""Reverse-mode gradients of every differentiable operator against central differences, in float64.

The differences run on NumPy operands and the gradient on traced ones, so the two branches are compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from onnx2jax.ops import qonnx, registry
from onnx2jax.ops.arrays import is_traced
from tests.support.drawing import types_of
from tests.support.helpers import run_op
from tests.support.joined import differences, joined
from tests.support.violations import every_case
from tests.tables.operators import Row, rows

RNG = np.random.default_rng(7)
GROUP = 30
"""Cases in one program."""

Name = TypeVar("Name", bound=Hashable)


class Fixed(NamedTuple):
    """A floating input that is not differentiated: the schema says so, or it decides where kinks lie."""

    value: np.ndarray


def u(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Values all apart, so that no maximum, median or rank is a tie within the differences."""
    count = max(int(np.prod(shape)), 1)
    return RNG.permutation(np.linspace(low, high, count) + RNG.uniform(0, 0.01, count)).reshape(shape)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


X = u(3, 4)
IMAGE = u(2, 4, 5, 5)
INDICES = ints([0, 2], [1, 1])

# operator, inputs (floating ones are differentiated), attributes
TABLE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    # elementwise
    *((name, (X,), {}) for name in ("Abs", "Atan", "Asinh", "Cos", "Cosh", "Erf", "Exp", "Identity", "Neg")),
    *((name, (X,), {}) for name in ("Sigmoid", "Sin", "Sinh", "Tan", "Tanh")),
    *((name, (u(3, 4, low=-0.9, high=0.9),), {}) for name in ("Acos", "Asin", "Atanh")),
    *((name, (u(3, 4, low=1.1, high=3),), {}) for name in ("Acosh", "Log", "Reciprocal", "Sqrt")),
    *((name, (X, u(4, low=1, high=2)), {}) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")),
    ("Pow", (u(3, 4, low=0.5, high=2), u(4)), {}),
    ("Pow", (u(3, 4), Fixed(np.array(2.0))), {}),
    ("Pow", (u(3, 4), ints(3)), {}),
    ("Mod", (u(3, 4, low=-5, high=5), Fixed(np.array(1.7))), {"fmod": 1}),
    ("Clip", (X, Fixed(np.array(-0.95)), Fixed(np.array(1.05))), {}),
    ("Where", (X > 0, u(3, 4), u(4)), {}),
    ("Cast", (X,), {"to": 11}),
    ("CastLike", (X, Fixed(np.zeros(1))), {}),
    ("CumSum", (X, ints(1)[0]), {"exclusive": 1, "reverse": 1}),
    ("CumProd", (u(3, 4, low=0.5, high=2), ints(1)[0]), {}),
    ("Dropout", (X, Fixed(np.array(0.4)), np.array(True)), {"seed": 3}),
    # activations
    *((name, (X,), {}) for name in ("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu")),
    *((name, (X,), {}) for name in ("Selu", "Shrink", "Softplus", "Softsign", "Swish", "ThresholdedRelu")),
    *((name, (X,), {}) for name in ("Hardmax", "LogSoftmax", "Softmax")),
    ("Gelu", (X,), {"approximate": "tanh"}),
    ("Celu", (X,), {"alpha": 2.0}),
    ("PRelu", (X, u(4)), {}),
    ("SwiGLU", (u(2, 6), u(2, 6)), {}),
    # reductions
    *(
        (f"Reduce{name}", (u(2, 3, 4, low=0.3, high=2), ints(0, 2)), {})
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    ),
    ("TopK", (X, ints(2)), {"n_outputs": 2}),
    # shape and indexing
    ("Reshape", (X, ints(2, -1)), {}),
    ("Flatten", (u(2, 3, 2),), {}),
    ("Transpose", (X,), {"perm": (1, 0)}),
    ("Squeeze", (u(1, 3, 1), ints(0)), {}),
    ("Unsqueeze", (X, ints(0, 3)), {}),
    ("Expand", (u(3, 1), ints(2, 1, 4)), {}),
    ("Tile", (X, ints(2, 1)), {}),
    ("Concat", (u(2, 3), u(4, 3)), {"axis": 0}),
    ("Split", (u(5, 2), ints(2, 3)), {"n_outputs": 2}),
    ("Slice", (X, ints(-1), ints(-10), ints(0), ints(-2)), {}),
    ("Pad", (X, ints(0, 1, 2, -1), np.array(3.0)), {}),
    ("Pad", (X, ints(1, 1, 2, 2)), {"mode": "reflect"}),
    ("CenterCropPad", (X, ints(5, 2)), {}),
    ("DepthToSpace", (u(1, 4, 2, 3),), {"blocksize": 2}),
    ("SpaceToDepth", (u(1, 1, 4, 6),), {"blocksize": 2}),
    ("Trilu", (X, ints(1)[0]), {}),
    ("Gather", (X, INDICES), {}),
    ("GatherElements", (X, INDICES), {"axis": 0}),
    ("GatherND", (X, INDICES), {}),
    ("Compress", (X, np.array([True, False, True])), {"axis": 0}),
    ("Scatter", (X, INDICES, u(2, 2)), {"axis": 0, "opset": 10}),
    *(("ScatterElements", (X, ints([0, 2]), u(1, 2)), {"reduction": r}) for r in ("none", "add", "mul", "max", "min")),
    *(("ScatterND", (X, ints([0], [2]), u(2, 4)), {"reduction": r}) for r in ("none", "add", "mul", "max", "min")),
    ("ScatterElements", (X, ints([0, 2, 1, 0], [0, 1, 1, 0]), u(2, 4)), {"reduction": "mul"}),
    ("ScatterND", (X, ints([0], [-3], [2], [0]), u(4, 4)), {"reduction": "mul"}),
    ("TensorScatter", (u(2, 5, 3), u(2, 2, 3), ints(1, 3)), {"axis": 1}),
    # linear algebra
    ("MatMul", (u(2, 3, 4), u(4, 2)), {}),
    ("Gemm", (u(4, 3), u(2, 4), u(2)), {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Einsum", (u(2, 3, 4), u(4, 3)), {"equation": "bij,ji->bi"}),
    ("Det", (u(2, 3, 3),), {}),
    # convolution, pooling
    ("Conv", (IMAGE, u(6, 2, 3, 3), u(6)), {"group": 2, "pads": (1, 0, 2, 1), "strides": (2, 1)}),
    ("Conv", (u(1, 3, 6), u(3, 1, 2), u(3)), {"group": 3, "dilations": (2,)}),
    ("ConvTranspose", (u(1, 4, 3, 3), u(4, 2, 3, 2), u(4)), {"group": 2, "strides": (2, 1), "pads": (1, 0, 0, 1)}),
    ("DeformConv", (u(1, 2, 4, 4), u(2, 2, 2, 2), Fixed(u(1, 8, 3, 3) / 4)), {"kernel_shape": (2, 2)}),
    ("AveragePool", (IMAGE,), {"kernel_shape": (3, 2), "pads": (1, 0, 1, 1), "strides": (2, 1)}),
    ("MaxPool", (IMAGE,), {"kernel_shape": (3, 2), "pads": (1, 0, 1, 1), "strides": (2, 1)}),
    ("LpPool", (IMAGE,), {"kernel_shape": (3, 2), "p": 3}),
    ("GlobalAveragePool", (IMAGE,), {}),
    ("GlobalMaxPool", (IMAGE,), {}),
    ("GlobalLpPool", (IMAGE,), {"p": 2}),
    ("MaxUnpool", (u(1, 1, 2, 2), ints([[[[0, 3], [9, 14]]]])[0]), {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ("MaxRoiPool", (u(1, 2, 6, 6), Fixed(np.array([[0.0, 1, 1, 4, 5]]))), {"pooled_shape": (2, 2)}),
    ("Col2Im", (u(1, 4, 4), ints(3, 3), ints(2, 2)), {}),
    ("CausalConvWithState", (u(2, 3, 5), u(3, 1, 3), u(3)), {"activation": "silu", "n_outputs": 2}),
    # normalization
    ("BatchNormalization", (IMAGE, u(4), u(4), u(4), u(4, low=1, high=2)), {}),
    ("BatchNormalization", (IMAGE, u(4), u(4), Fixed(u(4)), Fixed(u(4, low=1, high=2))), {"training_mode": 1}),
    ("InstanceNormalization", (IMAGE, u(4), u(4)), {}),
    ("GroupNormalization", (IMAGE, u(4), u(4)), {"num_groups": 2, "stash_type": 11}),
    ("LayerNormalization", (X, u(4), u(4)), {"stash_type": 11}),
    ("RMSNormalization", (X, u(4)), {"stash_type": 11}),
    ("SimplifiedLayerNormalization", (X, u(4)), {"stash_type": 11}),
    ("LRN", (IMAGE,), {"size": 3, "alpha": 0.5}),
    ("LpNormalization", (X,), {"p": 1}),
    ("LpNormalization", (X,), {"p": 2}),
    ("MeanVarianceNormalization", (IMAGE,), {}),
    # recurrent
    *(
        (name, (u(3, 2, 4), u(2, gates * 3, 4), u(2, gates * 3, 3), u(2, gates * 6)), {"hidden_size": 3, **more})
        for name, gates, more in (
            ("RNN", 1, {"direction": "bidirectional"}),
            ("GRU", 3, {"direction": "bidirectional"}),
            ("GRU", 3, {"direction": "bidirectional", "linear_before_reset": 1}),
            ("LSTM", 4, {"direction": "bidirectional"}),
        )
    ),
    (
        "LSTM",
        (u(3, 2, 4), u(1, 12, 4), u(1, 12, 3), u(1, 24), np.array([2, 3], np.int32), u(1, 2, 3), u(1, 2, 3), u(1, 9)),
        {"hidden_size": 3, "n_outputs": 3},
    ),
    # attention
    ("Attention", (u(1, 4, 3, 4), u(1, 2, 5, 4), u(1, 2, 5, 2), u(3, 5)), {"is_causal": 1, "softcap": 2.0}),
    ("RotaryEmbedding", (u(1, 2, 3, 4), u(1, 3, 2), u(1, 3, 2)), {}),
    (
        "LinearAttention",
        (u(1, 3, 8), u(1, 3, 4), u(1, 3, 6), None, u(1, 3, 2, low=-1, high=0), u(1, 3, 2)),
        {"q_num_heads": 4, "kv_num_heads": 2},
    ),
    # images
    ("RoiAlign", (u(1, 2, 6, 6), Fixed(np.array([[0.3, 1.2, 3.9, 4.7]])), ints(0)), {"output_height": 2}),
    ("Resize", (u(1, 1, 3, 4), None, None, ints(1, 1, 5, 3)), {"mode": "linear"}),
    ("Resize", (u(1, 1, 3, 4), None, None, ints(1, 1, 5, 3)), {"mode": "cubic"}),
    ("GridSample", (u(1, 2, 4, 4), Fixed(u(1, 3, 3, 2, low=-0.9, high=0.9))), {"mode": "linear"}),
    ("GridSample", (u(1, 2, 4, 4), Fixed(u(1, 3, 3, 2))), {"mode": "cubic", "padding_mode": "reflection"}),
    # losses, signal
    *(
        (name, (u(3, 4, 2), ints([0, 1], [3, 9], [2, 2]), Fixed(u(4, low=1, high=2))), {"ignore_index": 9, **more})
        for name, more in (("NegativeLogLikelihoodLoss", {}), ("SoftmaxCrossEntropyLoss", {"n_outputs": 2}))
    ),
    ("DFT", (u(1, 5, 2), ints(6)[0], None), {"inverse": 1}),
    ("DFT", (u(1, 5, 1), None, None), {"onesided": 1}),
    ("STFT", (u(1, 9, 1), ints(3)[0], u(4)), {}),
]


class Case(NamedTuple):
    """An operator, its inputs, the positions of those to differentiate, and keywords of ``run_op``."""

    name: str
    inputs: Sequence[Any]
    varied: Sequence[int]
    attributes: Mapping[str, Any]


@pytest.mark.parametrize("start", range(0, len(TABLE), GROUP))
def test_gradient(start: int) -> None:
    cases = {}
    for place, (name, inputs, attributes) in enumerate(TABLE[start : start + GROUP], start):
        varied = [i for i, x in enumerate(inputs) if isinstance(x, np.ndarray) and x.dtype == np.float64]
        known = [x.value if isinstance(x, Fixed) else x for x in inputs]
        cases[f"{name}-{place}"] = Case(name, known, varied, attributes)
    assert check(cases) == set(cases)


def gradient_rows() -> list[Row]:
    """The last row, of finite numbers, of each operator that TABLE has not and that takes float64.

    Straight-through estimators are no derivatives: tests/ops/test_qonnx.py.
    """
    named = {("", name) for name, *_ in TABLE} | {(qonnx.DOMAINS[0], name) for name in qonnx.ROUNDED}
    found = {r.key: r for r in rows() if r.key not in named and np.dtype(np.float64) in types_of(*r.key) and _varied(r)}
    return list(found.values())


def _varied(row: Row) -> list[int]:
    """The positions of floating inputs that may be traced."""
    operator = registry.resolve(row.domain, row.name, row.opsets()[-1])
    assert operator is not None
    places = [p for p, x in enumerate(row.inputs) if x is not None and x.dtype.kind == "f"]
    finite = all(np.isfinite(row.inputs[p]).all() for p in places)
    return [p for p in places if finite and operator.parameter(p) not in operator.static]


def check_row(row: Row) -> bool:
    """The gradient by all floating inputs, in float64; whether there is anything to differentiate."""
    return bool(check_rows([row]))


def check_rows(some: Iterable[Row]) -> set[tuple[str, str]]:
    """The gradients of rows by all floating inputs, in float64; the operators with anything to differentiate."""
    cases = {}
    for row in some:
        varied = _varied(row)
        inputs = [x.astype(np.float64) if p in varied else x for p, x in enumerate(row.inputs)]
        options = {"domain": row.domain, "opset": row.opsets()[-1], "n_outputs": row.outputs, **row.attributes}
        cases[row.key] = Case(row.name, inputs, varied, options)
    return check(cases)


def test_gradients_of_table_rows() -> None:
    some = gradient_rows()
    assert check_rows(some) == {row.key for row in some} - WITHOUT.keys()


WITHOUT: dict[tuple[str, str], str] = {
    **{("", name): "integers" for name in ("ArgMax", "ArgMin", "EyeLike", "Shape", "Size")},
    **{("ai.onnx.ml", name): "float32" for name in ("FeatureVectorizer", "LinearClassifier", "LinearRegressor")},
    **{("ai.onnx.ml", name): "float32" for name in ("Normalizer", "Scaler")},
}
"""Operators that give no float64 for it, and what they give."""


def check(cases: Mapping[Name, Case]) -> set[Name]:
    """Reverse mode against differences, of all cases in one program; those with an output in float64."""
    folded: dict[Name, dict[int, list[Any]]] = {}
    steps = {name: _steps(case) for name, case in cases.items()}
    compiled = joined(
        {name: (_differentiated(case, folded.setdefault(name, {})), (steps[name],)) for name, case in cases.items()},
        xla_backend_optimization_level=0,
    )
    found = {name for name, (outputs, *_) in compiled.items() if outputs}
    with every_case() as note:
        for name in found:
            outputs, grads, values = jax.tree.map(np.asarray, compiled[name])
            direct, after, before = ((values | folded[name])[step] for step in (0, 1, -1))
            with note(name):
                for a, b in zip(direct, outputs, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
                changes = [(a - b) / (2 * EPSILON) for a, b in zip(after, before, strict=True)]
                tangents = [(a - b) / (2 * EPSILON) for a, b in zip(steps[name][1], steps[name][-1], strict=True)]
                expected = sum(np.vdot(_cotangent(d.shape), d) for d in changes)
                actual = sum(np.vdot(g, t) for g, t in zip(grads, tangents, strict=True))
                np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    return found


EPSILON = 1e-5


def _cotangent(shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(1).normal(size=shape))


def _steps(case: Case) -> dict[int, list[np.ndarray]]:
    """The operands to differentiate, and a step before and after in a random direction."""
    rng = np.random.default_rng(0)
    operands = [case.inputs[i] for i in case.varied]
    tangents = [rng.normal(size=x.shape) for x in operands]
    return {n: [x + n * EPSILON * t for x, t in zip(operands, tangents, strict=True)] for n in (0, 1, -1)}


def _differentiated(case: Case, folded: dict[int, list[Any]]) -> Callable[..., Any]:
    """Outputs, their gradients with respect to all varied inputs, and outputs at each step unless these fold."""

    def f(*xs: Any) -> list[Any]:
        full = list(case.inputs)
        for i, x in zip(case.varied, xs, strict=True):
            full[i] = x
        return [y for y in jax.tree.leaves(run_op(case.name, *full, **case.attributes)) if y.dtype == np.float64]

    constants = _steps(case)

    def compute(steps: dict[int, list[Any]]) -> Any:
        outputs, pull = jax.vjp(f, *steps[0])
        values = {}
        for n, operands in steps.items() if outputs else ():
            results = f(*constants[n])
            if is_traced(results):  # the operator has no NumPy branch
                values[n] = f(*operands)
            else:
                folded[n] = results
        return outputs, pull([jnp.asarray(_cotangent(y.shape)) for y in outputs]), values

    return compute


INF = np.inf
# operator, its floating input, attributes, the gradient of the sum of its output (None: any, but finite)
DELICATE: list[tuple[str, Any, dict[str, Any], Any]] = [
    ("Relu", [-1e30, 1e30], {}, [0, 1]),
    ("Celu", [-200.0, 0.0, 200.0], {}, [0, 1, 1]),
    ("Elu", [-200.0, 0.0, 200.0], {}, [0, 1, 1]),
    ("Selu", [-200.0, 200.0], {}, [0, 1.05070102]),
    ("Softplus", [-200.0, 0.0, 200.0], {}, [0, 0.5, 1]),
    ("Sigmoid", [-200.0, 0.0, 200.0], {}, [0, 0.25, 0]),
    ("Mish", [-200.0, 0.0, 200.0], {}, [0, 0.6, 1]),
    ("Swish", [-200.0, 0.0, 200.0], {}, [0, 0.5, 1]),
    ("Gelu", [-200.0, 0.0, 200.0], {}, [0, 0.5, 1]),
    ("Gelu", [-200.0, 200.0], {"approximate": "tanh"}, [0, 1]),
    ("Softsign", [-200.0, 0.0], {}, [1 / 201**2, 1]),
    ("Softmax", [[-INF, 0.0, 100.0]], {}, [[0, 0, 0]]),
    ("LogSoftmax", [[0.0, 1000.0]], {}, [[1, -1]]),
    ("ReduceLogSumExp", [1000.0, -INF, 1000.0], {}, [0.5, 0, 0.5]),
    ("ReduceL2", [0.0, 0.0], {}, None),
    ("ReduceProd", [0.0, 2.0, 3.0], {}, [6, 0, 0]),
    ("ReduceProd", [0.0, 0.0, 3.0], {}, [0, 0, 0]),
    ("LpNormalization", [[0.0, 0.0]], {"p": 2}, None),
    ("LpNormalization", [[0.0, 0.0]], {"p": 1}, None),
    ("GlobalLpPool", [[[0.0, 0.0]]], {}, None),
    ("LpPool", [[[0.0, 0.0, 0.0]]], {"kernel_shape": (2,)}, None),
    ("MeanVarianceNormalization", [[[[3.0, 3.0]]]], {}, None),
    ("LRN", [[[[0.0]], [[0.0]]]], {"size": 2}, [[[[1]], [[1]]]]),
    ("Det", [[1.0, 2.0], [2.0, 4.0]], {}, [[4, -2], [-2, 1]]),
    ("Det", [[0.0, 0.0], [0.0, 0.0]], {}, [[0, 0], [0, 0]]),
]


def gradient(name: str, attributes: dict[str, Any]) -> Callable[..., Any]:
    return jax.grad(lambda x: run_op(name, x, **attributes).sum())


def test_gradients_stay_finite() -> None:
    calls = {
        f"{name}-{place}": (gradient(name, attributes), (np.array(x, np.float32),))
        for place, (name, x, attributes, _) in enumerate(DELICATE)
    }
    grads = joined(calls, xla_backend_optimization_level=0)
    assert [name for name, grad in grads.items() if not np.isfinite(grad).all()] == []
    pairs = zip(grads.items(), DELICATE, strict=True)
    known = {name: (grad, expected) for (name, grad), (*_, expected) in pairs if expected is not None}
    assert not differences(known, rtol=1e-5, atol=1e-6)


@jax.jit
@jax.grad
def untaken(x: Any) -> Any:
    return run_op("Where", np.array([False, True]), x, np.zeros(2, np.float32)).sum()


def test_an_untaken_branch_has_no_gradient() -> None:
    np.testing.assert_array_equal(untaken(np.float32([np.nan, 1])), [0, 1])


def test_powers_of_zero() -> None:
    base, exponent = np.float32([0, 0, 2]), np.float32([2, 1, 3])
    grads = jax.jit(jax.grad(lambda x, y: run_op("Pow", x, y).sum(), (0, 1)))(base, exponent)
    np.testing.assert_allclose(grads, [[0, 1, 12], [0, 0, 8 * np.log(2)]], rtol=1e-5)


def test_the_gradient_table_is_complete() -> None:
    """Each input that the newest schema of an operator calls differentiable is differentiated in some row."""
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version >= newest.get(schema.name, schema).since_version:
            newest[schema.name] = schema
    differentiable = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    wanted = {
        (name, formal.name)
        for name, schema in newest.items()
        for formal in schema.inputs
        if formal.differentiation_category == differentiable
    }
    varied = {
        (name, newest[name].inputs[min(place, len(newest[name].inputs) - 1)].name)
        for name, inputs, _ in TABLE
        if name in newest
        for place, x in enumerate(inputs)
        if isinstance(x, np.ndarray) and x.dtype == np.float64
    }
    assert len({name for name, _ in wanted}) == 121
    assert wanted <= varied
