"""Convolutions: every form the CPU takes against one plain sum, old and odd attributes, dtypes, derivatives, errors."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.ops import conv
from onnx2jax.ops.conv_rules import Problem, lowering
from onnx2jax.ops.window import Window
from tests.support.helpers import run_op
from tests.support.joined import differences, joined
from tests.support.models import text_model

RNG = np.random.default_rng(3)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def plain(x, w, *, strides, pads, dilations, groups):
    """Convolution as its definition reads, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    extents = [
        (n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], w.shape[2:], strides, dilations, strict=True)
    ]
    y = np.zeros((x.shape[0], w.shape[0], *extents))
    depth, out = w.shape[1], w.shape[0] // groups
    for g, at, tap in itertools.product(range(groups), np.ndindex(*extents), np.ndindex(*w.shape[2:])):
        place = tuple(a * s + t * d for a, s, t, d in zip(at, strides, tap, dilations, strict=True))
        read = x[(slice(None), slice(g * depth, (g + 1) * depth), *place)]
        y[(slice(None), slice(g * out, (g + 1) * out), *at)] += read @ w[(slice(g * out, (g + 1) * out), ..., *tap)].T
    return y


FORMS = [  # x, w, strides, pads, dilations, groups
    ((2, 4, 6, 5), (3, 4, 1, 1), (2, 3), ((1, 0), (0, 2)), (1, 1), 1),  # one tap
    ((2, 4, 7, 6), (4, 1, 3, 2), (2, 1), ((1, 2), (0, 1)), (1, 2), 4),  # depthwise
    ((1, 3, 7, 6), (9, 1, 3, 3), (1, 2), ((1, 1), (1, 1)), (1, 1), 3),  # depthwise, three filters a channel
    ((2, 6, 7, 6), (4, 3, 3, 2), (2, 1), ((1, 0), (0, 1)), (2, 1), 2),  # columns of groups
    ((1, 4, 9), (5, 4, 3), (2,), ((0, 2),), (2,), 1),  # columns, one axis
    ((1, 4, 4, 5, 3), (2, 4, 2, 3, 2), (1, 2, 1), ((1, 0), (1, 1), (0, 1)), (1, 1, 1), 1),  # three axes
    ((1, 2, 9, 10), (3, 2, 9, 9), (1, 1), ((0, 0), (1, 1)), (1, 1), 1),  # more taps than are unrolled
    ((1, 2, 9, 10), (2, 1, 9, 9), (1, 1), ((0, 0), (1, 1)), (1, 1), 2),  # the same, group by group
    ((0, 4, 5, 5), (3, 4, 3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),  # an empty batch
]


def geometry(w, strides, pads, dilations, groups=1):
    return Window(w.shape[2:], strides, pads, dilations), groups


def operands(form):
    """Random arrays for a row of FORMS, and its options by name."""
    x, w, *options = form
    return f32(*x), f32(*w), dict(zip(("strides", "pads", "dilations", "groups"), options, strict=True))


def test_every_lowering_matches_the_definition():
    calls, expected = {}, {}
    for place, (x, w, options) in enumerate(map(operands, FORMS)):
        expected[place] = plain(x, w, **options)
        window, groups = geometry(w, **options)
        for form in (conv.conv, conv._native, conv.on_cpu):
            calls[place, form.__name__] = partial(form, window=window, groups=groups), (x, w)
    pairs = {name: (got, expected[name[0]]) for name, got in joined(calls).items()}
    assert not differences(pairs, rtol=1e-4, atol=1e-4)


def test_transposed_convolution_is_the_adjoint():
    calls, images, expected = {}, {}, {}
    for place, (x, w, options) in enumerate(map(operands, FORMS[:7])):
        y = plain(x, w, **options)
        back = f32(*y.shape)
        images[place], expected[place] = x, np.vdot(y, back)
        where = y.shape[2:], x.shape[2:], *geometry(w, **options)
        for form in (conv._native, conv.on_cpu):
            transposed = lambda y, w, form=form, where=where: form(y, *conv._mirrored(w, *where))  # noqa: E731
            calls[place, form.__name__] = transposed, (back, w)
    pairs = {name: (np.vdot(got, images[name[0]]), expected[name[0]]) for name, got in joined(calls).items()}
    assert not differences(pairs, rtol=1e-3)


@pytest.mark.parametrize(
    ("auto_pad", "pads"), [("SAME_UPPER", (0, 0, 1, 1)), ("SAME_LOWER", (1, 1, 0, 0)), ("VALID", (0, 0, 0, 0))]
)
def test_auto_pad(auto_pad, pads):
    x, w = f32(1, 2, 6, 6), f32(3, 2, 2, 2)
    for opset in (1, 11, 22):
        got = run_op("Conv", x, w, opset=opset, auto_pad=auto_pad, kernel_shape=[2, 2])
        np.testing.assert_array_equal(got, run_op("Conv", x, w, opset=opset, pads=list(pads)))


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, [1, 1, 2, 1, 1]),
        ({"pads": [1, 0]}, [1, 2, 1, 1]),
        ({"output_padding": [1]}, [1, 1, 2, 1, 1, 0]),
        ({"auto_pad": "SAME_UPPER"}, [1, 1, 2, 1]),
        ({"auto_pad": "SAME_LOWER"}, [1, 2, 1, 1]),
        ({"auto_pad": "SAME_UPPER", "output_shape": [4]}, [1, 1, 2, 1]),
        ({"output_shape": [4]}, [1, 2, 1, 1]),
        ({"output_shape": [7]}, [1, 1, 2, 1, 1, 0, 0]),
        ({"strides": [4], "auto_pad": "SAME_UPPER"}, [1, 1, 1, 0, 1, 1, 1, 0]),
    ],
)
@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
@pytest.mark.parametrize("opset", [1, 11, 22])
def test_extent_of_a_transposed_convolution(attributes, expected, opset):
    ones = np.ones((1, 1, 2), np.float32), np.ones((1, 1, 3), np.float32)
    got = run_op("ConvTranspose", *ones, opset=opset, **{"strides": [2], **attributes})
    assert got.ravel().tolist() == expected


