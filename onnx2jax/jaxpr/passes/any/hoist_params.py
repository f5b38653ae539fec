"""Hoists parameter-only subexpressions out of the call: NumPy evaluates them once per set of parameters.

Before, a program of the parameters w, s and the input x:

    a = convert_element_type w;  b = mul a s;  c = transpose b;  d = dot_general x c

After, what is hoisted, and the program of its results and x:

    a = convert_element_type w;  b = mul a s;  c = transpose b        d = dot_general x c
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import numpy as np

from ....limits import MOST_GROWTH, SMALL_GROWTH
from ....proto.mapped import load
from ...const_eval import Step, can_evaluate
from ...program import Equation, Program, inline, nbytes, substitute, variables

CHEAP: Final = frozenset({"broadcast_in_dim", "iota", "pad", "reshape", "slice", "split", "squeeze"})
"""Not hoisted: inside the program they fuse with their consumers, and cost less than their results as arguments."""
PRODUCTS: Final = frozenset({"conv_general_dilated", "dot_general", "ffi_call"})
"""These fuse with no producer: a matrix of one number, as ConstantOfShape gives it, would be written in every call."""


class HoistedValues:
    """Hoisted values of one set of parameters, by computation: the programs of a model share them."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}

    def number(self, *computation: Any) -> int:
        """The number of a computation; equal computations have one number."""
        return self._numbers.setdefault(computation, len(self._numbers))

    def get(self, number: int) -> Any:
        """The value of a computation; None before it is stored."""
        return self._values.get(number)

    def store(self, number: int, value: Any) -> Any:
        """Store a value, and return the one to use: another thread's if that was first."""
        return self._values.setdefault(number, value)


class ParameterSource(Protocol):
    """Parameters as ``hoisted_arguments`` takes them."""

    shared: HoistedValues
    read: Callable[[str], Any]

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True, eq=False)
class SplitProgram:
    """A program split into hoisted steps and the rest. Without ``main`` it can be pickled.

    Attributes:
        steps: the hoisted equations, in order, over numbered variables.
        weights: the position of each parameter among the arguments -> its variable.
        constants: values of other variables that are read, each with the shape that it is broadcast to.
        hoisted: the variables that ``main`` takes in place of the parameters.
        main: a ClosedJaxpr of ``hoisted`` and the other arguments.
    """

    steps: Sequence[Step]
    weights: Mapping[int, int]
    constants: Mapping[int, tuple[np.ndarray, tuple[int, ...]]]
    hoisted: Sequence[int]
    main: Any

    def hoisted_arguments(self, names: Sequence[str], weights: ParameterSource) -> list[Any]:
        """The values of ``hoisted`` for parameters of these names, computed unless another program stored them."""
        parameters = {variable: names[place] for place, variable in self.weights.items()}
        known = self._identities(parameters, weights.shared)
        values = {v: weights.shared.get(known[v]) for v in self.hoisted if v not in parameters}
        absent = [v for v, value in values.items() if value is None]
        computed = dict(self._computed(absent, parameters, weights))  # all, or Unfoldable and none is kept
        values |= {v: weights.shared.store(known[v], value) for v, value in computed.items()}
        return [weights[parameters[v]] if v in parameters else values[v] for v in self.hoisted]

    def _computed(
        self, results: Sequence[int], names: Mapping[int, str], weights: ParameterSource
    ) -> Iterator[tuple[int, Any]]:
        """The values of some variables; each intermediate value is freed after its last use."""
        steps = _needed(self.steps, results)
        last = {v: step for step in steps for v in step.reads}
        values = {v: np.broadcast_to(*repeated) for v, repeated in self.constants.items()}
        wanted = set(results)
        yield from ((v, jax.device_put(values[v])) for v in wanted if v in values)
        for step in steps:
            for v in step.reads:
                if v not in values:
                    values[v] = np.asarray(load(weights.read(names[v])))
            values.update(step.evaluate(values))
            yield from ((v, jax.device_put(values[v])) for v in step.results if v in wanted)
            for v in (*step.reads, *step.results):
                if last.get(v, step) is step and v not in self.constants:
                    values.pop(v, None)

    def _identities(self, parameters: Mapping[int, str], shared: HoistedValues) -> dict[int, int]:
        """The number of each variable's computation: equal for equal computations of the same parameters."""
        known = {v: shared.number("weight", name) for v, name in parameters.items()}
        for v, (array, shape) in self.constants.items():
            content = hashlib.sha256(array.tobytes()).digest()
            known[v] = shared.number("constant", array.dtype.name, array.shape, shape, content)
        for step in self.steps:
            computation = shared.number(*step.identity(known))
            known |= {v: shared.number(computation, i) for i, v in enumerate(step.results)}
        return known


def without_hoisting(parameters: int) -> SplitProgram:
    """The split of a program from which nothing is hoisted; its first inputs are the parameters."""
    return SplitProgram([], {i: i for i in range(parameters)}, {}, [*range(parameters)], None)


