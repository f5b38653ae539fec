"""The official suite of ONNX through ``run`` and through calls, ``convert(model)(**feeds)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from tests.support import official
from tests.tables.official import FAILS, NOT_IN_JIT, STAGED


def _parameters() -> list[Any]:
    fails = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in FAILS.items()}
    return [pytest.param(c, id=n, marks=fails.get(n, ())) for n, c in official.cases().items()]


@pytest.mark.filterwarnings("ignore::onnx2jax.DeviationWarning")  # of runtimes, from these very cases
@pytest.mark.rule("FN-24")
@pytest.mark.parametrize("case", _parameters())
def test_case(case: official.Case, record_property: Callable[[str, object], None]) -> None:
    model = official.check(case)
    record_property("official", "one program" if model.jitted else "several")
    assert model.jitted is (case.name not in STAGED)


def test_no_case_is_left_out() -> None:
    assert onnx.__version__ == official.VERSION
    assert Counter(case.kind for case in official.cases().values()) == official.COUNTS
    assert set(official.cases()) >= set(FAILS) | STAGED | frozenset().union(*NOT_IN_JIT.values())
    assert all(FAILS.values()), "an exception needs a reason"
    assert (len(official.cases()), len(FAILS), len(STAGED)) == (2033, 0, 55)


def test_activations_of_the_light_resnet50() -> None:
    """They reach 1e19: anything that squares them, or multiplies before it divides, ends in infinities and NaN."""
    message, [([image], _)] = official.load(official.cases()["test_resnet50"])
    inner = [name for node in message.graph.node if node.op_type in ("Conv", "Relu", "Sum") for name in node.output]
    probed = onnx.ModelProto()
    probed.CopyFrom(message)
    del probed.graph.output[:]
    probed.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in inner)
    activations = onnx2jax.convert(probed).run(None, {official.free_inputs(message)[0].name: image})
    assert all(np.isfinite(a).all() for a in activations)
    assert max(np.abs(a).max() for a in activations) > 1e18


@pytest.mark.parametrize("name", ["attention_4d_causal_fp16", "attention_4d_gqa_with_past_and_present_fp16"])
def test_float16_attention_is_bit_exact(name: str) -> None:
    """Every step is rounded as ONNX's function says: the operator, its expansion and the stored result are the same."""
    for case in (official.cases()[f"test_{name}"], official.cases()[f"test_{name}_expanded"]):
        message, [(inputs, expected)] = official.load(case)
        feeds = dict(zip([v.name for v in official.free_inputs(message)], inputs, strict=True))
        for result, value in zip(onnx2jax.convert(message).run(None, feeds), expected, strict=True):
            np.testing.assert_array_equal(result, value)