@pytest.mark.parametrize(("stride", "warns"), [(3, False), (4, True)])
def test_same_pads_of_strides_larger_than_the_kernel_warn(stride, warns):
    """The pads would be negative: onnxruntime returns 7 elements, onnx.reference a zero in front."""
    model = onnx2jax.convert(
        text_model(f"""agraph (float[1,1,2] x, float[1,1,3] w) => (float[1,1,m] y) {{
        y = ConvTranspose <strides = [{stride}], auto_pad = "SAME_UPPER"> (x, w) }}""")
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = model(np.ones((1, 1, 2), np.float32), np.ones((1, 1, 3), np.float32))
    assert y.shape == (1, 1, 2 * stride)
    assert [w.category for w in caught] == [onnx2jax.errors.DeviationWarning] * warns


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_half_precision_is_summed_in_float32(name, dtype):
    x, w = np.ones((1, 4096, 2, 2), dtype), np.ones((1, 4096, 1, 1), dtype)
    got = run_op(name, x, w if name == "Conv" else w.swapaxes(0, 1), jit=True)
    assert got.dtype == dtype
    assert (np.asarray(got).astype(np.float32) == 4096).all()


def test_integers_are_summed_exactly():
    x, w = np.full((1, 64, 3, 3), -128, np.int8), np.full((2, 64, 3, 3), 127, np.int8)
    place = geometry(w, (1, 1), ((0, 0), (0, 0)), (1, 1))
    got = jax.jit(lambda x, w: conv.conv(x, w, *place))(x, w)
    assert got.dtype == np.int32
    assert np.asarray(got).ravel().tolist() == [-128 * 127 * 576] * 2


@pytest.mark.parametrize(("x", "w", "strides", "pads", "dilations", "groups"), FORMS[:4])
def test_derivatives_match_the_native_convolution(x, w, strides, pads, dilations, groups):
    x, w, options = operands((x, w, strides, pads, dilations, groups))

    @jax.jit
    def call(x, w):
        got, expected = (
            jax.grad(lambda x, w: (f(x, w, *geometry(w, **options)) ** 2).sum(), argnums=(0, 1))(x, w)  # noqa: B023
            for f in (conv.conv, conv._native)
        )
        return got, expected, jax.vmap(lambda v: conv.conv(v, w, *geometry(w, **options)))(jnp.stack([x, 2 * x]))

    got, expected, batched = call(x, w)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(batched[1], 2 * batched[0], rtol=1e-3, atol=1e-3)


def test_half_precision_gradients_keep_their_dtype():
    x, w = jnp.ones((1, 4, 3, 3), jnp.bfloat16), jnp.ones((4, 4, 2, 2), jnp.bfloat16)
    loss = lambda x, w: run_op("Conv", x, w).astype(jnp.float32).sum()  # noqa: E731
    assert [g.dtype for g in jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)] == [jnp.bfloat16] * 2


