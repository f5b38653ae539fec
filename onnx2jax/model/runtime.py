"""The mutable state of a Model: programs, parameters on devices, and the checks its calls have passed."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from .. import compat, debug
from ..errors import RecompilationWarning
from ..eval.interpreter import Context
from ..eval.node_errors import check_special_values
from ..eval.values import are_maps, to_device, to_host
from ..ir.graph import Graph
from ..ops.arrays import is_traced
from ..proto.mapped import LAZY_BYTES, load
from ..runtime.compile import Outcome
from ..runtime.dispatch import BoundCall, CallContext, Callee, Constants, Signature, signature, snapshot
from ..runtime.memory import copied
from ..runtime.params import DeviceParams
from ..runtime.partition import StagedProgram
from .calls import buckets
from .calls.arguments import as_param, as_text, check_readable
from .spec import Spec
from .structure import Structure, program_of

if TYPE_CHECKING:
    from ..runtime.background import Background
    from ..sharding.rules import Placement
    from .devices.pipeline import Pipeline

UNPROVEN: Final = 4
"""Programs without padding after which a warning says that calls do not verify a bucket."""


class Runtime:
    """Programs, device parameters and the dispatch cache of a Model.

    Attributes:
        spec: the model's frozen spec.
        structure: what it shares with models that differ only in parameter values.
        unchecked: new values of parameters that every call checks and takes as arguments: tracers, arrays over several
            devices, or of no parameter's type. Empty for the models of ``convert`` and ``with_params``.
        inner_models: the model that ``values`` ran last, by its output names.
    """

    spec: Spec
    structure: Structure
    unchecked: Mapping[str, Any]
    fields: tuple[str, ...]
    program: StagedProgram | Pipeline
    background: Background | None

    def __init__(
        self, spec: Spec, structure: Structure | None = None, unchecked: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """``structure`` is that of a model that differs only in parameter values; its programs are reused."""
        self.spec, self.unchecked = spec, unchecked
        self.structure = structure = Structure(spec) if structure is None else structure
        self.fields, self.program, self.background = structure.fields, structure.program, structure.background
        self.inner_models: dict[tuple[str, ...], Any] = {}
        self._unpadded: dict[tuple[tuple[str, ...], ...], StagedProgram | Pipeline | None] = {}
        """Programs without padding, by padded dimension variables; None once padding is proven harmless."""
        values = {**spec.parameters, **spec.changes}
        self._values = {n: v for n, v in values.items() if n not in unchecked}
        """The values of parameters, in memory or mapped from their files."""
        self._positional = tuple(v.name for v in spec.inputs)
        self._callee: Callee | None = None

    @classmethod
    def of_leaves(cls, leaves: Sequence[Any], structure: Structure) -> Runtime:
        """The runtime of a model that JAX has rebuilt from leaves."""
        changes, checked = structure.spec.changes, structure.checked(leaves)
        values = dict(zip(structure.names, leaves, strict=True)) if checked is None else checked
        spec = replace(structure.spec, changes={**changes, **values})
        return cls(spec, structure, values if checked is None else {})

    @cached_property
    def params(self) -> DeviceParams:
        """The parameters on their devices, except scalars, which are compiled in."""
        spec, values = self.spec, self._values
        shapes = {n: np.shape(v) for n, v in values.items() if np.size(v) != 1}
        types = {n: jax.ShapeDtypeStruct(shape, spec.stored[n].dtype) for n, shape in shapes.items()}
        return DeviceParams(
            types, lambda n: spec.as_stored(n, values[n]), lambda n, value: put(spec.placement, {n: value})[n]
        )

    @cached_property
    def constants(self) -> Constants:
        """Scalar parameters and fixed inputs: compiled in, because each argument adds to the cost of a call."""
        scalars = {n: np.asarray(to_host(load(v))) for n, v in self._values.items() if np.size(v) == 1}
        scalars = {n: self.spec.as_stored(n, v) if n in self.spec.types else v for n, v in scalars.items()}
        return Constants(scalars, self.spec.static)

    @cached_property
    def _scalars(self) -> dict[str, Any]:
        """The scalar parameters on their devices."""
        with compat.enable_x64(), compat.outside():
            scalars = {n: v for n, v in self.constants.params.items() if n in self.spec.types}
            return put(self.spec.placement, scalars)

    def arguments(self, names: Iterable[str]) -> dict[str, Any]:
        """Parameters as arguments of a program, by name: arrays on their devices, made once, or ``unchecked``."""
        every = ChainMap(dict(self.unchecked), self._scalars)
        with compat.enable_x64():
            return {n: every[n] if n in every else self.params[n] for n in names}

    @property
    def specialised(self) -> set[str]:
        """Inputs whose values are part of the signature."""
        return self.program.specialised if isinstance(self.program, StagedProgram) else set()

    def note(self, kind: str, path: str) -> None:
        """Print which path a call takes, at ONNX2JAX_DEBUG=2."""
        if debug.level() >= 2:
            debug.emit(f"{kind} of {self.spec.graph.name!r}: {path}")

    def share_params(self, other: Runtime) -> None:
        """Use the parameters on devices that another runtime has, or will have."""
        vars(self).update(params=other.params)

    # ------------------------------------------------------------------------------------------- the fast path

    def signature(
        self, args: Sequence[Any], named: Mapping[str, Any], as_numpy: bool
    ) -> tuple[Signature | None, list[Any]]:
        """The signature of a call in the caller's context, and its arrays."""
        program = self.program
        if self.unchecked or not isinstance(program, StagedProgram):
            return None, []
        values, names = list(args), self._positional[: len(args)]
        if named:
            values += named.values()
            names = (*names, *named)
        device = vars(self.params).get("device")  # known after the first call, which places the parameters
        return signature(self._current(program), names, values, device, as_numpy), values

    def call(self, bound: BoundCall, key: Signature | None, arrays: list[Any]) -> list[Any]:
        """The results of a bound call; raises InputTypeError for a deleted argument or parameter."""
        try:
            return bound.call(arrays)
        except (RuntimeError, ValueError):
            for name, value in zip(key.inputs if key else (), arrays, strict=False):
                check_readable(value, "input", repr(name))
            self._check_params()
            raise

    def _check_params(self) -> None:
        """Raise InputTypeError if a parameter was donated or deleted, as the leaf of a pytree."""
        for name, value in self.params.placed().items():
            check_readable(value, "parameter", repr(name))

    def bind(
        self, key: Signature | None, arguments: Sequence[Any], values: Mapping[str, Any], bound: BoundCall | None
    ) -> None:
        """Add a call without random key to the dispatch cache, if nothing but its compiled programs has to run again.

        Args:
            key: its signature.
            arguments: the caller's arguments, unchecked.
            values: the checked inputs by name, in the same order.
            bound: the one program that ran; None if there were several, or host nodes.
        """
        spec, program = self.spec, self.program
        if key is None or not isinstance(program, StagedProgram) or compat.checks_values():
            return
        if spec.graph.draws or spec.max_size or spec.placement is not None:
            return
        if tuple(values) != key.inputs:
            return
        converted = list(map(_conversion, values, arguments, values.values()))
        if not all(a is b or f for a, b, f in zip(arguments, values.values(), converted, strict=True)):
            return
        if bound is None and not program.is_single:
            bound = program.host_call(values, CallContext(self.params, self.constants, as_numpy=key.as_numpy))
        if bound is not None:
            key = key._replace(callee=self._current(program), device=self.params.device)
            self.params.bound[key] = _from_arguments(bound, list(values), arguments, converted, key.as_numpy)

    def _current(self, program: StagedProgram) -> Callee:
        """The callee of the current partition of the graph."""
        if self._callee is None or self._callee.graph is not program.partitioned:
            self._callee = Callee(program.partitioned, self.spec.settings, self.params.types, self.constants)
        return self._callee

    # ------------------------------------------------------------------------------------------- the full path

    def run(
        self, program: StagedProgram | Pipeline, values: Mapping[str, Any], rng: Any, x32: bool, as_numpy: bool = False
    ) -> Outcome:
        """A call of a program of this model."""
        placement = self.spec.placement
        if placement is not None:
            values, rng = placement.put_inputs(values), placement.put_replicated(rng)
        try:
            return program(values, CallContext(self.params, self.constants, rng, x32=x32, as_numpy=as_numpy))
        except RuntimeError:
            self._check_params()
            raise

    def applied(self, values: dict[str, Any], params: Mapping[str, Any], rng: Any, x32: bool) -> tuple[Any, ...]:
        """The outputs as a function of parameters, checked here, and of checked inputs; the others are the model's."""
        spec, placement = self.spec, self.spec.placement
        checked = {n: snapshot(as_param(n, v, self.structure.type_of(n, v))) for n, v in params.items()}
        passed = put(placement, checked)
        others = self.arguments(n for n in spec.types if n not in passed)
        feeds = values
        if placement is not None:
            feeds, rng = placement.put_inputs(values), placement.put_replicated(rng)
        context = CallContext(others | passed, Constants({}, spec.static), rng, passed, x32)
        results = self.program.outputs(feeds, context)
        self.structure.declared.compare(values | dict(spec.static), results)
        return results

    def evaluated(self, key: Signature | None, values: Mapping[str, Any], as_numpy: bool) -> tuple[Any, ...] | None:
        """The outputs of a call by NumPy; None if its program is compiled, or the call has to wait for it."""
        spec, program = self.spec, self.program
        if self.background is None or key is None or not isinstance(program, StagedProgram) or compat.checks_values():
            return None
        if spec.graph.draws or spec.graph.differentiates or spec.bucket or spec.max_size or spec.placement is not None:
            return None
        kind = _kind_of(key)
        if self.background.is_over(kind) or not self.params.on_one_cpu or is_traced(values):
            return None
        snapshots = {n: snapshot(v) for n, v in values.items()}
        known = {**{n: to_host(v) for n, v in values.items()}, **self.constants.inputs}
        params = {**self._params_on_host(), **self.constants.params}

        def compiled() -> None:
            if compat.trace_context() == key.configuration:  # otherwise the caller's thread compiles
                with compat.enable_x64():
                    self.run(program, snapshots, None, False, as_numpy)

        context = Context(params, None, spec.settings)
        results = self.background.evaluated(kind, spec.called, known, context, compiled)
        if results is None:
            return None
        check_special_values(spec.outputs, results)
        self.structure.declared.compare({**values, **spec.static}, results)
        return _own(results) if as_numpy else tuple(map(to_device, results))

    def _params_on_host(self) -> dict[str, Any]:
        """The parameters as NumPy arrays. Large ones share memory with those on devices; others are not put there."""
        placed = self.params.on_host()
        for name in self.params.types.keys() - placed.keys():
            value = self.params.read(name)
            small = type(value) is np.ndarray and value.nbytes < LAZY_BYTES
            placed[name] = value if small else to_host(self.params[name])
        return placed

    def is_evaluated(self, key: Signature | None) -> bool:
        """Whether NumPy evaluated a call of a signature, and will evaluate the next."""
        return self.background is not None and key is not None and self.background.is_over(_kind_of(key)) is False

    def wait(self, feeds: Mapping[str, Any]) -> None:
        """Have the calls of these feeds' signature compiled in the caller's thread."""
        if self.background is not None and (key := self.signature((), feeds, True)[0]) is not None:
            self.background.wait(_kind_of(key))

    def unpad(
        self, values: dict[str, Any], padded: dict[str, Any], results: tuple[Any, ...], extents: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """The results for inputs ``padded`` from ``values``, sliced back; which axes is found once per program."""
        key = buckets.equal_extents(extents, self.spec.bucket), tuple(np.shape(v) for v in padded.values())
        outputs = self.structure.unpadded.get(key)
        if outputs is None:
            graph = self.spec.with_static
            outputs = buckets.outputs_with_variables(graph, self.spec.bucket, values, padded, extents)
            self.structure.unpadded[key] = outputs
        return buckets.unpad(outputs, results, extents)

    def verify_padding(
        self, values: dict[str, Any], padded: dict[str, Any], results: Any, extents: Mapping[str, int], x32: bool
    ) -> None:
        """Compare with the results without padding, once for each set of padded variables and equal ones among them."""
        spec = self.spec
        names = buckets.equal_extents(extents, spec.bucket)
        plain = self._unpadded.setdefault(names, program_of(spec.called, spec.settings, spec.placement))
        if plain is None:
            return

        def run(graph: Graph, values: dict[str, Any]) -> tuple[Any, ...]:
            program = plain if graph is spec.called else program_of(graph, spec.settings, spec.placement)
            return self.run(program, values, None, x32).outputs

        def call(padded: dict[str, Any]) -> tuple[Any, ...]:
            return self.unpad(values, padded, self.run(self.program, padded, None, x32).outputs, extents)

        if buckets.verify_padding(spec.called, run, call, values, padded, results, extents):
            self._unpadded[names] = None
        elif plain.compilations == UNPROVEN:
            quoted, dims = (", ".join(f"{n!r}{end}" for n in sorted(extents)) for end in ("", ": n"))
            warnings.warn(
                f"bucket= pads {quoted}, and inputs that are constant do not show whether padding changes outputs: "
                f"until they vary, each new size is compiled without padding too; to verify it now: model.compile("
                f"dims={{{dims}}})",
                RecompilationWarning,
                stacklevel=5,
            )


def put(placement: Placement | None, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters on their devices, those of 64 bits too; on a CPU, ``device_put`` shares the memory of NumPy arrays."""
    with compat.enable_x64():
        if placement is not None:
            return placement.put_params(params)
        return {n: v if is_traced(v) else jax.device_put(load(v)) for n, v in params.items()}


def _kind_of(key: Signature) -> Hashable:
    """What calls share that wait for the same program: names, dtypes and shapes, and JAX's configuration."""
    return frozenset(zip(key.inputs, (a[:2] for a in key.arrays), strict=True)), key.configuration


def _own(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results that their receiver may write: parameters, constants, and what is returned twice are copied."""
    returned = set[int]()

    def writable(result: Any) -> Any:
        if isinstance(result, list) and not are_maps(result):
            return list(map(writable, result))
        if not isinstance(result, np.ndarray):
            return result
        if id(result) in returned or not (result.flags.owndata and result.flags.writeable):
            return result.copy()
        returned.add(id(result))
        return result

    return tuple(map(writable, results))


def _conversion(name: str, argument: Any, bound: Any) -> Callable[[Any], Any] | None:
    """What binding does to a NumPy array that may change it: strings are checked, int32 becomes int64."""
    kinds = (argument.dtype.kind, bound.dtype.kind) if type(argument) is np.ndarray is type(bound) else None
    if kinds in (("U", "O"), ("O", "O")):
        return partial(as_text, f"input {name!r}")
    return (lambda v: v.astype(np.int64)) if kinds == ("i", "i") and argument.dtype != bound.dtype else None


def _from_arguments(
    bound: BoundCall,
    names: list[str],
    arguments: Sequence[Any],
    conversions: Sequence[Callable[[Any], Any] | None],
    as_numpy: bool,
) -> BoundCall:
    """The bound call for arguments in the caller's order.

    Converts them as binding does, and copies other NumPy arrays unless it waits (``as_numpy``).
    """
    call, order = bound.call, None if names == list(bound.names) else [names.index(n) for n in bound.names]
    converts = any(conversions)

    def copying(values: list[Any]) -> list[Any]:
        return bound.call([copied(v) if type(v) is np.ndarray else v for v in values])

    if not as_numpy and any(type(v) is np.ndarray for v in arguments):
        call = copying
    if order is None and not converts:
        return bound._replace(call=call)

    def run(values: list[Any]) -> list[Any]:
        if converts:
            values = [v if f is None else f(v) for v, f in zip(values, conversions, strict=True)]
        return call(values if order is None else [values[i] for i in order])

    return bound._replace(call=run)