def hoist(program: Program) -> Program:
    """The program without parameter-only equations, which move to ``hoisted``.

    Calls that read parameters are inlined.
    """
    parameters = dict(enumerate(program.inputs[: program.parameters]))
    constants, names = dict(program.constants), dict[Any, Any]()
    known: dict[Any, Any] = dict.fromkeys((*parameters.values(), *constants))  # variable -> equation that computes it
    early, late = list[Equation](), list[Equation]()
    for equation, is_early in parameter_only(program, names, constants):
        (early if is_early else late).append(equation)
        if is_early:
            known.update(dict.fromkeys(equation.outputs, equation))
    roots: dict[Any, frozenset[Any]] = {v: frozenset((v,)) for v in parameters.values()}
    for equation in early:
        sources = frozenset().union(*(roots.get(v, frozenset()) for v in variables(equation.inputs)))
        roots.update(dict.fromkeys(equation.outputs, sources))
    outputs = [substitute(v, names) for v in program.outputs]
    results, back = _frontier(late, outputs, known, roots)
    numbers = {v: i for i, v in enumerate((*known, *constants))}
    steps = _needed([Step.of(e, numbers) for e in early], [numbers[v] for v in results])
    read = {*(numbers[v] for v in results), *(v for step in steps for v in step.reads)}
    constants_read = {numbers[v]: (v.aval, value) for v, value in constants.items() if numbers[v] in read}
    arrays = {number: (_unrepeated(x, aval.dtype), aval.shape) for number, (aval, x) in constants_read.items()}
    weights = {place: numbers[v] for place, v in parameters.items()}
    hoisted = SplitProgram(steps, weights, arrays, [numbers[v] for v in results], None)
    return program.replace(
        inputs=[*results, *program.inputs[program.parameters :]],
        outputs=outputs,
        equations=[*(e for e in early if id(e) in back), *late],
        constants={v: value for v, value in constants.items() if v not in {*results}},
        parameters=len(results),
        hoisted=hoisted,
    )


def parameter_only(
    program: Program, names: dict[Any, Any], constants: dict[Any, Any]
) -> Iterator[tuple[Equation, bool]]:
    """The equations, calls that read parameters inlined, each with whether it depends on parameters only.

    Args:
        program: a program.
        names, constants: as ``inline`` fills them; the program's own constants are in them.
    """
    known = {*program.inputs[: program.parameters]}

    def is_known(variable: Any) -> bool:
        return variable in known or variable in constants

    def opens(_equation: Equation, operands: Sequence[Any]) -> bool:
        return any(map(is_known, operands))

    for equation in inline(program.equations, names, constants, program.platform, opens):
        is_early = all(map(is_known, variables(equation.inputs))) and can_evaluate(equation)
        if is_early:
            known.update(equation.outputs)
        yield equation, is_early


def _frontier(
    late: Sequence[Equation], outputs: Sequence[Any], known: Mapping[Any, Any], roots: Mapping[Any, frozenset[Any]]
) -> tuple[list[Any], set[int]]:
    """The hoisted variables that the program takes, and (by id) early equations that stay in the program.

    An early equation stays if it is cheap, depends on no parameter, or has results much larger than the parameters it
    depends on. Operands of products are hoisted even if they depend on no parameter, unless they are small.
    """
    taken: dict[Any, None] = {}
    back: set[int] = set()
    multiplied = {v for e in late if e.name in PRODUCTS for v in variables(e.inputs)}
    wanted = variables([*(v for e in late for v in e.inputs), *outputs])
    for variable in wanted:  # which grows meanwhile
        if variable not in known or variable in taken:
            continue
        equation, sources = known[variable], roots.get(variable, frozenset())
        is_fused = variable not in multiplied or nbytes(variable) <= SMALL_GROWTH
        if not (_stays(equation, sources) if sources else is_fused):
            taken[variable] = None
        elif equation is not None and id(equation) not in back:
            back.add(id(equation))
            wanted.extend(variables(equation.inputs))
    return list(taken), back


def _stays(equation: Equation | None, sources: Collection[Any]) -> bool:
    """Whether an equation that could be hoisted stays in the program; None is a parameter."""
    if equation is None:
        return False
    results, source = sum(map(nbytes, equation.outputs)), sum(map(nbytes, sources))
    return equation.name in CHEAP or results > max(SMALL_GROWTH, MOST_GROWTH * source)


def _unrepeated(value: Any, dtype: Any) -> np.ndarray:
    """An array that broadcasts to the value: extent 1 along axes with stride 0."""
    array = np.asarray(value, dtype)
    return array[tuple(slice(None, None if step else 1) for step in array.strides)]


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[Step]:
    """The steps that the results depend on."""
    wanted, needed = set(results), []
    for step in reversed(steps):
        if wanted.intersection(step.results):
            needed.append(step)
            wanted.update(step.reads)
    return needed[::-1]
