"""A program cut into sections at the calls of its layers: repeated layers are then compiled once, and called in turn.

Before, one program, and after, three that are compiled:

    a = f x;  b = layer a w0;  c = layer b w1;  d = g c        a = f x   |   y = layer x w   |   d = g c

A call of a layer with 30 operands costs 70 us of dispatch, and nothing is fused across it: it pays for layers that take
milliseconds. Values between sections stay on the device; a section may overwrite (donation) what no later one reads.

The traced program is cut rather than the graph, since a decoder's has what surrounds its model, too: masks, positions,
the choice of a token. Cut in the graph, a decoder of three layers would run 7 programs a token instead of 5, and copy
caches of which layers read the shape alone; sequences that run apart (``vmap``) could not be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..eval.layers import LAYER
from ..jaxpr.pipeline import Passes
from ..jaxpr.program import (
    Equation,
    Program,
    as_function,
    is_literal,
    literal_value,
    nbytes,
    needed,
    new_variable,
    variables,
)
from .dispatch import BoundCall
from .executable import Executable
from .memory import trim_heap
from .params import DeviceParams
from .program_cache import Store, load_or_compile

BETWEEN: Final = "onnx_between_layers"
"""The name of programs of sections that are no layers."""
MOST_BETWEEN: Final = 1 << 20
"""Bytes of a parameter-only value outside of layers: it would be computed, and copied, in every call."""


@dataclass(frozen=True)
class Section:
    """A call of a compiled program.

    Attributes:
        executable: the program; calls of one layer share it.
        compiling: its compilation, in a thread.
        parameters: the names of its parameters.
        operands: the variables of its other arguments.
        donated: the variables of its last arguments, in whose memory results are written.
        results: the variables of its results.
        ends: the variables that no later section reads.
    """

    executable: Executable
    compiling: Future[Any]
    parameters: Sequence[str]
    operands: Sequence[Any]
    donated: Sequence[Any]
    results: Sequence[Any]
    ends: Collection[Any]


class Sections:
    """A traced function as sections. For one signature, and bound to parameter values as an ``Executable`` is.

    Attributes:
        sections: in order.
        structure: the pytree around the results.
        result_types: of the flat results.
    """

    def __init__(self, sections: Sequence[Section], program: Program, kept: Collection[Any], structure: Any) -> None:
        """
        Args:
            sections: in order.
            program: what they compute; its operands are variables alone.
            kept: the variables whose arrays callers keep: where one is an output, it is copied.
            structure: the pytree around the results.
        """
        self.sections, self.structure = sections, structure
        self.result_types = [v.aval for v in program.outputs]
        self._arguments = program.inputs[program.parameters :]
        read = {*program.outputs, *(v for s in sections for v in s.operands)}
        self._constants = {v: jax.device_put(np.asarray(c)) for v, c in program.constants.items() if v in read}
        self._outputs = [(v, v in kept) for v in program.outputs]

    def bind(self, params: DeviceParams, _leaves: Sequence[Any], names: Sequence[str], as_numpy: bool) -> BoundCall:
        """The sections bound to a model's parameters, for arguments of one signature; as ``Executable.bind``."""
        hoisted = [s.executable.hoisted(params, s.parameters) for s in self.sections]
        trim_heap()  # the parameters they were computed from
        bound = [(s, compat.unwrapped(s.compiling.result()), h) for s, h in zip(self.sections, hoisted, strict=True)]

        def call(leaves: Iterable[Any]) -> list[Any]:
            values = self._constants | dict(zip(self._arguments, leaves, strict=True))
            with compat.enable_x64():
                for section, compiled, weights in bound:
                    donated = [values[v] for v in section.donated]
                    results = compiled(weights, [values[v] for v in section.operands], donated)
                    values.update(zip(section.results, results, strict=True))
                    for variable in section.ends:
                        del values[variable]
                outputs = [jnp.copy(values[v]) if is_kept else values[v] for v, is_kept in self._outputs]
            return list(map(np.asarray, outputs)) if as_numpy else outputs

        return BoundCall(call, names, "layers", self.structure)


