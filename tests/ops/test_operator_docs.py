"""docs/operators.md is what the code says today, and no refusal is without a line in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import onnx2jax
from docs import make_operators
from docs.operator_limits import LIMITS, REFUSALS, TYPES_LEFT_OUT

OPS = Path(onnx2jax.__file__).parent / "ops"


def test_the_page_is_current() -> None:
    assert make_operators.PAGE.read_text() == make_operators.page(), "run `make docs`"


def test_limits_name_operators() -> None:
    served = {(domain, name) for domain, names in onnx2jax.supported().items() for name in names}
    assert set(LIMITS) <= served
    assert set(TYPES_LEFT_OUT) <= served & set(LIMITS)
    assert all(set(operators) <= set(LIMITS) for operators in REFUSALS.values())


def test_every_refusal_has_a_line() -> None:
    found = set()
    for path in OPS.rglob("*.py"):
        for function in ast.parse(path.read_text()).body:
            raised = [n.exc for n in ast.walk(function) if isinstance(n, ast.Raise)]
            if any(isinstance(e, ast.Call) and ast.unparse(e.func) == "NotImplementedError" for e in raised):
                assert isinstance(function, ast.FunctionDef)
                found.add(f"{path.stem}.{function.name}")
    assert found == set(REFUSALS)


@pytest.mark.parametrize("key", make_operators.ALSO_CHECKED, ids=str)
def test_gradients_that_other_files_check(key: tuple[str, str]) -> None:
    text = (OPS.parent.parent / make_operators.ALSO_CHECKED[key]).read_text()
    assert key[1] in text and "jax.grad" in text
