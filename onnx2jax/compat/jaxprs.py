"""Classes of traced programs, read off one.

``jax.extend.core``, which has them too, imports Pallas, for 50 ms; and in JAX 0.12 that adds states to the key of JAX's
trace caches, so that no signature of a call before is met again.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

_closed = jax.make_jaxpr(lambda x: x + 1)(jax.ShapeDtypeStruct((), "float32"))
_variable, _literal = _closed.jaxpr.eqns[0].invars
ClosedJaxpr: Any = type(_closed)
Literal: Any = type(_literal)
Var: Any = type(_variable)

transpose = lax.transpose_p
"""The primitive."""
Primitive: Any = type(transpose)


def evaluated(closed: Any, *args: Any) -> list[Any]:
    """The outputs of a traced program."""
    results: list[Any] = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    return results
