"""XLA's library for the convolutions of a program, by release."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.jaxpr import pipeline
from onnx2jax.jaxpr.passes.cpu.conv_lowering import library_options
from onnx2jax.jaxpr.pipeline import Passes
from tests.support.models import model, value

OLD, MIDDLE, NEW = (0, 10), (0, 11), (0, 12)


def program(*convolutions: tuple[int, int, int, int, int], dtype: type = np.float32) -> Any:
    """A ClosedJaxpr of convolutions, each (height, width, inputs, outputs, kernel)."""

    def run(operands: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return [lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) for x, w in operands]

    shapes = [((1, h, w, i), (1 if h == 1 else k, k, i, o)) for h, w, i, o, k in convolutions]
    return jax.make_jaxpr(run)([tuple(jax.ShapeDtypeStruct(s, dtype) for s in pair) for pair in shapes])


SMALL, MIDDLING, LARGE = (8, 8, 16, 32, 3), (14, 14, 64, 64, 3), (56, 56, 64, 64, 3)
NARROW, ROW, LONG = (120, 160, 96, 24, 3), (1, 2000, 64, 64, 3), (1, 4, 1, 258, 256)


@pytest.mark.parametrize(
    ("release", "eigen"),
    [
        (OLD, [LARGE, NARROW, ROW, LONG]), (MIDDLE, [SMALL, LONG]), (NEW, [SMALL, ROW, LONG]),
        ((0, 99), []), ((1, 0), []),
    ],
)  # fmt: skip
def test_each_release_has_its_own_convolutions_for_eigen(
    release: tuple[int, int], eigen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "jaxlib_release", lambda: release)
    for one in (SMALL, LARGE, NARROW, ROW, LONG):
        wanted = compat.eigen_convolutions() if one in eigen else None
        assert library_options(program(one)) == wanted, one


def test_the_flops_of_convolutions_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "jaxlib_release", lambda: OLD)
    assert library_options(program(LARGE, SMALL, SMALL)) is not None
    assert library_options(program(SMALL, *[MIDDLING] * 30, LARGE)) is None
    assert library_options(program()) is None, "no convolution"


def test_eigen_gets_no_program_with_integer_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no kernels for them: a network in int8 took 170 ms rather than 7."""
    monkeypatch.setattr(compat, "jaxlib_release", lambda: OLD)
    assert library_options(program(LARGE)) is not None
    assert library_options(program(LARGE, dtype=np.int8)) is None


def test_options_that_xla_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **_: jit(f, compiler_options={"xla_cpu_no_such": "x"}))
    assert compat.eigen_convolutions.__wrapped__() is None
    monkeypatch.undo()
    assert compat.jaxlib_release() not in (OLD, MIDDLE, NEW) or compat.eigen_convolutions() is not None


def test_options_leave_other_platforms_and_skipped_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "jaxlib_release", lambda: OLD)
    main = program(LARGE)
    assert pipeline.compiler_options(main, Passes()) is not None
    assert pipeline.compiler_options(main, Passes("tpu")) is None
    assert pipeline.compiler_options(main, Passes().skipping("conv_library")) is None


@pytest.mark.skipif(compat.jaxlib_release() not in (OLD, MIDDLE, NEW), reason="XLA's own choice")
def test_eigen_computes_the_same_and_xla_knows_the_option() -> None:
    """By ``run``, a call, a caller's jit and a gradient."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(64, 1, 256)).astype(np.float32)  # so long that every release takes Eigen
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[128, 128])]
    proto = model(nodes, [value("x", np.float32, ["n", 1, 512])], [value("y", np.float32, None)], {"w": kernel})
    m, plain = onnx2jax.convert(proto), onnx2jax.convert(proto, optimize={"skip": ["conv_library"]})
    x = rng.normal(size=(1, 1, 512)).astype(np.float32)
    (wanted,) = plain.run(None, {"x": x})
    (ours,) = m.run(None, {"x": x})
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(m(x), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(lambda x: m(x))(x), wanted, rtol=1e-4, atol=1e-4)
    slope = jax.grad(lambda x: m(x).sum())(x)
    np.testing.assert_allclose(slope, jax.grad(lambda x: plain(x).sum())(x), rtol=1e-4, atol=1e-4)
