"""What weights alone decide is computed once for a set of weights, not in every call.

Before, a program of the weights w, s and the input x:

    a = convert_element_type w;  b = mul a s;  c = transpose b;  d = dot_general x c

After, what is prepared from w and s, by NumPy, and the program of that and x:

    a = convert_element_type w;  b = mul a s;  c = transpose b        d = dot_general x c
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from ...proto.mapped import load
from ..thresholds import MOST_GROWTH, SMALL_GROWTH
from .inline import bytes_of, for_the_cpu, inlined, renamed, variables
from .on_numpy import Step, is_computable

CHEAP: Final = frozenset({"broadcast_in_dim", "iota", "pad", "reshape", "slice", "split", "squeeze"})
"""These cost less inside the program, where they fuse with what reads them, than their results as arguments."""
PRODUCTS: Final = frozenset({"conv_general_dilated", "dot_general", "ffi_call"})
"""These fuse with none of them: a matrix of one number, as ConstantOfShape gives it, is written anew in every call."""


class Made:
    """What has been prepared of a model's weights, by what was computed, for the programs of the model to share."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}

    def number(self, *what: Any) -> int:
        """A number that stands for what is computed."""
        return self._numbers.setdefault(what, len(self._numbers))

    def get(self, what: int) -> Any:
        """The value; None where nobody has prepared it."""
        return self._values.get(what)

    def keep(self, what: int, value: Any) -> Any:
        """The value to be used, which another thread may have made meanwhile."""
        return self._values.setdefault(what, value)


