"""A Model's parameters: as a dict, on devices, and as the leaves of a pytree whose static part is all else.

JAX builds models from any leaves: tracers, shapes, None, objects. So nothing is checked then. When such a model is
first used, its leaves become new values of parameters, as by ``with_params``, if they are arrays of the right types on
one device; otherwise each call takes them as arguments, as ``apply`` does, and checks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import DictKey

from ..errors import InputTypeError, UnsupportedError
from ..ir import analysis
from ..ir.graph import read_constants
from ..proto.types import TensorType
from ..runtime.dispatch import Constants
from ..runtime.params import DeviceParams, device_of, immutable, is_cpu
from .runtime import Runtime
from .spec import Spec
from .structure import Names, Structure


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
    def _runtime(self) -> Runtime:  # of a model that JAX has built, when it is first used
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
        spec, changes, unchecked = self.spec, self.spec.changes, self._runtime.unchecked
        known = self._runtime.params.on_host() if "params" in vars(self._runtime) else {}
        own = {n: v for n, v in known.items() if n not in changes}
        held = analysis.parameters(spec.graph) | dict(changes)
        narrow = {
            n: own[n] if n in own else immutable(spec.as_stored(n, held[n])) for n in spec.narrow - unchecked.keys()
        }
        file = read_constants(spec.graph, spec.narrow | changes.keys(), own)
        every = {**file, **changes, **narrow}
        return {n: every[n] if n in unchecked else _on_host(every[n]) for n in self.types}

    def __contains__(self, name: object) -> bool:
        """Whether a parameter has this name."""
        return name in self.types

    @property
    def weights(self) -> DeviceParams:
        """The parameters on their devices, except scalars, which are compiled in."""
        return self._runtime.params

    @property
    def constants(self) -> Constants:
        """Values that are compiled in: scalar parameters and fixed inputs."""
        return self._runtime.constants

    def changed(self) -> dict[str, Any]:
        """Parameters that differ from the file, by name, in its element types.

        Raises:
            InputTypeError: one is traced, or no array of its type.
        """
        types, changes = self.spec.types, self.spec.changes  # types are without integer variables of a TrainingModel
        if unchecked := [n for n in self._runtime.unchecked if n in changes]:
            raise InputTypeError(
                f"parameter {unchecked[0]!r} is {type(changes[unchecked[0]]).__name__}, not an array of type "
                f"{types[unchecked[0]]} on one device: such a model can be called, but not saved or trained"
            )
        dtypes = {n: types[n].dtype if n in types else v.dtype for n, v in changes.items()}
        return {n: v if v.dtype == dtypes[n] else v.astype(dtypes[n]) for n, v in changes.items()}


def _on_host(value: Any) -> Any:
    """A parameter for reading: on a CPU a NumPy array, which shares the memory of a JAX array."""
    return np.asarray(value) if isinstance(value, jax.Array) and is_cpu(device_of([value])) else value


def register(cls: type[Parameters]) -> None:
    """Register the class of models with JAX."""

    def with_keys(model: Parameters) -> tuple[list[tuple[DictKey, Any]], Structure | Names]:
        leaves, structure = model._flat
        return list(zip(map(DictKey, structure.names), leaves, strict=True)), structure

    def of_leaves(structure: Structure | Names, leaves: Any) -> Parameters:
        model = object.__new__(cls)
        vars(model)["_flat"] = tuple(leaves), structure
        if isinstance(structure, Structure):
            own = {n: getattr(structure.spec, n) for n in cls.__annotations__}
            vars(model).update(own, types=structure.spec.stored)
        return model

    jax.tree_util.register_pytree_with_keys(cls, with_keys, of_leaves, lambda model: model._flat)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"onnx2jax.{cls.__name__}",
        serialize_auxdata=lambda structure: json.dumps(structure.names).encode(),
        deserialize_auxdata=lambda data: Names(json.loads(data)),
    )
