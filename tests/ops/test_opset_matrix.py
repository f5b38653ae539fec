"""Operator x opset against onnxruntime: the branch for known values and the traced one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx2jax.ops import registry
from onnx2jax.ops.registry import Operator
from onnx2jax.runtime.values import to_host
from tests.support.branches import in_both_hands
from tests.support.helpers import run_op
from tests.support.official import assert_same
from tests.tables.operators import UNCOVERED, Row, rows

IR_VERSION = 10


@pytest.mark.rule("OR-01", "OR-13")
@pytest.mark.parametrize("case", [pytest.param(r, id=f"{r.name}-{n}") for n, r in enumerate(rows())])
def test_numpy_and_jax_agree_with_onnxruntime(case: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    results_of: dict[Operator, dict[str, list[Any]]] = {}
    for opset in case.opsets():
        operator = registry.resolve(case.domain, case.name, opset)
        assert operator is not None
        expected = list(case.expected) or _onnxruntime(case, opset)
        if operator not in results_of or "opset" in operator.fixtures:
            text = any(e.dtype == object for e in expected if isinstance(e, np.ndarray))
            results_of[operator] = _branches(case, opset, operator, traces=not text)
        for branch, results in results_of[operator].items():
            try:
                assert_same(results, expected, case.tolerance, case.tolerance)
            except AssertionError as e:
                e.add_note(f"opset {opset}, {branch} values, {case}")
                raise


def test_every_operator_has_a_row() -> None:
    defined = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    assert defined - {r.name for r in rows() if not r.domain} == {
        name for names in UNCOVERED.values() for name in names
    }


def _run(case: Row, inputs: Any, opset: int) -> tuple[Any, ...]:
    options: dict[str, Any] = {
        "opset": opset,
        "domain": case.domain,
        "n_outputs": case.outputs,
        "rng": jax.random.key(0),
    }
    results = run_op(case.name, *inputs, **options, **case.attributes)
    return (results,) if case.outputs == 1 else results


def _branches(case: Row, opset: int, operator: Operator, traces: bool) -> dict[str, list[Any]]:
    """Results by branch: of known values and, if it traces, of what need not be known."""
    inputs = enumerate(case.inputs)
    free = [p for p, x in inputs if traces and x is not None and operator.parameter(p) not in operator.static]
    results = in_both_hands(lambda xs: _run(case, xs, opset), case.inputs, free)
    return {branch: [to_host(r) for r in each] for branch, each in zip(("known", "traced"), results, strict=True)}


def _onnxruntime(case: Row, opset: int) -> list[Any]:
    names = ["" if x is None else f"x{p}" for p, x in enumerate(case.inputs)]
    outputs = [f"y{p}" for p in range(case.outputs)]
    attributes: dict[str, Any] = {
        k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in case.attributes.items()
    }
    node = helper.make_node(case.name, names, outputs, domain=case.domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, case.inputs, strict=True)
        if n
    ]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=n) for n in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(case.domain, opset)], ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {n: x for n, x in zip(names, case.inputs, strict=True) if n}))
