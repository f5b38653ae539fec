"""The official suite of ONNX, each case by value: through ``run`` and through calls, ``convert(model)(**feeds)``.

What each lane can find that no other can:

| lane | finds |
|---|---|
| ``run`` of many cases in one program | passes over optimised programs, operators in 64-bit mode |
| call of the same program | results as JAX's arrays, inputs that an asynchronous program reads |
| ``run`` of a case alone | NumPy in place of a program, host nodes, random draws, large networks, what is one program |
| ``apply`` in a caller's jit in 32 bits | operators without 64-bit types, inputs that have to be known |
| ``vmap`` of ``apply`` | batching rules of custom primitives and of control flow |
| gradient of ``apply`` | derivatives that differ, or fail, without 64-bit types |

The last three are in test_official_in_32_bits.py, with some cases of each operator outside of the extended tests.

The extended tests run each case alone through both: cases that share a program could hide what a pass does to one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from tests.support import official
from tests.support.official import Case
from tests.tables.official import BY_NUMPY, FAILS, NOT_IN_JIT, STAGED

pytestmark = pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")  # from these very cases

Record = Callable[[str, object], None]
UNTRACED = frozenset().union(*NOT_IN_JIT.values())
ALONE = {
    *FAILS,
    *STAGED,
    *official.BERNOULLI,
    *official.DROPOUT,
    "test_gradient_of_add",
    "test_gradient_of_add_and_mul",
}
"""Cases that cannot share a program; attributes of Gradient name values."""


def _is_alone(case: Case) -> bool:
    """Also those for which ``run`` takes NumPy, but for those that a call would compile here alone."""
    operators = {node.op_type for node in case.model.graph.node} if case.model and case.name not in UNTRACED else set()
    return case.name in ALONE or (len(operators) == 1 and operators <= BY_NUMPY)


LIGHT = [case for case in official.cases().values() if case.kind == "real"]
SMALL = [case for case in official.cases().values() if case.kind != "real"]
SINGLE = [*official.batches(filter(_is_alone, SMALL))]
JOINED = [
    batch
    for _, group in groupby(sorted((c for c in SMALL if not _is_alone(c)), key=official.imports), official.imports)
    for batch in official.batches(group)
]


def by_first(batches: Iterable[tuple[Case, ...]]) -> Any:
    """Parametrises a test by batches, each named after its first case."""
    return pytest.mark.parametrize("batch", [pytest.param(b, id=b[0].name) for b in batches])


def check(case: Case, record_property: Record, routes: Any = None) -> None:
    """Compare the results of a case alone, and whether it is one program; or see it fail as the table says."""
    if case.name in FAILS:
        with pytest.raises(Exception):  # noqa: B017
            official.check(case, routes)
        return
    model = official.check(case, routes)
    assert model.jitted is (case.name not in STAGED)
    record_property("official", "one program" if model.jitted else "several")


@pytest.mark.rule("FN-24")
@by_first(JOINED)
def test_cases_in_one_program(batch: tuple[Case, ...], subtests: Any, record_property: Record) -> None:
    record_property("official cases", len(batch))
    try:
        results = official.together(batch)
    except Exception:
        for case in batch:  # name those that fail
            with official.subtest(subtests, case):
                check(case, record_property)
        raise
    for case in batch:
        _, [(_, expected)] = official.load(case)
        with official.subtest(subtests, case):
            try:
                for found in results[case.name]:
                    official.compare(case, found, expected)
            except AssertionError:
                official.check(case)  # alone it is easier to read
                raise
            record_property("official", "one program")


@pytest.mark.rule("FN-24")
@by_first([*SINGLE, *((case,) for case in LIGHT)])
def test_cases_alone(batch: tuple[Case, ...], subtests: Any, record_property: Record) -> None:
    """Also by a call where no caller's jit can hold the case."""
    record_property("official cases", len(batch))
    for case in batch:
        with official.subtest(subtests, case):
            check(case, record_property, None if case.name in UNTRACED else [official.run])


@pytest.mark.extended
@pytest.mark.rule("FN-24")
@by_first(official.batches(SMALL))
def test_each_case_alone_by_run_and_by_a_call(batch: tuple[Case, ...], subtests: Any) -> None:
    for case in batch:
        with official.subtest(subtests, case):
            check(case, lambda *_: None)


@pytest.mark.extended
@by_first((case,) for case in LIGHT)
def test_light_models_by_a_call(batch: tuple[Case, ...]) -> None:
    check(batch[0], lambda *_: None, [official.call])


def test_no_case_is_left_out() -> None:
    assert onnx.__version__ == official.VERSION
    assert Counter(case.kind for case in official.cases().values()) == official.COUNTS
    ran = [case.name for batch in (*JOINED, *SINGLE, LIGHT) for case in batch]
    assert sorted(ran) == list(official.cases())
    assert set(official.cases()) >= ALONE | UNTRACED
    assert all(FAILS.values()), "an exception needs a reason"
    assert (len(official.cases()), len(FAILS), len(STAGED)) == (2033, 0, 55)


@pytest.mark.extended
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


@pytest.mark.parametrize("form", ["", "_expanded"])
def test_float16_attention_is_bit_exact(form: str) -> None:
    """Every step is rounded as ONNX's function says: the operator, its expansion and the stored result are the same."""
    names = ("causal_fp16", "gqa_with_past_and_present_fp16")
    some = [official.cases()[f"test_attention_4d_{name}{form}"] for name in names]
    _, _, expected = official.joined(some)
    for name, results in official.together(some).items():
        for result, value in zip(results[0], expected[name], strict=True):
            np.testing.assert_array_equal(result, value)
