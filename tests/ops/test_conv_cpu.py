"""The forms that convolutions take on a CPU: each gives the convolution, and which one is chosen for which shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from onnx2jax import compat
from onnx2jax.ops import conv_cpu
from onnx2jax.ops.window import Window, window_of
from onnx2jax.ops.winograd import POINTS, matrices

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


def reference(x: Any, w: Any, window: Any, groups: int) -> Any:
    """In float64, channels first."""
    with compat.enable_x64():
        first = np.moveaxis(x, -1, 1).astype(np.float64)
        y = lax.conv_general_dilated(
            first, w.astype(np.float64), window.strides, window.pads,
            rhs_dilation=window.dilations, feature_group_count=groups,
        )  # fmt: skip
        return np.moveaxis(np.asarray(y), 1, -1)


def forms(w: tuple[int, ...], groups: int, attributes: dict[str, Any]) -> list[str]:
    """The forms that support weights of a shape."""
    if groups > 1:
        return ["native", "piecewise", "columns", *(["depthwise"] if w[1] == 1 else [])]
    special = {(1, 1): ["pointwise"], (3, 3): ["winograd"] if attributes.keys() <= {"pads"} else []}
    plain = attributes.get("strides", (1,))[-1] == attributes.get("dilations", (1,))[-1] == 1
    return ["native", "columns", *special.get(w[2:], []), *(["packed"] if plain and w[1] else [])]


@pytest.mark.parametrize(
    ("form", "case"),
    [pytest.param(form, case, id=f"{form}: {case[0]}") for case in CASES for form in forms(*case[2:])],
)
def test_every_cpu_lowering_matches_lax_convolution(form: str, case: Any) -> None:
    _, x, w, groups, attributes = case
    window = window_of(x[1:-1], w[2:], **attributes)
    image, weights = (RNG.normal(size=shape).astype(np.float32) for shape in (x, w))
    ours = jax.jit(lambda x, w: getattr(conv_cpu, form)(x, w, window, groups))(image, weights)
    np.testing.assert_allclose(ours, reference(image, weights, window, groups), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3), (4, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 40), (3, 24), (4, 1), (15, 17)])
@pytest.mark.parametrize("kernel", [(1, 2), (3, 3), (4, 7)])
def test_int8_channels_are_combined_exactly(kernel: Any, inputs: int, outputs: int, strides: Any) -> None:
    """Also where the last pack reaches beyond the image, and where one ends before it."""
    image, weights = (RNG.integers(-128, 128, s, np.int8) for s in ((2, 9, 101, inputs), (outputs, inputs, *kernel)))
    window = window_of((9, 101), kernel, strides=strides, pads=[1, 2, 0, 3])
    assert conv_cpu._pack(image, weights, window) % strides[1] == 0
    ours = jax.jit(lambda x, w: conv_cpu.packed(x, w, window, 1))(image, weights)
    np.testing.assert_array_equal(ours, reference(image, weights, window, 1))


def test_which_int8_convolutions_combine_channels() -> None:
    image, weights = np.zeros((1, 224, 224, 3), np.int8), np.zeros((64, 3, 7, 7), np.int8)
    window = window_of((224, 224), (7, 7), strides=(2, 2), pads=[3] * 4)
    assert conv_cpu.chosen(image, weights, window, 1) is conv_cpu.packed
    assert conv_cpu.chosen(image[:, :12, :12], weights, window, 1) is conv_cpu.columns
    assert conv_cpu.chosen(image.astype(np.float32), weights.astype(np.float32), window, 1) is conv_cpu.native
    dilated = window._replace(dilations=(2, 2))
    assert conv_cpu.chosen(image, weights, dilated, 1) is conv_cpu.columns


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", ["3x3", "1-D", "depthwise", "groups"])
def test_the_chosen_lowering_rounds_once(name: str, dtype: Any) -> None:
    _, x, w, groups, attributes = next(case for case in CASES if case[0] == name)
    window = window_of(x[1:-1], w[2:], **attributes)
    image, weights = (RNG.normal(size=shape).astype(dtype) for shape in (x, w))
    ours = jax.jit(lambda x, w: conv_cpu.convolve(x, w, window, groups).astype(dtype))(image, weights)
    theirs = reference(image.astype(np.float32), weights.astype(np.float32), window, groups)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=eps, atol=max(1e-4, eps * 1e-2))


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (4, 5)])
@pytest.mark.parametrize("stretch", [(2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize("pads", [((0, 0), (0, 0)), ((1, 2), (0, 3)), ((2, -1), (3, 1))])
def test_transposed_convolution_by_stride_residues(
    kernel: tuple[int, ...], stretch: tuple[int, ...], pads: Any
) -> None:
    compare_transposed(kernel, stretch, Window(kernel, (1, 1), pads, (1, 1)), 1)


@pytest.mark.parametrize("stretch", [(2, 2), (4, 3), (6, 2), (16, 8)])
@pytest.mark.parametrize(("dilations", "groups"), [((2, 3), 1), ((4, 1), 1), ((1, 1), 3), ((3, 2), 3)])
def test_transposed_with_dilations_and_groups(stretch: Any, dilations: Any, groups: int) -> None:
    """Strides of more residues than are unrolled take the native form."""
    compare_transposed((3, 2), stretch, Window((3, 2), (1, 1), ((4, 3), (2, 5)), dilations), groups)


def compare_transposed(kernel: tuple[int, ...], stretch: tuple[int, ...], window: Window, groups: int) -> None:
    image, weights = (RNG.normal(size=s).astype(np.float32) for s in ((2, 5, 6, 3), (6, 3 // groups, *kernel)))

    @jax.jit
    def both(image: Any, weights: Any) -> Any:
        theirs = lax.conv_general_dilated(
            image, weights, (1, 1), window.pads, stretch, window.dilations, ("NHWC", "OIHW", "NHWC"), groups
        )
        return conv_cpu.convolve(image, weights, window, groups, stretch), theirs

    ours, theirs = both(image, weights)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(("side", "form"), [(128, conv_cpu.winograd), (129, conv_cpu.native)], ids=["held", "large"])
def test_winograd_is_for_images_that_the_cache_holds(side: int, form: conv_cpu.Form) -> None:
    image, weights = jax.ShapeDtypeStruct((1, side, side, 64), np.float32), np.empty((64, 64, 3, 3), np.float32)
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    assert conv_cpu.chosen(image, weights, window, 1) is form


def test_winograd_matches_to_six_digits() -> None:
    image, weights = (RNG.normal(size=s).astype(np.float32) for s in ((1, 28, 28, 64), (256, 64, 3, 3)))
    window = window_of((28, 28), (3, 3), pads=[1] * 4)
    assert conv_cpu.chosen(image, weights, window, 1) is conv_cpu.winograd
    assert conv_cpu.chosen(image, weights[:128], window._replace(strides=(2, 2)), 1) is conv_cpu.native
    assert conv_cpu.chosen(image.astype(np.int8), weights.astype(np.int8), window, 1) is conv_cpu.native
    exact = reference(image, weights, window, 1)
    ours = jax.jit(lambda x, w: conv_cpu.convolve(x, w, window, 1))(image, weights)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=4e-6 * np.max(np.abs(exact)))


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
