"""Operands of com.microsoft of another rank or extent: onnxruntime's checks, which broadcasting would let pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.errors import OnnxError
from onnx2jax.ops import index, registry
from tests.ops.test_microsoft import MICROSOFT, real
from tests.ops.test_microsoft_types import TABLE
from tests.support.helpers import run_op

NAMES = sorted(name for domain, name in index.MODULES if domain == MICROSOFT)
OPERATORS = {name: operator for name in NAMES if (operator := registry.resolve(MICROSOFT, name, 1))}
SHAPES: dict[str, dict[str, str]] = {
    name: shapes for name, operator in OPERATORS.items() if (shapes := getattr(operator.function, "shapes", {}))
}

NEVER = (1, 1, 1, 1, 1, 1)
"""Axes before an operand's own: no operator takes so many."""


def _mutated(x: np.ndarray) -> Iterator[np.ndarray]:
    yield x.reshape(*NEVER, *x.shape)
    yield x.reshape(-1)
    if x.size:
        yield x.reshape(-1)[:1].reshape(())
    for axis in range(x.ndim):
        yield np.concatenate([x, x], axis)


def _runs(name: str, inputs: list[Any], **attributes: Any) -> bool:
    """Whether an operator accepts operands; any exception but ours is an error of this test."""
    try:
        with compat.enable_x64():
            jax.eval_shape(lambda: run_op(name, *inputs, domain=MICROSOFT, n_outputs=TABLE[name][1], **attributes))
    except OnnxError:
        return False
    return True


def test_shapes_are_of_operands() -> None:
    assert all(shapes.keys() <= {*OPERATORS[name].inputs} for name, shapes in SHAPES.items()) and len(SHAPES) > 20


@pytest.mark.parametrize("name", sorted(SHAPES.keys() & TABLE.keys()))
def test_operands_have_the_declared_shapes(name: str) -> None:
    inputs, _, attributes = TABLE[name]
    operator = OPERATORS[name]
    assert _runs(name, inputs, **attributes)
    for place, x in enumerate(inputs):
        if x is not None and operator.inputs[place] in SHAPES[name]:
            wrong = [*inputs[:place], x.reshape(*NEVER, *x.shape), *inputs[place + 1 :]]
            assert not _runs(name, wrong, **attributes), operator.inputs[place]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_rank_and_extent_is_accepted_or_refused_by_our_own_error(name: str) -> None:
    inputs, _, attributes = TABLE[name]
    for place, x in enumerate(inputs):
        for wrong in _mutated(np.asarray(x)) if x is not None else ():
            _runs(name, [*inputs[:place], wrong, *inputs[place + 1 :]], **attributes)


WEIGHT = np.arange(64, dtype=np.uint8).reshape(4, 2, 8)
PROJECTED = [real(2, 3, 8)] * 3


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "said"),
    [
        (
            "MatMulNBits",
            [real(2, 16), WEIGHT, real(4)],
            {"K": 16, "N": 4, "block_size": 16},
            r"B .*\[N=4, blocks=1, 8\]",
        ),
        (
            "MatMulNBits",
            [real(2, 16), WEIGHT[:, :1], real(4), WEIGHT[0]],
            {"K": 16, "N": 4, "block_size": 16},
            "zero_p",
        ),
        ("MultiHeadAttention", [*PROJECTED, None, np.ones((2, 1, 3, 3), np.int32)], {"num_heads": 2}, "rank 1 to 3"),
        ("FusedConv", [real(1, 2, 3, 3), real(2, 2, 1, 1), None, real(1, 1, 3, 3)], {"activation": "Relu"}, "Z"),
        ("FusedConv", [real(1, 2, 3, 3), real(2, 2, 1, 1), real(1)], {"activation": "Relu"}, "B must"),
        ("FastGelu", [real(2, 8), real(1, 8)], {}, "bias must"),
    ],
)
def test_surplus_operands_are_refused(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(OnnxError, match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)