class Source(Protocol):
    """Weights as ``prepare`` sees them."""

    made: Made
    read: Callable[[str], Any]

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program split in two. Without ``main`` it can be pickled.

    Attributes:
        steps: what weights alone decide, in order, over variables that have numbers.
        weights: the places of those among the arguments, with the variables that they give values to.
        constants: values of other variables that are read, each with the shape that it is broadcast to.
        handed: the variables that the program takes in place of the weights.
        main: the program of ``handed`` and the other arguments.
    """

    steps: Sequence[Step]
    weights: Mapping[int, int]
    constants: Mapping[int, tuple[np.ndarray, tuple[int, ...]]]
    handed: Sequence[int]
    main: ClosedJaxpr | None

    def prepare(self, names: Sequence[str], weights: Source) -> list[Any]:
        """What is handed to the program, from weights and the names of those that stand among the arguments."""
        given = {variable: names[place] for place, variable in self.weights.items()}
        known = self._identities(given, weights.made)
        found = {v: weights.made.get(known[v]) for v in self.handed if v not in given}
        absent = [v for v, value in found.items() if value is None]
        computed = dict(self._computed(absent, given, weights))  # all, or Unfoldable and none is kept
        found |= {v: weights.made.keep(known[v], value) for v, value in computed.items()}
        return [weights[given[v]] if v in given else found[v] for v in self.handed]

    def _computed(self, results: Sequence[int], given: Mapping[int, str], weights: Source) -> Iterator[tuple[int, Any]]:
        """The values of some variables, each value that they come from kept no longer than it is read."""
        steps = _needed(self.steps, results)
        last = {v: step for step in steps for v in step.reads}
        values = {v: np.broadcast_to(*repeated) for v, repeated in self.constants.items()}
        wanted = set(results)
        yield from ((v, jax.device_put(values[v])) for v in wanted if v in values)
        for step in steps:
            for v in step.reads:
                if v not in values:
                    values[v] = np.asarray(load(weights.read(given[v])))
            values.update(step.computed(values))
            yield from ((v, jax.device_put(values[v])) for v in step.results if v in wanted)
            for v in (*step.reads, *step.results):
                if last.get(v, step) is step and v not in self.constants:
                    values.pop(v, None)

    def _identities(self, given: Mapping[int, str], made: Made) -> dict[int, int]:
        """For each variable a number that is the same where the same is computed of the same weights."""
        known = {v: made.number("weight", name) for v, name in given.items()}
        for v, (array, shape) in self.constants.items():
            content = hashlib.sha256(array.tobytes()).digest()
            known[v] = made.number("constant", array.dtype.name, array.shape, shape, content)
        for step in self.steps:
            own = made.number(*step.identity(known))
            known |= {v: made.number(own, i) for i, v in enumerate(step.results)}
        return known


def split(closed: ClosedJaxpr, weights: Sequence[bool]) -> Prepared:
    """The program split in what weights alone decide and the rest.

    Args:
        closed: the program.
        weights: for each of its arguments whether it is a weight.
    """
    jaxpr = closed.jaxpr
    given = {i: v for i, (v, is_weight) in enumerate(zip(jaxpr.invars, weights, strict=True)) if is_weight}
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known: dict[Any, Any] = dict.fromkeys((*given.values(), *constants))  # variable -> equation that makes it
    early, late = [], []
    names: dict[Any, Any] = {}
    for equation, is_early in decided(closed, given.values(), names, constants):
        if is_early:
            early.append(equation)
            known.update(dict.fromkeys(equation.outvars, equation))
        else:
            late.append(equation)
    roots: dict[Any, frozenset[Any]] = {v: frozenset((v,)) for v in given.values()}
    for equation in early:
        found = frozenset().union(*(roots.get(v, frozenset()) for v in variables(equation.invars)))
        roots.update(dict.fromkeys(equation.outvars, found))
    outputs = [renamed(v, names) for v in jaxpr.outvars]
    handed, back = _frontier(late, outputs, known, roots)
    rest = [v for v, is_weight in zip(jaxpr.invars, weights, strict=True) if not is_weight]
    left = [v for v in constants if v not in {*handed}]
    main = jaxpr.replace(
        constvars=left,
        invars=[*handed, *rest],
        eqns=[*(e for e in early if id(e) in back), *late],
        outvars=outputs,
    )
    numbers = {v: i for i, v in enumerate((*known, *constants))}
    results = [numbers[v] for v in handed]
    steps = _needed([Step.of(e, numbers) for e in early], results)
    read = {*results, *(v for step in steps for v in step.reads)}
    held = {numbers[v]: (v.aval, value) for v, value in constants.items() if numbers[v] in read}
    return Prepared(
        steps,
        {place: numbers[v] for place, v in given.items()},
        {number: (_once(value, aval.dtype), aval.shape) for number, (aval, value) in held.items()},
        results,
        ClosedJaxpr(main, [constants[v] for v in left]),  # jax 0.12 has no constvars without values
    )


def decided(
    closed: ClosedJaxpr, weights: Iterable[Any], names: dict[Any, Any], constants: dict[Any, Any]
) -> Iterator[tuple[Any, bool]]:
    """The equations, those of programs that read weights in their place, each with whether weights alone decide it.

    Args:
        closed: the program.
        weights: those of its arguments that are.
        names, constants: as ``inlined`` fills them; the program's own constants are there.
    """
    known = set(weights)

    def is_known(variable: Any) -> bool:
        return variable in known or variable in constants

    def opens(operands: Sequence[Any]) -> bool:
        return any(map(is_known, operands))

    for equation in inlined(closed.jaxpr.eqns, names, constants, opens, for_the_cpu):
        is_early = is_computable(equation) and all(map(is_known, variables(equation.invars)))
        if is_early:
            known.update(equation.outvars)
        yield equation, is_early


def _frontier(
    late: Sequence[Any], outputs: Sequence[Any], known: Mapping[Any, Any], roots: Mapping[Any, frozenset[Any]]
) -> tuple[list[Any], set[int]]:
    """The variables to hand over, and (by id) the equations that the program computes after all.

    Those are equations that are cheap, that follow from no weight, and whose results are much larger than the weights
    they come from. What a product reads is handed over, whether or not it follows from a weight, unless it is small.
    """
    handed: dict[Any, None] = {}
    back: set[int] = set()
    multiplied = {v for e in late if e.primitive.name in PRODUCTS for v in variables(e.invars)}
    wanted = variables([*(v for e in late for v in e.invars), *outputs])
    for variable in wanted:  # which grows meanwhile
        if variable not in known or variable in handed:
            continue
        equation, sources = known[variable], roots.get(variable, frozenset())
        if not (_stays(equation, sources) if sources else variable not in multiplied or _is_small(variable)):
            handed[variable] = None
        elif equation is not None and id(equation) not in back:
            back.add(id(equation))
            wanted.extend(variables(equation.invars))
    return list(handed), back


def _stays(equation: Any, sources: Collection[Any]) -> bool:
    """Whether an equation that could be prepared of weights is left in the program; a weight has none."""
    if equation is None:
        return False
    made, source = sum(map(bytes_of, equation.outvars)), sum(map(bytes_of, sources))
    return equation.primitive.name in CHEAP or made > max(SMALL_GROWTH, MOST_GROWTH * source)


def _is_small(variable: Any) -> bool:
    return bytes_of(variable) <= SMALL_GROWTH


def _once(value: Any, dtype: Any) -> np.ndarray:
    """An array without what is repeated in it, as far as its strides say: what broadcasts to it."""
    array = np.asarray(value, dtype)
    return array[tuple(slice(None, None if step else 1) for step in array.strides)]


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[Step]:
    """Those of the steps that lead to the results."""
    wanted, needed = set(results), []
    for step in reversed(steps):
        if wanted.intersection(step.results):
            needed.append(step)
            wanted.update(step.reads)
    return needed[::-1]
