"""What training changes: variables and a random key, as a pytree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ModelError
from ..ir.training_info import TrainingInfo
from ..runtime.values import widened
from .engine import State


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState(State):
    """What training changes: a pytree of arrays.

    Attributes:
        variables: the variables among the main graph's initializers, by name.
        own: for each training_info, the variables among its algorithm's own initializers, by name.
        key: the random key for what comes next.
    """

    variables: dict[str, jax.Array]
    own: tuple[dict[str, jax.Array], ...]
    key: Any


def assigned(
    state: TrainingState, index: int, info: TrainingInfo, binding: Mapping[str, str], results: Mapping[str, Any]
) -> TrainingState:
    """The state after the assignments of a binding, all at once."""
    variables, own = dict(state.variables), dict(state.own[index])
    for name, output in binding.items():
        place = variables if name in variables else own
        old, new = place[name], results[output]
        if not (hasattr(new, "dtype") and (new.shape, new.dtype) == (old.shape, old.dtype)):
            kind = f"{new.dtype}{list(new.shape)}" if hasattr(new, "dtype") else type(new).__name__
            raise ModelError(
                f"{info.path}: output {output!r} ({kind}) is assigned to variable {name!r}, which is "
                f"{old.dtype}{list(old.shape)}: a variable keeps its type and shape",
                rule="TR-25",
            )
        place[name] = jnp.asarray(new)
    return replace(state, variables=variables, own=(*state.own[:index], own, *state.own[index + 1 :]))


def all_widened(values: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Variables in the types they are stored in, which a caller in 32-bit mode could not make."""
    return {n: widened(v, stored[n].dtype) for n, v in values.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FineTuningState(State):
    """Everything that a step changes: a pytree of arrays, to be kept and restored as a whole.

    Attributes:
        params: the parameters that are trained, by ONNX name. 16-bit ones are kept in float32 here.
        stats: running statistics of batch normalisation by ONNX name; empty unless ``batchnorm="train"``.
        opt_state: the optimizer's.
        step: steps done, int32.
        key: the random key from which each step draws its own.
    """

    params: dict[str, jax.Array]
    stats: dict[str, jax.Array]
    opt_state: Any
    step: jax.Array
    key: jax.Array
