"""A convolution takes over the scale of what follows it, such as BatchNormalization, and one sum is left.

Before, where m, f and b are one number a channel and, like w, decided by weights alone, and nothing else reads c to e:

    c:f32[1,64,56,56] = conv_general_dilated x w
    d:f32[1,64,56,56] = sub c m
    e:f32[1,64,56,56] = mul d f
    g:f32[1,64,56,56] = add e b

After; v and h are computed once and not in every call:

    n:f32[64] = sub 0.0 m;  p:f32[64] = mul n f;  h:f32[64] = add p b
    v:f32[64,64,3,3] = scaled w f p
    c:f32[1,64,56,56] = conv_general_dilated x v
    g:f32[1,64,56,56] = add c h

MobileNetV2 takes 0.95 of the processor time, ResNet-50 0.965, a classifier of text lines (35 BatchNormalization) 0.92;
where images are large, or XLA's kernels take all the time, nothing is gained; nor by what stands before a convolution.

Results differ by roundings of the terms that are summed, as in another order of sums. Where numbers are so large or
small that they would be lost, preparing them fails with ``Unfoldable``, and the program is made anew without this.
Weights that something else reads too stay as they are, rather than lie in memory twice; so do those of products, which
are handed over as they lie, while those of convolutions are put into another order anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from ... import compat
from ..thresholds import MOST_GROWTH, SMALL_GROWTH
from .inline import as_type, bytes_of, placed, variables
from .on_numpy import is_computable

SCALES: Final = ("mul", "div")
AFFINE: Final = ("add", "sub", *SCALES)


class Link(NamedTuple):
    """An equation that scales or shifts each channel: what it does, by which variable, or literal."""

    equation: Any
    by: Any


def folded(
    equations: Sequence[Any], weights: Collection[Any], outputs: Sequence[Any], constants: dict[Any, Any]
) -> list[Any]:
    """The equations with what follows convolutions folded into their weights.

    Args:
        equations: in one row (see ``inline``).
        weights: those of the program's arguments that are.
        outputs: what it returns.
        constants: the values of other variables; it gets those that new equations read.
    """
    program = _Program(equations, weights, outputs, constants)
    new, traced = {id(e): [e] for e in equations}, dict[Any, ClosedJaxpr]()
    for convolution in filter(program.is_served, equations):
        chain = program.chain(convolution)
        if any(link.equation.primitive.name in SCALES for link in chain):
            for equation in (convolution, *(link.equation for link in chain)):
                new[id(equation)] = []
            new[id(chain[-1].equation)] = _folded(convolution, chain, traced, constants)
    return [e for equation in equations for e in new[id(equation)]]


class _Program:
    """Who makes what, who reads it, and from which weights it follows."""

    def __init__(
        self, equations: Sequence[Any], weights: Collection[Any], outputs: Sequence[Any], constants: Collection[Any]
    ) -> None:
        self.roots: dict[Any, frozenset[Any]] = {v: frozenset() for v in constants}
        """The weights that values come from which weights alone decide."""
        self.roots |= {v: frozenset((v,)) for v in weights}
        self.makers: dict[Any, Any] = {}
        self.reader: dict[Any, Any] = {}
        self.reads = Counter(variables(outputs))
        self.root_reads = Counter[Any]()
        """How often the program reads what comes from a weight, preparing left out."""
        for equation in equations:
            operands = variables(equation.invars)
            self.reads.update(operands)
            self.reader.update(dict.fromkeys(operands, equation))
            self.makers.update(dict.fromkeys(equation.outvars, equation))
            roots = frozenset[Any]().union(*(self.roots.get(v, ()) for v in operands))
            if is_computable(equation) and all(v in self.roots for v in operands):
                self.roots.update(dict.fromkeys(equation.outvars, roots))
            else:
                self.root_reads.update(roots)
        self.root_reads.update(r for v in variables(outputs) for r in self.roots.get(v, ()))

    def is_served(self, equation: Any) -> bool:
        """Whether it is a convolution whose weights follow from weights of the model that it alone reads."""
        if equation.primitive.name != "conv_general_dilated" or equation.params["batch_group_count"] != 1:
            return False
        w, result = equation.invars[1], equation.outvars[0].aval
        if isinstance(w, Literal) or {w.aval.dtype, equation.invars[0].aval.dtype, result.dtype} != {np.dtype("f4")}:
            return False
        roots = self.roots.get(w, ())
        is_prepared = 0 < w.aval.size * 4 <= max(SMALL_GROWTH, MOST_GROWTH * sum(map(bytes_of, roots)))
        is_alone = all(self.root_reads[r] == 1 or bytes_of(r) <= SMALL_GROWTH for r in roots)
        return bool(roots) and is_prepared and is_alone

    def chain(self, convolution: Any) -> list[Link]:
        """What scales and shifts the channels of its result, one after the other, before anything else reads it."""
        channel = convolution.params["dimension_numbers"].out_spec[1]
        (value,), chain = convolution.outvars, list[Link]()
        while self.reads[value] == 1 and (link := self._link(self.reader.get(value), value, channel)):
            chain.append(link)
            (value,) = link.equation.outvars
        return chain

    def _link(self, equation: Any, value: Any, channel: int) -> Link | None:
        if equation is None or equation.primitive.name not in AFFINE or equation.outvars[0].aval != value.aval:
            return None
        left, right = equation.invars
        if left is not value and equation.primitive.name in ("sub", "div"):
            return None
        by = self._by_channel(right if left is value else left, channel)
        return None if by is None else Link(equation, by)

    def _by_channel(self, operand: Any, channel: int) -> Any:
        """What an operand repeats in all but the channels of a shape, one number or one each; None if it is not so."""
        axes = [*range(len(operand.aval.shape))]
        while not isinstance(operand, Literal) and (maker := self._broadcast(operand)) is not None:
            axes = [axes[axis] for axis in maker.params["broadcast_dimensions"]]
            (operand,) = maker.invars
        if not isinstance(operand, Literal) and operand not in self.roots:
            return None
        extents = zip(axes, operand.aval.shape, strict=True)
        alike = all(n == 1 or axis == channel for axis, n in extents)
        return operand if alike and operand.aval.dtype == np.float32 else None

    def _broadcast(self, variable: Any) -> Any:
        maker = self.makers.get(variable)
        is_one = maker is not None and maker.primitive.name == "broadcast_in_dim" and len(maker.invars) == 1
        return maker if is_one else None


def _folded(
    convolution: Any, chain: Sequence[Link], traced: dict[Any, ClosedJaxpr], constants: dict[Any, Any]
) -> list[Any]:
    """The equations of the convolution, its weights scaled, and of one sum. ``traced`` keeps those of each kind."""
    names = tuple(link.equation.primitive.name for link in chain)
    operands = [*convolution.invars, *(link.by for link in chain)]
    types = tuple(map(as_type, operands))
    key = names, types, str(convolution.params)
    if key not in traced:
        traced[key] = jax.make_jaxpr(partial(_convolved, convolution, names))(*types)
    return placed(traced[key], convolution.replace(outvars=chain[-1].equation.outvars), operands, constants)


def _convolved(convolution: Any, names: Sequence[str], x: Any, w: Any, *operands: Any) -> Any:
    """What a convolution and equations with these names and operands come to."""
    numbers = convolution.params["dimension_numbers"]
    channel, kernel = numbers.out_spec[1], numbers.rhs_spec[0]
    count = w.shape[kernel]
    extents = [count if axis == kernel else 1 for axis in range(w.ndim)]
    shift = lax.full((count,), 0, w.dtype)
    for name, v in zip(names, operands, strict=True):
        v = lax.broadcast_in_dim(lax.reshape(v, (v.size,)), (count,), (0,))
        if name in SCALES:
            v = v if name == "mul" else lax.div(lax.full_like(v, 1), v)
            shift = lax.mul(shift, v)
            w = compat.scaled(w, lax.reshape(v, extents), shift)
        else:
            shift = (lax.add if name == "add" else lax.sub)(shift, v)
    y = convolution.primitive.bind(x, w, **convolution.params)
    return y if {*names} <= {*SCALES} else lax.add(y, lax.broadcast_in_dim(shift, y.shape, (channel,)))
