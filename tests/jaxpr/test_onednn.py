"""Products and convolutions of int8 by oneDNN's kernels: exact sums, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import onnx2jax
from onnx2jax import compat
from onnx2jax.jaxpr.passes.cpu import onednn
from onnx2jax.jaxpr.passes.cpu.conv_lowering import convolve
from onnx2jax.jaxpr.pipeline import Passes
from onnx2jax.jaxpr.program import Program
from onnx2jax.ops.quant import int8_product
from onnx2jax.ops.window import Window
from onnx2jax.runtime.executable import Executable
from tests.support import models
from tests.support.programs import rewritten

RNG = np.random.default_rng(0)
NEEDS_IT = pytest.mark.skipif(not onednn.is_available(), reason="this processor or this jaxlib has no such kernels")


def int8(*shape: int) -> np.ndarray:
    """Numbers up to both ends, which kernels without VNNI would sum in too few bits."""
    return RNG.choice(np.int8([-128, -127, 126, 127]), shape)


def convolved(x: Any, w: Any, strides: int = 1, **given: Any) -> Any:
    given = {"padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **given}
    return lax.conv_general_dilated(x, w, (strides,) * 2, preferred_element_type=np.int32, **given)


def multiplied(x: Any, w: Any, axes: Any = ((-1,), (0,))) -> Any:
    axes = tuple(tuple(a % n.ndim for a in part) for part, n in zip(axes, (x, w), strict=True))
    return lax.dot_general(x, w, (axes, ((), ())), preferred_element_type=np.int32)


SUPPORTED: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a product": (multiplied, int8(65, 130), int8(130, 67)),
    "one row": (multiplied, int8(1, 1027), int8(1027, 1030)),
    "a stack of rows": (multiplied, int8(2, 33, 130), int8(130, 67)),
    "a convolution": (convolved, int8(2, 9, 10, 33), int8(3, 2, 33, 40)),
    "with strides": (partial(convolved, strides=2), int8(1, 12, 13, 32), int8(3, 3, 32, 64)),
    "of one pixel": (convolved, int8(1, 9, 9, 64), int8(1, 1, 64, 70)),
}
LEFT: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "a small product": (multiplied, int8(4, 8), int8(8, 4)),
    "a row by a small matrix": (multiplied, int8(1, 513), int8(513, 600)),
    "floats": (lambda x, w: x @ w, np.ones((65, 130), "f"), np.ones((130, 67), "f")),
    "unsigned": (multiplied, np.ones((65, 130), np.uint8), np.ones((130, 67), np.uint8)),
    "a transposed weight": (partial(multiplied, axes=((-1,), (1,))), int8(65, 130), int8(67, 130)),
    "no rows": (multiplied, int8(0, 513), int8(513, 600)),
    "padding": (partial(convolved, padding="SAME"), int8(2, 9, 10, 33), int8(3, 2, 33, 40)),
    "dilations": (partial(convolved, rhs_dilation=(2, 2)), int8(2, 9, 10, 33), int8(3, 2, 33, 40)),
    "groups": (partial(convolved, feature_group_count=2), int8(2, 19, 20, 32), int8(3, 2, 16, 40)),
    "HNWC": (partial(convolved, dimension_numbers=("HNWC", "HWIO", "HNWC")), int8(9, 8, 9, 40), int8(3, 2, 40, 40)),
}  # fmt: skip


def kernels(function: Callable[..., Any], *operands: Any) -> tuple[int, Any, Any]:
    """How many equations call oneDNN; the program before and after."""
    closed = jax.make_jaxpr(lambda x, w: [function(x, w) + 1])(*operands)
    changed = rewritten(onednn.call_onednn, closed)
    return sum(e.primitive.name == "ffi_call" for e in changed.jaxpr.eqns), closed, changed


@pytest.mark.parametrize("name", SUPPORTED)
def test_onednn_is_called_for(name: str) -> None:
    assert kernels(*SUPPORTED[name])[0] == 1


def loop(w: Any, x: Any) -> Any:
    """A program that multiplies each of some rows by w, in a loop."""
    return jax.make_jaxpr(lambda w, x: lax.scan(lambda n, row: (n + 1, multiplied(row, w)), 0, x)[1])(w, x)


def test_a_loop_over_time_calls_them_in_each_step() -> None:
    x, w = int8(3, 65, 130), int8(130, 67)
    closed = loop(w, x)
    changed = rewritten(onednn.call_onednn, closed)
    assert "onednn" in str(changed)
    if onednn.is_available():
        np.testing.assert_array_equal(*(jaxpr_as_fun(c)(jnp.asarray(w), jnp.asarray(x))[0] for c in (closed, changed)))


@NEEDS_IT
@pytest.mark.parametrize(
    ("shape", "is_weight", "once"),
    [((512, 2048), True, True), ((512, 2048), False, False), ((520, 2100), True, False), ((256, 1024), True, False)],
)
def test_weights_of_a_loop_are_packed_once(shape: tuple[int, int], is_weight: bool, once: bool) -> None:
    x, w = int8(3, 1, shape[0]), int8(*shape)
    changed = rewritten(onednn.call_onednn, loop(w, x), int(is_weight))
    assert ("weights_prepacked" in str(changed)) is once
    np.testing.assert_array_equal(jaxpr_as_fun(changed)(jnp.asarray(w), jnp.asarray(x))[0], x.astype(np.int32) @ w)


@NEEDS_IT
def test_weights_of_a_product_by_platform_in_a_loop_are_packed() -> None:
    def each(w: Any, x: Any) -> Any:
        return lax.scan(lambda n, row: (n + 1, int8_product(row, w)), 0, x)[1]

    closed = jax.make_jaxpr(each)(int8(768, 3072), int8(3, 1, 768))
    assert "weights_prepacked" in str(rewritten(onednn.call_onednn, closed, 1))


def test_weights_are_not_packed_where_onednn_reads_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_packs", lambda *_: False)
    x, w = int8(3, 8, 512), int8(512, 2048)
    changed = str(rewritten(onednn.call_onednn, loop(w, x), 1))
    assert "onednn" in changed
    assert "weights_prepacked" not in changed


@pytest.mark.parametrize("name", LEFT)
def test_other_products_stay(name: str) -> None:
    count, before, after = kernels(*LEFT[name])
    assert count == 0
    assert str(before) == str(after)


@NEEDS_IT
def test_sums_are_exact() -> None:
    operands = [jax.tree.map(jnp.asarray, operands) for _, *operands in SUPPORTED.values()]
    programs = [kernels(*case)[1:] for case in SUPPORTED.values()]

    def both(operands: Any) -> Any:
        return [[jaxpr_as_fun(p)(*two)[0] for p in pair] for pair, two in zip(programs, operands, strict=True)]

    for name, (before, after) in zip(SUPPORTED, jax.jit(both)(operands), strict=True):
        np.testing.assert_array_equal(before, after, err_msg=name)


@NEEDS_IT
@pytest.mark.parametrize("portable", [False, True])
def test_programs_use_them_that_no_other_process_has_to_load(portable: bool) -> None:
    x, w = int8(65, 130), int8(130, 67)
    program = Executable(
        jax.jit(lambda _, w, x: [multiplied(x, w["w"])], static_argnums=0),
        0,
        {"w": w},
        x,
        options=Passes(portable=portable),
    )
    assert ("onednn" in program.main.lower([w], [x]).as_text()) is not portable


@NEEDS_IT
@pytest.mark.parametrize("optimize", [True, False])
def test_a_model_multiplies_by_them_when_it_is_optimised(optimize: bool) -> None:
    x, w = int8(65, 130), int8(130, 67)
    node = onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    model = onnx2jax.convert(
        models.model([node], [models.value("x", np.int8, x.shape)], [models.value("y", np.int32, None)], {"w": w}),
        optimize=optimize,
    )
    np.testing.assert_array_equal(model.run(None, {"x": x})[0], x.astype(np.int32) @ w.astype(np.int32))


def test_onednn_is_off_with_the_persistent_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "keeps_programs", lambda: True)
    assert not onednn.is_available()


PADDED = ((1, 2), (0, 1))


@NEEDS_IT
@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 5), (1, 1)])
def test_a_convolution_of_floats_with_padding(kernel: tuple[int, int], strides: int) -> None:
    x = RNG.normal(size=(2, 19, 16, 3)).astype(np.float32)
    w = RNG.normal(size=(*kernel, 3, 17)).astype(np.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = lax.conv_general_dilated(x, w, (strides,) * 2, PADDED, dimension_numbers=numbers)
    found = jax.jit(partial(onednn.convolution, strides=(strides,) * 2, pads=PADDED))(x, w)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@NEEDS_IT
@pytest.mark.parametrize("extent", [40, 20])
def test_narrow_images_of_int8_are_convolved_where_they_have_many_pixels(extent: int) -> None:
    x, w = int8(1, extent, extent, 3), int8(16, 3, 3, 3)
    window = Window((3, 3), (1, 1), PADDED, (1, 1))

    def ours(x: Any, w: Any, onednn: bool) -> Any:
        return convolve(x, w, window, 1, (1, 1), onednn, np.int32)

    made = jax.make_jaxpr(partial(ours, onednn=True))(x, w)
    names = [e.primitive.name for e in made.jaxpr.eqns]
    assert ("ffi_call" in names) == (extent == 40)
    np.testing.assert_array_equal(*jax.jit(lambda x, w: (jaxpr_as_fun(made)(x, w)[0], ours(x, w, False)))(x, w))


FLOATS = {
    # extent, inputs, outputs, kernel, stride, whether oneDNN computes it
    "few outputs, by packs of 4": (64, 16, 3, 9, 1, True),
    "few outputs, by packs of 2": (64, 32, 8, 3, 1, True),
    "one output": (100, 16, 1, 9, 1, True),
    "few outputs, with strides": (130, 3, 16, 9, 2, True),
    "few outputs of few products": (20, 16, 3, 9, 1, False),
    "many products": (160, 64, 64, 3, 1, True),
    "Winograd's": (56, 64, 64, 3, 1, False),
    "fewer products": (40, 64, 64, 3, 1, False),
}


@NEEDS_IT
@pytest.mark.parametrize(("extent", "inputs", "outputs", "kernel", "stride", "expected"), FLOATS.values(), ids=FLOATS)
def test_floats_of_few_outputs_or_many_products_are_convolved_by_onednn(
    extent: int, inputs: int, outputs: int, kernel: int, stride: int, expected: bool
) -> None:
    x = RNG.integers(-8, 9, (1, extent, extent + 3, inputs)).astype("f")  # sums are exact
    w = RNG.integers(-8, 9, (outputs, inputs, kernel, kernel)).astype("f")
    window = Window((kernel, kernel), (stride, stride), ((1, 2), (2, 1)), (1, 1))

    def ours(x: Any, w: Any, onednn: bool) -> Any:
        return convolve(x, w, window, 1, (1, 1), onednn, np.float32)

    made = jax.make_jaxpr(partial(ours, onednn=True))(x, w)
    assert ("ffi_call" in str(made)) is expected
    found, plain = jax.jit(lambda x, w: (jaxpr_as_fun(made)(x, w)[0], ours(x, w, False)))(x, w)
    np.testing.assert_allclose(found, plain, atol=0 if expected else 0.1)


def images(extent: int) -> onnx.ModelProto:
    """A convolution of narrow images, such as the first of a network."""
    sides = {"x": (np.float32, [1, 3, extent, extent]), "w": (np.float32, [32, 3, 3, 3])}
    return models.one_node("Conv", sides, pads=[1] * 4, strides=[2, 2])


@NEEDS_IT
@pytest.mark.parametrize(("extent", "uses_onednn"), [(512, True), (64, False)], ids=["long", "short"])
def test_narrow_images_of_long_programs_use_onednn(extent: int, uses_onednn: bool) -> None:
    m, plain = onnx2jax.convert(images(extent)), onnx2jax.convert(images(extent), optimize=False)
    x = RNG.normal(size=(1, 3, extent, extent)).astype(np.float32)
    w = RNG.normal(size=(32, 3, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(m(x, w), plain(x, w), rtol=1e-5, atol=1e-5)
    (executable,) = next(iter(m._runtime.program._compiled.values())).executables.values()  # type: ignore[union-attr]
    assert ("onednn" in executable.main.lower([], [w, x]).as_text()) == uses_onednn


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_products_are_looked_for_in_loops(dtype: Any) -> None:
    def loop(x: Any, w: Any) -> Any:
        def step(h: Any, _: Any) -> Any:
            y = jax.lax.dot_general(h, w, (((1,), (0,)), ((), ())), preferred_element_type=np.int32)
            return y.astype(dtype), None

        return jax.jit(lambda x: jax.lax.scan(step, x, None, length=3)[0])(x)

    traced = jax.make_jaxpr(loop)(np.ones((1, 4), dtype), np.ones((4, 4), dtype))
    assert onednn.multiplies_bytes(Program.of(traced)) is (dtype == np.int8)
