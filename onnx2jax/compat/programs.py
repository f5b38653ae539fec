"""Compiled programs: where they run, what they cost, how they are stored; and calls of XLA's own kernels."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.version import __version__ as jaxlib_version

from .config import keeps_programs


@contextmanager
def profiled() -> Iterator[list[bytes]]:
    """A scope that JAX's profiler records; afterwards the list holds what it wrote, an XSpace for each process."""
    written: list[bytes] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield written
        written += [path.read_bytes() for path in sorted(Path(folder).rglob("*.xplane.pb"))]


annotation: Final = jax.profiler.TraceAnnotation
"""A scope on the host that profiles show by name."""


def cost_analysis(compiled: Any) -> Mapping[str, float]:
    """XLA's counts for a compiled program, on one device, such as "flops"; none where it gives none."""
    try:
        counts = compiled.cost_analysis() or {}
    except (AttributeError, NotImplementedError):
        counts = {}
    return counts if counts.get("flops") else _of_modules(compiled) or counts


def _of_modules(compiled: Any) -> Mapping[str, float]:
    """The counts that XLA makes of a program for CUDA, which ``cost_analysis`` leaves empty."""
    try:
        from jaxlib import _jax

        module = compiled.runtime_executable().hlo_modules()[0]
        return dict(_jax.hlo_module_cost_analysis(jax.local_devices(backend="cpu")[0].client, module))
    except (ImportError, AttributeError, NotImplementedError, IndexError, TypeError, RuntimeError):
        return {}


def unwrapped(compiled: Any) -> Callable[..., Any]:
    """A compiled function without its Python wrapper, which takes 1 to 2 us a call; with it where JAX differs."""
    try:
        return compiled._executable.create_cpp_call(compiled._params) or compiled
    except (AttributeError, TypeError):
        return compiled


def dump_compiled(compiled: Any) -> Any:
    """A compiled function as something that can be pickled, for ``load_compiled`` on such a machine; None at times.

    With JAX's compilation cache the executable may have been read from there. Serialized again it lacks functions,
    which only its calls report: NOT_FOUND.
    """
    if keeps_programs():
        return None
    try:
        from jax.experimental import serialize_executable

        return serialize_executable.serialize(compiled)
    except (ImportError, AttributeError, NotImplementedError, RuntimeError, ValueError):  # it may hold arrays
        return None


def has_narrow_arguments(lowered: Any) -> bool:
    """Whether arguments of a lowered or compiled function have 2 or 4 bits: compiled, it refuses their layouts."""
    types = {aval.dtype for aval in jax.tree.leaves(lowered.in_avals)}
    return any(jnp.iinfo(t).bits < 8 for t in types if jnp.issubdtype(t, np.integer)) or any(
        jnp.finfo(t).bits < 8 for t in types if jnp.issubdtype(t, np.floating)
    )


def devices_of(compiled: Any) -> list[int]:
    """The numbers of the devices that a compiled function runs on."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return sorted({device.id for sharding in shardings for device in sharding.device_set})


def load_compiled(dumped: Any, *devices: Any) -> Any:
    """The compiled function, on these devices in the order of its program; on the first one when left out."""
    from jax.experimental import serialize_executable

    code, arguments, results = dumped
    devices = devices or (jax.local_devices()[0],)
    return serialize_executable.deserialize_and_load(
        code, arguments, results, backend=devices[0].client, execution_devices=devices
    )


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices of a lowered function's program, in its order; none where JAX differs."""
    try:
        return tuple(lowered._lowering._device_list)
    except (AttributeError, TypeError):
        return ()


_OF_PROCESS: Final = ("host_callbacks", "keepalive", "ordered_effects", "unordered_effects", "mut")
"""Arguments of compilation that tie a program to its process."""
_DECISIVE: Final = (
    "committed", "context_mesh", "global_in_avals", "global_out_avals", "in_layouts", "in_shardings", "kept_var_idx",
    "out_layouts", "out_shardings",
)  # fmt: skip
"""Arguments of compilation that the module does not show, weak types among them."""


def calls_process(text: str) -> bool:
    """Whether a lowered program, by its text, calls Python or oneDNN, which no other process can load."""
    return "callback" in text or "onednn" in text


