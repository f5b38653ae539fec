"""FloatingPointError of jax.debug_nans and debug_infs names the node where NaN or infinity begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.cli import main
from tests.support.models import text_model

CHAIN = "g (float[n,2] x) => (float[n,2] y) { a = MatMul(x, k) b = MatMul(a, k) d = MatMul(b, k) y = Sub(b, d) }"
K = np.float32([[300, 0], [0, 300]])
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda m, x: m(x),
    "run": lambda m, x: m.run(None, {"x": x}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_overflow_in_float16_is_named_with_its_operands_and_cure(call: Callable[[Any, Any], Any]) -> None:
    x, source = np.float32([[1, 20]]), text_model(CHAIN, k=K)
    with jax.debug_nans(True):
        call(onnx2jax.convert(source), x)
        call(onnx2jax.convert(source, dtype="bfloat16"), x)
        with pytest.raises(FloatingPointError) as e:
            call(onnx2jax.convert(source, dtype="float16"), x)
    lines = str(e.value).split("\n")
    assert lines[0] == "node 'd' (MatMul, opset 21): output 'd' holds nan, and no operand does"
    assert lines[2] == "before it, node 'b' (MatMul, opset 21): output 'b' holds inf, and no operand does"
    assert lines[3] == "operands: a: float16[1, 2] from 300 to 6000, k: float16[2, 2] from 0 to 300"
    assert "dtype='bfloat16'" in lines[4]


def test_infinities_that_end_inside_are_passed_over() -> None:
    """The mask's -inf does not reach the output; the logarithm's does."""
    text = """g (float[3] x) => (float[3] y)
        { m = Where(keep, x, low) s = Softmax(m) p = Add(s, one) q = Sub(s, s1) r = Log(x) y = Add(r, p) }"""
    constants = {"keep": np.array([True, False, True]), "low": np.float32(-np.inf), "one": np.float32(1)}
    m = onnx2jax.convert(text_model(text, **constants, s1=np.float32(1)))
    with (
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match=r"node 'r' \(Log.*\n.*x: float32\[3\] from 0 to 2"),
    ):
        m(np.float32([0, 1, 2]))


def test_an_input_or_parameter_with_nan_is_named() -> None:
    m = onnx2jax.convert(text_model(CHAIN, k=K))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"^'x', an input or parameter of 'g', holds nan$"):
            m(np.float32([[np.nan, 1]]))
        with pytest.raises(FloatingPointError, match=r"^'k', an input or parameter"):
            m.with_params({"k": K * np.nan})(np.float32([[1, 1]]))


def test_inside_a_callers_jit_the_error_is_jaxs() -> None:
    m = onnx2jax.convert(text_model(CHAIN, k=K), dtype="float16")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(m)(np.float32([[1, 20]]))


def test_run_notes_where_nan_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(text_model(CHAIN, k=K), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.float32([[1, 20]]))
    command = ["run", str(tmp_path / "m.onnx"), "--input", f"x={tmp_path / 'x.npy'}"]
    assert main(command) == 0
    assert "holds" not in capsys.readouterr().err
    assert main([*command, "--dtype", "float16"]) == 0
    assert "before it, node 'b' (MatMul" in capsys.readouterr().err