def test_one_lowering_for_every_platform():
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in (jax.export.symbolic_shape("n, 4, 8, 8"), (4, 4, 3, 3))]
    options = {"strides": (1, 1), "pads": ((1, 1), (1, 1)), "dilations": (1, 1)}
    exported = jax.export.export(
        jax.jit(lambda x, w: conv.conv(x, w, *geometry(w, **options))), platforms=("cpu", "cuda", "tpu")
    )
    assert str(exported(*shapes).out_avals[0].shape) == "(n, 4, 8, 8)"


def test_col2im_sums_overlapping_columns():
    columns = np.ones((1, 9, 4), np.float32)
    got = run_op("Col2Im", columns, np.array([4, 4]), np.array([3, 3]))
    np.testing.assert_array_equal(got[0, 0], np.outer([1, 2, 2, 1], [1, 2, 2, 1]))


def test_integer_offsets_of_deform_conv_are_shifts():
    x, w = f32(1, 2, 5, 5), f32(3, 2, 3, 3)
    offset = np.zeros((1, 18, 3, 3), np.float32)
    with compat.enable_x64():
        np.testing.assert_allclose(run_op("DeformConv", x, w, offset), run_op("Conv", x, w), rtol=1e-4, atol=1e-5)
    offset[:, 1::2] = 1  # one column to the right: beyond the edge lies zero
    shifted = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., 1:]
    np.testing.assert_allclose(run_op("DeformConv", x, w, offset), run_op("Conv", shifted, w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "words"),
    [
        ("Conv", (f32(1, 2, 2, 2), f32(1, 2, 3, 3)), {}, "does not fit"),
        ("Conv", (f32(1, 4, 5, 5), f32(2, 3, 3, 3)), {}, "group"),
        ("Conv", (f32(1, 2, 5, 5), f32(1, 2, 3, 3)), {"kernel_shape": [3, 2]}, "kernel_shape"),
        ("Conv", (f32(1, 2, 5, 5), f32(1, 2, 3, 3)), {"strides": [2]}, "strides"),
        ("Conv", (f32(1, 2, 5, 5), f32(1, 2, 3, 3)), {"auto_pad": "SAME"}, "auto_pad"),
        ("Col2Im", (f32(1, 9, 5), np.array([4, 4]), np.array([3, 3])), {}, "block, 4"),
    ],
)
def test_errors_name_mismatched_shapes(name, inputs, attributes, words):
    with pytest.raises(ValueError, match=words):
        run_op(name, *inputs, **attributes)


def lowered(x, w, window):
    """The form that a TPU takes."""
    return lowering(Problem(x.dtype, (x.shape[0], *x.shape[2:]), w.shape, window), "tpu")


def test_patches_are_one_product():
    """The form for TPUs of windows that lie side by side; pixels beyond the last whole patch are left out."""
    calls, expected = {}, {}
    for shape, kernel in (
        ((2, 3, 16, 16), (4, 4)),
        ((1, 1, 17, 10), (3, 5)),
        ((2, 5, 9), (2,)),
        ((1, 2, 4, 5, 6), (2, 2, 3)),
    ):
        x, w = f32(*shape), f32(6, shape[1], *kernel)
        rank = len(kernel)
        window = Window(kernel, kernel, ((0, 0),) * rank, (1,) * rank)
        assert lowered(x, w, window) == "patches"
        calls[shape] = partial(conv._patches, window=window), (x, w)
        expected[shape] = plain(x, w, strides=kernel, pads=[(0, 0)] * rank, dilations=(1,) * rank, groups=1)
    pairs = {shape: (y, expected[shape]) for shape, y in joined(calls).items()}
    assert not differences(pairs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"strides": (2, 4)}, {"pads": ((1, 0), (0, 0))}, {"dilations": (1, 2)}, {"kernel": (1, 1), "strides": (1, 1)}],
)
def test_other_windows_are_no_patches(change):
    window = Window((4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1))._replace(**change)
    assert lowered(f32(1, 3, 16, 16), f32(8, 3, *window.kernel), window) != "patches"


FILTERS = {
    "one axis": ((2, 1, 700), Window((33,), (1,), ((0, 0),), (1,))),
    "strides and pads": ((2, 1, 701), Window((40,), (2,), ((3, 20),), (1,))),
    "few results": ((1, 1, 70), Window((64,), (3,), ((0, 0),), (1,))),
    "along columns": ((2, 1, 300, 3), Window((32, 1), (1, 1), ((5, 0), (0, 1)), (1, 1))),
    "along rows": ((2, 1, 3, 300), Window((1, 32), (1, 2), ((0, 0), (0, 0)), (1, 1))),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (ml_dtypes.bfloat16, 0.1)])
