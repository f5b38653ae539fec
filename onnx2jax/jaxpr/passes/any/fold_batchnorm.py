"""Folds scales behind convolutions, such as BatchNormalization's, into their weights; one sum is left.

Before, where m, f and b are one number a channel and, like w, follow from parameters, and nothing else reads c to e:

    c:f32[1,64,56,56] = conv_general_dilated x w
    d:f32[1,64,56,56] = sub c m
    e:f32[1,64,56,56] = mul d f
    g:f32[1,64,56,56] = add e b

After; v and h are hoisted:

    n:f32[64] = sub 0.0 m;  p:f32[64] = mul n f;  h:f32[64] = add p b
    v:f32[64,64,3,3] = scaled w f p
    c:f32[1,64,56,56] = conv_general_dilated x v
    g:f32[1,64,56,56] = add c h

MobileNetV2 takes 0.95 of the processor time, ResNet-50 0.965, a classifier of text lines (35 BatchNormalization) 0.92
(jax 0.10); where images are large, or XLA's kernels take all the time, nothing is gained; nor by scales before a
convolution. On an H100 a program of ResNet-50 moves 0.68 of the bytes for 8 images, in 80 kernels rather than 125, of
MobileNetV2 0.93 in 57 rather than 74: cuDNN's and cuBLAS's kernels add and apply Relu, but do not scale.

Results differ by roundings of the terms that are summed, as in another order of sums. Where numbers are so large or
small that they would be lost, or a sum rounds on purpose, as (y + 2**23) - 2**23 does, evaluating them raises
``Unfoldable``, and the program is compiled without this pass.
In bfloat16 the weights and the sum are rounded once more, as those of a network without BatchNormalization are: errors
of ResNet-50, MobileNetV2 and two readers of text grow by 5 to 27 %. Done on NVIDIA GPUs alone: there ResNet-50 moves
0.67 of the bytes, while XLA for a TPU fuses what follows a convolution by itself.
Weights with another reader stay as they are, since a second copy would take memory; so do those of products, which are
not copied for another layout as those of convolutions are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import compat
from ....limits import MOST_GROWTH, SMALL_GROWTH
from ...const_eval import can_evaluate
from ...program import Equation, Program, is_literal, nbytes, splice, type_of, variables

SCALES: Final = ("mul", "div")
AFFINE: Final = ("add", "sub", *SCALES)
FLOATS: Final = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


Link = tuple[Equation, Any]
"""An equation that scales or shifts each channel, and the variable, or literal, it does so by; None if it widens."""


def fold(program: Program) -> Program:
    """The program with what follows convolutions folded into their weights; the same object where it has none."""
    if not (compat.has_primitives() and program.has("conv_general_dilated")):
        return program
    program = program.inlined()
    uses, constants = _Uses(program, FLOATS if program.platform == "cuda" else FLOATS[:1]), dict(program.constants)
    new, traced = {id(e): [e] for e in program.equations}, dict[Any, Program]()
    for convolution in filter(uses.can_fold_into, program.equations):
        chain = uses.chain(convolution)
        if any(equation.name in SCALES for equation, _ in chain):
            for equation in (convolution, *(equation for equation, _ in chain)):
                new[id(equation)] = []
            new[id(chain[-1][0])] = _folded(convolution, chain, traced, constants)
    equations = [e for equation in program.equations for e in new[id(equation)]]
    return program.replace(equations=equations, constants=constants)


class _Uses:
    """Use-def chains of a program, and the parameters that its values follow from."""

    def __init__(self, program: Program, dtypes: Sequence[Any]) -> None:
        """``dtypes`` are those of convolutions that can be folded into."""
        self.dtypes = dtypes
        self.roots: dict[Any, frozenset[Any]] = {v: frozenset() for v in program.constants}
        """The parameters of each value that depends on parameters only."""
        self.roots |= {v: frozenset((v,)) for v in program.inputs[: program.parameters]}
        self.producers: dict[Any, Equation] = {}
        self.reader: dict[Any, Equation] = {}
        self.reads = Counter(variables(program.outputs))
        self.root_reads = Counter[Any]()
        """How often equations that are not hoisted read what follows from a parameter."""
        for equation in program.equations:
            operands = variables(equation.inputs)
            self.reads.update(operands)
            self.reader.update(dict.fromkeys(operands, equation))
            self.producers.update(dict.fromkeys(equation.outputs, equation))
            roots = frozenset[Any]().union(*(self.roots.get(v, ()) for v in operands))
            if all(v in self.roots for v in operands) and can_evaluate(equation):
                self.roots.update(dict.fromkeys(equation.outputs, roots))
            else:
                self.root_reads.update(roots)
        self.root_reads.update(r for v in variables(program.outputs) for r in self.roots.get(v, ()))

    def can_fold_into(self, equation: Equation) -> bool:
        """Whether it is a convolution whose weights follow from parameters that nothing else reads."""
        if equation.name != "conv_general_dilated" or equation.params["batch_group_count"] != 1:
            return False
        x, w = equation.inputs
        types = {v.aval.dtype for v in (x, w, *equation.outputs)}
        if is_literal(w) or types not in [{dtype} for dtype in self.dtypes]:
            return False
        roots = self.roots.get(w, ())
        is_hoisted = 0 < nbytes(w) <= max(SMALL_GROWTH, MOST_GROWTH * sum(map(nbytes, roots)))
        is_alone = all(self.root_reads[r] == 1 or nbytes(r) <= SMALL_GROWTH for r in roots)
        return bool(roots) and is_hoisted and is_alone

    def chain(self, equation: Equation) -> list[Link]:
        """The equations that scale and shift a convolution's channels, each the only reader of the one before."""
        channel = equation.params["dimension_numbers"].out_spec[1]
        (value,), chain = equation.outputs, list[Link]()
        if value.aval.dtype != np.float32:
            widened = self.reader.get(value) if self.reads[value] == 1 else None
            if widened is None or widened.name != "convert_element_type" or widened.params["new_dtype"] != np.float32:
                return []
            chain.append((widened, None))
            (value,) = widened.outputs
        while self.reads[value] == 1 and (link := self._link(self.reader.get(value), value, channel)):
            chain.append(link)
            (value,) = link[0].outputs
        return chain

    def _link(self, equation: Equation | None, value: Any, channel: int) -> Link | None:
        if equation is None or equation.name not in AFFINE or equation.outputs[0].aval != value.aval:
            return None
        left, right = equation.inputs
        if left is not value and equation.name in ("sub", "div"):
            return None
        by = self._by_channel(right if left is value else left, channel)
        return None if by is None else (equation, by)

    def _by_channel(self, operand: Any, channel: int) -> Any:
        """The scalar, or one number a channel, that an operand broadcasts; None where it varies otherwise."""
        axes = [*range(len(operand.aval.shape))]
        while not is_literal(operand) and (producer := self.producers.get(operand)):
            if producer.name != "broadcast_in_dim" or len(producer.inputs) > 1:
                break
            axes = [axes[axis] for axis in producer.params["broadcast_dimensions"]]
            (operand,) = producer.inputs
        if not is_literal(operand) and operand not in self.roots:
            return None
        extents = zip(axes, operand.aval.shape, strict=True)
        return operand if all(n == 1 or axis == channel for axis, n in extents) else None


