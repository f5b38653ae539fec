"""Edge values beside onnxruntime and onnx.reference: what no reference confirms is judged, in a table with reasons.

Each configuration is an operator with NaN, infinities, extreme integers, extents of 0 and 1 and the like. Where the
references differ from each other, the library has to agree with one of them, or a row says why with neither.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import OnnxError
from onnx2jax.ops import registry
from onnx2jax.ops.registry import Operator
from tests.ops.test_edges import RANDOM, newest
from tests.ops.test_microsoft_types import CASES_AND_ROWS
from tests.support import edges, emitters, judged, lanes, official
from tests.support.edges import Edge
from tests.support.judged import Row
from tests.support.references import References
from tests.support.violations import every_case
from tests.tables.operators import rows

SEED = int(os.environ.get("EDGES_SEED", "0"))
COUNT = int(os.environ.get("EDGES_COUNT", "3000"))


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with References() as both:
        yield both


def disagreements(edge: Edge, references: References, known: bool = False) -> list[str]:
    """How the library differs from every reference that answers; none if it agrees with one, or refuses beside one.

    The operands are inputs, or constants if ``known``.
    """
    constant = lanes.constants(edge)
    answers = {name: x for name, x in references.answers(*constant).items() if not isinstance(x, str)}
    proto, feeds = constant if known else (edge.proto, dict(edge.feeds))
    try:
        with emitters.newer():
            ours = lanes.leaves(onnx2jax.convert(proto, max_trips=lanes.MOST_TRIPS).run(None, feeds))
    except OnnxError as error:
        return [f"raises where both references answer: {error}"] if len(answers) == 2 else []
    except Exception as error:
        raise AssertionError(f"an error that is not ours: {error!r}") from error
    found = {name: "; ".join(lanes.differences(ours, lanes.leaves(x))) for name, x in answers.items()}
    return [f"{name}: {difference}" for name, difference in found.items()] if found and all(found.values()) else []


def judgement(edge: Edge, found: list[str]) -> Row | None:
    """The first row that covers a disagreement."""
    table = judged.RAISED if found[0].startswith("raises") else judged.ROWS
    return next((row for row in table if row.covers(edge)), None)


def test_a_reference_that_hangs_is_replaced(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = edges._single("Identity", [np.ones(3, np.float32)], 1, {}, "", 17)
    monkeypatch.setattr("tests.support.references.SECONDS", 0)
    assert {*references.answers(edge.proto, edge.feeds).values()} == {"took more than 0 seconds"}
    monkeypatch.undo()
    for answer in references.answers(edge.proto, edge.feeds).values():
        assert not isinstance(answer, str), answer
        np.testing.assert_array_equal(answer[0], edge.feeds["x0"])


def test_references_agree(references: References) -> None:
    """Some rows with known operands, which NumPy evaluates: nothing is compiled."""
    rng = random.Random(51)
    folding = [edge for edge in newest()[""] if not _operator(edge).heavy]
    with every_case() as case:
        for row in folding[::10]:
            edge = edges.changed(row, rng)
            with case(f"{edge.name}, {edge.changes}"):
                found = disagreements(edge, references, known=True)
                assert not found or judgement(edge, found), found


def _operator(edge: Edge) -> Operator:
    operator = registry.resolve(edge.node.domain, edge.node.op_type, edge.opset)
    assert operator is not None
    return operator


@pytest.mark.long
def test_many_references_agree(references: References) -> None:
    """COUNT configurations; ``EDGES_SEED=1`` draws others. A row that none needs makes it an expected failure."""
    nodes = [c for c in official.cases().values() if c.kind == "node" and "expanded" not in c.name]
    nodes = [c for c in nodes if official.load(c)[1][0][0]]
    drawn = [edge for edge in edges.sources(rows(), CASES_AND_ROWS, nodes) if not any(w in edge.name for w in RANDOM)]
    needed: set[Row] = set()
    with every_case() as case:
        for n in range(COUNT):
            rng = random.Random(SEED * 10**6 + n)
            edge = edges.changed(rng.choice(drawn), rng)
            with case(f"{n}, {edge.name}, {edge.changes}"):
                if found := disagreements(edge, references, known=n % 4 > 0):  # few are compiled
                    row = judgement(edge, found)
                    assert row, found
                    needed.add(row)
    if unneeded := [row.operators for row in (*judged.ROWS, *judged.RAISED) if row not in needed]:
        pytest.xfail(f"rows of tests/support/judged.py that no disagreement needed: {', '.join(unneeded)}")
