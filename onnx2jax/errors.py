"""The errors of onnx2jax. Each derives from OnnxError and from the built-in a caller would expect."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BucketError",
    "CacheError",
    "CheckpointError",
    "ExternalDataError",
    "ExternalDataNotFoundError",
    "InputError",
    "InputNameError",
    "InputShapeError",
    "InputTypeError",
    "InputValueError",
    "KnownValueError",
    "LossError",
    "ModelError",
    "OnnxError",
    "OperatorError",
    "ProcessError",
    "RandomKeyError",
    "RebatchError",
    "ShardingError",
    "TrainingFormError",
    "UnsupportedError",
    "UnsupportedOperatorError",
]


def with_rules(text: str, *rules: str) -> str:
    """A message that ends with the rules of the format it is about.

    >>> with_rules("the graph has no name", "MV-04")
    'the graph has no name (rule MV-04)'
    """
    return f"{text} (rule{'s' * (len(rules) > 1)} {', '.join(rules)})" if rules else text


class OnnxError(Exception):
    """Base of every error that onnx2jax raises on purpose.

    Attributes:
        message: what is wrong, where, and how to mend it.
        rules: the rules of the format that are broken, as in docs/conformance.md; the text ends with them.
    """

    def __init__(self, message: str = "", *, rule: str | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.rules = (rule,) if isinstance(rule, str) else rule

    def __str__(self) -> str:
        return with_rules(self.message, *self.rules)


class ModelError(OnnxError, ValueError):
    """The file is no ONNX model, or breaks a rule of the format."""


class ExternalDataError(ModelError):
    """A tensor's data in a file beside the model is out of bounds or out of reach."""


class ExternalDataNotFoundError(ExternalDataError, FileNotFoundError):
    """The file that should hold a tensor's data is not there."""


class UnsupportedError(OnnxError, NotImplementedError):
    """The model is legal, but something in it is not implemented."""


class UnsupportedOperatorError(UnsupportedError):
    """The model uses operators that nothing serves; the message lists all of them."""


class InputError(OnnxError):
    """A call does not fit the model's declared inputs."""


class InputNameError(InputError, TypeError):
    """An input is missing, unknown, or given twice."""


class InputTypeError(InputError, TypeError):
    """An input has another element type than declared."""


class InputShapeError(InputError, ValueError):
    """An input has another rank or extent than declared, or two inputs disagree about a dimension variable."""


class InputValueError(InputError, ValueError):
    """An argument has a value that it cannot have, such as a token that is in no vocabulary."""


class OperatorError(OnnxError, ValueError):
    """An operator refuses its inputs or attributes; the message names the node, opset, shapes and dtypes."""


class KnownValueError(OnnxError, TypeError):
    """A value that must be known before compiling is traced.

    Operators raise it with a message alone, and the evaluator says where. Known values would cure it: a Loop around
    unrolls, a program may run the node on the host.

    Attributes:
        values: names of the graph's values that it may be.
        node: the node that needs it.
    """

    def __init__(self, message: str = "", values: tuple[str, ...] = (), node: Any = None) -> None:
        super().__init__(message)
        self.values, self.node = values, node


class CheckpointError(OnnxError, ValueError):
    """A checkpoint is damaged, or does not fit the state for which it is loaded."""


class RandomKeyError(OnnxError, TypeError):
    """The model draws random numbers and no key was given."""


class BucketError(OnnxError, ValueError):
    """Padding to a bucket changes an output of the model."""


class CacheError(OnnxError, ValueError):
    """A decoder's logits with a fixed-length KV cache differ from those with a growing one."""


class RebatchError(OnnxError, ValueError):
    """A model's batch size cannot be changed, or not with certainty."""


class ShardingError(OnnxError, ValueError):
    """A sharding does not fit the mesh or an array, or a device configuration the model."""


class ProcessError(OnnxError, RuntimeError):
    """The processes of one program do not do the same: they differ in a file or in arrays, or one of them stopped."""


class LossError(OnnxError, TypeError):
    """A loss is not one floating number."""


class TrainingFormError(OnnxError, ValueError):
    """A model cannot be trained in the way asked for: nothing to train, or no training form of its nodes."""
