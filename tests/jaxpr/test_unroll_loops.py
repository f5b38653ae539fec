"""Short loops unrolled: the same numbers, and loops that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax import lax
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.jaxpr.passes.cpu.unroll_loops import UNROLLED_STEPS, unroll_loops
from onnx2jax.jaxpr.program import Program, as_function
from tests.eval.test_layers import normal
from tests.support import decoders
from tests.support.models import model, value


class Operands(NamedTuple):
    """A first state, what steps read, and a number."""

    c: Any
    w: Any
    v: Any
    z: Any


OPERANDS = Operands(normal(64, 256), normal(4, 64, 256), normal(4, 256), np.float32(3))
SHORT: dict[str, Callable[[Operands], Any]] = {
    "one array a step": lambda o: lax.scan(lambda t, x: (t * 2 + x, None), o.c, o.w)[0],
    "two, and one that all read": lambda o: lax.scan(lambda t, x: (t * o.z + x[0] - x[1], None), o.c, (o.w, o.v))[0],
    "from the end": lambda o: lax.scan(lambda t, x: (t * 2 + x, None), o.c, o.w, reverse=True)[0],
    "none": lambda o: lax.scan(lambda t, _: (t * o.z + 1, None), o.c, None, length=3)[0],
    "several loops": lambda o: lax.scan(
        lambda t, x: (t + x, None), lax.scan(lambda t, x: (t * 2 + x, None), o.c, o.w)[0], o.w
    )[0],
}
LONG: dict[str, Callable[[Operands], Any]] = {
    "many steps": lambda o: lax.scan(lambda t, _: (t * o.z, None), o.c, None, length=UNROLLED_STEPS + 1)[0],
    "a result for each step": lambda o: lax.scan(lambda t, x: (t, x + o.z), o.c, o.w)[1],
    "two carries": lambda o: lax.scan(lambda t, x: ((t[1], t[0] + x), None), (o.c, o.c), o.w)[0],
    "few bytes": lambda o: lax.scan(lambda t, x: (t + x, None), o.v[0], o.v)[0],
    "loops in a loop": lambda o: lax.scan(
        lambda t, x: (lax.fori_loop(0, o.z.astype(np.int32), lambda _, u: u + x, t), None), o.c, o.w
    )[0],
    "inside of a loop": lambda o: lax.fori_loop(
        0, o.z.astype(np.int32), lambda _, t: lax.scan(lambda t, x: (t + x, None), t, o.w)[0], o.c
    ),
}


def unrolled(function: Callable[[Operands], Any]) -> tuple[Program, Program]:
    before = Program.of(jax.make_jaxpr(function)(OPERANDS))
    return before, unroll_loops(before)


def loops(program: Program) -> int:
    return sum(e.name == "scan" for e in program.equations)


def test_numbers_are_those_of_the_loop(subtests: pytest.Subtests) -> None:
    programs = {case: unrolled(function) for case, function in SHORT.items()}
    both = {case: [as_function(p.closed()) for p in pair] for case, pair in programs.items()}
    results = jax.jit(lambda o: {case: [f(*o)[0] for f in pair] for case, pair in both.items()})(OPERANDS)
    for case, (before, after) in programs.items():
        with subtests.test(case):
            assert (loops(before) > 0, loops(after)) == (True, 0)
            expected, ours = map(np.asarray, results[case])
            np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("case", LONG)
def test_other_loops_stay(case: str) -> None:
    before, after = unrolled(LONG[case])
    assert after is before


def test_products_with_packed_weights() -> None:
    """On releases whose loops are serial, a row by words of 4 bytes is no loop; on others it is one."""
    packed, scales, _ = decoders.in_four_bits(normal(1024, 512), asymmetric=False)
    sizes = {"K": 512, "N": 1024, "bits": 4, "block_size": 32}
    node = helper.make_node("MatMulNBits", ["x", "packed", "scales"], ["y"], domain=decoders.MS, **sizes)
    ends = [value("x", np.float32, [1, 512])], [value("y", np.float32, [1, 1024])]
    proto = model([node], *ends, {"packed": packed, "scales": scales}, opsets={decoders.MS: 1})
    converted = onnx2jax.convert(proto)
    x = normal(1, 512)
    ours = converted(x)
    (subprogram,) = converted._runtime.program._compiled.values()  # type: ignore[union-attr]
    (executable,) = subprogram.executables.values()
    text = executable._whole.lower(executable.hoisted(converted.weights), [x]).as_text()
    assert ("stablehlo.while" in text) != compat.has_serial_loops()
    plain = onnx2jax.convert(proto, optimize={"skip": ["unroll_loops"]})
    np.testing.assert_allclose(ours, plain(x), rtol=1e-5, atol=1e-5)
