"""Products with packed weights: the form for accelerators, which no test runs there, beside that for CPUs."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax.limits import PACKED_ADDED_ROWS, PACKED_MANY_ROWS, PACKED_PRODUCT
from onnx2jax.ops import packed
from onnx2jax.ops.microsoft.weights import CODES
from tests.support.joined import joined

OUT, BLOCKS = 64, 3


def operands(bits, size, rows, zero, dtype=np.float32, value=packed.integer):
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(rows, BLOCKS * size * 8 // bits)).astype(dtype)
    codes = rng.integers(0, 256, (OUT, BLOCKS, size), dtype=np.uint8)
    if value is packed.float8:
        codes &= 0xF7  # no NaN
    scales = rng.uniform(0.5, 1, (OUT, BLOCKS)).astype(np.float32)
    zeros = {"none": None, "float": rng.normal(size=(OUT, BLOCKS)).astype(np.float32), "uint8": codes[:, :, 0] & 3}
    return x, codes, scales, zeros[zero]


def by_hand(x, codes, scales, zeros, bits, value):
    """In NumPy, number by number."""
    numbers = np.stack([codes >> k & 2**bits - 1 for k in range(0, 8, bits)], axis=-1).reshape(OUT, BLOCKS, -1)
    weight = np.asarray(value(jnp.asarray(numbers), np.float32))
    if value is packed.integer:
        weight = weight - (2 ** (bits - 1) if zeros is None else zeros[:, :, None].astype(np.float32))
    return x.astype(np.float32) @ (weight * scales[:, :, None]).reshape(OUT, -1).T


KINDS = pytest.mark.parametrize(
    ("bits", "size", "zero", "value"),
    [
        (4, 16, "none", packed.integer),
        (4, 6, "float", packed.integer),
        (4, 16, "uint8", packed.integer),
        (2, 8, "uint8", packed.integer),
        (8, 32, "none", packed.integer),
        (4, 8, "none", packed.looked_up(CODES[0])),
        (8, 16, "none", packed.float8),
    ],
)
ROWS = (1, 5, 70)


def check_forms(forms, kind, rows):
    """Compare forms of the product, each with the weight on one device and on several, with the unpacked weight."""
    bits, size, zero, value = kind
    given = {n: operands(bits, size, n, zero, value=value) for n in rows}
    calls = {
        (n, form, spread): (partial(form, bits=bits, spread=spread, value=value), given[n])
        for n, form, spread in product(rows, forms, (False, True))
    }
    for (n, *_), got in joined(calls).items():
        wanted = by_hand(*given[n], bits, value)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@KINDS
def test_the_form_for_cpus_is_the_product_of_the_unpacked_weight(bits, size, zero, value):
    """It depends on the number of rows."""
    check_forms([packed._in_words], (bits, size, zero, value), ROWS)


@pytest.mark.parametrize("rows", [5, *(pytest.param(n, marks=pytest.mark.extended) for n in ROWS if n != 5)])
@KINDS
def test_forms_for_accelerators_are_the_product_of_the_unpacked_weight(bits, size, zero, value, rows):
    forms = [
        partial(packed._as_stored, width=width, by=by, axis=axis)
        for width, by, axis in ((1000, packed._multiplied, 2), (5, packed._multiplied, 3), (OUT, packed._added, 3))
    ]
    check_forms(forms, (bits, size, zero, value), [rows])


FORMS = pytest.mark.parametrize("by", [packed._multiplied, packed._added])


def on_accelerators(by):
    """The form for accelerators of weights of 4 bits, multiplied by a function."""
    return partial(packed._as_stored, width=OUT, by=by, axis=3, bits=4, spread=False, value=packed.integer)


@FORMS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_summed_in_float32(dtype, by):
    given = operands(4, 16, 3, "none", dtype)
    got = jax.jit(on_accelerators(by))(*given)
    assert got.dtype == np.float32
    wanted = by_hand(*given, 4, packed.integer)
    np.testing.assert_allclose(got, wanted, atol=1e-2 * np.abs(wanted).max())


@FORMS
def test_scales_in_float8_are_those_numbers(by):
    x, codes, scales, _ = operands(4, 16, 2, "none")
    narrow = scales.astype(ml_dtypes.float8_e4m3fn)
    got = jax.jit(on_accelerators(by))(x, codes, narrow, None)
    wanted = by_hand(x, codes, narrow.astype(np.float32), None, 4, packed.integer)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_accelerators_read_bytes_and_cpus_words():
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands(4, 16, 1, "uint8")]
    traced = jax.jit(lambda *v: packed.packed_product(*v, 4)).trace(*types)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert {p for p, text in texts.items() if "xui32" in text} == {"cpu"}


@pytest.mark.parametrize(("rows", "products"), [(1, 0), (PACKED_ADDED_ROWS, 0), (PACKED_ADDED_ROWS + 1, 1)])
def test_few_rows_are_no_product_on_cuda(rows, products):
    """XLA adds up the products of few rows while it unpacks the weight; for a product it would store the weight."""
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands(4, 16, rows, "uint8")]
    traced = jax.jit(lambda *v: packed.packed_product(*v, 4)).trace(*types)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("dot_general") == products


@pytest.mark.parametrize(("rows", "products"), [(PACKED_MANY_ROWS - 1, 2), (PACKED_MANY_ROWS, 1)])
def test_many_rows_take_more_of_the_weight_on_cuda(rows, products):
    """All pieces of a weight would read the rows, and their results would be joined."""
    columns = PACKED_PRODUCT // 1024 + 1
    shapes = ((rows, 1024), jnp.bfloat16), ((columns, 32, 16), np.uint8), ((columns, 32), np.float32)
    types = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    traced = jax.jit(lambda *v: packed.packed_product(*v, None, 4)).trace(*types)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("dot_general") == products


def test_products_of_equal_shapes_share_a_trace():
    """A decoder has several products a layer, each with loops inside, which take longest to trace."""
    x, *weight = operands(4, 16, 1, "uint8")
    traced = jax.make_jaxpr(lambda *v: [packed.packed_product(*v, 4), packed.packed_product(v[0] * 2, *v[1:], 4)])(
        x, *weight
    )
    first, second = (e.params["jaxpr"] for e in traced.eqns if "jaxpr" in e.params)
    assert first is second


@FORMS
def test_gradients_of_the_form_for_accelerators(by):
    x, *rest = operands(4, 16, 2, "float")
    form = on_accelerators(by)
    got = jax.jit(jax.grad(lambda x: jnp.sum(form(x, *rest) ** 2)))(x)
    weight = by_hand(np.eye(x.shape[1], dtype=np.float32), *rest, 4, packed.integer)
    np.testing.assert_allclose(got, 2 * x @ weight @ weight.T, rtol=1e-3, atol=1e-3 * np.abs(got).max())
