"""Edge values, extents, ranks and types for every operator: a model gives the same, whichever way it is evaluated."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onnx2jax.errors import KnownValueError
from tests.ops.test_microsoft_types import CASES_AND_ROWS
from tests.support import edges, lanes, official
from tests.support.edges import Edge
from tests.support.violations import every_case
from tests.tables.operators import NEWEST, rows

RANDOM = "Random", "random", "Bernoulli", "bernoulli", "multinomial", "training_dropout"
"""In the names of operators and cases that draw."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def newest() -> dict[str, list[Edge]]:
    """One edge of each row that is supported by the newest operator sets, by domain."""
    found: dict[str, list[Edge]] = {"com.microsoft": [edges.of_microsoft(*row) for row in CASES_AND_ROWS]}
    for row in rows():
        opset = max(row.opsets())
        if not any(word in row.name for word in RANDOM) and (row.domain or opset == NEWEST):
            found.setdefault(row.domain, []).append(edges.of_row(row, opset))
    return found


def _able(some: list[Edge], rng: random.Random) -> list[Edge]:
    with_changes = [edges.changed(edge, rng) for edge in some]
    return [edge for edge in with_changes if lanes.answers_alone(edge)]


FEW, MORE = [("", 40)], [("", 4), ("ai.onnx.ml", 1), ("com.microsoft", 6)]
"""Of as many rows of a domain one is tried."""


@pytest.mark.parametrize(("domain", "step"), [*FEW, *(pytest.param(*m, marks=pytest.mark.extended) for m in MORE)])
def test_lanes_agree(domain: str, step: int) -> None:
    """Some rows, each changed, as nodes of one model."""
    able = _able(newest()[domain][::step], random.Random(51))
    assert len(able) > 4
    assert not lanes.problems(lanes.together(able))


def test_axes_of_scalars() -> None:
    """NumPy takes a scalar to have an axis 0, JAX does not: known and traced operands have to be refused alike."""
    differ = []
    for edge in (e for some in newest().values() for e in some):
        first = edge.node.input[0] if edge.node.input else ""
        if all(a.name != "axis" for a in edge.node.attribute) or not getattr(edge.feeds.get(first), "ndim", 0):
            continue
        scalar = edges.with_scalars(edge, [first])
        traced, known = lanes.refusals(scalar)
        if (traced is None) != (known is None) and not isinstance(traced, KnownValueError):
            differ.append(f"{scalar.name}: {traced} | {known}")
    assert not differ


SEED = int(os.environ.get("EDGES_SEED", "0"))
COUNT = 5000
SECONDS = 120
"""The most that a configuration may take in all lanes, of which some compile recurrent networks."""


def _late(*_: Any) -> None:
    raise TimeoutError(f"a configuration took more than {SECONDS} seconds")


@pytest.mark.long
@pytest.mark.parametrize("block", range(COUNT // 100))
def test_many_lanes_agree(block: int) -> None:
    """A hundred configurations, each alone; ``EDGES_SEED=1`` draws others."""
    some = official.cases().values()
    nodes = [c for c in some if c.kind == "node" and "expanded" not in c.name and official.load(c)[1][0][0]]
    drawn = [edge for edge in edges.sources(rows(), CASES_AND_ROWS, nodes) if not any(w in edge.name for w in RANDOM)]
    previous = signal.signal(signal.SIGALRM, _late)
    try:
        with every_case() as case:
            for n in range(100 * block, 100 * (block + 1)):
                rng = random.Random(SEED * 10**6 + n)
                edge = edges.changed(rng.choice(drawn), rng)
                signal.alarm(SECONDS)
                with case(f"{n}, {edge.name}, {edge.changes}"):
                    problems = lanes.problems(lanes.answers(edge))
                    assert not problems, "; ".join(problems)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
