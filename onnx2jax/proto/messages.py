"""Message classes of the ONNX format.

They have a descriptor pool of their own, so they do not conflict with those of the ``onnx`` package. They are built at
import time from a serialized descriptor (onnx.binpb, compiled from onnx.proto), because generated code works with one
major version of protobuf only.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("onnx.binpb").read_bytes()).file:
    _POOL.AddSerializedFile(_file.SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"onnx2jax.{name}"))


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