def sections_of(
    traced: Any,
    names: Sequence[str],
    device: Any,
    options: Passes,
    donated: Collection[int] = (),
    store: Store | None = None,
) -> Sections | None:
    """The sections of a traced function; None if it calls no layer twice, or is no sequence of sections.

    Args:
        traced: a jitted function of parameters and other arguments, as ``jit(f).trace`` returns it.
        names: of its parameters, which are the first of its flat arguments.
        device: where sections run.
        options: which passes run over each section; BatchNorm is not folded.
        donated: positions of flat arguments, parameters left out, that calls overwrite.
        store: keeps the compiled programs.
    """
    program = Program.of(traced.jaxpr, len(names), options.platform).inlined(_calls_layers)
    program, layers = _with_read_operands(program)
    if len(layers) == len({*layers.values()}) or program.effects or _has_large_between(program):
        return None
    parts, parameters = _parts(program, layers), dict(zip(program.inputs, names, strict=False))
    given = {v for i, v in enumerate(program.inputs[len(names) :]) if i in donated}
    kept = {*program.inputs, *program.constants} - given
    last = {v: place for place, part in enumerate(parts) for v in part.inputs}
    last |= dict.fromkeys(program.outputs, len(parts))
    overwritten = _overwritten(parts, kept, last)
    sections, pool = list[Section](), ThreadPoolExecutor()
    compiled = dict[Any, tuple[Executable, Future[Any]]]()
    for place, (inner, inputs, outputs) in enumerate(parts):
        weights = [i for i, v in enumerate(inputs) if v in parameters]
        rest = [i for i in range(len(inputs)) if i not in {*weights, *overwritten[inner]}]
        groups = weights, rest, overwritten[inner]
        if (key := (inner, *weights)) not in compiled:
            types = [{i: inner.inputs[i].aval for i in group} for group in groups]
            jitted = _jitted(inner, LAYER if inner in layers.values() else BETWEEN)
            executable = Executable(jitted, None, *types, options=options.skipping("fold_batchnorm"))
            lowered = executable.lowered_by_types(device, len(overwritten[inner]))
            compiled[key] = executable, pool.submit(load_or_compile, lowered, store)
        read, operands, donatable = ([inputs[i] for i in group] for group in groups)
        ends = {v for v in inputs if last[v] == place}.difference(read).union(v for v in outputs if v not in last)
        sections.append(Section(*compiled[key], [parameters[v] for v in read], operands, donatable, outputs, ends))
    pool.shutdown(wait=False)  # its threads end with their work: none is there to be forked
    return Sections(sections, program, kept, jax.tree.structure(traced.out_info))


class _Part(NamedTuple):
    """A call of a program, which is the same for all calls of a layer, with variables."""

    program: Program
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def _with_read_operands(program: Program) -> tuple[Program, dict[Equation, Program]]:
    """The program without operands that layers do not read, and for each call of a layer what it computes.

    Literals that are operands of layers, or outputs, become constants.
    """
    constants, equations, layers = dict(program.constants), list[Equation](), dict[Equation, Program]()
    read = dict[int, tuple[Program, list[int]]]()

    def named(operand: Any) -> Any:
        if not is_literal(operand):
            return operand
        variable = new_variable(operand)
        constants[variable] = literal_value(operand)
        return variable

    for equation in program.equations:
        if _is_layer(equation):
            body = equation.params["jaxpr"]
            if id(body) not in read:
                read[id(body)] = Program.of(body).without_unread()
            layer, places = read[id(body)]
            equation = equation.replace([named(equation.inputs[i]) for i in places])
            layers[equation] = layer
        equations.append(equation)
    outputs = list(map(named, program.outputs))
    equations = needed(equations, outputs)
    layers = {e: layers[e] for e in equations if e in layers}
    return program.replace(equations=equations, outputs=outputs, constants=constants), layers


