"""Images channels last: the same numbers, valid programs, and no transposes between what has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from onnx2jax import compat
from onnx2jax.jaxpr.passes.cpu.layout_assignment import assign_layouts
from onnx2jax.ops.conv import conv
from onnx2jax.ops.quant import integer_conv
from onnx2jax.ops.window import window_of
from tests.ops.test_conv_cpu import reference
from tests.support.helpers import as_weights
from tests.support.programs import hoisted, rewritten, traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 8, 10)).astype(np.float32)
W = RNG.normal(size=(6, 6, 3, 3)).astype(np.float32)
V = RNG.normal(size=6).astype(np.float32)


def convolved(x: Any, w: Any = None) -> Any:
    """A 3x3 convolution that keeps the image's extents, as the operator Conv traces it."""
    w = jnp.asarray(W) if w is None else w
    return conv(x, w, window_of(x.shape[2:], w.shape[2:], pads=[1] * 4))


def transposes(function: Callable[..., Any], *inputs: Any, rtol: float = 1e-5) -> int:
    """How often a call transposes more than a weight, in a function of a weight and inputs that is shown to hold."""
    with compat.enable_x64():
        closed = jax.jit(function).trace(W, *inputs).jaxpr
        parts = hoisted(rewritten(assign_layouts, closed, 1), 1)
        prepared = parts.hoisted_arguments(*as_weights([W, *inputs]))
        both = jax.jit(lambda prepared, w, *xs: (jaxpr_as_fun(parts.main)(*prepared, *xs), function(w, *xs)))
        ours, wanted = both(prepared, W, *inputs)
        for a, b in zip(ours, jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1, float(jnp.max(jnp.abs(b), initial=0))))
            assert a.dtype == b.dtype
    return sum(e.primitive.name == "transpose" and moves(e) for e in parts.main.jaxpr.eqns)


