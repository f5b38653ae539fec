"""Converts a model to a flax.nnx or equinox module, to be trained together with their own layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import InputTypeError, TrainingFormError, known_keywords
from ..model.model import Model
from .weights import select_trainable


@known_keywords
def to_nnx(model: Model, *, trainable: Any = None) -> Any:
    """The model as a ``flax.nnx.Module``, whose trainable parameters are ``nnx.Param``, by ONNX name in ``params``.

    The module is called like the model, with ``rngs=`` (an ``nnx.Rngs`` or a key) if it draws random numbers. It works
    under ``nnx.jit``, ``nnx.grad`` and other transformations, and inside other modules. ``module.to_model()`` returns
    the Model with the module's current parameters.

    Args:
        model: a Model. BatchNormalization and Dropout stay in inference form; ``finetune`` has a training form.
        trainable: which parameters to train, as in ``finetune``; by default the weights of layers. All others are
            constants.

    Raises:
        InputNameError, InputTypeError, TrainingFormError: for ``trainable``, as in ``finetune``.
        ImportError: flax is not installed.

    >>> import numpy as np, onnx2jax
    >>> module = onnx2jax.training.to_nnx(onnx2jax.convert(onnx2jax.demo_model()))
    >>> module(np.zeros((1, 1, 8, 8), np.float32)).shape
    (1, 10)
    """
    return _nnx()(model, _params(model, trainable))


@known_keywords
def to_equinox(model: Model, *, trainable: Any = None) -> Any:
    """The model as an ``equinox.Module``, whose trainable parameters are arrays, by ONNX name in ``params``.

    The module is called like the model, with ``key=`` if it draws random numbers. It works under ``eqx.filter_jit``,
    ``eqx.filter_grad`` and other transformations, and inside other modules: all of its arrays are trainable, and
    ``eqx.is_inexact_array`` selects them. ``module.to_model()`` returns the Model with the module's parameters.

    Args:
        model, trainable: as for ``to_nnx``.

    Raises:
        InputNameError, InputTypeError, TrainingFormError: for ``trainable``, as in ``finetune``.
        ImportError: equinox is not installed.

    >>> import numpy as np, onnx2jax
    >>> module = onnx2jax.training.to_equinox(onnx2jax.convert(onnx2jax.demo_model()))
    >>> module(np.zeros((1, 1, 8, 8), np.float32)).shape
    (1, 10)
    """
    return _equinox()(_params(model, trainable), _Static(model))


def _params(model: Model, trainable: Any) -> dict[str, Any]:
    """Copies of the parameters to train."""
    if not isinstance(model, Model):
        raise InputTypeError(
            f"a module is made of a Model, not {type(model).__name__}: to_nnx(onnx2jax.convert(source))"
        )
    try:
        names, _ = select_trainable(model.graph, model.params, trainable)
    except TrainingFormError:
        if trainable is not None:
            raise
        names = ()  # a module may have no parameters
    with compat.enable_x64():
        return {n: jnp.array(model.params[n]) for n in names}


@dataclass(frozen=True)
class _Static:
    """Hides a Model's own parameters from flax and equinox: a leaf, compared by identity of the model."""

    model: Model


@cache
def _nnx() -> Any:
    nnx = compat.optional("flax.nnx", "nnx")
    base: Any = nnx.Module

    class NnxModel(base):
        """A Model as a flax.nnx module. Created by ``onnx2jax.training.to_nnx``."""

        __qualname__ = "NnxModel"  # by which pickle imports it, though it is created on first use

        def __init__(self, model: Model, params: dict[str, Any]) -> None:
            self._static = _Static(model)
            self.params = nnx.Dict({n: nnx.Param(v) for n, v in params.items()})

        def __call__(self, /, *args: Any, rngs: Any = None, **named: Any) -> Any:
            rng = rngs() if callable(rngs) else rngs
            return self._static.model.apply({n: v[...] for n, v in self.params.items()}, *args, rng=rng, **named)

        def to_model(self) -> Model:
            """The Model with the module's current parameters."""
            return self._static.model.with_params({n: np.asarray(v[...]) for n, v in self.params.items()})

    return NnxModel


@cache
def _equinox() -> Any:
    eqx = compat.optional("equinox", "equinox")
    base: Any = eqx.Module

    class EquinoxModel(base):
        """A Model as an equinox module. Created by ``onnx2jax.training.to_equinox``."""

        __qualname__ = "EquinoxModel"

        params: dict[str, Any]
        static: _Static = eqx.field(static=True)

        def __call__(self, /, *args: Any, key: Any = None, **named: Any) -> Any:
            return self.static.model.apply(self.params, *args, rng=key, **named)

        def to_model(self) -> Model:
            """The Model with the module's parameters."""
            return self.static.model.with_params({n: np.asarray(v) for n, v in self.params.items()})

    return EquinoxModel


def __getattr__(name: str) -> Any:
    if name in ("NnxModel", "EquinoxModel"):
        return _nnx() if name == "NnxModel" else _equinox()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
