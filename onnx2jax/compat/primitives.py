"""Primitives of our own, and their rules. Imported by tracing.py alone, which does without it where JAX does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters.ad import Zero, primitive_jvps, primitive_transposes
from jax.interpreters.batching import primitive_batchers
from jax.interpreters.mlir import lower_fun, register_lowering

from .jaxprs import Primitive

forward_only = Primitive("forward_only")
"""The identity, whose transpose raises what its parameter ``error`` makes.

A new error each time: caches keep the parameter, and an error that was raised keeps its traceback, frames and tracers.
"""
scaled = Primitive("scaled")
"""w * by."""


def _transpose(_cotangent: Any, _x: Any, *, error: Callable[[], Exception]) -> Any:
    raise error()


def _jvp(primals: Any, tangents: Any, *, error: Callable[[], Exception]) -> Any:
    (x,), (t,) = primals, tangents
    return forward_only.bind(x, error=error), t if isinstance(t, Zero) else forward_only.bind(t, error=error)


def _batch(xs: Any, axes: Any, *, error: Callable[[], Exception]) -> Any:
    (x,) = xs
    return forward_only.bind(x, error=error), axes[0]


forward_only.def_impl(lambda x, **_: x)
forward_only.def_abstract_eval(lambda x, **_: x)
primitive_jvps[forward_only] = _jvp
primitive_transposes[forward_only] = _transpose
primitive_batchers[forward_only] = _batch
register_lowering(forward_only, lambda _ctx, x, **_: [x])

scaled.def_impl(lambda w, by, _shift, _most: w * by)
scaled.def_abstract_eval(lambda w, _by, _shift, _most: w)
register_lowering(scaled, lower_fun(lambda w, by, _shift, _most: w * by, multiple_results=False))
