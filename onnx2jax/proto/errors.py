"""What can be wrong with a file. The errors of the compiler are in onnx2jax.errors, which holds these too."""

from __future__ import annotations


class OnnxError(Exception):
    """Base of every error that onnx2jax raises on purpose."""


class ModelError(OnnxError, ValueError):
    """The file is no ONNX model, or breaks a rule of the format."""


class ExternalDataError(ModelError):
    """A tensor's data in a file beside the model is out of bounds or out of reach."""


class ExternalDataNotFoundError(ExternalDataError, FileNotFoundError):
    """The file that should hold a tensor's data is not there."""
