"""Message classes of the ONNX format.

They have a descriptor pool of their own, so they do not conflict with those of the ``onnx`` package. They are built at
import time from a serialized descriptor (onnx.binpb, compiled from onnx.proto), because generated code works with one
major version of protobuf only.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import get_data
from typing import Any


def _empty_pool() -> tuple[Any, Callable[[Any], Any]]:
    """An empty descriptor pool, and the function from a message's descriptor to its class.

    Both of protobuf's C library: its public modules ``descriptor_pool`` and ``message_factory``, which do the same,
    import the messages in Python too, and that takes longer than converting a small file.
    """
    try:
        from google.protobuf.descriptor import _message as library  # type: ignore[attr-defined]
        from google.protobuf.message import Message
        from google.protobuf.pyext.cpp_message import GeneratedProtocolMessageType  # type: ignore[import-not-found]

        pool = library.DescriptorPool()
    except (ImportError, AttributeError):
        from google.protobuf import descriptor_pool, message_factory

        return descriptor_pool.DescriptorPool(), message_factory.GetMessageClass
    classes: dict[str, Any] = {}

    def class_of(descriptor: Any) -> Any:
        if descriptor.full_name not in classes:
            members = {"DESCRIPTOR": descriptor, "__module__": None}
            classes[descriptor.full_name] = GeneratedProtocolMessageType(descriptor.name, (Message,), members)
            for field in descriptor.fields:
                if field.message_type:
                    class_of(field.message_type)
        return classes[descriptor.full_name]

    return pool, class_of


_POOL, _class_of = _empty_pool()
_POOL.AddSerializedFile(get_data(__package__, "onnx.binpb"))


def _message(name: str) -> Any:
    return _class_of(_POOL.FindMessageTypeByName(f"onnx2jax.{name}"))


ModelProto = _message("ModelProto")
GraphProto = _message("GraphProto")
NodeProto = _message("NodeProto")
FunctionProto = _message("FunctionProto")
AttributeProto = _message("AttributeProto")
TensorProto = _message("TensorProto")
SparseTensorProto = _message("SparseTensorProto")
TypeProto = _message("TypeProto")
ValueInfoProto = _message("ValueInfoProto")
TrainingInfoProto = _message("TrainingInfoProto")
OperatorSetProto = _message("OperatorSetProto")
SequenceProto = _message("SequenceProto")
MapProto = _message("MapProto")
OptionalProto = _message("OptionalProto")
