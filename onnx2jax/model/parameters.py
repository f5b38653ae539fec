"""A Model's parameters: as a dict, on devices, and as the leaves of a pytree whose static part is all else.

JAX builds models from any leaves: tracers, shapes, None, objects. So nothing is checked then. When such a model is
first used, its leaves become new values of parameters, as by ``with_params``, if they are arrays of the right types on
one device; otherwise each call takes them as arguments, as ``apply`` does, and checks them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import DictKey

from .. import compat
from ..errors import InputTypeError, UnsupportedError, known_keywords
from ..ir.graph import read_constants
from ..ops.arrays import is_traced
from ..proto.types import TensorType
from .calls.arguments import as_param, check_names, stack_of
from .spec import Spec

if TYPE_CHECKING:
    from ..runtime.dispatch import Constants
    from ..runtime.params import DeviceParams
    from .runtime import Runtime
    from .structure import Structure

_CREATION: Final = threading.RLock()
"""Held while the runtime of a model is created, by whichever thread uses it first."""


class Names:
    """The static part of a Model in a program of ``jax.export`` that was read from a file: its parameters' names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __eq__(self, other: object) -> bool:
        return self.names == getattr(other, "names", None)  # of a Structure, too

    def __hash__(self) -> int:
        return hash(self.names)