def test_long_filters_are_toeplitz_products(dtype, tolerance):
    """The form for TPUs of many taps along one axis of one channel."""
    calls, expected = {}, {}
    for case, (shape, window) in FILTERS.items():
        x, w = f32(*shape).astype(dtype), f32(2, 1, *window.kernel).astype(dtype)
        assert lowered(x, w, window) == "toeplitz"
        calls[case] = partial(conv._toeplitz, window=window), (x, w)
        expected[case] = plain(x, w, strides=window.strides, pads=window.pads, dilations=window.dilations, groups=1)
    results = joined(calls)
    assert {y.dtype for y in results.values()} == {np.dtype(dtype)}
    pairs = {case: (np.float32(y), np.float32(expected[case])) for case, y in results.items()}
    assert not differences(pairs, rtol=tolerance, atol=tolerance)


BOTH = Window((32, 2), (1, 1), ((0, 0), (0, 0)), (1, 1))


@pytest.mark.parametrize("change", [{"kernel": (16,)}, {"strides": (8,)}, {"dilations": (2,)}, BOTH._asdict()])
def test_other_windows_are_no_long_filters(change):
    window = FILTERS["one axis"][1]._replace(**change)
    shape = (300,) * len(window.kernel)
    assert lowered(f32(1, 1, *shape), f32(1, 1, *window.kernel), window) != "toeplitz"
    assert lowered(f32(1, 2, *shape), f32(1, 2, *window.kernel), window) != "toeplitz"


FEW = {
    "wide": ((2, 3, 10, 50), (4, 3, 3, 11), Window((3, 11), (1, 1), ((1, 1), (5, 5)), (1, 1))),
    "high": ((1, 2, 50, 10), (3, 2, 12, 3), Window((12, 3), (1, 1), ((0, 3), (1, 1)), (1, 1))),
    "strides and dilations": ((1, 2, 40, 60), (8, 2, 4, 9), Window((4, 9), (3, 2), ((2, 0), (1, 4)), (2, 3))),
    "few taps of many channels": ((2, 9, 12, 9), (3, 9, 3, 3), Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))),
    "one row of the kernel": ((1, 2, 8, 50), (2, 2, 1, 33), Window((1, 33), (1, 1), ((0, 0), (0, 0)), (1, 1))),
}


@pytest.mark.parametrize("case", FEW)
def test_few_filters_are_convolutions_of_rows(case):
    """The form for TPUs of few filters over few images, and its gradient."""
    x, w, window = FEW[case]
    rng = np.random.default_rng(3)  # its own: whatever tests the process ran before
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (x, w))
    assert lowered(x, w, window) == "rows"

    @jax.jit
    def call(x, w):
        return [
            (y, *back(jnp.cos(y)))
            for form in (conv._by_rows, conv._native)
            for y, back in [jax.vjp(lambda x, w: form(x, w, window=window, groups=1), x, w)]  # noqa: B023
        ]

    got, expected = call(x, w)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rows_of_half_precision_are_summed_in_float32():
    x, w, window = FEW["wide"]
    x, w = (f32(*shape).astype(ml_dtypes.bfloat16) for shape in (x, w))
    y, expected = jax.jit(
        lambda x, w: (conv._by_rows(x, w, window), conv._native(*(v.astype(np.float32) for v in (x, w)), window, 1))
    )(x, w)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(np.float32(y), expected, rtol=8e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((1, 8, 56, 56), (64, 8, 3, 13)),  # many filters
        ((16, 8, 56, 56), (8, 8, 3, 13)),  # many images
        ((8, 9, 56, 56), (3, 9, 3, 3)),
        ((1, 8, 56, 56), (8, 8, 3, 3)),  # few taps over fewer channels than rows of results
        ((1, 8, 56, 56), (1, 8, 1, 1)),
        ((1, 8, 3, 56), (8, 8, 3, 13)),  # one row of results
        ((0, 8, 56, 56), (8, 8, 3, 13)),
    ],
)
def test_other_filters_are_not_few(x, w):
    window = Window(w[2:], (1, 1), ((0, 0), (0, 0)), (1, 1))
    assert lowered(f32(*x), f32(*w), window) != "rows"


