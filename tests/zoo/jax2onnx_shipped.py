"""Cases that jax2onnx ships with its converters: the names of those that are taken lie in jax2onnx_shipped.txt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from .case import Case, Export
from .jax2onnx_models import JAX2ONNX, export

TABLE: Final = Path(__file__).with_suffix(".txt")


@cache
def shipped() -> dict[str, Mapping[str, Any]]:
    """Each case by ``context.component testcase``."""
    from jax2onnx.plugins import plugin_system as plugins

    plugins.import_all_plugins()
    entries = [*plugins.PLUGIN_REGISTRY.values(), *plugins.EXAMPLE_REGISTRY.values()]
    tables = [e if isinstance(e, dict) else getattr(e, "metadata", None) or {} for e in entries]
    return {
        f"{t.get('context')}.{t.get('component')} {c['testcase']}": c for t in tables for c in t.get("testcases") or ()
    }


def _export(name: str, folder: Path) -> Export:
    case = shipped()[name]
    function = case["callable"]
    if hasattr(function, "instantiate"):
        function = function.with_dtype(jnp.float32).instantiate()
    options = {"opset": case["opset_version"]} if "opset_version" in case else {}
    return export(lambda _, *xs: function(*xs), {}, list(_sizes(case)), folder, **options)


def _sizes(case: Mapping[str, Any]) -> Iterator[Sequence[np.ndarray]]:
    """Its operands, for two sizes of what has a name."""
    if "input_values" in case:
        yield [_narrow(np.asarray(v)) for v in case["input_values"]]
        return
    shapes = [s if isinstance(s, tuple | list) else (s,) for s in case.get("input_shapes", ())]
    free = any(isinstance(n, str) for s in shapes for n in s)
    for rows in (2, 3) if free else (2,):
        rng = np.random.default_rng(0)
        dtypes = case.get("input_dtypes") or [np.float32] * len(shapes)
        sized = [[rows if isinstance(n, str) else n for n in s] for s in shapes]
        yield [_narrow(_drawn(rng, s, np.dtype(d))) for s, d in zip(sized, dtypes, strict=True)]


def _drawn(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind in "iu":
        return rng.integers(0, 5, shape).astype(dtype)
    return rng.random(shape) > 0.5 if dtype.kind == "b" else rng.standard_normal(shape).astype(dtype)


def _narrow(value: np.ndarray) -> np.ndarray:
    """As JAX has it by default."""
    return value.astype({"int64": "int32", "float64": "float32"}.get(value.dtype.name, value.dtype))


CASES: Final = tuple(
    Case("jax2onnx's own cases", name, JAX2ONNX, partial(_export, name), ("jax2onnx",))
    for name in TABLE.read_text().splitlines()
)
