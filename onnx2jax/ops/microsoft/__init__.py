"""The domain com.microsoft: operators that onnxruntime's optimizers, quantizers and model builders emit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Final, TypeVar, cast

from ..arrays import check_shapes
from ..registry import op

microsoft: Final = functools.partial(op, domain="com.microsoft")
"""Registers a function as the meaning of an operator of this domain."""

F = TypeVar("F", bound=Callable[..., Any])


def operands(**shapes: str) -> Callable[[F], F]:
    """Declare the shapes of operands that broadcasting would accept, and onnxruntime does not.

    A name is an extent, the same in all operands of a node; a name of an attribute is that attribute's value, a number
    itself, ``name?`` may also be 1, and ``*`` is an extent of its own. ``|`` separates the shapes that an operand may
    have.

    >>> import numpy as np
    >>> operands(B="width")(lambda A, B: A + B)(np.ones((2, 3)), np.ones((1, 3)))
    Traceback (most recent call last):
        ...
    ValueError: B must have the shape [width] (it has (1, 3))
    """

    def declare(function: F) -> F:
        names = tuple(signature(function).parameters)

        @functools.wraps(function)
        def checked(*values: Any, **attributes: Any) -> Any:
            _check(shapes, dict(zip(names, values, strict=False)), attributes)
            return function(*values, **attributes)

        checked.shapes = shapes  # type: ignore[attr-defined]
        return cast(F, checked)

    return declare


def _check(shapes: Mapping[str, str], operands: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    extents = {name: value for name, value in attributes.items() if type(value) is int}
    for name, allowed in shapes.items():
        if (value := operands.get(name)) is None:
            continue
        matches = [shape.split() for shape in allowed.split("|") if len(shape.split()) == value.ndim]
        if not matches:
            wanted = " or ".join(f"[{', '.join(shape.split())}]" for shape in allowed.split("|"))
            raise ValueError(f"{name} must have the shape {wanted} (it has {value.shape})")
        extents |= {n: int(n) for n in matches[0] if n.isdigit()}
        names = [f"{name}_{axis}" if n == "*" else n for axis, n in enumerate(matches[0])]
        check_shapes(extents, **{name: (value, " ".join(names))})
