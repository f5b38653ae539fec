"""A program cut into sections at the calls of its layers: repeated layers are then compiled once, and called in turn.

Before, one program, and after, three that are compiled:

    a = f x;  b = layer a w0;  c = layer b w1;  d = g c        a = f x   |   y = layer x w   |   d = g c

A call of a layer with 30 operands costs 70 us of dispatch, and nothing is fused across it: it pays for layers that take
milliseconds. Values between sections stay on the device; a section may overwrite (donation) what no later one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import compat
from ..eval.layers import LAYER
from ..eval.values import to_device, unaliased
from ..jaxpr import pipeline
from ..jaxpr.program import (
    CALLS,
    Equation,
    Program,
    as_function,
    branch_for,
    inline,
    is_literal,
    literal_value,
    nbytes,
    needed,
    substitute,
    variables,
)
from .dispatch import BoundCall
from .memory import trim_heap
from .params import DeviceParams, device_of
from .program_cache import Store, load_or_compile

BETWEEN: Final = "onnx_between_layers"
"""The name of programs of sections that are no layers."""
MOST_BETWEEN: Final = 1 << 20
"""Bytes of a parameter-only value outside of layers: it would be computed, and copied, in every call."""


class CompiledSection:
    """A program that one or several sections run. A thread compiles it while its caller goes on.

    Attributes:
        split: what is hoisted from it.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        donated: Sequence[int],
        options: pipeline.Passes,
        device: Any,
        pool: Executor,
        store: Store | None,
    ) -> None:
        """
        Args:
            name: for profiles.
            program: its inputs are parameters and operands.
            donated: positions of operands whose memory is for results.
            options: which passes run over it.
            device: where it runs.
            pool: threads that compile.
            store: keeps what they compile.
        """
        split = pipeline.run(program.closed(), program.parameters, options)
        self.split, function = replace(split, main=None), as_function(split.main)

        def section(hoisted: Sequence[Any], *operands: Any) -> list[Any]:
            return unaliased(map(to_device, function(*hoisted, *operands)), (*hoisted, *operands))

        section.__name__ = name
        placed = None if device == device_of(()) else SingleDeviceSharding(device)  # would commit results to it
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=placed) for t in split.main.in_avals]
        count = len(split.hoisted)
        jitted = jax.jit(
            section,
            donate_argnums=tuple(i + 1 for i in donated),
            compiler_options=pipeline.compiler_options(split.main, options),
        )
        self._compiling = pool.submit(load_or_compile, jitted.lower(types[:count], *types[count:]), store)

    @cached_property
    def call(self) -> Callable[..., list[Any]]:
        """The results from the hoisted values and the operands."""
        return compat.unwrapped(self._compiling.result())


@dataclass(frozen=True)
class Section:
    """A part of a program.

    Attributes:
        compiled: what it runs.
        parameters: the names of its parameters.
        operands: the number of each other operand; a literal's value instead.
        results: the numbers of its results.
        ends: numbers of what no later section reads.
    """

    compiled: CompiledSection
    parameters: tuple[str, ...]
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    ends: tuple[int, ...]


