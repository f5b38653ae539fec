"""docs/operators.md is what the code says today, and no operator refuses anything without limits that say so."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

import onnx2jax
from docs import make_operators
from onnx2jax.ops import registry
from tests.ops import test_microsoft_types
from tests.ops.test_gradients import TABLE
from tests.support.helpers import ROOT
from tests.tables.folding import CASES
from tests.tables.operators import TYPES_LEFT_OUT, rows

OPS = Path(onnx2jax.__file__).parent / "ops"
OPERATORS = [
    operator
    for domain, names in make_operators.own().items()
    for name, versions in names.items()
    for since in versions
    if (operator := registry.resolve(domain, name, since)) is not None
]

ELSEWHERE = {
    "tests/ops/test_attention.py": "ai.onnx.preview.FlexAttention",
    "tests/ops/test_control.py": "If Loop Scan SequenceMap",
    "tests/ops/test_elementwise.py": "GivenTensorFill",
    "tests/ops/test_extensions.py": "ai.onnx.contrib.EncodeImage",
    "tests/ops/test_ml.py": "ai.onnx.ml.CastMap ai.onnx.ml.DictVectorizer ai.onnx.ml.ZipMap",
    "tests/ops/test_random.py": "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "tests/ops/test_sequence.py": "Optional OptionalGetElement OptionalHasElement SequenceAt SequenceEmpty "
    "SequenceErase SequenceInsert SequenceLength",
    "tests/ops/test_shape.py": "Constant",
    "tests/ops/test_microsoft_generation.py": " ".join(
        f"com.microsoft.{name}" for name in ("BeamSearch", "GreedySearch", "Sampling")
    ),
    "tests/ops/test_microsoft_whisper.py": "com.microsoft.WhisperBeamSearch",
    "tests/ops/test_text.py": "com.microsoft.MurmurHash3 com.microsoft.Tokenizer",
    "tests/ops/test_vision.py": "ImageDecoder",
    "tests/training/test_gradient.py": "ai.onnx.preview.training.Gradient",
    "tests/runtime/test_partition.py": " ".join(
        f"onnx2jax.padded.{name}" for name in ("Compress", "Loop", "NonMaxSuppression", "NonZero", "Unique")
    ),
    # called by Loop on the host; the same function as in ai.onnx
    "onnx2jax/ops/control.py": "onnx2jax.padded.Trips",
    "onnx2jax/ops/microsoft/fused.py": "com.microsoft.SimplifiedLayerNormalization",
}
"""Operators in no table, by the file that tests them: they take graphs, sequences, maps, texts or chance."""

BEHIND_UFUNCS = {"elementwise._on_dims": (("", "Div"), ("", "Mod"))}
"""Functions that raise NotImplementedError inside a function of NumPy's making, and the operators they belong to."""


def test_unsupported_operators_have_a_reason() -> None:
    """Of onnxruntime's operators."""
    supported = make_operators.own()["com.microsoft"].keys()
    assert test_microsoft_types.SCHEMAS.keys() - supported <= make_operators.MISSING.keys()


def test_the_operator_page_is_current() -> None:
    assert make_operators.PAGE.read_text() == make_operators.page(), "run `make docs`"


def test_unsupported_types_are_listed_as_limits() -> None:
    assert all("strings" in _limits(*key) for key in TYPES_LEFT_OUT)


def test_every_unsupported_option_is_documented() -> None:
    """Whoever can reach a NotImplementedError says in its limits what it does not do."""
    seen = set(BEHIND_UFUNCS)
    for operator in OPERATORS:
        found = set(_refusals(operator.function, set()))
        alone = {name for name, choices in operator.choices.items() if len(choices) == 1}
        assert operator.limits or not found | alone, (operator.domain, operator.name, found, alone)
        seen |= found
    assert all(_limits(*key) for keys in BEHIND_UFUNCS.values() for key in keys)
    files = [path for path in OPS.rglob("*.py") if path.name != "registry.py"]
    assert seen == {name for path in files for name in _raising(path)}


def test_every_operator_is_in_a_table() -> None:
    tables = {row.key for row in rows()} | CASES.keys()
    tables |= {("", name) for name, *_ in TABLE} | {("com.microsoft", name) for name in test_microsoft_types.TABLE}
    missing = {(operator.domain, operator.name) for operator in OPERATORS} - tables
    assert {".".join(filter(None, key)) for key in missing} == set(" ".join(ELSEWHERE.values()).split())
    for path, names in ELSEWHERE.items():
        text = (ROOT / path).read_text()
        assert [name for name in names.split() if name.rpartition(".")[2] not in text] == []


def _limits(domain: str, name: str) -> str:
    operator = registry.resolve(domain, name)
    assert operator is not None
    return operator.limits


def _raising(path: Path) -> Iterator[str]:
    for function in ast.parse(path.read_text()).body:
        raised = [n.exc for n in ast.walk(function) if isinstance(n, ast.Raise)]
        if any(isinstance(e, ast.Call) and ast.unparse(e.func) == "NotImplementedError" for e in raised):
            assert isinstance(function, ast.FunctionDef)
            yield f"{path.stem}.{function.name}"


def _refusals(value: Any, seen: set[int]) -> Iterator[str]:
    """The functions in ops/ that raise NotImplementedError and that a value calls, holds or encloses."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, dict | list | tuple):
        inner = list(value.values() if isinstance(value, dict) else value)
    elif isinstance(value, functools.partial):
        inner = [value.func]
    elif isinstance(value, FunctionType) and value.__module__.startswith("onnx2jax.ops"):
        codes = [value.__code__]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        names = {name for code in codes for name in code.co_names}
        if "NotImplementedError" in names:
            yield f"{value.__module__.rpartition('.')[2]}.{value.__qualname__}"
        inner = [value.__globals__[n] for n in names if n in value.__globals__]
        inner += [cell.cell_contents for cell in value.__closure__ or ()]
    for held in inner:
        yield from _refusals(held, seen)


@pytest.mark.parametrize("key", make_operators.ALSO_CHECKED, ids=str)
def test_operators_whose_gradients_are_tested_elsewhere(key: tuple[str, str]) -> None:
    text = (OPS.parent.parent / make_operators.ALSO_CHECKED[key]).read_text()
    assert key[1] in text and any(way in text for way in ("jax.grad", "jax.vjp", "check_gradients"))
