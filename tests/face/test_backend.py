"""ONNX's own test runner on ``onnx2jax.backend``."""

from __future__ import annotations

import functools
import io
import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import backend, errors
from tests.support.models import model, one_node, value
from tests.support.official import BERNOULLI, DROPOUT

A_SLICE = "^test_(add|cast_FLOAT_to_(BF|DOUBLE|STR)|clip|concat|if|loop1[13]|max_|optional|reduce_sum|scan_|top_k)"
RANDOM = {*BERNOULLI, *DROPOUT}
"""ONNX specifies no random generator, so values cannot be compared; tests/conformance compares frequencies."""
UNCOMPARED = {"test_loop16_seq_none"}
"""Its output is a list of scalars, of which the runner takes the length."""


@functools.cache
def runner() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute their expected outputs while they are imported
        from onnx.backend.test import BackendTest

        return BackendTest(backend, __name__)


def run(*kinds: str) -> tuple[unittest.TestResult, int]:
    """Run cases on the CPU; returns the result and the number not skipped, which some Pythons' `testsRun` includes."""
    suite = [
        t for t in runner().test_suite if t.id().endswith("_cpu") and any(k in type(t).__name__ for k in kinds or ("",))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = unittest.TextTestRunner(io.StringIO()).run(unittest.TestSuite(suite))
    return result, len(suite) - len(result.skipped)


def failures(result: unittest.TestResult) -> dict[str, str]:
    return {t.id().rpartition(".")[2]: text.splitlines()[-1] for t, text in (*result.failures, *result.errors)}


def test_onnx_runs_a_slice_of_its_cases() -> None:
    runner().include(A_SLICE)
    result, ran = run("Node")
    assert failures(result) == {}
    assert ran > 100


@pytest.mark.long
def test_onnx_runs_all_its_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNX_MODELS", str(tmp_path))  # the runner writes inputs of the light models there
    runner.cache_clear()
    for name in sorted(RANDOM | UNCOMPARED):
        runner().exclude(f"^{name}_cpu$")
    result, ran = run()
    runner.cache_clear()
    assert failures(result) == {}
    assert ran > 2000


X = np.float32([[-1, 2]])


def test_inputs_by_position_by_name_or_single() -> None:
    prepared = backend.prepare(one_node("Sub", dict.fromkeys("ab", (np.float32, [1, 2]))))
    np.testing.assert_array_equal(prepared.run([X, X + 1])[0], [[-1, -1]])
    np.testing.assert_array_equal(prepared.run({"b": X, "a": X + 1})[0], [[1, 1]])
    with pytest.raises(errors.InputNameError, match="'b' not given"):
        prepared.run(X)
    with pytest.raises(errors.InputNameError, match="3 are given"):
        prepared.run([X, X, X])


def test_a_single_node() -> None:
    node = helper.make_node("Clip", ["x", "", "top"], ["y"])
    np.testing.assert_array_equal(backend.run_node(node, [X, np.float32(1)])[0], [[-1, 1]])
    upsample = helper.make_node("Upsample", ["x"], ["y"], scales=[1.0, 2.0])
    np.testing.assert_array_equal(backend.run_node(upsample, [X], opset_version=7)[0], [[-1, -1, 2, 2]])
    square = helper.make_node("Mul", ["x", "x"], ["y"])
    np.testing.assert_array_equal(backend.run_node(square, [X])[0], X * X)


def test_devices_are_those_of_jax() -> None:
    assert backend.supports_device("CPU") and backend.supports_device("CPU:0")
    assert not backend.supports_device("NPU") and not backend.supports_device("CPU:99")
    with pytest.raises(errors.UnsupportedError, match="no device 'NPU'; JAX has cpu:0"):
        backend.prepare(onnx2jax.demo_model(), "NPU")


def test_models_with_unsupported_operators_are_not_compatible() -> None:
    unknown = helper.make_node("Nothing", ["x"], ["y"], domain="nobody")
    x, y = value("x", np.float32, [1]), onnx.ValueInfoProto(name="y")
    assert not backend.is_compatible(model([unknown], [x], [y], opsets={"nobody": 1}))
    assert backend.is_compatible(onnx2jax.demo_model())