def moves(equation: Any) -> bool:
    """Whether a transpose moves more than axes of one, in more than a vector."""
    shape, order = equation.invars[0].aval.shape, equation.params["permutation"]
    long = [axis for axis in order if shape[axis] > 1]
    return len(long) > 1 and long != sorted(long)


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "elementwise": lambda x: jnp.tanh(x) * 2 + jnp.maximum(x, 0) - x,
    "an inner jit": jax.jit(lambda x: jnp.where(x > 0, x, 0.1 * x)),
    "custom_jvp": jax.nn.relu,
    "clamp": lambda x: lax.clamp(np.float32(-1), x, np.float32(1)),
    "a channel's factor and bias": lambda x: x * V[:, None, None] + V.reshape(1, 6, 1, 1),
    "a row's bias": lambda x: x + jnp.arange(10, dtype=np.float32),
    "squeeze and excite": lambda x: x * jax.nn.sigmoid(jnp.mean(x, (2, 3), keepdims=True)),
    "softmax over channels": lambda x: jax.nn.softmax(x, axis=1),
    "normalised": lambda x: (x - x.mean((2, 3), keepdims=True)) * lax.rsqrt(x.var((2, 3), keepdims=True) + 1e-5),
    "pad": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0), (0, 2)), constant_values=3),
    "slice": lambda x: x[:, :, 1::2, :7],
    "reverse": lambda x: x[:, :, ::-1],
    "a dynamic slice": lambda x: lax.dynamic_slice(x, [jnp.int32(i) for i in (0, 0, 1, 2)], (2, 6, 5, 5)),
    "concatenate": lambda x: jnp.concatenate([x, x], 2),
    "halves of channels joined": lambda x: jnp.concatenate([*jnp.split(x, 2, axis=1)][::-1], 1),
    "max pool": lambda x: lax.reduce_window(x, np.float32(-np.inf), lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
    "sum pool": lambda x: lax.reduce_window(x, np.float32(0), lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
    "cumulative": lambda x: jnp.cumsum(x, axis=3),
    "nearest resize": lambda x: jnp.take(x, np.array([0, 0, 1, 2, 2, 3]), axis=2),
    "half precision": lambda x: (x.astype(np.float16) * 2).astype(np.float32),
    "a transpose and its inverse": lambda x: jnp.tanh(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "rows as the batch": lambda x: jnp.sin(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "rows and columns as one axis": lambda x: jnp.tanh(x.reshape(2, 6, 80)).reshape(2, 6, 8, 10),
    "groups of channels": lambda x: (x.reshape(2, 2, 3, 8, 10) * 2).reshape(2, 6, 8, 10),
    "new axes of one": lambda x: (x[:, None] + 1)[:, 0],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_convolutions_nothing_is_transposed(name: str) -> None:
    """One transpose brings the image in, one the result out."""
    rtol = 1e-2 if name == "half precision" else 1e-5
    assert transposes(lambda w, x: convolved(BETWEEN[name](convolved(x, w)), w), X, rtol=rtol) == 2


PIXELS = RNG.normal(size=(8, 10)).astype(np.float32)
SUMMED: dict[str, Callable[[Any], Any]] = {
    "all pixels": lambda x: lax.dot_general(x, PIXELS, (((2, 3), (0, 1)), ((), ()))),
    "columns": lambda x: lax.dot_general(x, PIXELS[0], (((3,), (0,)), ((), ()))),
    "rows": lambda x: lax.dot_general(x, PIXELS[:, 0], (((2,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_sum_over_pixels_is_a_product_without_transposes(name: str) -> None:
    """XLA would transpose an operand whose summed axes lie before others that it keeps."""

    def network(w: Any, x: Any) -> Any:
        return SUMMED[name](convolved(x, w))

    assert transposes(network, X) <= 2
    closed = rewritten(assign_layouts, jax.jit(network).trace(W, X).jaxpr, 1)
    products = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert products
    for product in products:
        ((_, summed), _), x = product.params["dimension_numbers"], product.invars[1].aval
        assert summed == (x.ndim - 2,)


FORCED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "channel shuffle": (lambda x: x.reshape(2, 2, 3, 8, 10).swapaxes(1, 2).reshape(2, 6, 8, 10), 3),
    "linear resize": (
        lambda x: jnp.einsum("nchw,hH,wW->ncHW", x, np.ones((8, 4), "f") / 8, np.ones((10, 5), "f") / 10),
        3,
    ),
    "what has no rule": (lambda x: jnp.sort(x, axis=3), 4),
    "all in one axis": (lambda x: jnp.tanh(x.reshape(2, 480)).reshape(2, 6, 8, 10), 4),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda _, v: v * 2, x), 4),
}


@pytest.mark.parametrize("name", FORCED)
def test_what_needs_the_plain_order_gets_it(name: str) -> None:
    between, expected = FORCED[name]
    assert transposes(lambda w, x: convolved(between(convolved(x, w)), w), X) == expected


def test_depth_to_space_takes_one_transpose() -> None:
    def function(w: Any, x: Any) -> Any:
        y = convolved(x, w)[:, :4].reshape(2, 1, 2, 2, 8, 10)
        return convolved(y.transpose(0, 1, 4, 2, 5, 3).reshape(2, 1, 16, 20), w[:1, :1])

    assert transposes(function, X) <= 3


def test_two_images_in_different_orders_meet_channels_last() -> None:
    assert transposes(lambda w, x, y: convolved(convolved(x, w) + y, w), X, X) == 3


def test_a_head_that_flattens_after_global_pooling() -> None:
    assert transposes(lambda w, x: convolved(x, w).mean((2, 3)) @ w.reshape(6, 54), X) == 1


def test_products_with_the_image_are_told_where_its_axes_lie() -> None:
    def attention(w: Any, x: Any) -> Any:
        flat = convolved(x, w).reshape(2, 6, 80)
        weights = jax.nn.softmax(jnp.einsum("ncp,ncq->npq", flat, flat), axis=-1)
        return convolved(jnp.einsum("npq,ncq->ncp", weights, flat).reshape(2, 6, 8, 10), w)

    assert transposes(attention, X, rtol=1e-4) <= 3


@pytest.mark.parametrize(
    ("extents", "stretch", "pads"), [((0, 9), 1, 2), ((5, 1), 2, 0), ((0, 5), 3, 3), ((3, 3), 1, 0)]
)
def test_images_without_pixels(extents: tuple[int, int], stretch: int, pads: int) -> None:
    """As a transposed convolution may read or make them."""

    def function(w: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), [(pads, pads)] * 2, lhs_dilation=(stretch,) * 2)

    transposes(function, np.ones((0 if extents == (3, 3) else 2, 6, *extents), np.float32))


def test_several_outputs_and_weights_that_calls_compute() -> None:
    assert transposes(lambda w, x: (convolved(x, w), convolved(x, w * x.mean()).sum(), w.T, jnp.float32(1)), X) >= 2


def test_a_program_without_convolutions_stays_as_it_is() -> None:
    closed = jax.make_jaxpr(lambda x: jax.nn.relu(x) @ x.T)(V)
    assert rewritten(assign_layouts, closed) is closed


def test_new_equations_keep_the_scopes_of_nodes() -> None:
    def function(w: Any, x: Any) -> Any:
        with jax.named_scope("stem"):
            return convolved(x, w)

    changed = rewritten(assign_layouts, jax.jit(function).trace(W, X).jaxpr, 1)
    assert {str(e.source_info.name_stack) for e in changed.jaxpr.eqns} == {"stem"}


# ------------------------------------------------------------------------------------------------- integers


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_integer_convolutions_are_one_of_int8_and_exact(signed: bool, asymmetric: bool, group: int) -> None:
    """Beyond 57 input channels float32 would need several."""
    low = -128 if signed else 0
    x = RNG.integers(low, low + 256, (1, 128, 6, 7)).astype(np.int8 if signed else np.uint8)
    w = RNG.integers(low, low + 256, (24, 128 // group, 3, 3)).astype(x.dtype)
    zero_points = [x.dtype.type(low + 3), np.full(24, low + 128, x.dtype) + np.arange(24, dtype=x.dtype) * asymmetric]

    def function(w: Any, x: Any) -> Any:
        return integer_conv(x, w, *zero_points, group=group, pads=[1] * 4)

    with compat.enable_x64():
        closed = traced(function, w, x)
        parts = hoisted(rewritten(assign_layouts, closed, 1), 1)
        (ours,) = jax.jit(jaxpr_as_fun(parts.main))(*parts.hoisted_arguments(*as_weights([w, x])), x)
        kinds = [
            e.invars[0].aval.dtype
            for e in parts.main.jaxpr.eqns
            if e.primitive.name in ("conv_general_dilated", "dot_general")
        ]
    wide = (v.astype(np.int64) for v in (x, w))
    a, b = (v - z.astype(np.int64).reshape(s) for v, z, s in zip(wide, zero_points, ((), (-1, 1, 1, 1)), strict=True))
    exact = reference(np.moveaxis(a, 1, -1), b, window_of((6, 7), (3, 3), pads=[1] * 4), group)
    np.testing.assert_array_equal(np.moveaxis(exact, -1, 1), ours)
    assert kinds == [np.int8] if group == 1 else np.int8 not in kinds


def test_forms_of_a_tpu_stay_there() -> None:
    """A few filters of many taps are convolutions of rows on a TPU, which take a CPU three times as long."""
    x = RNG.normal(size=(1, 8, 40, 60)).astype(np.float32)
    w = RNG.normal(size=(8, 8, 3, 39)).astype(np.float32)
    window = window_of(x.shape[2:], w.shape[2:], pads=[1, 19, 1, 19])
    with compat.enable_x64():
        closed = jax.jit(lambda w, x: [conv(x, w, window)]).trace(w, x).jaxpr
        parts = hoisted(rewritten(assign_layouts, closed, 1), 1)
    (found,) = (e for e in parts.main.jaxpr.eqns if e.primitive.name == "conv_general_dilated")
    assert found.invars[0].aval.shape[0] == 1
