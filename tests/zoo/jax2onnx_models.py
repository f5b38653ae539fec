"""JAX by jax2onnx, there and back: functions of jax.numpy and lax, layers of flax.nnx and equinox.

In an environment of its own: it wants an older orbax than the extra 'test'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from .case import Case, Export, Inputs
from .feature import Lazy
from .other_frameworks import LOOP

JAX2ONNX: Final = "jax2onnx"
Shape = tuple[int, ...]
nnx: Any = Lazy("flax.nnx")
eqx: Any = Lazy("equinox")


def export(
    function: Callable[..., Any], params: Any, sizes: Sequence[Sequence[Any]], folder: Path, **options: Any
) -> Export:
    """``function(params, *operands)`` for one or two sizes; what differs in the shapes is dynamic."""
    from jax2onnx import to_onnx

    scope = jax.export.SymbolicScope()
    specs = [
        jax.ShapeDtypeStruct(_dims(a.shape, b.shape, scope), a.dtype) for a, b in zip(sizes[0], sizes[-1], strict=True)
    ]
    names = [f"x{i}" for i in range(len(specs))]
    path = folder / "model.onnx"
    closed = partial(function, params)
    to_onnx(closed, specs, input_names=names, return_mode="file", output_path=str(path), **options)
    given = {v.name for v in _graph(path).input}
    inputs = [{n: np.asarray(v) for n, v in zip(names, args, strict=True) if n in given} for args in sizes]
    expected = [[np.asarray(v) for v in jax.tree.leaves(jax.jit(closed)(*args))] for args in sizes]
    stored = {jax.tree_util.keystr(path): np.asarray(v) for path, v in jax.tree.leaves_with_path(params)}

    def gradients(_: Inputs, cotangents: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        floating = {n: v for n, v in zip(names, sizes[0], strict=True) if jnp.issubdtype(v.dtype, jnp.floating)}

        def loss(params: Any, floating: Mapping[str, Any]) -> Any:
            args = [floating.get(n, v) for n, v in zip(names, sizes[0], strict=True)]
            outputs = [o for o in jax.tree.leaves(function(params, *args)) if jnp.issubdtype(o.dtype, jnp.floating)]
            return sum(jnp.vdot(c, o) for c, o in zip(cotangents, outputs, strict=True))

        by_params, by_inputs = jax.jit(jax.grad(loss, (0, 1)))(params, floating)
        slopes = zip(stored, jax.tree.leaves(by_params), strict=True)
        return {n: np.asarray(g) for n, g in [*slopes, *by_inputs.items()]}

    continuous = stored or any(jnp.issubdtype(v.dtype, jnp.floating) for v in sizes[0])
    return Export(path, inputs, expected, gradients if continuous else None, stored)


def _graph(path: Path) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False).graph


def _dims(one: Shape, other: Shape, scope: Any) -> tuple[Any, ...]:
    """Extents; a symbol for each that differs, one for each value."""
    texts = [str(a) if a == b else f"n{a}" for a, b in zip(one, other, strict=True)]
    return jax.export.symbolic_shape(", ".join(texts), scope=scope) if one != other else one


def _plain(function: Callable[..., Any]) -> Callable[[], tuple[Callable[..., Any], Any]]:
    return lambda: (lambda _, *args: function(*args), {})


def _nnx(make: Callable[[Any], Any], call: Callable[..., Any] = lambda m, *xs: m(*xs)) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Callable[..., Any], Any]:
        module = make(nnx.Rngs(0))
        module.eval() if hasattr(module, "eval") else None
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        return lambda p, *xs: call(nnx.merge(graph, p, rest), *xs), params

    return build


def _eqx(make: Callable[[Any], Any], call: Callable[..., Any] = lambda m, *xs: m(*xs)) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Callable[..., Any], Any]:
        params, rest = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
        return lambda p, *xs: call(eqx.combine(p, rest), *xs), params

    return build


def _floats(*shapes: Shape) -> Callable[[np.random.Generator], list[np.ndarray]]:
    return lambda rng: [rng.standard_normal(s).astype(np.float32) for s in shapes]


def _drawn(*operands: Callable[[np.random.Generator], Any], dtype: Any = None) -> Callable[..., list[np.ndarray]]:
    return lambda rng: [np.asarray(o(rng), dtype) for o in operands]


def _ints(*shape: int, low: int = -9, high: int = 10) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.integers(low, high, shape).astype(np.int32)


ROWS: Final = _floats((2, 4)), _floats((3, 4))
PAIRS: Final = _floats((2, 4), (2, 4)), _floats((3, 4), (3, 4))
SERIES: Final = _floats((2, 5, 4)), _floats((3, 5, 4))
IMAGES: Final = _floats((1, 8, 8, 3)), _floats((2, 8, 8, 3))
SQUARE: Final = (_floats((4, 4)),)
ROW: Final = (_floats((4,)),)
POSITIVE: Final = tuple(_drawn(lambda r, n=n: r.uniform(0.1, 1.1, (n, 4)), dtype=np.float32) for n in (2, 3))
ONES: Final = tuple(_drawn(lambda r, n=n: r.uniform(-0.9, 0.9, (n, 4)), dtype=np.float32) for n in (2, 3))
COUNTS: Final = (_drawn(_ints(3, 4), _ints(3, 4, low=1)),)
Sizes = Sequence[Callable[[np.random.Generator], list[np.ndarray]]]

NUMPY: Final[dict[str, tuple[Callable[..., Any], Sizes]]] = {
    "trigonometry": (lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.arctan(x), jnp.sinh(x), jnp.cosh(x)), ROWS),
    "inverse functions": (lambda x: (jnp.arcsin(x), jnp.arccos(x), jnp.arctanh(x), jnp.arcsinh(x)), ONES),
    "exponentials": (lambda x: (jnp.exp(x), jnp.exp2(x), jnp.expm1(x), jnp.logaddexp(x, 1.0)), ROWS),
    "logarithms": (lambda x: (jnp.log(x), jnp.log10(x), jnp.log1p(x), jnp.sqrt(x)), POSITIVE),
    "arctan2, hypot, copysign": (lambda x, y: (jnp.arctan2(x, y), jnp.hypot(x, y), jnp.copysign(x, y)), PAIRS),
    "rounding": (lambda x: (jnp.round(x), jnp.floor(x), jnp.ceil(x), jnp.sign(x)), ROWS),
    "trunc": (lambda x: jnp.trunc(x * 3), ROWS),
    "division of integers": (lambda x, y: (x // y, x % y, jnp.fmod(x, y), jnp.sign(x)), COUNTS),
    "division of floats": (lambda x, y: (x / y, x // y, x % y, jnp.fmod(x, y)), PAIRS[:1]),
    "bits": (lambda x, y: (x & y, x | y, x ^ y, ~x, x << 2, x >> 1), COUNTS),
    "comparisons": (lambda x, y: (x < y, x >= y, x == y, jnp.logical_xor(x > 0, y > 0), jnp.isfinite(x)), PAIRS),
    "powers": (lambda x, y: (jnp.power(x, y), x**2.5, jnp.square(x), jnp.cbrt(x), jnp.reciprocal(x)),
               (_drawn(*[lambda r: r.uniform(0.1, 2, (2, 4))] * 2, dtype=np.float32),)),
    "extremes": (lambda x, y: (jnp.maximum(x, y), jnp.fmin(x, y), jnp.clip(x, -0.5, y)), PAIRS),
    "reductions": (lambda x: (x.sum(1), x.mean(0), x.prod(1), x.max(), x.min(1, keepdims=True)), ROWS),
    "variances": (lambda x: (x.var(1), x.std(0, ddof=1), jnp.linalg.norm(x, axis=1), jnp.ptp(x, axis=1)), SERIES),
    "all, any, count_nonzero": (lambda x: ((x > 0).all(1), (x > 1).any(), jnp.count_nonzero(x > 0, axis=0)), ROWS),
    "matmul, dot": (lambda x: (x @ x.T, jnp.vdot(x, x), jnp.tensordot(x, x, 2)), SQUARE),
    "einsum": (lambda x: (jnp.einsum("bij,bkj->bik", x, x), jnp.einsum("bij->bj", x)), SERIES),
    "einsum of a diagonal": (lambda x: jnp.einsum("ii->i", x), SQUARE),
    "linear algebra": (lambda x: (jnp.linalg.det(x), jnp.trace(x), jnp.tril(x), jnp.triu(x, 1), jnp.kron(x, x)),
                       SQUARE),
    "joins": (lambda x, y: (jnp.concatenate([x, y], 1), jnp.stack([x, y]), jnp.hstack([x, y])), PAIRS),
    "splits": (lambda x: (*jnp.split(x, 2, axis=1), *jnp.array_split(x, 3, axis=1)), ROWS),
    "axes": (lambda x: (x.T, jnp.swapaxes(x, 0, 1), jnp.moveaxis(x, 1, 0), x[:, None], jnp.flip(x, 1)), ROWS),
    "reshapes": (lambda x: (x.reshape(-1, 2), x.ravel(), jnp.broadcast_to(x, (2, 4, 4)), jnp.tile(x, (2, 1))), SQUARE),
    "reshape of a free size": (lambda x: x.reshape(x.shape[0] * 2, -1), ROWS),
    "roll, repeat": (lambda x: (jnp.roll(x, 1, 1), jnp.repeat(x, 2, 1), jnp.rot90(x)), SQUARE),
    "pad": (lambda x: (jnp.pad(x, ((0, 0), (1, 2))), jnp.pad(x, ((0, 0), (2, 1)), mode="reflect"),
                       jnp.pad(x, 1, mode="edge")), SQUARE),
    "slices": (lambda x: (x[:, 1:3], x[:, ::-1], x[:, ::2], x[..., -1]), ROWS),
    "indices": (lambda x: (x[:, jnp.array([2, 0])], jnp.take(x, jnp.array([1, 1]), axis=0), x[jnp.arange(4), 0]),
                SQUARE),
    "take along an axis": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), SQUARE),
    "at[].set, add": (lambda x: (x.at[:, 1].set(0.0), x.at[0].add(1.0), x.at[jnp.array([0, 2])].multiply(2.0)), SQUARE),
    "at[].max of indices twice": (lambda x: x.at[jnp.array([1, 1])].max(x[:2]), SQUARE),
    "sort, argsort": (lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1), jnp.argmax(x, 1), jnp.argmin(x, 0)), ROWS),
    "searchsorted, interp": (lambda x: (jnp.searchsorted(jnp.arange(4.0), x), jnp.interp(x, jnp.arange(4.0),
                             jnp.arange(4.0) ** 2)), ROW),
    "meshgrid, linspace": (lambda x: (*jnp.meshgrid(x, x), x + jnp.linspace(0, 1, 4)), ROW),
    "nan": (lambda x: (jnp.nan_to_num(jnp.log(x)), jnp.nanmax(x, 1), jnp.isnan(jnp.sqrt(x))), ROWS),
    "sinc, convolve": (lambda x: (jnp.sinc(x), jnp.convolve(x, jnp.ones(3), mode="same")), ROW),
    "casts": (lambda x: (x.astype(jnp.int32), (x > 0).astype(jnp.float32), x.astype(jnp.float16), x.astype(bool)),
              ROWS),
    "bincount": (lambda x: jnp.bincount(x, length=6), (_drawn(_ints(9, low=0, high=6)),)),
    "one_hot": (lambda x: jax.nn.one_hot(x, 5), tuple(_drawn(_ints(n, low=0, high=5)) for n in (3, 4))),
}  # fmt: skip

LAX: Final[dict[str, tuple[Callable[..., Any], Sizes]]] = {
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), ROWS),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, s: (jnp.tanh(s[0]) + i * s[1], s[1]), (x, x))[0], ROWS),
    "while_loop": (lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1.0, x), ROWS),
    "scan": (lambda x: lax.scan(lambda c, y: (c + jnp.tanh(y), c * y), jnp.zeros(4), x), ROWS),
    "scan of rows of a batch": (lambda x: lax.scan(lambda c, y: (c + y, c @ jnp.ones((4, 2))), x[0], x), SERIES),
    "map": (lambda x: lax.map(lambda row: row * row.sum(), x), ROWS),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 3)), SQUARE),
    "dynamic_slice of a traced start": (lambda x, i: lax.dynamic_slice(x, (i[0], 0), (2, 3)),
                                        (lambda r: [*_floats((4, 4))(r), np.int32([1])],)),
    "dynamic_update_slice": (lambda x, i: lax.dynamic_update_slice(x, jnp.ones((2, 2)), (i[0], 1)),
                             (lambda r: [*_floats((4, 4))(r), np.int32([1])],)),
    "gather": (lambda x, i: x[i], (lambda r: [*_floats((4, 4))(r), np.int32([3, 0, 3])],)),
    "scatter_add": (lambda x, i: jnp.zeros((5, 4)).at[i].add(x),
                    (lambda r: [*_floats((4, 4))(r), np.int32([3, 0, 3, 1])],)),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 3),
                    (lambda r: [*_floats((4, 4))(r), np.int32([2, 0, 2, 1])],)),
    "top_k": (lambda x: lax.top_k(x, 2), ROWS),
    "reduce_window": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"), IMAGES),
    "conv_general_dilated": (lambda x: lax.conv_general_dilated(x, jnp.ones((3, 3, 3, 2)) / 9, (2, 1), "SAME",
                             rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")), IMAGES),
    "conv_transpose": (lambda x: lax.conv_transpose(x, jnp.ones((3, 3, 3, 2)) / 9, (2, 2), "SAME"), IMAGES),
    "dot_general": (lambda x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))), SERIES),
    "cumlogsumexp, cummax": (lambda x: (lax.cumlogsumexp(x, 1), lax.cummax(x, 1)), ROWS),
    "erf, lgamma, rsqrt": (lambda x: (lax.erf(x), lax.rsqrt(x), lax.lgamma(x)), POSITIVE),
    "clamp, select_n": (lambda x: (lax.clamp(-0.5, x, 0.5), lax.select_n(x > 0, x, -x)), SQUARE),
    "stop_gradient": (lambda x: x * lax.stop_gradient(x), ROWS),
    "custom_jvp": (lambda x: jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.softplus(x) + jax.nn.gelu(x), ROWS),
    "activations": (lambda x: (jax.nn.elu(x), jax.nn.selu(x), jax.nn.celu(x), jax.nn.leaky_relu(x), jax.nn.mish(x),
                               jax.nn.hard_swish(x), jax.nn.glu(x), jax.nn.log_sigmoid(x)), ROWS),
    "softmax, logsumexp": (lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x), jax.nn.logsumexp(x, 1),
                                      jax.nn.standardize(x)), ROWS),
    "gradient inside": (jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()), ROWS),
    "vmap": (jax.vmap(lambda row: row @ jnp.ones((4, 2)) + row[0]), ROWS),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), ROWS),
    "image.resize": (lambda x: jax.image.resize(x, (1, 12, 6, 3), "bilinear", antialias=False), IMAGES[:1]),
    "dot_product_attention": (lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True),
                              (_floats((2, 5, 2, 4)),)),
}  # fmt: skip


def _gru(cell: Any, x: Any) -> Any:
    return lax.scan(lambda h, row: ((y := cell(row, h)), y), jnp.zeros(6), x)[1]


def _statistics(norm: Any) -> Any:
    norm.mean.set_value(jnp.linspace(-0.2, 0.3, 3))
    norm.var.set_value(jnp.linspace(0.5, 1.5, 3))
    return norm


def _chain(*layers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda rngs: nnx.Sequential(*(layer(rngs) for layer in layers))


NNX: Final[dict[str, tuple[Callable[[], tuple[Any, Any]], Sizes]]] = {
    "Linear, gelu": (_nnx(_chain(lambda r: nnx.Linear(4, 8, rngs=r), lambda _: nnx.gelu,
                                 lambda r: nnx.Linear(8, 3, rngs=r))), ROWS),
    "LinearGeneral": (_nnx(lambda r: nnx.LinearGeneral((5, 4), (2, 3), axis=(-2, -1), rngs=r)), SERIES),
    "Einsum": (_nnx(lambda r: nnx.Einsum("bij,jk->bik", (4, 3), (3,), rngs=r)), SERIES),
    "Conv": (_nnx(lambda r: nnx.Conv(3, 4, (3, 3), strides=2, rngs=r)), IMAGES),
    "Conv, groups, dilated": (_nnx(lambda r: nnx.Conv(3, 6, (3, 3), kernel_dilation=2, feature_group_count=3, rngs=r)),
                              IMAGES),
    "Conv of a series, causal": (_nnx(lambda r: nnx.Conv(4, 4, 3, padding="CAUSAL", rngs=r)), SERIES),
    "ConvTranspose": (_nnx(lambda r: nnx.ConvTranspose(3, 4, (3, 3), strides=2, rngs=r)), IMAGES),
    "BatchNorm": (_nnx(lambda r: _statistics(nnx.BatchNorm(3, use_running_average=True, rngs=r))), IMAGES),
    "LayerNorm": (_nnx(lambda r: nnx.LayerNorm(4, rngs=r)), SERIES),
    "RMSNorm": (_nnx(lambda r: nnx.RMSNorm(4, rngs=r)), SERIES),
    "GroupNorm": (_nnx(lambda r: nnx.GroupNorm(3, 3, rngs=r)), IMAGES),
    "InstanceNorm": (_nnx(lambda r: nnx.InstanceNorm(3, rngs=r)), IMAGES),
    "Embed": (_nnx(lambda r: nnx.Embed(20, 4, rngs=r)), tuple(_drawn(_ints(n, 5, low=0, high=20)) for n in (2, 3))),
    "Dropout": (_nnx(lambda r: nnx.Dropout(0.5, deterministic=True, rngs=r)), ROWS),
    "MultiHeadAttention": (_nnx(lambda r: nnx.MultiHeadAttention(2, 4, decode=False, deterministic=True, rngs=r)),
                           SERIES),
    "pools": (_nnx(lambda _: nnx.Sequential(lambda x: nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2)),
                                            lambda x: nnx.avg_pool(x, window_shape=(2, 2), padding="SAME"))), IMAGES),
    "GRUCell": (_nnx(lambda r: nnx.GRUCell(4, 6, rngs=r)), (_floats((2, 6), (2, 4)),)),
    "LSTMCell": (_nnx(lambda r: nnx.LSTMCell(4, 6, rngs=r), lambda m, c, h, x: m((c, h), x)),
                 (_floats((2, 6), (2, 6), (2, 4)),)),
    "LoRALinear": (_nnx(lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r)), ROWS),
    "PReLU": (_nnx(lambda _: nnx.PReLU(0.1)), ROWS),
    "Conv, BatchNorm, Linear": (_nnx(_chain(
        lambda r: nnx.Conv(3, 4, (3, 3), rngs=r), lambda r: nnx.BatchNorm(4, use_running_average=True, rngs=r),
        lambda _: nnx.relu, lambda _: lambda x: nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2)),
        lambda _: lambda x: x.mean((1, 2)),
        lambda r: nnx.Linear(4, 3, rngs=r))), IMAGES),
}  # fmt: skip

EQX: Final[dict[str, tuple[Callable[[], tuple[Any, Any]], Sizes]]] = {
    "Linear": (_eqx(lambda k: eqx.nn.Linear(4, 3, key=k)), ROW),
    "Linear, vmap": (_eqx(lambda k: eqx.nn.Linear(4, 3, key=k), lambda m, x: jax.vmap(m)(x)), ROWS),
    "MLP": (_eqx(lambda k: eqx.nn.MLP(4, 2, 8, 2, key=k), lambda m, x: jax.vmap(m)(x)), ROWS),
    "Conv2d": (_eqx(lambda k: eqx.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=k)), (_floats((3, 8, 8)),)),
    "Conv1d, groups": (_eqx(lambda k: eqx.nn.Conv1d(4, 8, 3, groups=2, key=k)), (_floats((4, 9)),)),
    "ConvTranspose2d": (_eqx(lambda k: eqx.nn.ConvTranspose2d(3, 4, 3, stride=2, key=k)), (_floats((3, 5, 5)),)),
    "LayerNorm": (_eqx(lambda _: eqx.nn.LayerNorm(4), lambda m, x: jax.vmap(m)(x)), ROWS),
    "RMSNorm": (_eqx(lambda _: eqx.nn.RMSNorm(4), lambda m, x: jax.vmap(m)(x)), ROWS),
    "GroupNorm": (_eqx(lambda _: eqx.nn.GroupNorm(2, 4)), (_floats((4, 5, 5)),)),
    "Embedding": (_eqx(lambda k: eqx.nn.Embedding(20, 4, key=k), lambda m, x: jax.vmap(m)(x)),
                  (_drawn(_ints(5, low=0, high=20)),)),
    "MultiheadAttention": (_eqx(lambda k: eqx.nn.MultiheadAttention(2, 4, key=k), lambda m, x: m(x, x, x)),
                           (_floats((5, 4)),)),
    "RotaryPositionalEmbedding": (_eqx(lambda _: eqx.nn.RotaryPositionalEmbedding(4)), (_floats((5, 4)),)),
    "pools": (_eqx(lambda _: eqx.nn.Sequential([eqx.nn.MaxPool2d(2, 2), eqx.nn.AvgPool2d(2, 1)])),
              (_floats((3, 8, 8)),)),
    "adaptive pool": (_eqx(lambda _: eqx.nn.AdaptiveAvgPool2d(2)), (_floats((3, 8, 8)),)),
    "GRUCell": (_eqx(lambda k: eqx.nn.GRUCell(4, 6, key=k), _gru), (_floats((5, 4)),)),
}  # fmt: skip

STARTS: Final = "jax2onnx writes the slice from a traced start to a traced end, whose length is not said"
KNOWN: Final[dict[str, dict[str, str]]] = {
    "jax.lax and jax.nn, dynamic_slice of a traced start": {"jit": STARTS},
    "jax.lax and jax.nn, while_loop": {"grad": LOOP},
    "jax.lax and jax.nn, stop_gradient": {"grad": "jax2onnx drops stop_gradient, for which ONNX has no operator"},
}
REFUSED: Final = {
    "jnp.log2 / jax2onnx": "NotImplementedError: No plugins registered for primitive 'log2'",
    "jnp.outer of matrices / jax2onnx": "writes an output of the operands' axes, (4, 4, 4, 4) instead of (16, 16)",
    "jnp.fft.rfft, jnp.abs of it / jax2onnx": "writes complex numbers as pairs in a last axis, and abs of each",
    "jnp.cumsum(x, 1) / jax2onnx": "TypeError: expects a single positional argument; with axis=1 it is written",
    "jnp.cumprod / jax2onnx": "writes CumProd, an operator of opset 26, into a file of opset 23",
    "jnp.linalg.eig / jax2onnx": "writes complex numbers as pairs in a last axis",
    "jnp.select / jax2onnx": "TypeError: with a default and without one",
    "jnp.power and x // y of a free size / jax2onnx": "'_DimExpr' object cannot be interpreted as an integer",
    "jnp.linalg.inv, solve / jax2onnx": "NotImplementedError: custom_linear_solve with vecmat constants",
    "jax.image.resize(antialias=True) / jax2onnx": "NotImplementedError",
    "lax.clamp of a free size / jax2onnx": "InconclusiveDimensionOperation",
    "nnx.RNN / jax2onnx": "TraceContextError: Cannot mutate RngCount from a different trace level",
    "nnx.max_pool(x, (2, 2)) / jax2onnx": "TypeError: takes 1 positional argument; with window_shape= it is written",
    "lax.associative_scan / jax2onnx": "NotImplementedError: lax.pad with interior padding > 0",
    "lax.fori_loop over a closure, or to a traced end / jax2onnx": "TracerArrayConversionError",
    "lax.scan(reverse=True) / jax2onnx": "NotImplementedError: Reverse scan is not supported in IR pipeline",
    "lax.switch of three / jax2onnx": "ValueError: too many values to unpack (expected 2)",
    "any function with jax 0.12 / jax2onnx": "AttributeError: module 'jax._src.core' has no attribute 'ClosedJaxpr'",
}


def _make(build: Callable[[], tuple[Callable[..., Any], Any]], sizes: Sizes, folder: Path) -> Export:
    function, params = build()
    return export(function, params, [size(np.random.default_rng(0)) for size in sizes], folder)


def _case(family: str, name: str, build: Callable[[], tuple[Any, Any]], sizes: Sizes, *needs: str) -> Case:
    known = KNOWN.get(f"{family}, {name}", {})
    return Case(family, name, JAX2ONNX, partial(_make, build, sizes), ("jax2onnx", *needs), known=known)


CASES: Final = (
    *(_case("jax.numpy", name, _plain(f), sizes) for name, (f, sizes) in NUMPY.items()),
    *(_case("jax.lax and jax.nn", name, _plain(f), sizes) for name, (f, sizes) in LAX.items()),
    *(_case("flax.nnx", name, build, sizes, "flax") for name, (build, sizes) in NNX.items()),
    *(_case("equinox", name, build, sizes, "equinox") for name, (build, sizes) in EQX.items()),
)
