"""Rows of the table with another attribute, rank or extent: accepted, or refused in our own words."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.ops import registry
from tests.support.helpers import run_op
from tests.support.tiers import extended, groups
from tests.tables.operators import Row, rows

INTERNALS = re.compile(
    r"to unpack|division by zero|dynamic_update_slice|dot_general|gufunc|Tracer|ShapedArray|could not be broadcast|"
    r"for broadcasting|lax\.|jnp\.|NoneType|object has no attribute|\[-0|reduce_window window"
)
"""Words of NumPy, JAX and Python, which a user of a model has not called."""

STRINGS = {"GPT2Tokenizer", "CLIPTokenizer", "RobertaTokenizer", "SpmTokenizer", "BpeDecoder", "RaggedTensorToSparse"}
STRINGS |= {"VectorToString", "StringToVector", "MaskedFill", "TfIdfVectorizer"}
"""Operators whose attributes are files or tables, and those with operands of no fixed rank, which are not mutated."""


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, int):
        return [0, -1, value + 1, 97]
    if isinstance(value, float):
        return [0.0, -1.0, float("nan")]
    if isinstance(value, str):
        return ["bogus", ""]
    if isinstance(value, list | tuple) and value and not isinstance(value[0], str | bytes | tuple):
        return [[*value][:-1], [*value, value[-1]], [0 * v for v in value], [-v for v in value]]
    return []


def _operands(x: np.ndarray) -> list[np.ndarray]:
    if not x.ndim:
        return [x[None], np.stack([x, x])]
    return [x[None], *([x[0]] if len(x) else []), np.concatenate([x, x], -1), np.concatenate([x, x]), x[:0]]


def _mutants(row: Row) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    for name, value in row.attributes.items():
        for other in _attributes(value):
            yield f"{name}={other}", [*row.inputs], {**row.attributes, name: other}
    for place, x in enumerate(row.inputs):
        for other in _operands(np.asarray(x)) if x is not None else ():
            inputs = [*row.inputs[:place], np.asarray(other, np.asarray(x).dtype), *row.inputs[place + 1 :]]
            yield f"input {place} of shape {np.shape(other)}", inputs, dict(row.attributes)


def _check(row: Row, inputs: list[Any], attributes: dict[str, Any], traced: bool) -> None:
    opset = max(row.opsets())
    operator = registry.resolve(row.domain, row.name, opset)
    assert operator is not None
    options = {"domain": row.domain, "opset": opset, "n_outputs": row.outputs, "rng": jax.random.key(0), **attributes}
    free = {
        p: x for p, x in enumerate(inputs) if x is not None and operator.parameter(p) not in operator.static | {None}
    }
    try:
        if not traced:
            run_op(row.name, *inputs, **options)
        elif free:
            jax.eval_shape(
                lambda free: jax.tree.map(
                    lambda y: 0 if isinstance(y, np.ndarray) else y,
                    run_op(row.name, *(free.get(p, x) for p, x in enumerate(inputs)), **options),
                ),
                free,
            )
    except OnnxError as e:
        first = str(e).splitlines()[0]
        assert f"'{row.name}'" in first and not INTERNALS.search(first), first


def _some() -> list[Row]:
    every = [r for r in rows() if r.name not in STRINGS and not any(np.asarray(x).dtype == object for x in r.inputs)]
    first = {row.name: row for row in reversed(every)}
    return list(first.values())


@pytest.mark.parametrize(
    ("some", "share"), [(_some(), 0.1), *(extended(g.values[0], 1.0, id=g.id) for g in groups(_some(), 40))]
)
def test_what_an_operator_refuses_it_refuses_in_our_words(some: list[Row], share: float) -> None:
    """In NumPy and traced; each exception that is not ours is an error of this test."""
    rng = random.Random(0)
    with compat.enable_x64(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for row in some:
            for what, inputs, attributes in _mutants(row):
                if rng.random() < share:
                    for traced in (False, True):
                        try:
                            _check(row, inputs, attributes, traced)
                        except Exception as e:
                            e.add_note(f"in {row.name} with {what}, {'traced' if traced else 'known'}")
                            raise
