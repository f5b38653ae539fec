"""Property test of partitioning: results of random graphs match the reference, call after call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

import onnx2jax
from onnx2jax.ops import iteration
from onnx2jax.runtime import partition
from tests.support import graphs

onnxruntime.set_default_logger_severity(4)
Feeds = dict[str, np.ndarray]
Drawn = tuple[onnx.ModelProto, bool]


def _runtime(proto: onnx.ModelProto, feeds: list[Feeds]) -> list[list[Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [session.run(None, f) for f in feeds]


def expected(proto: onnx.ModelProto, beyond: bool, feeds: list[Feeds]) -> list[list[Any]]:
    """The outputs of the reference evaluator, or of onnxruntime if ``beyond`` the former."""
    if not beyond:
        evaluator = ReferenceEvaluator(proto)
        return [evaluator.run(None, f) for f in feeds]
    return _runtime(proto, feeds)


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, list):
        assert isinstance(ours, list) and len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
        return
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    if theirs.dtype.kind in "OU":
        assert ours.tolist() == theirs.tolist()
        return
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def check(proto: onnx.ModelProto, beyond: bool, feeds: list[Feeds], eager: bool, counts: Counter[str]) -> None:
    """``eager`` compiles host loops from their second trip on, two trips at a time."""
    try:
        wanted = expected(proto, beyond, feeds)
    except Exception as error:
        counts["no oracle"] += 1
        hypothesis.note(f"no oracle: {error}")
        hypothesis.assume(False)
    counts["compared"] += 1
    model = onnx2jax.convert(proto)
    with pytest.MonkeyPatch.context() as patch:
        if eager:
            patch.setattr(partition, "HOST_TRIPS", 1)
            patch.setattr(iteration, "MAX_ROWS", 2)
        for f, results in zip(feeds, wanted, strict=True):
            for ours, theirs in zip(model.run(None, f), results, strict=True):
                assert_same(ours, theirs)


_OPTIONS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


def check_many(examples: int, **options: Any) -> None:
    """Checks random graphs, few of which the oracles reject."""
    counts: Counter[str] = Counter()

    @settings(max_examples=examples, **options, **_OPTIONS)
    @given(drawn=graphs.models(), feeds=st.lists(graphs.feeds(), min_size=2, max_size=3), eager=st.booleans())
    def run(drawn: Drawn, feeds: list[Feeds], eager: bool) -> None:
        check(*drawn, feeds, eager, counts)

    run()
    assert counts["compared"] >= examples, counts
    assert counts["no oracle"] <= examples / 10, counts


def test_partitioned_results_match_the_reference() -> None:
    check_many(20, phases=[Phase.generate])  # the long profile shrinks failures


@pytest.mark.long
def test_partitioned_results_of_many_graphs() -> None:
    check_many(3000)
