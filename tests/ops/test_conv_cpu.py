"""The forms that convolutions take on a CPU: each gives the convolution, and which one is chosen for which shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from onnx2jax import compat
from onnx2jax.ops import conv_cpu
from onnx2jax.ops.conv_cpu import POINTS, matrices
from onnx2jax.ops.conv_rules import Problem
from onnx2jax.ops.window import Window, window_of
from tests.support.joined import differences, joined

RNG = np.random.default_rng(0)

# x (N, spatial..., C), w (O, C / groups, kernel...)
DENSE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 8, 9, 5), (4, 5, 3, 3), {}),
    "1x1": ((2, 8, 9, 5), (4, 5, 1, 1), {}),
    "1x1, strided and padded": ((2, 8, 9, 5), (4, 5, 1, 1), {"strides": (2, 3), "pads": [1, 0, 2, 1]}),
    "3x3 over no whole number of tiles": ((2, 9, 14, 5), (4, 5, 3, 3), {"pads": [1, 0, 2, 1]}),
    "asymmetric pads": ((1, 8, 9, 5), (4, 5, 3, 2), {"pads": [1, 0, 2, 1]}),
    "strides and dilations": ((1, 12, 13, 5), (4, 5, 3, 3), {"strides": (2, 1), "dilations": (2, 3)}),
    "1-D": ((2, 20, 5), (3, 5, 4), {"strides": (2,), "pads": [1, 2]}),
    "3-D": ((1, 6, 7, 5, 2), (3, 2, 3, 2, 3), {"pads": [1, 0, 1, 0, 1, 1]}),
    "empty batch": ((0, 8, 9, 5), (4, 5, 3, 3), {}),
    "no channel": ((1, 8, 9, 0), (4, 0, 3, 3), {}),
}
GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "depthwise": ((2, 8, 9, 6), (6, 1, 3, 3), 6, {"pads": [1, 1, 1, 1], "strides": (2, 1)}),
    "depthwise, two results a channel": ((2, 8, 9, 3), (6, 1, 3, 3), 3, {}),
    "depthwise, 1-D": ((1, 20, 4), (4, 1, 5), 4, {"dilations": (2,)}),
    "groups": ((2, 8, 9, 6), (4, 3, 3, 3), 2, {"pads": [1, 1, 1, 1]}),
    "groups, 1x1": ((2, 8, 9, 6), (4, 3, 1, 1), 2, {}),
    "many groups": ((1, 5, 5, 160), (80, 2, 3, 3), 80, {}),
}
CASES = [
    *((name, x, w, 1, a) for name, (x, w, a) in DENSE.items()),
    *((name, x, w, groups, a) for name, (x, w, groups, a) in GROUPED.items()),
]


def exact(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...] = ()) -> Any:
    """In float64, traced in 64 bits."""
    x, w, axes = jnp.asarray(x, np.float64), jnp.asarray(w, np.float64), "DHW"[5 - x.ndim :]
    dimensions = (f"N{axes}C", f"OI{axes}", f"N{axes}C")
    strides, pads, dilations = window.strides, window.pads, window.dilations
    return lax.conv_general_dilated(x, w, strides, pads, stretch or None, dilations, dimensions, groups)


def reference(x: Any, w: Any, window: Window, groups: int) -> Any:
    """``exact`` as NumPy."""
    with compat.enable_x64():
        return np.asarray(jax.jit(lambda x, w: exact(x, w, window, groups))(x, w))


def forms(w: tuple[int, ...], groups: int, attributes: dict[str, Any]) -> list[str]:
    """The forms that support weights of a shape."""
    if groups > 1:
        return ["native", "piecewise", "columns", *(["depthwise"] if w[1] == 1 else [])]
    special = {(1, 1): ["pointwise"], (3, 3): ["tiled"] if attributes.keys() <= {"pads"} else []}
    plain = attributes.get("strides", (1,))[-1] == attributes.get("dilations", (1,))[-1] == 1
    return ["native", "columns", *special.get(w[2:], []), *(["packed"] if plain and w[1] else [])]


Case = tuple[Sequence[Callable[..., Any]], tuple[Any, ...], tuple[int, ...], tuple[int, ...]]


def violations(cases: Mapping[Any, Case], dtype: Any = np.float32, **tolerances: float) -> list[str]:
    """The forms that differ from ``exact``, in one program of all cases: forms, their arguments, and shapes."""

    def computing(forms: Sequence[Callable[..., Any]], arguments: Any) -> Callable[[Any, Any], Any]:
        return lambda x, w: ([form(x, w, *arguments) for form in forms], exact(x, w, *arguments))

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        return RNG.integers(-128, 128, shape, np.int8) if dtype == np.int8 else RNG.normal(size=shape).astype(dtype)

    calls = {name: (computing(f, arguments), (drawn(x), drawn(w))) for name, (f, arguments, x, w) in cases.items()}
    results = {
        (name, form.__name__): (np.asarray(ours, np.float64), theirs)
        for name, (found, theirs) in joined(calls).items()
        for form, ours in zip(cases[name][0], found, strict=True)
    }
    return differences(results, **tolerances)


@pytest.mark.parametrize("grouped", [False, True])
def test_every_cpu_lowering_matches_lax_convolution(grouped: bool) -> None:
    cases = {
        name: ([getattr(conv_cpu, f) for f in forms(w, groups, a)], (window_of(x[1:-1], w[2:], **a), groups), x, w)
        for name, x, w, groups, a in CASES
        if (groups > 1) is grouped
    }
    assert not violations(cases, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [(1, 2), (3, 3), (4, 7)])
def test_int8_channels_are_combined_exactly(kernel: Any) -> None:
    """Also where the last pack reaches beyond the image, and where one ends before it."""
    cases = {}
    for strides, (inputs, outputs) in product([(1, 1), (2, 2), (1, 3), (4, 4)], [(1, 40), (3, 24), (4, 1), (15, 17)]):
        window, x, w = (
            window_of((9, 101), kernel, strides=strides, pads=[1, 2, 0, 3]),
            (2, 9, 101, inputs),
            (outputs, inputs, *kernel),
        )
        assert Problem(np.dtype(np.int8), x[:-1], w, window).pack % strides[1] == 0
        cases[strides, inputs, outputs] = [conv_cpu.packed], (window, 1), x, w
    assert not violations(cases, np.int8, rtol=0)


def test_int8_in_groups_is_summed_in_int32() -> None:
    """ONNX's quantised convolutions in groups are not of int8, but a user's function can have one."""
    cases = {
        name: ([conv_cpu.convolve], (window_of(x[1:-1], w[2:], **a), groups), x, w)
        for name, (x, w, groups, a) in GROUPED.items()
    }
    assert not violations(cases, np.int8, rtol=0)


def test_which_int8_convolutions_combine_channels() -> None:
    image, weights = np.zeros((1, 224, 224, 3), np.int8), np.zeros((64, 3, 7, 7), np.int8)
    window = window_of((224, 224), (7, 7), strides=(2, 2), pads=[3] * 4)
    assert conv_cpu.chosen(image, weights, window, 1) is conv_cpu.packed
    assert conv_cpu.chosen(image[:, :12, :12], weights, window, 1) is conv_cpu.columns
    assert conv_cpu.chosen(image.astype(np.float32), weights.astype(np.float32), window, 1) is conv_cpu.native
    dilated = window._replace(dilations=(2, 2))
    assert conv_cpu.chosen(image, weights, dilated, 1) is conv_cpu.columns


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_the_chosen_lowering_rounds_once(dtype: Any) -> None:
    def rounded(x: Any, w: Any, *arguments: Any) -> Any:
        return conv_cpu.convolve(x, w, *arguments).astype(dtype)

    cases = {
        name: ([rounded], (window_of(x[1:-1], w[2:], **attributes), groups), x, w)
        for name, x, w, groups, attributes in CASES
        if name in ("3x3", "1-D", "depthwise", "groups")
    }
    eps = float(jnp.finfo(dtype).eps)
    assert not violations(cases, dtype, rtol=eps, atol=max(1e-4, eps * 1e-2))


def transposed(kernel: tuple[int, ...], stretch: tuple[int, ...], pads: Any, dilations: Any, groups: int) -> Case:
    window = Window(kernel, (1, 1), pads, dilations)
    return [conv_cpu.convolve], (window, groups, stretch), (2, 5, 6, 3), (6, 3 // groups, *kernel)


def test_transposed_convolution_by_stride_residues() -> None:
    kernels, stretches = [(1, 1), (2, 2), (3, 3), (4, 5)], [(2, 2), (3, 1), (1, 4)]
    all_pads = [((0, 0), (0, 0)), ((1, 2), (0, 3)), ((2, -1), (3, 1))]
    cases = {c: transposed(*c, (1, 1), 1) for c in product(kernels, stretches, all_pads)}
    assert not violations(cases, rtol=1e-4, atol=1e-4)


def test_transposed_with_dilations_and_groups() -> None:
    """Strides of more residues than are unrolled take the native form."""
    stretches, others = [(2, 2), (4, 3), (6, 2), (16, 8)], [((2, 3), 1), ((4, 1), 1), ((1, 1), 3), ((3, 2), 3)]
    cases = {c: transposed((3, 2), c[0], ((4, 3), (2, 5)), *c[1]) for c in product(stretches, others)}
    assert not violations(cases, rtol=1e-4, atol=1e-4)


def test_columns_of_few_pixels_and_of_small_groups() -> None:
    """A result of 14x14 pixels: by columns from 196 channels on, or of groups of few channels."""
    window = window_of((14, 14), (3, 3), pads=[1] * 4)

    def chosen(channels: int, groups: int = 1, batch: int = 1) -> Any:
        image = np.broadcast_to(np.float32(0), (batch, 14, 14, channels))
        return conv_cpu.chosen(image, np.zeros((channels, channels // groups, 3, 3), np.float32), window, groups)

    assert [chosen(195), chosen(196), chosen(196, batch=2)] == [conv_cpu.native, conv_cpu.columns, conv_cpu.native]
    grouped = [chosen(128, 32), chosen(256, 32), chosen(512, 256)]
    assert grouped == [conv_cpu.columns, conv_cpu.piecewise, conv_cpu.columns]
    assert [chosen(64, 16, batch=64), chosen(256, 128, batch=64)] == [conv_cpu.piecewise, conv_cpu.native]


@pytest.mark.parametrize(("side", "form"), [(128, conv_cpu.tiled), (129, conv_cpu.native)], ids=["held", "large"])
def test_winograd_is_for_images_that_the_cache_holds(side: int, form: conv_cpu.Form) -> None:
    image, weights = jax.ShapeDtypeStruct((1, side, side, 64), np.float32), np.empty((64, 64, 3, 3), np.float32)
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    assert conv_cpu.chosen(image, weights, window, 1) is form


def test_winograd_matches_to_six_digits() -> None:
    image, weights = (RNG.normal(size=s).astype(np.float32) for s in ((1, 28, 28, 64), (256, 64, 3, 3)))
    window = window_of((28, 28), (3, 3), pads=[1] * 4)
    assert conv_cpu.chosen(image, weights, window, 1) is conv_cpu.tiled
    assert conv_cpu.chosen(image, weights[:128], window._replace(strides=(2, 2)), 1) is conv_cpu.native
    assert conv_cpu.chosen(image.astype(np.int8), weights.astype(np.int8), window, 1) is conv_cpu.native
    exact = reference(image, weights, window, 1)
    ours = jax.jit(lambda x, w: conv_cpu.convolve(x, w, window, 1))(image, weights)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=4e-6 * np.max(np.abs(exact)))


def by_packs(x: Any, w: Any, window: Window, groups: int) -> Any:
    return conv_cpu.in_packs(x, w, window, groups, 4, conv_cpu.native)


@pytest.mark.parametrize("form", [conv_cpu.tiled, by_packs])
def test_what_is_not_finite_reaches_its_windows_alone(form: conv_cpu.Form) -> None:
    """Tiles and packs multiply by zero what a window does not hold, and 0 * NaN is NaN."""
    images, weights = (RNG.normal(size=s).astype(np.float32) for s in ((4, 8, 9, 2), (3, 2, 3, 3)))
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    for image, value in zip(images[1:], (np.nan, np.inf, 3e38), strict=True):
        image[3, 4, 1] = value
    each = [lambda x, f=f: f(x[None], weights, window, 1)[0] for f in (form, conv_cpu.native)]
    alone, expected = (np.stack([jax.jit(f)(x) for x in images]) for f in each)
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-5)
    together, gradients = jax.jit(lambda x: (jax.vmap(each[0])(x), jax.grad(lambda x: (each[0](x) ** 2).sum())(x[0])))(
        images
    )
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-5)
    wanted = jax.jit(jax.grad(lambda x: (each[1](x) ** 2).sum()))(images[0])
    np.testing.assert_allclose(gradients, wanted, rtol=1e-4, atol=1e-4)


def test_vmap_computes_one_branch_of_a_guarded_form() -> None:
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    images, weights = np.ones((4, 1, 8, 9, 2), np.float32), np.ones((3, 2, 3, 3), np.float32)
    closed = jax.make_jaxpr(jax.vmap(lambda x: conv_cpu.tiled(x, weights, window, 1)))(images)
    assert "conv_general_dilated" not in [e.primitive.name for e in closed.jaxpr.eqns]


def test_toom_cook_matrices_are_exact() -> None:
    after, filtering, before = matrices(POINTS)
    x, w = RNG.normal(size=6), RNG.normal(size=3)
    np.testing.assert_allclose(after @ ((before @ x) * (filtering @ w)), np.correlate(x, w, "valid"), rtol=1e-12)


def test_depthwise_convolution_slices_the_padded_image_only() -> None:
    """XLA would compute that anew, with the activation before it, beside the padded one."""
    image, weights = np.ones((1, 8, 9, 6), np.float32), np.ones((6, 1, 3, 3), np.float32)
    window = window_of((8, 9), (3, 3), pads=[1, 1, 1, 1])
    closed = jax.make_jaxpr(lambda x, w: conv_cpu.depthwise(x, w, window, 6))(image, weights)
    whole = ((0, 1, 1, 0), (1, 9, 10, 6))
    slices = [
        (e.params["start_indices"], e.params["limit_indices"]) for e in closed.jaxpr.eqns if e.primitive.name == "slice"
    ]
    assert len(slices) > 9
    assert whole not in slices