class Parameters:
    """The base of Model that has its parameters."""

    types: Mapping[str, TensorType]
    """Shape and dtype of each of ``params``."""

    @cached_property
    def _flat(self) -> tuple[tuple[Any, ...], Structure | Names]:
        """The leaves, which are arrays on their devices, made once, and the static part."""
        structure = self._runtime.structure
        return tuple(self._runtime.arguments(structure.names).values()), structure

    @cached_property
    def _runtime(self) -> Runtime:
        """Programs and parameters on devices, created with the first use: converting imports no compiler."""
        from .runtime import Runtime

        with _CREATION:
            if (runtime := vars(self).get("_runtime")) is not None:  # another thread has created it meanwhile
                return runtime
            runtime = vars(self)["_runtime"] = Runtime(self.spec) if "_flat" not in vars(self) else self._of_leaves()
        return runtime

    def _of_leaves(self) -> Runtime:
        """The runtime of a model that JAX has built."""
        from .runtime import Runtime

        leaves, structure = self._flat
        if isinstance(structure, Names):
            raise UnsupportedError(
                "this Model is a result of a program of jax.export, which has parameters and no graph: "
                "jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(result))"
            )
        runtime = Runtime.of_leaves(leaves, structure)
        if not runtime.unchecked and not all(isinstance(v, jax.Array) for v in leaves):
            del vars(self)["_flat"]  # from now on the leaves are arrays on the device
        return runtime

    @cached_property
    def spec(self) -> Spec:
        """The frozen graph, parameters and options."""
        return self._runtime.spec

    @property
    def params(self) -> dict[str, Any]:
        """The weights by ONNX name: a new dict of arrays that nobody can write, for JAX's transformations.

        External data is read on first access.

        Raises:
            ExternalDataError: an external data file was changed after the model was converted.
        """
        return dict(self._params)

    @property
    def floating_params(self) -> dict[str, Any]:
        """Those of ``params`` that ``jax.grad`` differentiates: a model with packed weights has integer ones, too.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> loss = lambda params, x: model.apply(params, x).sum()
        >>> slopes = jax.grad(loss)(model.floating_params, np.zeros((1, 1, 8, 8), np.float32))
        >>> slopes.keys() == model.params.keys()
        True
        """
        return {n: v for n, v in self._params.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    @cached_property
    def _params(self) -> dict[str, Any]:
        from ..runtime.params import immutable

        runtime = vars(self).get("_runtime") or ("_flat" in vars(self) and self._runtime) or None
        spec, changes, unchecked = self.spec, self.spec.changes, {} if runtime is None else runtime.unchecked
        known = runtime.params.on_host() if runtime is not None and "params" in vars(runtime) else {}
        unchanged = {n: v for n, v in known.items() if n not in changes}
        values = {**spec.parameters, **changes}
        converted = {
            n: unchanged[n] if n in unchanged else immutable(spec.as_stored(n, values[n]))
            for n in spec.converted - unchecked.keys()
        }
        file = read_constants(spec.graph, spec.converted | changes.keys(), unchanged)
        every = {**file, **changes, **converted}
        return {n: every[n] if n in unchecked else _on_host(every[n]) for n in self.types}

    @known_keywords
    def with_params(self, params: Mapping[str, Any], *, new_shapes: bool = False) -> Self:
        """The model with new values for some of its parameters.

        Compiled programs are shared, unless shapes are new: then outputs are declared as computed, and ``save`` writes
        the new shapes.

        Args:
            params: arrays by name; NumPy's are copied.
            new_shapes: allow other shapes for initializers of the main graph: a head with another number of classes,
                a larger vocabulary.

        Raises:
            InputNameError, InputTypeError: an unknown name, or another dtype.
            InputShapeError: another shape without ``new_shapes``, or one that the graph cannot compute with.

        >>> import numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> head = {n: model.params[n][:3] for n in ("fc.weight", "fc.bias")}
        >>> model.with_params(head, new_shapes=True).outputs[0].shape
        ('batch', 3)
        """
        from ..runtime.params import immutable

        check_names(params, self.types)
        with compat.enable_x64():
            types = {n: self._runtime.structure.type_of(n, v) for n, v in params.items()}
            types = {n: replace(t, shape=None) if new_shapes else t for n, t in types.items()}
            changes = {n: immutable(as_param(n, v, types[n])) for n, v in params.items()}
        if any(v.shape != self.types[n].shape for n, v in changes.items()):
            from .changes.shapes import with_new_shapes

            return with_new_shapes(self, changes)
        return self._replace(replace(self.spec, changes={**self.spec.changes, **changes}))

    def _replace(self, spec: Spec) -> Self:
        """The model of another spec; shares programs if only parameter values differ."""
        model: Any = type(self)
        runtime, unchecked = self._runtime, {id(v) for v in self._runtime.unchecked.values()}
        structure = runtime.structure if spec.differs_only_in_values(self.spec) else None
        left = {n: v for n, v in spec.changes.items() if id(v) in unchecked or is_traced(v)}
        if structure is None and not left:
            return model(spec)
        from .runtime import Runtime

        return model(spec, Runtime(spec, structure, left))

    def __contains__(self, name: object) -> bool:
        """Whether a parameter has this name."""
        return name in self.types

    @property
    def weights(self) -> DeviceParams:
        """The parameters on their devices, except scalars, which are compiled in.

        Raises:
            InputError: a leaf is no array of its parameter's type, or they are on several devices.
        """
        runtime = self._runtime
        for name, value in runtime.unchecked.items():
            as_param(name, value, runtime.structure.type_of(name, value))
        if runtime.unchecked:
            raise InputTypeError(
                "the parameters are on several devices: convert(..., mesh=mesh) shards them; inside jax.jit, apply "
                "takes them as they are, as do a decoder's prefill and step"
            )
        return runtime.params

    @property
    def constants(self) -> Constants:
        """Values that are compiled in: scalar parameters and fixed inputs."""
        return self._runtime.constants

    def changed(self) -> dict[str, Any]:
        """Parameters that differ from the file, by name, in its element types.

        Raises:
            InputTypeError: one is traced, or no array of its type.
        """
        types, changes = self.spec.types, self.spec.changes
        if unchecked := [n for n in self._runtime.unchecked if n in changes]:
            name, value = unchecked[0], changes[unchecked[0]]
            what = f"{_described(value)}, not an array of type {types[name]} on one device"
            if stack := self._stack:
                fix = f"the model is a stack of {list(stack)} models: take one, jax.tree.map(lambda a: a[0], model)"
            else:
                fix = "such a model can be called, but not saved or trained"
            raise InputTypeError(f"parameter {name!r} is {what}: {fix}")
        return self.spec.in_file_types(changes)

    @property
    def _stack(self) -> tuple[int, ...]:
        """The axes that all leaves have before those of their parameters, as stacked models have them; () for none."""
        leaves, structure = vars(self).get("_flat") or ((), Names(()))
        if isinstance(structure, Names):
            return ()
        named = zip(structure.names, leaves, strict=True)
        stacks = {stack_of(np.shape(v), structure.spec.types[n].shape or ()) for n, v in named}
        return stacks.pop() or () if len(stacks) == 1 else ()


def _described(value: Any) -> str:
    """What a leaf is: an array's type and devices, or a value's class."""
    if not isinstance(value, jax.Array):
        return type(value).__name__
    kind = str(TensorType(np.dtype(value.dtype), tuple(value.shape)))
    if is_traced(value):
        return f"a tracer of type {kind}"
    return f"{kind} on {len(value.sharding.device_set)} devices" if len(value.sharding.device_set) > 1 else kind


def _on_host(value: Any) -> Any:
    """A parameter for reading: on a CPU a NumPy array, which shares the memory of a JAX array."""
    from ..runtime.params import device_of, is_cpu

    return np.asarray(value) if isinstance(value, jax.Array) and is_cpu(device_of([value])) else value


def attributes_of(cls: type[Parameters], spec: Spec) -> dict[str, Any]:
    """The public attributes of a model, which the class annotates."""
    return {**{n: getattr(spec, n) for n in cls.__annotations__}, "types": spec.stored}


def register(cls: type[Parameters]) -> None:
    """Register the class of models with JAX."""

    def with_keys(model: Parameters) -> tuple[list[tuple[DictKey, Any]], Structure | Names]:
        leaves, structure = model._flat
        return list(zip(map(DictKey, structure.names), leaves, strict=True)), structure

    def of_leaves(structure: Structure | Names, leaves: Any) -> Parameters:
        model = object.__new__(cls)
        vars(model)["_flat"] = tuple(leaves), structure
        if not isinstance(structure, Names):
            vars(model).update(attributes_of(cls, structure.spec))
        return model

    jax.tree_util.register_pytree_with_keys(cls, with_keys, of_leaves, lambda model: model._flat)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"onnx2jax.{cls.__name__}",
        serialize_auxdata=lambda structure: json.dumps(structure.names).encode(),
        deserialize_auxdata=lambda data: Names(json.loads(data)),
    )