CHANNELS_LAST = [
    ((2, 6, 9, 10), (6, 1, 3, 3), Window((3, 3), (2, 1), ((1, 1), (0, 2)), (1, 2)), ()),
    ((2, 6, 5), (5, 6, 1), Window((1,), (1,), ((0, 0),), (1,)), ()),
    ((2, 6, 5, 4), (5, 6, 1, 1), Window((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)), ()),
    ((2, 6, 5, 4), (5, 6, 1, 1), Window((1, 1), (2, 1), ((0, 0), (0, 0)), (1, 1)), ()),
    ((2, 6, 5, 4), (5, 6, 1, 1), Window((1, 1), (1, 1), ((1, 0), (0, 0)), (1, 1)), ()),
    ((2, 6, 5, 4, 3), (5, 6, 1, 1, 1), Window((1,) * 3, (1,) * 3, ((0, 0),) * 3, (1,) * 3), ()),
    ((2, 6, 9, 10), (4, 3, 3, 2), Window((3, 2), (1, 2), ((1, 0), (0, 0)), (1, 2)), ()),
    ((2, 6, 5, 4), (4, 6, 3, 2), Window((3, 2), (1, 1), ((1, 2), (1, 1)), (1, 1)), (2, 3)),
    ((1, 3, 7, 6, 5), (4, 3, 3, 2, 3), Window((3, 2, 3), (1, 2, 1), ((1, 0), (0, 0), (2, 2)), (1, 1, 2)), ()),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 8e-3)])
def test_channels_last_for_cuda(dtype, tolerance):
    """Depthwise kernels and products are summed in float32 where the type is shorter."""

    def both(x, w, window, stretch):
        groups = x.shape[1] // w.shape[1]
        single = (v.astype(np.float32) for v in (x, w))
        return conv._on_cuda(x, w, window, groups, stretch), conv._native(*single, window, groups, stretch)

    calls = {
        place: (partial(both, window=window, stretch=stretch), tuple(f32(*shape).astype(dtype) for shape in (x, w)))
        for place, (x, w, window, stretch) in enumerate(CHANNELS_LAST)
    }
    results = joined(calls)
    assert {y.dtype for y, _ in results.values()} == {np.dtype(dtype)}
    pairs = {place: (np.float32(y), expected) for place, (y, expected) in results.items()}
    assert not differences(pairs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("platform", "w", "window"),
    [
        ("tpu", (8, 3, 4, 4), Window((4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1))),
        ("cuda", (8, 3, 4, 4), Window((4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1))),
        ("tpu", (2, 1, 32, 1), Window((32, 1), (1, 1), ((16, 16), (0, 0)), (1, 1))),
        ("cuda", (3, 1, 3, 3), Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))),
        ("cuda", (5, 3, 1, 1), Window((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))),
    ],
)
def test_forms_of_accelerators_are_lowered_without_a_convolution(platform, w, window):
    groups = 3 if w[1] == 1 and platform == "cuda" else 1
    x = jax.ShapeDtypeStruct((1, w[1] * groups, 16, 16), np.float32)
    traced = jax.jit(lambda x, w: conv.conv(x, w, window, groups)).trace(x, jax.ShapeDtypeStruct(w, np.float32))
    lowered, _, otherwise = traced.lower(lowering_platforms=(platform,)).as_text().partition("stablehlo.case")
    assert "stablehlo.convolution" not in lowered
    assert ("stablehlo.convolution" in otherwise) == (window.kernel == (32, 1))  # for images that are not finite
    assert "stablehlo.convolution" in traced.lower(lowering_platforms=("rocm",)).as_text()


def test_few_filters_are_lowered_as_rows_for_tpus_alone():
    x, w, window = FEW["wide"]
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (x, w)]
    traced = jax.jit(lambda x, w: conv.conv(x, w, window)).trace(*types)
    rows, plain = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("tpu", "cuda"))
    assert "tensor<24x3x60xf32>" in rows  # 2 images of 10 rows with padding, 12 filters of one row each
    assert "tensor<24x3x60xf32>" not in plain


@pytest.mark.parametrize("traced", [False, True])
def test_transposed_convolution_of_an_image_without_rows(traced: bool) -> None:
    """What its windows add to is there, and is 0: strides * (0 - 1) + 3 rows."""
    x, w = np.zeros((1, 2, 0, 4), np.float32), np.ones((2, 3, 3, 2), np.float32)
    y = run_op("ConvTranspose", x, w, strides=[2, 2], jit=traced)
    np.testing.assert_array_equal(y, np.zeros((1, 3, 1, 8), np.float32))


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_kernels_without_taps_are_refused(name: str) -> None:
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 0, 3), np.float32)
    for traced in (False, True):
        with pytest.raises(OnnxError, match="must be positive"):
            run_op(name, x, w, jit=traced)
