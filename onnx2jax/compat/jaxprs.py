"""Classes of traced programs, which JAX exports for extensions; without that, they are those of a traced program."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

ClosedJaxpr: Any
Literal: Any
Var: Any

try:
    from jax.extend.core import ClosedJaxpr, Literal, Var
except ImportError:
    _closed = jax.make_jaxpr(lambda x: x + 1)(jax.ShapeDtypeStruct((), "float32"))
    _variable, _literal = _closed.jaxpr.eqns[0].invars
    ClosedJaxpr, Literal, Var = type(_closed), type(_literal), type(_variable)

transpose = lax.transpose_p
"""The primitive."""


def evaluated(closed: Any, *args: Any) -> list[Any]:
    """The outputs of a traced program."""
    results: list[Any] = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    return results
