"""Ways in which a caller traces a function: each makes its own program, and must leave a model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax


def total(results: Any) -> Any:
    """The sum of the floating-point results, which has a gradient."""
    arrays = [v for v in jax.tree.leaves(results) if jnp.issubdtype(v.dtype, jnp.floating)]
    return sum(v.astype(jnp.float32).sum() for v in arrays)


def twice(x: Any) -> Any:
    return np.stack([x, x])


def symbolic(function: Callable[[Any], Any], x: Any) -> Any:
    """Exports with a free first extent."""
    extents = export.symbolic_shape(",".join(["rows", *map(str, x.shape[1:])]))
    return export.export(jax.jit(function))(jax.ShapeDtypeStruct(extents, x.dtype))


TRACES: Final[dict[str, Callable[[Callable[[Any], Any], Any], Any]]] = {
    "jit": lambda f, x: jax.jit(f)(x),
    "jit of a constant": lambda f, x: jax.jit(lambda: f(x))(),
    "vmap": lambda f, x: jax.vmap(f)(twice(x)),
    "grad": lambda f, x: jax.grad(lambda v: total(f(v)))(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda v: total(f(v))))(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(lambda v: total(f(v))))(twice(x)),
    "jvp": lambda f, x: jax.jvp(lambda v: total(f(v)), (x,), (x,)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(lambda v: total(f(v))), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(lambda v: total(f(v)), x)[1](x),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(lambda v: total(f(v))))(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "scan": lambda f, x: lax.scan(lambda none, v: (none, f(v)), None, twice(x)),
    "cond": lambda f, x: lax.cond(jnp.array(True), f, f, x),
    "export": symbolic,
}
"""By name: traces a function of one array at an example."""
