"""Keywords of ``convert`` with values of another kind: errors that show one to use."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputError, InputNameError, InputShapeError, InputTypeError, InputValueError
from tests.support.models import mlp, model, value

F = np.float32


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dims": [8]}, InputTypeError, "dims is [8]; it is a dict: dims={'batch': 8}"),
        ({"static": [1]}, InputTypeError, "static is [1]; it is a dict: static={'shape': [1, 8]}"),
        ({"bucket": [1, 4]}, InputTypeError, "bucket is [1, 4]; it is a dict: bucket={'batch': [1, 4]}"),
        ({"rebatch": "x"}, InputTypeError, "rebatch is 'x'; it is a dict or True: rebatch={'x': 0}"),
        ({"max_size": 100}, InputTypeError, "max_size is 100; it is a dict: max_size={'nms': 100}"),
        ({"max_trips": "3"}, InputTypeError, "max_trips is '3'; it is an integer"),
        ({"warn_after": None}, InputTypeError, "warn_after is None; it is an integer"),
        ({"microbatches": 2.0}, InputTypeError, "microbatches is 2.0; it is an integer"),
        ({"float32": True}, InputTypeError, "For a whole model: dtype='float32'"),
        ({"bucket": {"batch": []}}, InputValueError, "bucket has 'batch': []; it takes sizes of 1 or more"),
        ({"bucket": {"batch": [0, 4]}}, InputValueError, "bucket has 'batch': [0, 4]; it takes sizes of 1 or more"),
        ({"bucket": {"batch": [4]}, "dims": {"batch": 4}}, InputNameError, "leave 'batch' out of one of them"),
    ],
    ids=str,
)
def test_values_of_another_kind(options: Any, error: type[InputError], text: str) -> None:
    with pytest.raises(error) as caught:
        onnx2jax.convert(mlp(), **options)
    assert text in str(caught.value)
    with pytest.raises(error):
        onnx2jax.convert(mlp()).with_options(**options)


def relu(shape: list[Any]) -> Any:
    node = helper.make_node("Relu", ["x"], ["y"])
    return model([node], [value("x", F, shape)], [value("y", F, shape)])


@pytest.mark.parametrize("keyword", ["dims", "bucket"])
def test_dimensions_without_a_name_are_listed(keyword: str) -> None:
    given = {"batch": [1, 4] if keyword == "bucket" else 4}
    with pytest.raises(
        InputNameError, match=r"names \['batch'\]; the model's dimension variables are \['x_0', 'x_2'\]$"
    ):
        onnx2jax.convert(relu([None, 3, None]), **{keyword: given})


@pytest.mark.parametrize(
    ("shape", "options", "fix"),
    [
        (
            ["n", 3],
            {"dims": {"n": 2}, "rebatch": {"x": 0, "y": 0}},
            "; dims= fixes 'n': for other extents convert without it",
        ),
        ([None, 3], {"dims": {"x_0": 2}}, "; dims= fixes 'x_0': for other extents convert without it"),
        ([2, 3], {}, "; for other batch sizes: convert(..., rebatch=True)"),
        ([2, 3], {"rebatch": {"z": 0}}, "; for other batch sizes: convert(..., rebatch={'z': 0, 'x': 0})"),
    ],
)
def test_another_batch_size_is_freed_by_the_option_that_fixes_it(
    shape: list[Any], options: dict[str, Any], fix: str
) -> None:
    ends = [value("x", F, shape), value("z", F, [2, 3])], [value("y", F, [2, 3])]
    m = onnx2jax.convert(model([helper.make_node("Add", ["x", "z"], ["y"])], *ends), **options)
    with pytest.raises(InputShapeError, match=rf"but 4 is given: shape \[4, 3\]{re.escape(fix)}$"):
        m(np.ones((4, 3), F), np.ones((2, 3), F))


def test_buckets_for_a_model_of_a_fixed_batch_size() -> None:
    bucket = {"batch": [1, 4]}
    with pytest.raises(InputNameError, match=r"for other batch sizes: convert\(..., rebatch=True\)"):
        onnx2jax.convert(relu([1, 3]), bucket=bucket)
    x = np.random.default_rng(0).normal(size=(3, 3)).astype(F)
    for shape in ([1, 3], [None, 3]):
        m = onnx2jax.convert(relu(shape), bucket=bucket, rebatch=True).compile(dims={"batch": 4})
        np.testing.assert_array_equal(m(x), np.maximum(x, 0))
        assert m.outputs[0].shape == ("batch", 3) and m.compilations == 1
