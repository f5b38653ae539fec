"""A model as a module of flax.nnx or of equinox: its weights are theirs, to be trained among layers of their own."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import TrainingFormError
from ..model.model import Model
from .finetune_arguments import chosen


def to_nnx(model: Model, *, trainable: Any = None) -> Any:
    """The model as a ``flax.nnx.Module``: what is trained of it are ``nnx.Param``, by ONNX name in ``module.params``.

    A call is that of the model, with ``rngs=`` (an ``nnx.Rngs`` or a key) where it draws random numbers. It works under
    ``nnx.jit``, ``nnx.grad`` and the others, and as a part of other modules. ``module.to_model()`` is the Model with
    the weights that the module has by then, to be saved.

    Args:
        model: what ``convert`` made. BatchNormalization and Dropout stay in the form of inference; ``finetune`` has
            others.
        trainable: which parameters, as in ``finetune``; without it weights of layers. All else is constant.

    Raises:
        InputNameError, InputTypeError, TrainingFormError: as in ``finetune``, of ``trainable``.
        ImportError: flax is not installed.

    >>> import numpy as np, onnx2jax
    >>> module = onnx2jax.to_nnx(onnx2jax.convert(onnx2jax.demo_model()))
    >>> module(np.zeros((1, 1, 8, 8), np.float32)).shape
    (1, 10)
    """
    return _nnx()(model, _params(model, trainable))


def to_equinox(model: Model, *, trainable: Any = None) -> Any:
    """The model as an ``equinox.Module``: what is trained of it are arrays, by ONNX name in ``module.params``.

    A call is that of the model, with ``key=`` where it draws random numbers. It works under ``eqx.filter_jit``,
    ``eqx.filter_grad`` and the others, and as a part of other modules: every array in it is trained, and
    ``eqx.is_inexact_array`` finds them. ``module.to_model()`` is the Model with the weights of the module, to be saved.

    Args:
        model, trainable: as for ``to_nnx``.

    Raises:
        InputNameError, InputTypeError, TrainingFormError: as in ``finetune``, of ``trainable``.
        ImportError: equinox is not installed.

    >>> import numpy as np, onnx2jax
    >>> module = onnx2jax.to_equinox(onnx2jax.convert(onnx2jax.demo_model()))
    >>> module(np.zeros((1, 1, 8, 8), np.float32)).shape
    (1, 10)
    """
    return _equinox()(_params(model, trainable), model)


def _params(model: Model, trainable: Any) -> dict[str, Any]:
    """Arrays of their own for what is trained."""
    try:
        names, _ = chosen(model.graph, model.params, trainable)
    except TrainingFormError:
        if trainable is not None:
            raise
        names = ()  # a module may do without
    with compat.enable_x64():
        return {n: jnp.array(model.params[n]) for n in names}


@cache
def _nnx() -> Any:
    nnx = compat.optional("flax.nnx", "nnx")
    base: Any = nnx.Module

    class NnxModel(base):
        """A converted model. Made by ``onnx2jax.to_nnx``."""

        def __init__(self, model: Model, params: dict[str, Any]) -> None:
            self.model = model
            self.params = nnx.Dict({n: nnx.Param(v) for n, v in params.items()})

        def __call__(self, /, *args: Any, rngs: Any = None, **named: Any) -> Any:
            rng = rngs() if callable(rngs) else rngs
            return self.model.apply({n: v[...] for n, v in self.params.items()}, *args, rng=rng, **named)

        def to_model(self) -> Model:
            """The Model with the weights that this module has now."""
            return self.model.with_params({n: np.asarray(v[...]) for n, v in self.params.items()})

    return _public(NnxModel)


@cache
def _equinox() -> Any:
    eqx = compat.optional("equinox", "equinox")
    base: Any = eqx.Module

    class EquinoxModel(base):
        """A converted model. Made by ``onnx2jax.to_equinox``."""

        params: dict[str, Any]
        model: Model = eqx.field(static=True)

        def __call__(self, /, *args: Any, key: Any = None, **named: Any) -> Any:
            return self.model.apply(self.params, *args, rng=key, **named)

        def to_model(self) -> Model:
            """The Model with the weights of this module."""
            return self.model.with_params({n: np.asarray(v) for n, v in self.params.items()})

    return _public(EquinoxModel)


def _public(made: Any) -> Any:
    """A class that pickle finds, although it is made when it is first wanted."""
    made.__module__, made.__qualname__ = __name__, made.__name__
    return made


def __getattr__(name: str) -> Any:
    if name in ("NnxModel", "EquinoxModel"):
        return _nnx() if name == "NnxModel" else _equinox()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
