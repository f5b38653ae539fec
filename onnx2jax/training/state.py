"""Training states: pytrees of everything that a step updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ModelError
from ..eval.values import widened
from ..ir.training_info import TrainingInfo
from .engine import State


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState(State):
    """The state of a TrainingModel: a pytree of arrays.

    Attributes:
        variables: the variables among the main graph's initializers, by name.
        own: for each training_info, the variables among its algorithm's own initializers, by name.
        key: the PRNG key of the next step.
    """

    variables: dict[str, jax.Array]
    own: tuple[dict[str, jax.Array], ...]
    key: Any


def assign(
    state: TrainingState, index: int, info: TrainingInfo, binding: Mapping[str, str], results: Mapping[str, Any]
) -> TrainingState:
    """The state after the simultaneous assignments of a binding.

    Raises:
        ModelError: a new value has another shape or dtype than its variable (rule TR-25).
    """
    variables, of_algorithm = dict(state.variables), dict(state.own[index])
    for name, output in binding.items():
        target = variables if name in variables else of_algorithm
        old, new = target[name], results[output]
        if not (hasattr(new, "dtype") and (new.shape, new.dtype) == (old.shape, old.dtype)):
            kind = f"{new.dtype}{list(new.shape)}" if hasattr(new, "dtype") else type(new).__name__
            raise ModelError(
                f"{info.path}: output {output!r} ({kind}) is assigned to variable {name!r}, which is "
                f"{old.dtype}{list(old.shape)}: a variable keeps its dtype and shape",
                rule="TR-25",
            )
        target[name] = jnp.asarray(new)
    return replace(state, variables=variables, own=(*state.own[:index], of_algorithm, *state.own[index + 1 :]))


def widen_all(values: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The variables in their stored dtypes, which a caller in 32-bit mode may have narrowed."""
    return {n: widened(v, stored[n].dtype) for n, v in values.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FineTuningState(State):
    """The state of a FineTuning: a pytree of arrays, to be checkpointed as a whole.

    Attributes:
        params: the trained parameters, by ONNX name; 16-bit ones are held in float32.
        stats: running statistics of BatchNormalization, by ONNX name; empty unless ``batchnorm="train"``.
        opt_state: the optimizer's state.
        step: int32, the number of steps taken.
        key: the PRNG key from which the key of each step is derived.
        loss_scale: by what the loss is multiplied before it is differentiated; None unless the model computes in
            float16.
    """

    params: dict[str, jax.Array]
    stats: dict[str, jax.Array]
    opt_state: Any
    step: jax.Array
    key: jax.Array
    loss_scale: jax.Array | None = None