def _folded(
    convolution: Equation, chain: Sequence[Link], traced: dict[Any, Program], constants: dict[Any, Any]
) -> list[Equation]:
    """The equations of the convolution, its weights scaled, and of one sum; ``traced`` caches them by types."""
    names = tuple(equation.name for equation, _ in chain)
    operands = [*convolution.inputs, *(by for _, by in chain if by is not None)]
    types = tuple(map(type_of, operands))
    key = names, types, str(convolution.params)
    if key not in traced:
        traced[key] = Program.traced(partial(_convolved, convolution, names), *operands)
    return splice(traced[key], convolution.replace(outputs=chain[-1][0].outputs), operands, constants)


def _convolved(equation: Equation, names: Sequence[str], *operands: Any) -> Any:
    """The result of a convolution and of equations with these names and operands behind it."""
    numbers, names = equation.params["dimension_numbers"], [name for name in names if name in AFFINE]
    x, weights = operands[: -len(names)]
    w = lax.convert_element_type(weights, np.float32)
    channel, kernel = numbers.out_spec[1], numbers.rhs_spec[0]
    count = w.shape[kernel]
    extents = [count if axis == kernel else 1 for axis in range(w.ndim)]
    ones = lax.full((count,), 1, w.dtype)
    shift = most = lax.full((count,), 0, w.dtype)
    for name, v in zip(names, operands[-len(names) :], strict=True):
        v = lax.broadcast_in_dim(lax.reshape(v, (v.size,)), (count,), (0,))
        if name in SCALES:
            v = v if name == "mul" else lax.div(ones, v)
            shift, most = lax.mul(shift, v), lax.mul(most, lax.abs(v))
            w = compat.scaled(w, lax.reshape(v, extents), shift, most)
        else:
            shift = (lax.add if name == "add" else lax.sub)(shift, v)
            most = lax.max(most, lax.abs(shift))
    if sum(name not in SCALES for name in names) > 1:
        w = compat.scaled(w, lax.reshape(ones, extents), shift, most)
    (y,) = equation.bind([x, lax.convert_element_type(w, weights.dtype)])
    if not {*names} <= {*SCALES}:
        y = lax.add(y, lax.broadcast_in_dim(lax.convert_element_type(shift, y.dtype), y.shape, (channel,)))
    return lax.convert_element_type(y, np.float32)
