"""The official cases on operands they were not made for: an answer, or an error of ours, and no other exception."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.errors import OnnxError
from tests.support import official
from tests.support.helpers import assert_on_purpose

INTEGERS = [0, 1, 2, 3, 7, 100, 1000, -1, -2, -100, -(2**40)]
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -1.0]


def changed(rng: random.Random, operand: Any) -> Any:
    """An operand with another extent, rank or element."""
    if not isinstance(operand, np.ndarray) or operand.dtype == object:
        return operand
    array = operand.copy()
    match rng.randrange(4):
        case 0 if array.ndim and array.size:
            axis = rng.randrange(array.ndim)
            extent = rng.choice([0, 1, array.shape[axis] + 1, array.shape[axis] - 1])
            return np.take(array, np.arange(extent) % array.shape[axis], axis)
        case 1:
            return array[None]
        case 2:
            return array.reshape(-1)
        case 3 if array.size and array.dtype.kind in "iuf":
            fits: list[Any] = FLOATS
            if array.dtype.kind in "iu":
                limits = np.iinfo(array.dtype)
                fits = [v for v in INTEGERS if limits.min <= v <= limits.max]
            array.flat[rng.randrange(array.size)] = rng.choice(fits)
    return array


def shapeless(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without declared shapes, which would refuse most of what is tried."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for end in (*model.graph.input, *model.graph.output):
        if end.type.HasField("tensor_type"):
            end.type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.long)])
def test_arbitrary_operands_compute_or_raise_our_errors(count: int) -> None:
    rng = random.Random(count)
    nodes = [case for case in official.cases().values() if case.kind == "node"]
    answered = refused = 0
    for case in rng.choices(nodes, k=count):
        proto, [(operands, _), *_] = official.load(case)
        if not operands:
            continue
        feeds = {info.name: operand for info, operand in zip(proto.graph.input, operands, strict=True)}
        name = rng.choice([*feeds])
        feeds[name] = changed(rng, feeds[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                onnx2jax.convert(shapeless(proto), max_trips=1000)(**feeds)
            except OnnxError as e:
                refused += 1
                assert_on_purpose(e)
            except Exception as e:
                e.add_note(f"{case.name} with {name} = {feeds[name]!r}")
                raise
            else:
                answered += 1
    assert answered > 2 * refused, (answered, refused)
