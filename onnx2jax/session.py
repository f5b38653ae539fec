"""A drop-in ``InferenceSession`` and what it takes, for code written for onnxruntime."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from .errors import UnsupportedError
from .ir.file import check_keywords
from .model.convert import convert
from .model.model import Model
from .proto.dtypes import ELEMENT_TYPES, to_code
from .proto.types import MapType, OptionalType, SequenceType, SparseTensorType, TensorType, ValueInfo

__all__ = [
    "ExecutionMode",
    "GraphOptimizationLevel",
    "InferenceSession",
    "RunOptions",
    "SessionOptions",
    "get_available_providers",
    "get_device",
]

PROVIDER: Final = "JaxExecutionProvider"


class GraphOptimizationLevel(enum.IntEnum):
    """onnxruntime's levels; here all but the first are ``convert(..., optimize=True)``."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(enum.IntEnum):
    """onnxruntime's modes, without effect here: XLA schedules a program."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class RunOptions:
    """Options of a run; any attribute may be set, and is ignored with one warning."""


class SessionOptions:
    """Options of a session: those below have effect, any other may be set, and is ignored with one warning.

    Attributes:
        graph_optimization_level: ``ORT_DISABLE_ALL`` is ``convert(..., optimize=False)``.

    >>> import onnx2jax
    >>> options = onnx2jax.session.SessionOptions()
    >>> options.intra_op_num_threads = 1
    >>> options.add_free_dimension_override_by_name("batch", 8)
    """

    def __init__(self) -> None:
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self._dims: dict[str, int] = {}

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Fix a dimension variable, as ``convert(..., dims={name: value})`` does."""
        self._dims[name] = value

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Ignored, with one warning."""
        setattr(self, key, value)

    def register_custom_ops_library(self, path: str) -> None:
        """Unsupported.

        Raises:
            UnsupportedError: always, with the alternative.
        """
        raise UnsupportedError(f"{path} holds machine code for onnxruntime: write its operators with onnx2jax.ops.op")

    def _options(self) -> dict[str, Any]:
        """The keywords of ``convert``."""
        disabled = self.graph_optimization_level == GraphOptimizationLevel.ORT_DISABLE_ALL
        return ({"optimize": False} if disabled else {}) | ({"dims": self._dims} if self._dims else {})


def get_available_providers() -> list[str]:
    """The only provider: JAX."""
    return [PROVIDER]


def get_device() -> str:
    """Where JAX runs a model by default: "CPU", "GPU" or "TPU"."""
    return jax.default_backend().upper()


@dataclass(frozen=True)
class NodeArg:
    """An input or output: ``shape`` holds extents, dimension variables and None; ``type`` is onnxruntime's name."""

    name: str
    shape: list[int | str | None]
    type: str