class Sections:
    """A traced function as sections, of which those that are calls of one layer share a compiled program.

    For one signature, and bound to parameter values as an ``Executable`` is.
    """

    def __init__(
        self, sections: Sequence[Section], outputs: Sequence[Any], kept: Collection[int], structure: Any
    ) -> None:
        """
        Args:
            sections: in order.
            outputs: the number of each output; a literal's value instead.
            kept: the numbers of arguments that are not donated: where one is an output, it is copied.
            structure: the pytree around the outputs.
        """
        self.sections, self.structure = tuple(sections), structure
        self._outputs = [(v, type(v) is not int or v in kept) for v in outputs]

    @classmethod
    def of(
        cls,
        traced: Any,
        names: Sequence[str],
        device: Any,
        options: pipeline.Passes,
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
        options = options.skipping("fold_batchnorm")
        cut = _Cut(Program.of(traced.jaxpr, len(names)), names, donated, options, device, store)
        if not cut.is_layered:
            return None
        sections, kept = list(cut.sections()), {*range(cut.count)} - {*donated}
        return cls(sections, cut.outputs, kept, jax.tree.structure(traced.out_info))

    def hoisted(self, params: DeviceParams) -> list[list[Any]]:
        """What each section takes in place of its parameters; computed once for each set of them."""
        hoisted = params.hoisted.get(self)
        if hoisted is None:
            with compat.outside():
                hoisted = [s.compiled.split.hoisted_arguments(s.parameters, params) for s in self.sections]
            params.hoisted[self] = hoisted
            trim_heap()
        return hoisted

    def bind(self, params: DeviceParams, _leaves: Sequence[Any], names: Sequence[str], as_numpy: bool) -> BoundCall:
        """The sections bound to a model's parameters, for arguments of one signature; as ``Executable.bind``."""
        hoisted = self.hoisted(params)

        def call(leaves: list[Any]) -> list[Any]:
            results = self.run(hoisted, leaves)
            return list(map(np.asarray, results)) if as_numpy else results

        return BoundCall(call, names, "compiled", self.structure)

    def run(self, hoisted: Sequence[Sequence[Any]], leaves: Iterable[Any]) -> list[Any]:
        """The flat results for flat arguments of the types it was traced with."""
        values: dict[int, Any] = dict(enumerate(leaves))
        with compat.enable_x64():
            for section, weights in zip(self.sections, hoisted, strict=True):
                operands = [values[v] if type(v) is int else v for v in section.operands]
                results = section.compiled.call(weights, *operands)
                values.update(zip(section.results, results, strict=True))
                for number in section.ends:
                    del values[number]
            outputs = ((values[v] if type(v) is int else v, copied) for v, copied in self._outputs)
            return [jnp.copy(v) if copied else v for v, copied in outputs]

    def __call__(self, hoisted: Sequence[Sequence[Any]], *args: Any) -> Any:
        """The results for arguments of the types it was traced with."""
        return jax.tree.unflatten(self.structure, self.run(hoisted, jax.tree.leaves(args)))


@dataclass(frozen=True, eq=False)
class _Part:
    """A call of a layer, or the equations between two; before it is compiled.

    Attributes:
        kind: equal for calls of one layer.
        name: of its program, for profiles.
        program: what it computes.
        inputs, outputs: the variables, or literals, of which it is called.
    """

    kind: Any
    name: str
    program: Program
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    has_effects = False


class _Cut:
    """The parts of a program, in order."""

    def __init__(
        self,
        program: Program,
        names: Sequence[str],
        donated: Collection[int],
        options: pipeline.Passes,
        device: Any,
        store: Store | None,
    ) -> None:
        self.program, self.options, self.device, self.store = program, options, device, store
        self._parameters = dict(zip(program.inputs, names, strict=False))
        self._given = list(program.inputs[len(names) :])
        self._donated = {self._given[i] for i in donated}
        self._constants = dict(program.constants)
        self._calling: dict[int, bool] = {}
        self._layers: dict[int, tuple[Program, list[bool]]] = {}
        branch = branch_for(options.platform)
        names_of, opens = dict[Any, Any](), lambda equation, _operands: self._calls_layers(equation)
        inlined = inline(program.equations, names_of, self._constants, branch, opens)
        equations: list[Any] = [self._layer(e) if _is_layer(e) else e for e in inlined]
        self._ends = [substitute(v, names_of) for v in program.outputs]
        self._equations: list[Any] = needed(equations, self._ends)
        self._numbers: dict[Any, int] = {v: i for i, v in enumerate(self._given)}
        self.count = len(self._given)

    @property
    def is_layered(self) -> bool:
        """Whether a layer is called twice, and little but layers reads parameters."""
        kinds = [e.kind for e in self._equations if isinstance(e, _Part)]
        return len(kinds) > len({*kinds}) and not self.program.effects and not self._has_large_between

    @property
    def _has_large_between(self) -> bool:
        """Whether layers read something large that follows from parameters alone, and constants."""
        known, derived = {*self._parameters, *self._constants}, set[Any]()
        for each in self._equations:
            read = variables(each.inputs)
            if isinstance(each, _Part):
                if any(v in derived and nbytes(v) > MOST_BETWEEN for v in read):
                    return True
            elif known.issuperset(read):
                known.update(each.outputs)
                if any(v in derived or v in self._parameters for v in read):
                    derived.update(each.outputs)
        return False

    @property
    def outputs(self) -> list[Any]:
        """The number of each output, or its value."""
        return [self._operand(v) for v in self._ends]

    def sections(self) -> Iterator[Section]:
        """The parts with compiled programs."""
        last = self._last_reads()
        ends = [{v for v in variables(p.inputs) if last[v] == place} for place, p in enumerate(self.parts)]
        free: dict[Any, list[bool]] = {}
        for part, ending in zip(self.parts, ends, strict=True):  # what all calls of a layer may overwrite
            each = [self._may_donate(v, ending) and part.inputs.count(v) == 1 for v in part.inputs]
            free[part.kind] = [a and b for a, b in zip(each, free.get(part.kind, each), strict=True)]
        compiled: dict[Any, CompiledSection] = {}
        pool = ThreadPoolExecutor()
        for part, ending in zip(self.parts, ends, strict=True):
            parameters = [i for i, v in enumerate(part.inputs) if not is_literal(v) and v in self._parameters]
            rest = [i for i in range(len(part.inputs)) if i not in {*parameters}]
            if (key := (part.kind, *parameters)) not in compiled:
                inputs = [part.program.inputs[i] for i in (*parameters, *rest)]
                program = part.program.replace(inputs=inputs, parameters=len(parameters))
                donated = _reused(inputs[len(parameters) :], [free[part.kind][i] for i in rest], program.outputs)
                compiled[key] = CompiledSection(
                    part.name, program, donated, self.options, self.device, pool, self.store
                )
            results = tuple(self._numbers.setdefault(v, len(self._numbers)) for v in part.outputs)
            unread = (v for v in part.outputs if v not in last)
            yield Section(
                compiled[key],
                tuple(self._parameters[part.inputs[i]] for i in parameters),
                tuple(self._operand(part.inputs[i]) for i in rest),
                results,
                tuple(self._numbers[v] for v in (*ending, *unread) if v in self._numbers),
            )
        pool.shutdown(wait=False)  # its threads end with their work: none is there to be forked

    @cached_property
    def parts(self) -> list[_Part]:
        """Layers, and between them what they need. What needs no layer comes first, what no layer needs at the end."""
        depends: set[Any] = set()
        before, pending = list[Any](), list[Any]()
        for each in self._equations:
            if isinstance(each, _Part) or not depends.isdisjoint(variables(each.inputs)):
                depends.update(each.outputs)
                pending.append(each)
            else:
                before.append(each)
        groups, waiting = [before], list[Any]()
        for each in pending:
            if isinstance(each, _Part):
                now = needed(waiting, each.inputs)
                waiting = [e for e in waiting if e not in now]
                groups += [now, [each]]
            else:
                waiting.append(each)
        groups.append(waiting)
        later = set(variables(self._ends))
        parts = list[_Part]()
        for group in reversed(groups):
            if group:
                parts.append(group[0] if isinstance(group[0], _Part) else self._part(group, later))
                later.update(v for e in group for v in variables(e.inputs))
        return parts[::-1]

    def _part(self, equations: Sequence[Equation], later: Collection[Any]) -> _Part:
        """Equations between layers; ``later`` is what is read after them."""
        made = dict.fromkeys(v for e in equations for v in e.outputs)
        read = dict.fromkeys(v for e in equations for v in variables(e.inputs))
        inputs = [v for v in read if v not in made and v not in self._constants]
        outputs = [v for v in made if v in later]
        constants = {v: self._constants[v] for v in read if v in self._constants}
        program = self.program.replace(inputs=inputs, outputs=outputs, equations=equations, constants=constants)
        return _Part(object(), BETWEEN, program, inputs, outputs)

    def _layer(self, call: Equation) -> _Part:
        """A call of a layer, without the operands that it does not read."""
        jaxpr = call.params["jaxpr"]
        if id(jaxpr) not in self._layers:
            program = Program.of(jaxpr)
            equations = needed(program.equations, program.outputs)
            read = {*variables(program.outputs), *(v for e in equations for v in variables(e.inputs))}
            reads = [v in read for v in program.inputs]
            program = program.replace(inputs=[*compress(program.inputs, reads)], equations=equations)
            self._layers[id(jaxpr)] = program, reads
        program, reads = self._layers[id(jaxpr)]
        return _Part(id(jaxpr), LAYER, program, [*compress(call.inputs, reads)], call.outputs)

    def _last_reads(self) -> dict[Any, int]:
        """Each variable -> the part that reads it last; one after all parts if it is an output."""
        last = {v: place for place, part in enumerate(self.parts) for v in variables(part.inputs)}
        return last | dict.fromkeys(variables(self._ends), len(self.parts))

    def _may_donate(self, operand: Any, ends: Collection[Any]) -> bool:
        """Whether a part may overwrite an operand, given those that no later part reads."""
        if is_literal(operand) or operand in self._constants or operand not in ends:
            return False
        return operand in self._donated or operand not in self._given

    def _operand(self, operand: Any) -> Any:
        """The number of a variable; the value of a literal or constant."""
        value = literal_value(operand) if is_literal(operand) else self._constants.get(operand)
        return self._numbers[operand] if value is None else jax.device_put(np.asarray(value))

    def _calls_layers(self, equation: Equation) -> bool:
        """Whether an equation is a call in which layers are called."""
        if equation.name not in CALLS or _is_layer(equation):
            return False
        body = equation.params[CALLS[equation.name]]
        if id(body) not in self._calling:
            inner = Program.of(body)
            self._calling[id(body)] = any(_is_layer(e) or self._calls_layers(e) for e in inner.equations)
        return self._calling[id(body)]


def _is_layer(equation: Equation) -> bool:
    return equation.name == "jit" and equation.params["name"] == LAYER


def _reused(inputs: Sequence[Any], free: Sequence[bool], outputs: Iterable[Any]) -> tuple[int, ...]:
    """The free inputs in whose memory an output of the same type can lie."""
    types = [(v.aval.shape, v.aval.dtype) for v in variables(outputs)]
    reused = []
    for i, variable in enumerate(inputs):
        kind = variable.aval.shape, variable.aval.dtype
        if free[i] and kind in types:
            types.remove(kind)
            reused.append(i)
    return tuple(reused)
