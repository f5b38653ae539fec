"""A drop-in ``InferenceSession`` and what it takes, for code written for onnxruntime."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import jax

from .errors import UnsupportedError, did_you_mean
from .ir.file import check_keywords
from .model.convert import convert
from .model.model import Model
from .proto.types import (
    ELEMENT_TYPES,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
    ValueInfo,
    to_code,
)

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

_LOGGING: Final = ("log_severity_level", "log_verbosity_level", "logid")
_THREADING: Final = ("intra_op_num_threads", "inter_op_num_threads", "use_per_session_threads")
_DEVICES: Final = "devices are chosen by jax.default_device, or InferenceSession(..., mesh=mesh)"
_PROFILE: Final = "session.model.profile(...) of inputs is a profile by node"
_LOGS: Final = "JAX logs by Python's logging, logging.getLogger('jax').setLevel('ERROR')"
IGNORED: Final = {
    "*": "of onnxruntime's own classes nothing is read, onnx2jax.session.SessionOptions has effect",
    "optimized_model_filepath": "onnx2jax.save(session.model.simplified(), path) writes a smaller file",
    **dict.fromkeys(("enable_profiling", "profile_file_prefix"), _PROFILE),
    **dict.fromkeys(_THREADING, "XLA has as many threads as NPROC in the environment says"),
    **dict.fromkeys(_LOGGING, _LOGS),
}
"""Options without effect -> what to use."""
_ARRAYS: Final = (
    "JAX arrays stay on their device without it. Call the model, session.model(...), with arrays from jax.device_put; "
    "its results stay on the device, too"
)
_VALUES: Final = "session.model.with_params({name: array}) has other values of initializers"
_ONE: Final = "there is one provider, JAX's: leave it out"
INSTEAD: Final = {
    "OrtValue": _ARRAYS,
    "IOBinding": _ARRAYS,
    "io_binding": _ARRAYS,
    "run_with_iobinding": _ARRAYS,
    "run_with_ort_values": _ARRAYS,
    "run_async": "session.model(...) returns JAX arrays before they are computed; jax.block_until_ready waits",
    "end_profiling": _PROFILE,
    "get_profiling_start_time_ns": _PROFILE,
    "disable_fallback": _ONE,
    "enable_fallback": _ONE,
    "add_provider": _ONE,
    "add_initializer": _VALUES,
    "add_external_initializers": _VALUES,
    "add_free_dimension_override_by_denotation": "add_free_dimension_override_by_name takes the names of dimensions, "
    "as session.get_inputs() has them",
    "register_custom_ops_library": "it holds machine code for onnxruntime, write its operators with onnx2jax.ops.op",
    "set_default_logger_severity": _LOGS,
    "set_default_logger_verbosity": _LOGS,
    "set_seed": "session.run draws other random numbers in each call, session.model.run(None, feeds, rng=0) the same",
    "disable_telemetry_events": "nothing is sent to anybody: leave it out",
    "capi": "errors are those of onnx2jax.errors",
    "preload_dlls": "jax loads CUDA's libraries itself: leave it out",
    "OrtDevice": _ARRAYS,
    "__version__": "onnx2jax.__version__ is that of this package",
}
"""Attributes of onnxruntime, its sessions and options -> what to use."""


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


class _UnsupportedName(UnsupportedError, AttributeError):
    """What onnxruntime has and this interface lacks; ``hasattr`` is False for it."""


def _missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    if name in INSTEAD:
        return _UnsupportedName(f"{owner}.{name} is unsupported: {INSTEAD[name]}")
    return AttributeError(f"{owner} has no attribute {name!r}{did_you_mean(name, known)}")


class _Interface:
    """Base of classes of onnxruntime's names: what they lack is answered with what to use."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _missing(type(self).__name__, name, dir(self))


class _Options(_Interface):
    """Options that may be set: those of onnxruntime.

    Raises:
        AttributeError: another attribute is set, such as a misspelt one.
    """

    _names: frozenset[str]

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names and not name.startswith("_"):
            near = did_you_mean(name, self._names)
            raise AttributeError(f"{type(self).__name__} has no option {name!r}{near or f': {sorted(self._names)}'}")
        super().__setattr__(name, value)

    def _ignored(self) -> list[str]:
        """The options that were set and have no effect."""
        return sorted([n for n in vars(self) if n[0] != "_" and n != "graph_optimization_level"] + [*self._entries])


class RunOptions(_Options):
    """Options of a run: onnxruntime's may be set, and are ignored with one warning for each."""

    _names = frozenset({*_LOGGING, "only_execute_path_to_fetches", "terminate", "training_mode"})

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Ignored, with one warning."""
        self._entries[key] = value


class SessionOptions(_Options):
    """Options of a session: those below have effect; onnxruntime's others are ignored with one warning for each.

    Attributes:
        graph_optimization_level: ``ORT_DISABLE_ALL`` is ``convert(..., optimize=False)``.

    >>> import onnx2jax
    >>> options = onnx2jax.session.SessionOptions()
    >>> options.intra_op_num_threads = 1
    >>> options.add_free_dimension_override_by_name("batch", 8)
    """

    _names = frozenset(
        {
            *IGNORED,
            *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
            *("graph_optimization_level", "use_deterministic_compute"),
        }
        - {"*"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self._dims: dict[str, int] = {}

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Fix a dimension variable, as ``convert(..., dims={name: value})`` does."""
        self._dims[name] = value

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Ignored, with one warning."""
        self._entries[key] = value

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


class InferenceSession(_Interface):
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

    _warned: ClassVar[set[str]] = set()
    """The ignored options that a warning has named."""

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        check_keywords(options, InferenceSession, convert)
        if isinstance(sess_options, SessionOptions):
            options = sess_options._options() | options
        self.model: Model = convert(path_or_bytes, **options)
        self._sess_options = SessionOptions() if sess_options is None else sess_options
        self._warn_once(providers, provider_options, sess_options=sess_options)

    @staticmethod
    def _warn_once(
        providers: Sequence[Any] | None = None,
        provider_options: Any = None,
        **options: SessionOptions | RunOptions | None,
    ) -> None:
        default = {PROVIDER} | ({"CPUExecutionProvider"} if jax.default_backend() == "cpu" else set())
        ignored = {
            f"{kind}.{name}": IGNORED.get(name, "")
            for kind, value in options.items()
            for name in (value._ignored() if isinstance(value, _Options) else ["*"] * (value is not None))
        }
        if {p if isinstance(p, str) else p[0] for p in providers or ()} - default:
            ignored["providers"] = _DEVICES
        if any(provider_options or ()):
            ignored["provider_options"] = _DEVICES
        if new := {name: fix for name, fix in ignored.items() if name not in InferenceSession._warned}:
            InferenceSession._warned.update(new)
            fixes = "; ".join(dict.fromkeys(filter(None, new.values())))
            warnings.warn(
                f"onnx2jax.session.InferenceSession ignores {', '.join(new)}{': ' * bool(fixes)}{fixes}", stacklevel=3
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

    def get_session_options(self) -> Any:
        """The ``sess_options``."""
        return self._sess_options

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of the provider: none."""
        return {PROVIDER: {}}

    def set_providers(self, providers: Sequence[Any], provider_options: Any = None) -> None:
        """Ignored, with one warning."""
        self._warn_once(providers, provider_options)


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


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise _missing("onnx2jax.session", name, __all__)
