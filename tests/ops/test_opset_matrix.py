"""Operator x opset against onnxruntime: the branch for known values and the traced one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx2jax.eval.values import to_host
from onnx2jax.ops import registry
from onnx2jax.ops.registry import Operator
from tests.support.branches import Hands, each_in_both_hands
from tests.support.helpers import run_op
from tests.support.official import assert_same
from tests.support.tiers import extended, groups
from tests.support.violations import every_case
from tests.tables.operators import UNCOVERED, Row, rows

IR_VERSION = 10


def _tiers() -> list[Any]:
    """All rows; four fifths of the combinations of GridSample's modes, which cost as much as the rest, are extended."""
    spare = [row.name == "GridSample" and n % 5 > 0 for n, row in enumerate(rows())]
    main = [row for row, is_spare in zip(rows(), spare, strict=True) if not is_spare]
    return [*groups(main, 60), extended([*itertools.compress(rows(), spare)], id="GridSample")]


@pytest.mark.rule("OR-01", "OR-13")
@pytest.mark.parametrize("some", _tiers())
def test_numpy_and_jax_agree_with_onnxruntime(some: list[Row]) -> None:
    check_rows(some)


def check_rows(some: Sequence[Row]) -> None:
    """Each row at each of its opsets, known and traced; versions that mean the same are compiled once."""
    expected = _expected(some)
    hands: dict[Any, Hands] = {}
    for n, opset in expected:
        program = _program(n, some[n], opset)
        if program not in hands:
            text = any(e.dtype == object for e in expected[n, opset] if isinstance(e, np.ndarray))
            hands[program] = _run(some[n], opset), some[n].inputs, [] if text else _free(some[n], opset)
    results = each_in_both_hands(hands)
    with every_case() as case:
        for (n, opset), right in expected.items():
            for branch, found in zip(("known", "traced"), results[_program(n, some[n], opset)], strict=True):
                with case(f"opset {opset}, {branch} values, {some[n]}"):
                    assert_same([to_host(r) for r in found], right, some[n].tolerance, some[n].tolerance)


def test_every_operator_has_a_row() -> None:
    defined = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    assert defined - {r.name for r in rows() if not r.domain} == {
        name for names in UNCOVERED.values() for name in names
    }


def _operator(row: Row, opset: int) -> Operator:
    operator = registry.resolve(row.domain, row.name, opset)
    assert operator is not None
    return operator


def _program(n: int, row: Row, opset: int) -> tuple[Any, ...]:
    """What decides the results of a row at an opset."""
    operator = _operator(row, opset)
    return n, operator, opset if "opset" in operator.fixtures else None


def _run(row: Row, opset: int) -> Callable[[list[Any]], tuple[Any, ...]]:
    def run(inputs: list[Any]) -> tuple[Any, ...]:
        options: dict[str, Any] = {"opset": opset, "domain": row.domain, "rng": jax.random.key(0)}
        results = run_op(row.name, *inputs, n_outputs=row.outputs, **options, **row.attributes)
        return (results,) if row.outputs == 1 else results

    return run


def _free(row: Row, opset: int) -> list[int]:
    """Positions of inputs that need not be known."""
    operator = _operator(row, opset)
    return [p for p, x in enumerate(row.inputs) if x is not None and operator.parameter(p) not in operator.static]


def _expected(some: Sequence[Row]) -> dict[tuple[int, int], list[Any]]:
    """By place of the row and opset, what the specification says; else what onnxruntime computes."""
    found = {(n, opset): list(row.expected) for n, row in enumerate(some) for opset in row.opsets()}
    together: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (n, opset), values in found.items():
        if not values:
            together[some[n].domain, opset].append(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
        for (domain, opset), places in together.items():
            results = _onnxruntime([some[n] for n in places], domain, opset)
            found |= {(n, opset): values for n, values in zip(places, results, strict=True)}
    return found


def _onnxruntime(some: Sequence[Row], domain: str, opset: int) -> list[list[Any]]:
    """The results of several rows, as nodes of one model."""
    nodes, feeds = [], {}
    for n, row in enumerate(some):
        named = {f"x{n}.{p}": x for p, x in enumerate(row.inputs)}
        outputs = [f"y{n}.{p}" for p in range(row.outputs)]
        attributes: dict[str, Any] = {
            k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in row.attributes.items()
        }
        names = ["" if x is None else name for name, x in named.items()]
        nodes.append(helper.make_node(row.name, names, outputs, domain=domain, **attributes))
        feeds |= {name: x for name, x in named.items() if x is not None}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=n) for node in nodes for n in node.output]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, opset)], ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = iter(session.run([v.name for v in outputs], feeds))
    return [[next(results) for _ in node.output] for node in nodes]
