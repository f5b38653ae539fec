"""Convolutions of a training step: which programs are rewritten, and that their gradients stay."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import onnx2jax
from onnx2jax.jaxpr.passes.cpu.train_conv import assign_layouts
from onnx2jax.jaxpr.pipeline import Passes, run_training
from onnx2jax.jaxpr.program import Program
from tests.support.models import text_model
from tests.support.programs import traced

RNG = np.random.default_rng(0)


def step(channels: int, side: int, kernel: int = 3, groups: int = 1, strides: int = 1) -> Any:
    """The gradients of two convolutions as a program in 64-bit mode, and arguments for it."""
    pad, shape = kernel // 2, (channels, channels // groups, kernel, kernel)
    attributes = f"group = {groups}, strides = [{strides}, {strides}], pads = [{pad}, {pad}, {pad}, {pad}]"
    text = (
        f"g (float[2,{channels},{side},{side}] x) => (y) {{ h = Conv<{attributes}>(x, v) a = Relu(h) y = Conv(a, w) }}"
    )
    weights = {
        "v": RNG.standard_normal(shape, np.float32) / kernel**2,
        "w": RNG.standard_normal((channels, channels, 1, 1), np.float32),
    }
    model = onnx2jax.convert(text_model(text, **weights))

    def loss(v: Any, w: Any, x: Any) -> Any:
        return (model.apply({"v": v, "w": w}, x) ** 2).mean()

    arguments = (*weights.values(), RNG.standard_normal((2, channels, side, side), np.float32))
    return traced(jax.grad(loss, (0, 1, 2)), *arguments), arguments


@pytest.mark.parametrize(("side", "kernel"), [(9, 3), (8, 1), pytest.param(12, 5, marks=pytest.mark.extended)])
def test_gradients_are_those_of_the_plain_program(side: int, kernel: int, subtests: pytest.Subtests) -> None:
    with jax.enable_x64(True):
        cases = {
            (groups, strides): step(32, side, kernel, groups, strides) for groups in (1, 2, 32) for strides in (1, 2)
        }
        programs = {case: (run_training(closed, 2, Passes()), closed) for case, (closed, _) in cases.items()}
        arguments = {case: given for case, (_, given) in cases.items()}
        results = jax.jit(lambda all: {c: [jaxpr_as_fun(p)(*all[c]) for p in programs[c]] for c in programs})(arguments)
    for (groups, strides), (changed, closed) in programs.items():
        with subtests.test(groups=groups, strides=strides):
            assert str(changed) != str(closed)
            for ours, plain in zip(*results[groups, strides], strict=True):
                np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5 * float(abs(np.asarray(plain)).max()))


def test_a_dense_network_of_few_pixels_keeps_its_layout() -> None:
    """Transposing 64 x 64 x 3 x 3 weights costs more than what 2 x 4 x 4 pixels gain."""
    with jax.enable_x64(True):
        for groups, side, is_rewritten in ((1, 4, False), (64, 4, True), (1, 16, True)):
            program = Program.of(step(64, side, groups=groups)[0], 2)
            assert (assign_layouts(program) is not program) == is_rewritten