def lowered_key(lowered: Any) -> tuple[str, ...] | None:
    """Texts that decide what a lowered function compiles to, its constants included.

    None if that is bound to this process, as Python callbacks are, or where JAX differs.
    """
    try:
        lowering, devices = lowered._lowering, lowered_devices(lowered)
        compile_args = lowering.compile_args
        is_bound = lowering.const_args or any(compile_args[n] for n in _OF_PROCESS)
        if not devices or is_bound or jax.process_count() > 1:
            return None
        arguments = jax.tree.leaves(lowered.args_info)  # those that the module drops as well
        options = lowering._compiler_options_kvs, lowering._donated_invars
        decisive = [*options, arguments, *(compile_args[n] for n in _DECISIVE)]
    except (AttributeError, KeyError, TypeError):
        return None
    if calls_process(text := lowered.as_text()):
        return None
    kinds = [(d.id, d.platform, d.device_kind) for d in devices]
    return text, repr(decisive), repr(kinds), devices[0].client.platform_version


_making_device = threading.Lock()


def synchronous_device() -> Any:
    """A CPU whose programs run in the thread that calls them; None where this jaxlib makes none.

    Those of ``jax.devices()`` hand programs of more than 1000 operations to a thread of XLA's. JAX 0.10.0 writes an
    error to the terminal, wrongly, for each program that is loaded there.
    """
    with _making_device:  # a program runs on the device that it was loaded for alone: threads have to share one
        return _synchronous_device()


@functools.cache
def _synchronous_device() -> Any:
    if jax.__version_info__ < (0, 10, 2):
        return None
    try:
        from jaxlib import xla_client

        client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=1)
        return client.devices()[0]
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


def merges_constants() -> bool:
    """Whether XLA merges the constants of neighbouring sums, and those of products, as that of jaxlib 0.10 does."""
    return jaxlib_release() < (0, 12)


def has_serial_loops() -> bool:
    """Whether XLA:CPU runs the kernels inside of a loop on one thread, as jaxlib 0.12 does.

    In 0.10 they run on all threads; in 0.11 a loop takes as long as its steps one after the other.
    """
    return jaxlib_release() >= (0, 11)


@functools.cache
def eigen_convolutions() -> dict[str, bool | str] | None:
    """Options of XLA:CPU for a program whose convolutions Eigen computes: YNNPACK computes products alone.

    None where this XLA refuses them, which costs 10 ms to find out: options of this kind come and go.
    """
    options: dict[str, bool | str] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except RuntimeError:
        return None
    return options


@functools.cache
def jaxlib_release() -> tuple[int, int]:
    """Its first two numbers."""
    major, minor, *_ = jaxlib_version.split(".")
    return int(major), int(minor)


@functools.cache
def x86_features() -> frozenset[str]:
    """What an x86 processor supports beyond the base, as Linux names it; empty on other processors and systems."""
    cpu = Path("/proc/cpuinfo")
    if sys.platform != "linux" or platform.machine() != "x86_64" or not cpu.exists():
        return frozenset()
    return frozenset(cpu.read_text().partition("flags")[2].partition("\n")[0].split()) - {":"}


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_int8_kernels() -> bool:
    """Whether XLA:CPU multiplies int8 fast on this processor: with VNNI or AMX, and assumed where nobody measured."""
    features = x86_features()
    return not features or not features.isdisjoint({"avx512_vnni", "avx_vnni", "amx_int8"})


def has_onednn() -> bool:
    """Whether ``onednn`` is supported: its targets are internal to XLA.

    0.12 reads the same settings, but int8 convolutions beside other calls give wrong sums or end the process.
    """
    return jaxlib_release() == (0, 10)


def onednn(target: str, settings: Mapping[str, Any], shape: Sequence[int], *operands: Any) -> Any:
    """What one of oneDNN's functions in jaxlib gives on a CPU: of int8 operands in int32, of others in their type.

    Args:
        target, settings: as XLA calls it.
        shape: of the result.
    """
    dtype = operands[0].dtype
    result = jax.ShapeDtypeStruct(tuple(shape), np.int32 if dtype == np.int8 else dtype)
    text = json.dumps(settings)
    return jax.ffi.ffi_call(target, result, custom_call_api_version=2, legacy_backend_config=text)(*operands)


def scan_constants(scan: Any) -> int:
    """Number of leading operands that every step of a scan reads unchanged; 0 in releases without ``onednn``,
    which store it elsewhere."""
    return int(scan.params.get("num_consts", 0)) if has_onednn() else 0


def erf(x: Any) -> Any:
    """``lax.erf``. Before JAX 0.10.2 that of float32 is 0.9999998 where it should be 1: Gelu of -1e30 was -9e22."""
    y = lax.erf(x)
    if x.dtype != np.float32 or jax.__version_info__ >= (0, 10, 2):
        return y
    return jnp.where(jnp.abs(x) < 4, y, jnp.sign(x))  # the nearest float32 from 3.92 on