@dataclass(frozen=True)
class ModelMetadata:
    """Descriptive fields of the file."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """A model with the calls of ``onnxruntime.InferenceSession``, run by JAX.

    Args:
        path_or_bytes: the file, or its bytes.
        sess_options: a ``SessionOptions``; onnxruntime's own is ignored, with one warning.
        providers, provider_options: accepted and ignored, with one warning if they request something else than JAX's
            defaults. Choose devices by ``jax.default_device`` or ``convert(..., mesh=)``.
        **options: keywords of ``onnx2jax.convert``.

    Attributes:
        model: the Model, for ``grad``, ``vmap``, and arrays that stay on their device.

    >>> import numpy as np, onnx2jax
    >>> session = onnx2jax.session.InferenceSession(onnx2jax.demo_model(), providers=["CPUExecutionProvider"])
    >>> session.get_inputs()[0]
    NodeArg(name='image', shape=['batch', 1, 8, 8], type='tensor(float)')
    >>> (logits,) = session.run(None, {"image": np.zeros((2, 1, 8, 8), np.float32)})
    >>> logits.shape
    (2, 10)
    """

    _warned = False

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        check_keywords(options, InferenceSession, convert)
        own = sess_options._options() if isinstance(sess_options, SessionOptions) else {}
        self.model: Model = convert(path_or_bytes, **{**own, **options})
        self._warn_once(providers, provider_options, sess_options=sess_options)

    @staticmethod
    def _warn_once(
        providers: Sequence[Any] | None = None,
        provider_options: Any = None,
        **options: SessionOptions | RunOptions | None,
    ) -> None:
        own = {PROVIDER} | ({"CPUExecutionProvider"} if jax.default_backend() == "cpu" else set())
        ignored = [f"{kind}.{name}" for kind, given in options.items() for name in _ignored(given)]
        ignored += ["providers"] * bool({p if isinstance(p, str) else p[0] for p in providers or ()} - own)
        ignored += ["provider_options"] * any(provider_options or ())
        if ignored and not InferenceSession._warned:
            InferenceSession._warned = True
            warnings.warn(
                f"onnx2jax.session.InferenceSession ignores {', '.join(ignored)}: JAX runs the model on "
                f"{jax.default_backend()}. To choose devices: jax.default_device, or InferenceSession(..., mesh=mesh)",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return f"InferenceSession({self.model!r})"

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """The outputs as NumPy arrays; all of them if ``output_names`` is None or empty.

        Raises:
            InputError: the feeds do not fit the model.
        """
        if run_options is not None:
            self._warn_once(run_options=run_options)
        return self.model.run(output_names or None, input_feed)

    def get_inputs(self) -> list[NodeArg]:
        """The required inputs."""
        return list(map(_node_arg, self.model.inputs))

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in order."""
        return list(map(_node_arg, self.model.outputs))

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs with a default."""
        return list(map(_node_arg, self.model.optional.values()))

    def get_modelmeta(self) -> ModelMetadata:
        """The descriptive fields of the file."""
        assert self.model.origin is not None
        m = self.model.origin.open().message
        return ModelMetadata(
            producer_name=m.producer_name,
            graph_name=m.graph.name,
            domain=m.domain,
            description=m.doc_string,
            graph_description=m.graph.doc_string,
            version=m.model_version,
            custom_metadata_map={p.key: p.value for p in m.metadata_props},
        )

    def get_providers(self) -> list[str]:
        """The only provider: JAX."""
        return get_available_providers()

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of the provider: none."""
        return {PROVIDER: {}}

    def set_providers(self, providers: Sequence[Any], provider_options: Any = None) -> None:
        """Ignored, with one warning."""
        self._warn_once(providers, provider_options)

    def io_binding(self) -> Any:
        """Unsupported.

        Raises:
            UnsupportedError: always, with the alternative.
        """
        raise self._no_binding("io_binding")

    def run_with_iobinding(self, *_: Any) -> Any:
        """Unsupported, like ``io_binding``."""
        raise self._no_binding("run_with_iobinding")

    def run_with_ort_values(self, *_: Any) -> Any:
        """Unsupported, like ``io_binding``."""
        raise self._no_binding("run_with_ort_values")

    def _no_binding(self, what: str) -> UnsupportedError:
        names = ", ".join(v.name for v in self.model.inputs)
        return UnsupportedError(
            f"{what} is unsupported: JAX arrays stay on their device without it. Call the model, "
            f"session.model({names}), with arrays from jax.device_put; its results stay on the device, too"
        )


def _ignored(options: Any) -> list[str]:
    """The attributes of options that have no effect; of onnxruntime's own, whose attributes all have a value, "*"."""
    if not isinstance(options, SessionOptions | RunOptions | None):
        return ["*"]
    return sorted(vars(options or RunOptions()).keys() - {"graph_optimization_level", "_dims"})


def _node_arg(info: ValueInfo) -> NodeArg:
    return NodeArg(info.name, list(info.shape or ()), _type_name(info.type))


def _type_name(kind: Any) -> str:
    """A type in onnxruntime's notation.

    >>> import numpy as np
    >>> _type_name(SequenceType(MapType(np.dtype("int64"), TensorType(np.dtype("float32"), ()))))
    'seq(map(int64,tensor(float)))'
    """
    match kind:
        case SparseTensorType():
            return f"sparse_tensor({_element(kind.dtype)})"
        case TensorType():
            return f"tensor({_element(kind.dtype)})"
        case SequenceType():
            return f"seq({_type_name(kind.element)})"
        case OptionalType():
            return f"optional({_type_name(kind.element)})"
        case MapType():
            return f"map({_element(kind.key)},{_type_name(kind.value)})"
        case _:
            return str(kind or "")


def _element(dtype: Any) -> str:
    return ELEMENT_TYPES[to_code(dtype)].name.lower()
