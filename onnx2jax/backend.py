"""ONNX's backend interface (``onnx.backend.base``), as functions of this module.

It needs no onnx: models are whatever ``onnx2jax.convert`` takes, a ``ModelProto`` among them.

>>> import numpy as np, onnx2jax
>>> prepared = onnx2jax.backend.prepare(onnx2jax.demo_model(), "CPU")
>>> prepared.run([np.zeros((2, 1, 8, 8), np.float32)])[0].shape
(2, 10)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from .errors import InputNameError, OnnxError, UnsupportedError
from .model.convert import convert
from .model.model import Model
from .proto.messages import ModelProto, NodeProto
from .proto.types import to_code

NEWEST: Final = 28
"""The default ``opset_version`` of single nodes."""
PLATFORMS: Final = {"CPU": "cpu", "CUDA": "gpu", "GPU": "gpu", "TPU": "tpu"}
"""JAX's names for ONNX's devices."""


class PreparedModel:
    """A model on a device, returned by ``prepare``.

    Attributes:
        model: the Model.
    """

    def __init__(self, model: Model, device: jax.Device) -> None:
        self.model: Model = model
        self._device = device

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """The outputs as NumPy.

        Args:
            inputs: a list of arrays in the order of the model's inputs, a dict of them by name, or one array.

        Raises:
            InputError: they do not match the inputs.
        """
        if not isinstance(inputs, Mapping):
            values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
            names = [v.name for v in (*self.model.inputs, *self.model.optional.values())]
            if len(values) > len(names):
                raise InputNameError(f"the model has {len(names)} inputs ({', '.join(names)}); {len(values)} are given")
            inputs = dict(zip(names, values, strict=False))
        with jax.default_device(self._device):
            return tuple(self.model.run(None, inputs))


def is_compatible(model: Any, device: str = "CPU", **_: Any) -> bool:
    """Whether a model can be prepared: it is valid and all its operators are supported."""
    try:
        prepare(model, device)
    except OnnxError:
        return False
    return True


def prepare(model: Any, device: str = "CPU", **options: Any) -> PreparedModel:
    """A model prepared for a device.

    Args:
        model: what ``onnx2jax.convert`` takes.
        device: "CPU", "CUDA" or "TPU", with a number behind a colon if there are several.
        **options: keywords of ``onnx2jax.convert``.

    Raises:
        UnsupportedError: JAX has no such device, or some operators are unsupported.
        ModelError: the model is invalid.
    """
    return PreparedModel(convert(model, **options), _device(device))


def run_model(model: Any, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
    """The outputs of a model: ``prepare`` followed by ``run``."""
    return prepare(model, device, **options).run(inputs)


def run_node(
    node: Any, inputs: Sequence[Any], device: str = "CPU", outputs_info: Any = None, **options: Any
) -> tuple[Any, ...]:
    """The outputs of a single node.

    Args:
        node: a NodeProto.
        inputs: arrays for those of its inputs that have a name, in order.
        device: as for ``prepare``.
        outputs_info: ignored; types are inferred from the inputs.
        **options: ``opset_version``, and keywords of ``onnx2jax.convert``.

    >>> from onnx import helper
    >>> import numpy as np, onnx2jax
    >>> onnx2jax.backend.run_node(helper.make_node("Neg", ["x"], ["y"]), [np.ones(2, np.float32)])
    (array([-1., -1.], dtype=float32),)
    """
    del outputs_info
    message = ModelProto(ir_version=10)
    message.opset_import.add(domain="", version=options.pop("opset_version", NEWEST))
    copied = NodeProto.FromString(node.SerializeToString())
    if copied.domain:
        message.opset_import.add(domain=copied.domain, version=1)
    message.graph.name = "node"
    message.graph.node.append(copied)
    names = list(dict.fromkeys(filter(None, copied.input)))
    for name, value in zip(names, inputs, strict=True):
        message.graph.input.add(name=name).type.tensor_type.elem_type = to_code(np.asarray(value).dtype)
    for name in filter(None, copied.output):
        message.graph.output.add(name=name)
    return run_model(message.SerializeToString(), dict(zip(names, inputs, strict=True)), device, **options)


def supports_device(device: str) -> bool:
    """Whether JAX has a device of this kind here."""
    try:
        _device(device)
    except UnsupportedError:
        return False
    return True


def _device(name: str) -> jax.Device:
    kind, _, number = name.partition(":")
    try:
        return jax.devices(PLATFORMS[kind])[int(number or 0)]
    except (KeyError, IndexError, ValueError, RuntimeError) as e:
        devices = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
        raise UnsupportedError(f"there is no device {name!r}; JAX has {devices}") from e
