"""Applies passes to jaxprs from ``jax.make_jaxpr``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import check_jaxpr

from onnx2jax import compat
from onnx2jax.jaxpr.passes.any.hoist_params import SplitProgram, hoist
from onnx2jax.jaxpr.program import Program


def traced(function: Callable[..., Any], *operands: Any, platform: str = "cpu") -> Any:
    """The program of a function as the passes for a platform take it."""
    with compat.on_platform(platform, keeps_convolutions=True):
        return jax.make_jaxpr(function)(*operands)


def rewritten(rewrite: Callable[[Program], Program], closed: Any, parameters: int = 0, platform: str = "cpu") -> Any:
    """The program after a pass, checked to be valid; the same object if the pass returns its argument."""
    program = Program.of(closed, parameters, platform)
    new = rewrite(program)
    if new is program:
        return closed
    changed = new.closed()
    check_jaxpr(changed.jaxpr)
    return changed


def hoisted(closed: Any, parameters: int) -> SplitProgram:
    """The program split into hoisted steps and the rest."""
    program = hoist(Program.of(closed, parameters))
    main = program.closed()
    check_jaxpr(main.jaxpr)
    return replace(program.hoisted, main=main)
