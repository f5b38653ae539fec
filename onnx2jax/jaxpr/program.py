"""Programs as passes see them: the only module, beside compat.py, that reads and builds JAX's jaxprs.

A ``Program`` is a list of ``Equation`` over variables. Variables are opaque but for ``aval``, their shape and dtype.
Inlining puts the equations of inner calls in their place:

    b = jit[jaxpr={lambda; p. q = neg p; q}] a      c = neg a
    c = custom_jvp_call[...f...] b                  d = max c 0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

import jax
import numpy as np

from .. import compat
from ..compat.jaxprs import ClosedJaxpr, Literal, Var, evaluated, transpose
from ..ops.conv_rules import Problem
from ..ops.window import Window

Opens = Callable[["Equation", Sequence[Any]], bool]
"""Whether a call is inlined, given the variables among its operands."""
CALLS: Final = {
    "jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vmap_call": "call",
}  # fmt: skip
"""Primitives that call a program -> the parameter that holds it."""


class Equation:
    """An application of a primitive.

    Attributes:
        name, params: of the primitive.
        inputs: variables and literals.
        outputs: variables.
    """

    __slots__ = ("_jax", "inputs", "name", "outputs", "params")

    def __init__(self, equation: Any) -> None:
        self._jax = equation
        self.name: str = equation.primitive.name
        self.inputs: Sequence[Any] = equation.invars
        self.outputs: Sequence[Any] = equation.outvars
        self.params: Mapping[str, Any] = equation.params

    def replace(
        self, inputs: Sequence[Any] | None = None, outputs: Sequence[Any] | None = None, **params: Any
    ) -> Equation:
        """The equation with other variables, and with some parameters changed."""
        return self._replaced(
            invars=self.inputs if inputs is None else [*inputs],
            outvars=self.outputs if outputs is None else [*outputs],
            params={**self.params, **params},
        )

    def transpose(self, variable: Any, permutation: tuple[int, ...]) -> Equation:
        """A transpose of a variable, at this equation's place in the model."""
        shape = tuple(variable.aval.shape[axis] for axis in permutation)
        new, params = Var(variable.aval.update(shape=shape, weak_type=False)), {"permutation": permutation}
        return self._replaced(primitive=transpose, invars=[variable], outvars=[new], params=params, effects=set())

    def located_at(self, other: Equation) -> Equation:
        """The equation at another one's place in the model."""
        return self._replaced(source_info=other._jax.source_info)

    def within(self, scope: Any) -> Equation:
        """The equation with its scope of names inside another."""
        return self._replaced(source_info=self._jax.source_info.replace(name_stack=scope))

    @property
    def scope(self) -> Any:
        """The scopes of names that it was traced in; as text those of profiles."""
        return self._jax.source_info.name_stack

    @property
    def named_scope(self) -> Any:
        """The context in which what replaces it is traced."""
        return jax.named_scope(str(self.scope))

    @property
    def has_effects(self) -> bool:
        return bool(self._jax.effects)

    @property
    def inner(self) -> list[Program]:
        """The programs among its parameters."""
        every = (v for value in self.params.values() for v in (value if isinstance(value, tuple | list) else (value,)))
        return [Program.of(v) for v in every if hasattr(getattr(v, "jaxpr", v), "eqns")]

    def with_inner(self, rewrite: Callable[[Program], Program], done: dict[int, Any]) -> Equation:
        """The equation with the programs among its parameters rewritten, unless they would need room for constants.

        ``done`` has what became of each, by id: calls of one program are still of one.
        """

        def changed(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(map(changed, value))
            if not hasattr(getattr(value, "jaxpr", value), "eqns"):
                return value
            if id(value) not in done:
                program = Program.of(value)
                closed = value if (new := rewrite(program)) is program else new.closed()
                has_room = isinstance(value, ClosedJaxpr) or closed is value
                done[id(value)] = closed if has_room else value if closed.consts else closed.jaxpr
            return done[id(value)]

        return self.replace(**{n: changed(v) for n, v in self.params.items()}) if self.inner else self

    @property
    def convolution(self) -> Problem:
        """The convolution that it is."""
        x, w, y = (v.aval for v in (*self.inputs, *self.outputs))
        image, kernel, result = self.params["dimension_numbers"]
        sizes, shape = (y.shape[result[0]], *(x.shape[i] for i in image[2:])), tuple(w.shape[i] for i in kernel)
        names = "window_strides", "padding", "rhs_dilation", "lhs_dilation"
        strides, pads, dilations, stretch = (tuple(self.params[name]) for name in names)
        window = Window(shape[2:], strides, tuple(map(tuple, pads)), dilations)
        groups, batches = self.params["feature_group_count"], self.params["batch_group_count"]
        return Problem(x.dtype, sizes, shape, window, groups, stretch, batches, [y.shape[i] for i in result[2:]])

    def bind(self, values: Sequence[Any], **params: Any) -> list[Any]:
        """Its results for values of its inputs, with some parameters changed."""
        results = self._jax.primitive.bind(*values, **{**self.params, **params})
        return list(results) if self._jax.primitive.multiple_results else [results]

    def _replaced(self, **fields: Any) -> Equation:
        return Equation(self._jax.replace(**fields))

    def __str__(self) -> str:
        return str(self._jax)


@dataclass(frozen=True, eq=False)
class Program:
    """What passes rewrite.

    Attributes:
        inputs, outputs: variables; outputs may be literals.
        equations: in an order in which they can be computed.
        constants: values of variables that are no inputs.
        parameters: how many inputs, the first of them, are the same in many calls: a model's parameters.
        platform: whose branch inlining takes of a choice by platform.
        hoisted: what is computed of the parameters before a call, whose results are then the first inputs.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    equations: Sequence[Equation]
    constants: Mapping[Any, Any] = field(repr=False)
    parameters: int = 0
    platform: str = "cpu"
    hoisted: Any = None
    _jax: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, jaxpr: Any, parameters: int = 0, platform: str = "cpu") -> Program:
        """The program of a ClosedJaxpr, or of a Jaxpr without constants."""
        body = getattr(jaxpr, "jaxpr", jaxpr)
        constants = dict(zip(body.constvars, getattr(jaxpr, "consts", ()), strict=False))
        equations = [*map(Equation, body.eqns)]
        return cls(body.invars, body.outvars, equations, constants, parameters, platform, None, body)

    @classmethod
    def traced(cls, function: Callable[..., Any], *operands: Any) -> Program:
        """The program of a function of values like some variables."""
        return cls.of(jax.make_jaxpr(lambda *xs: function(*xs))(*map(type_of, operands)))

    def closed(self) -> Any:
        """The program as JAX has it."""
        body = self._jax.replace(
            constvars=[*self.constants], invars=[*self.inputs], outvars=[*self.outputs],
            eqns=[e._jax for e in self.equations],
        )  # fmt: skip
        return ClosedJaxpr(body, [*self.constants.values()])

    def replace(self, **fields: Any) -> Program:
        """The program with other attributes."""
        return replace(self, **fields)

    @property
    def effects(self) -> bool:
        """Whether it does more than compute its outputs, such as printing."""
        return bool(self._jax.effects)

    def inlined(self, opens: Opens = lambda _equation, _operands: True) -> Program:
        """The program with the equations of inner calls in their place, without those that nothing reads.

        ``opens`` as for ``inline``.
        """
        if not any(e.name in CALLS or is_platform_choice(e) for e in self.equations):
            return self.replace(equations=needed(self.equations, self.outputs))
        names, constants = dict[Any, Any](), dict(self.constants)
        equations = [*inline(self.equations, names, constants, self.platform, opens)]
        outputs = [substitute(v, names) for v in self.outputs]
        return self.replace(equations=needed(equations, outputs), outputs=outputs, constants=constants)

    def part(self, equations: Sequence[Equation], later: Collection[Any]) -> Program:
        """The program of some of the equations; its outputs are what they compute of the variables in ``later``."""
        made = dict.fromkeys(v for e in equations for v in e.outputs)
        read = dict.fromkeys(v for e in equations for v in variables(e.inputs))
        constants = {v: value for v, value in self.constants.items() if v in read}
        inputs, outputs = [v for v in read if v not in made and v not in constants], [v for v in made if v in later]
        return self.replace(inputs=inputs, outputs=outputs, equations=equations, constants=constants, parameters=0)

    def without_unread(self) -> tuple[Program, list[int]]:
        """The program without equations and inputs that nothing reads, and the positions of the other inputs."""
        equations = needed(self.equations, self.outputs)
        read = {*variables(self.outputs), *(v for e in equations for v in variables(e.inputs))}
        places = [i for i, v in enumerate(self.inputs) if v in read]
        return self.replace(inputs=[self.inputs[i] for i in places], equations=equations), places

    def has(self, name: str) -> bool:
        """Whether a primitive is applied, here or in an inner program that inlining opens."""
        opened = (e for e in self.equations if e.name in CALLS or is_platform_choice(e))
        return any(e.name == name for e in self.equations) or any(p.has(name) for e in opened for p in e.inner)

    def any(self, wanted: Callable[[Equation], bool]) -> bool:
        """Whether an equation is wanted, here or in any inner program; those that several call are searched once."""
        todo, seen = [self], set[int]()
        while todo:
            program = todo.pop()
            if id(program._jax) not in seen:
                seen.add(id(program._jax))
                if any(map(wanted, program.equations)):
                    return True
                todo += (inner for e in program.equations for inner in e.inner)
        return False


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A program as a function of its inputs."""
    return partial(evaluated, closed)


# ------------------------------------------------------------------------------------------------------ variables


def is_literal(operand: Any) -> bool:
    """Whether an operand is a literal of the program."""
    return isinstance(operand, Literal)


def literal_value(operand: Any) -> np.ndarray:
    """The value of a literal, in its dtype."""
    return np.asarray(operand.val, getattr(operand.aval, "dtype", None))


def variables(operands: Iterable[Any]) -> list[Any]:
    """Those of the operands that are no literals."""
    return [v for v in operands if not isinstance(v, Literal)]


def new_variable(like: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A new variable of another one's dtype, and of its shape unless one is given."""
    return Var(like.aval if shape is None else like.aval.update(shape=shape))


def substitute(operand: Any, names: Mapping[Any, Any]) -> Any:
    """The variable or literal that replaces an operand."""
    return operand if isinstance(operand, Literal) else names.get(operand, operand)


def type_of(operand: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype with which functions of an operand are traced."""
    return jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)


def nbytes(operand: Any) -> int:
    """Bytes of an operand's value; 0 for what is no array."""
    aval = operand.aval
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize if hasattr(aval, "shape") else 0


def values_of(operands: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """The values of operands, from those of variables."""
    return [literal_value(v) if isinstance(v, Literal) else values[v] for v in operands]


# ------------------------------------------------------------------------------------------------------ equations


def needed(equations: Sequence[Equation], outputs: Sequence[Any]) -> list[Equation]:
    """The equations that the outputs are computed from, and those with effects."""
    wanted, kept = set(variables(outputs)), list[Equation]()
    for equation in reversed(equations):
        if equation.has_effects or wanted.intersection(equation.outputs):
            kept.append(equation)
            wanted.update(variables(equation.inputs))
    return kept[::-1]


def inline(
    equations: Sequence[Equation],
    names: dict[Any, Any],
    constants: dict[Any, Any],
    platform: str,
    opens: Opens = lambda _equation, _operands: True,
    around: Any = None,
) -> Iterator[Equation]:
    """The equations, with those of inner programs in the place of calls.

    Args:
        equations: of a program.
        names: what replaces a variable of the program; filled meanwhile.
        constants: values of variables that inner programs close over; filled meanwhile.
        platform: whose branch of a choice by platform is taken.
        opens: whether a call is inlined, given these variables.
        around: the scope of names around the equations.
    """
    for equation in equations:
        scope = equation.scope if around is None else around + equation.scope
        operands = [substitute(v, names) for v in equation.inputs]
        callee = _callee(equation, operands, opens, platform)
        if callee is None:
            results = [new_variable(v) for v in equation.outputs]  # an inner program can occur twice
            names.update(zip(equation.outputs, results, strict=True))
            new = equation.replace(operands, results)
            yield new if around is None else new.within(scope)
            continue
        program, operands = callee
        closed_over = {v: new_variable(v) for v in program.constants}
        constants.update((closed_over[v], value) for v, value in program.constants.items())
        within = closed_over | dict(zip(program.inputs, operands, strict=True))
        yield from inline(program.equations, within, constants, platform, opens, scope)
        names.update(zip(equation.outputs, (substitute(v, within) for v in program.outputs), strict=True))


def _callee(equation: Equation, operands: list[Any], opens: Opens, platform: str) -> tuple[Program, list[Any]] | None:
    """The program that an equation calls, and its operands; None where it calls none, or that is not opened."""
    if is_platform_choice(equation):
        return Program.of(equation.params["branches"][_branch(equation, platform)]), operands[1:]
    if equation.name in CALLS and opens(equation, variables(operands)):
        return Program.of(equation.params[CALLS[equation.name]]), operands
    return None


def is_convolution(equation: Equation) -> bool:
    """Whether it is ``lax.conv_general_dilated``."""
    return equation.name == "conv_general_dilated"


def is_platform_choice(equation: Equation) -> bool:
    """Whether it is one of ``lax.platform_dependent``."""
    return equation.name == "cond" and bool(equation.params.get("branches_platforms"))


def _branch(equation: Equation, platform: str) -> int:
    """The branch of a choice that a platform takes."""
    platforms = equation.params["branches_platforms"]
    index = next((i for i, names in enumerate(platforms) if names and platform in names), None)
    return int(platforms.index(None)) if index is None else index


def expand(
    function: Callable[..., Any],
    equation: Equation,
    operands: Sequence[Any],
    constants: dict[Any, Any],
) -> list[Equation]:
    """The equations of a function of operands that computes the result of an equation.

    ``constants`` gets the values that the function closes over.
    """
    return splice(Program.traced(function, *operands), equation, operands, constants)


def splice(
    program: Program,
    equation: Equation,
    operands: Sequence[Any],
    constants: dict[Any, Any],
) -> list[Equation]:
    """The equations of a program with these operands, whose result becomes that of an equation."""
    names = dict(zip(program.inputs, operands, strict=True))
    equations = [*inline(program.equations, names, constants, program.platform)]
    constants.update(program.constants)
    (output,), result = equation.outputs, substitute(program.outputs[0], names)
    return [
        e.replace(outputs=[output if v is result else v for v in e.outputs]).located_at(equation) for e in equations
    ]


F = TypeVar("F", bound=Callable[..., Any])


def portable(function: F) -> F:
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

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        with compat.enable_x64():
            traced = jax.make_jaxpr(lambda *xs: function(*jax.tree.unflatten(structure, xs)), return_shape=True)
            closed, shapes = traced(*leaves)
            results = as_function(Program.of(closed, platform="").inlined().closed())(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return cast(F, call)
