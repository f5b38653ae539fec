"""The primitives that passes know by name exist in this JAX: a pass meets a renamed one no more, and is only slow."""

from __future__ import annotations

import ast
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import primitives

from onnx2jax.jaxpr.program import CALLS, Program
from tests.support.house import modules, package_of, tree

_KNOWN: Final = (
    "abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim "
    "cbrt ceil clamp concatenate cond conv_general_dilated convert_element_type copy cos cosh div dot_general "
    "dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge gt integer_pow iota is_finite le log log1p "
    "logistic lt max min mul ne neg nextafter not or pad pow reduce_and reduce_max reduce_min reduce_precision "
    "reduce_sum reduce_window rem reshape rev round rsqrt scan select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh transpose while xor"
)
KNOWN: Final = frozenset(_KNOWN.split())
WORDS: Final = {"call", "name"}
"""Other strings in passes that are also names of primitives."""


def names_in_passes() -> set[str]:
    """The words of all strings, but for docstrings."""
    found = set[str]()
    for module, path in modules().items():
        if package_of(module) == "jaxpr" or module == "runtime.numpy_executor":
            nodes = list(ast.walk(tree(path)))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            strings = (n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
            found.update(word for n in strings if id(n) not in docstrings for word in n.value.split())
    return found


def test_every_primitive_that_passes_know_exists() -> None:
    present = {getattr(p, "name", "") for p in vars(primitives).values()}
    assert present >= KNOWN
    assert names_in_passes() & present - WORDS - CALLS.keys() == KNOWN  # so that a new one joins the list


def test_calls_are_named_and_hold_programs_as_inlining_expects() -> None:
    def calls(x: Any) -> Any:
        y = jax.jit(lambda v: v + 1)(x)
        y = jax.nn.relu(y)  # custom_jvp
        y = vjp(y)
        return vmapped(y)

    vjp = jax.custom_vjp(lambda v: v * 2)
    vjp.defvjp(lambda v: (v * 2, None), lambda _, g: (g,))
    vmapped = jax.custom_batching.custom_vmap(lambda v: v - 1)
    vmapped.def_vmap(lambda _, batched, v: (v - 1, batched[0]))
    closed = jax.make_jaxpr(calls)(np.float32(1))
    program = Program.of(closed)
    assert {e.name for e in program.equations} == CALLS.keys()
    assert all(CALLS[e.name] in e.params for e in program.equations)
    assert not {e.name for e in program.inlined().equations} & CALLS.keys()
