"""Functions in JAX's own primitives, for programs that read jaxprs: other exporters, other compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax

from .. import compat
from .program import Program, as_function, branch_for

P = ParamSpec("P")
R = TypeVar("R")


def portable(function: Callable[P, R]) -> Callable[P, R]:
    """The function, traced into primitives that every reader of jaxprs knows.

    A converted model has branches by platform (``lax.platform_dependent``) and, called in JAX's 32-bit mode, a
    primitive of this package around its 64-bit program. The result has the branches that no platform is named for, and
    calls inlined; it computes the same numbers, on a CPU perhaps more slowly.

    Args:
        function: of positional arguments, arrays or pytrees of them.

    >>> import jax, numpy as np, onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> program = jax.make_jaxpr(onnx2jax.portable(model))(np.zeros((1, 1, 8, 8), np.float32))
    >>> "platform_index" in str(program)
    False
    """

    whole: Callable[..., Any] = function

    @functools.wraps(whole)
    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        with compat.enable_x64():
            traced = jax.make_jaxpr(lambda *xs: whole(*jax.tree.unflatten(structure, xs)), return_shape=True)
            closed, shapes = traced(*leaves)
            results = as_function(Program.of(closed).inlined(branch_for("")).closed())(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return cast("Callable[P, R]", call)
