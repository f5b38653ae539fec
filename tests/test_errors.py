"""Errors: the rules field, copying and pickling."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax import errors
from onnx2jax.errors import ExternalDataNotFoundError, KnownValueError, ModelError, OnnxError
from tests.support.cases import parse
from tests.support.helpers import ROOT
from tests.support.sources import sources

RULES = {line[:5] for line in (ROOT / "tests/tables/rules.txt").read_text(encoding="utf-8").splitlines()}


@pytest.mark.parametrize(
    "rule, rules, text",
    [
        ((), (), "what"),
        ("GR-02", ("GR-02",), "what (rule GR-02)"),
        (("GR-01", "GR-14"), ("GR-01", "GR-14"), "what (rules GR-01, GR-14)"),
    ],
)
def test_messages_end_with_the_rules(rule: Any, rules: tuple[str, ...], text: str) -> None:
    for error in (ModelError("what", rule=rule), ExternalDataNotFoundError("what", rule=rule)):
        assert (error.message, error.rules, str(error)) == ("what", rules, text)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_can_be_copied_and_pickled(copied: Callable[[OnnxError], OnnxError], subtests: Any) -> None:
    for name in errors.__all__:
        with subtests.test(error=name):
            error = getattr(errors, name)("what is wrong")
            error.rules = ("GR-02",)
            error.add_note("inside a node")
            again = copied(error)
            assert (type(again), str(again), vars(again)) == (type(error), "what is wrong (rule GR-02)", vars(error))


def test_errors_are_pickled_with_their_node() -> None:
    """The operator's function comes from a table and has no module-level name."""
    model = onnx2jax.convert(parse("g (float[4] x, int64[1] s) => (float[n] y) { t = Abs(s) y = Reshape(x, t) }"))
    with pytest.raises(KnownValueError) as caught:
        jax.jit(model.apply)(model.params, np.ones(4, np.float32), np.array([4]))
    inner = model.graph.nodes[0]
    error = KnownValueError("what is wrong", caught.value.values, inner)
    again = pickle.loads(pickle.dumps(error))
    assert (again.values, str(again.node), again.node.target) == (("t",), str(inner), inner.target)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_message_spells_a_rule() -> None:
    """Rules are passed as rule=, or to with_rules."""
    spelled = re.compile(r"\brules? [A-Z]{2}-\d|\(rules? $")
    texts = {(m, text) for m, source in sources().items() if m != "errors" for text in source.strings}
    assert [(module, text) for module, text in texts if spelled.search(text)] == []


def test_every_rule_exists() -> None:
    named = {m: set(re.findall(r"\b[A-Z]{2}-\d{2}\b", source.text)) for m, source in sources().items()}
    assert {m: unknown for m, rules in named.items() if (unknown := rules - RULES)} == {}