def _has_large_between(program: Program) -> bool:
    """Whether layers read something large that follows from parameters alone, and constants."""
    parameters = {*program.inputs[: program.parameters]}
    known, derived = parameters.union(program.constants), set[Any]()
    for equation in program.equations:
        read = variables(equation.inputs)
        if _is_layer(equation):
            if any(v in derived and nbytes(v) > MOST_BETWEEN for v in read):
                return True
        elif known.issuperset(read):
            known.update(equation.outputs)
            if not (parameters.isdisjoint(read) and derived.isdisjoint(read)):
                derived.update(equation.outputs)
    return False


def _parts(program: Program, layers: Mapping[Equation, Program]) -> list[_Part]:
    """Layers, and between them what they need. What needs no layer comes first, what no layer needs at the end."""
    order = {equation: place for place, equation in enumerate(layers)}
    reader = dict[Any, int]()  # the first layer that needs a variable
    for equation in reversed(program.equations):
        at = order.get(equation, min((reader[v] for v in equation.outputs if v in reader), default=len(order)))
        reader |= {v: min(at, reader.get(v, at)) for v in variables(equation.inputs)}
    groups, after = [list[Equation]() for _ in range(len(order) + 1)], set[Any]()
    for equation in program.equations:
        depends = equation in order or not after.isdisjoint(variables(equation.inputs))
        after.update(equation.outputs if depends else ())
        if equation not in order:
            place = min((reader[v] for v in equation.outputs if v in reader), default=len(order))
            groups[place if depends else 0].append(equation)
    parts, later = list[_Part](), {*program.outputs}
    ordered = [*chain.from_iterable(zip(groups, ([e] for e in order), strict=False)), groups[-1]]
    for group in reversed([g for g in ordered if g]):
        if (layer := layers.get(group[0])) is not None:
            parts.append(_Part(layer, group[0].inputs, group[0].outputs))
        else:
            part = program.part(group, later)
            parts.append(_Part(part, part.inputs, part.outputs))
        later.update(v for e in group for v in variables(e.inputs))
    return parts[::-1]


def _overwritten(parts: Sequence[_Part], kept: Collection[Any], last: Mapping[Any, int]) -> dict[Program, list[int]]:
    """For each program the positions of inputs in whose memory its outputs are written.

    These are of an output's type, and none of the program's calls reads one that is ``kept``, or read later: ``last``
    has the place of each variable's last reader.
    """
    free = dict[Program, set[int]]()
    for place, part in enumerate(parts):
        once = {v: i for i, v in enumerate(part.inputs) if part.inputs.count(v) == 1}
        ends = {i for v, i in once.items() if v not in kept and last[v] == place}
        free[part.program] = free.get(part.program, ends) & ends
    found = dict[Program, list[int]]()
    for program, places in free.items():
        types = [(v.aval.shape, v.aval.dtype) for v in variables(program.outputs)]
        found[program] = []
        for i in sorted(places):
            if (kind := (program.inputs[i].aval.shape, program.inputs[i].aval.dtype)) in types:
                types.remove(kind)
                found[program].append(i)
    return found


def _jitted(program: Program, name: str) -> Any:
    """The program as a jitted function of a static key, and of dicts of its arguments by position."""
    function = as_function(program.closed())

    def section(_: Any, *args: Mapping[int, Any]) -> list[Any]:
        values = dict(chain.from_iterable(each.items() for each in args))
        return function(*(values[i] for i in range(len(values))))

    section.__name__ = name
    return jax.jit(section, static_argnums=0)


def _is_layer(equation: Equation) -> bool:
    return equation.name == "jit" and bool(equation.params["name"] == LAYER)


def _calls_layers(equation: Equation, _operands: Any = None) -> bool:
    """Whether an equation is a call in which layers are called."""
    return not _is_layer(equation) and any(program.any(_is_layer) for program in equation.inner)
